"""The processes of a run: `delayq run` workers, and children that obey commands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from .commands import MARK
from .recorder import AT_ONCE, EVENTS

_SCRIPTS: Final = Path(__file__).resolve().parents[1]
_PATH: Final = f"{_SCRIPTS}{os.pathsep}{_SCRIPTS.parent}"
APPLICATION: Final = "bench_suite.application:dq"
_COMMAND_LIMIT_S: Final = 600.0
_STOP_LIMIT_S: Final = 45.0
_LOOK_S: Final = 0.1
_LINE_LIMIT: Final = 64 * 2**20
_START_BYTES: Final = 16


class BenchError(Exception):
    """A run cannot go on; the text says why."""


class TooLate(BenchError):
    """What had to be done before an instant was not; with a longer lead it may be."""


def environment(dsn: str, settings: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without its settings of delayq and PostgreSQL."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("DELAYQ_", "PG"))
    }
    return {**kept, "PYTHONPATH": _PATH, "DELAYQ_DSN": dsn, **settings}


class Worker:
    """One `delayq run`, and what its handlers wrote down."""

    def __init__(self, process: asyncio.subprocess.Process, events: Path, log: Path) -> None:
        self._process = process
        self._events = events
        self._log = log
        self._sent: signal.Signals | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def starts(self) -> list[tuple[int, int]]:
        """(task number, nanoseconds since 1970) of every start that is in the file by now."""
        found = array("q")
        if self._events.exists():
            whole = self._events.read_bytes()
            found.frombytes(whole[: len(whole) // _START_BYTES * _START_BYTES])
        return list(zip(found[::2], found[1::2], strict=True))

    def count(self) -> int:
        """How many starts are in the file by now; costs nothing."""
        return self._events.stat().st_size // _START_BYTES if self._events.exists() else 0

    def check(self) -> None:
        """Raises BenchError with the end of its log if it has ended by itself."""
        if self._process.returncode is not None and self._sent is None:
            raise BenchError(f"delayq run ended with {self._process.returncode}: {self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines that it logged."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal that ends it; it may take its time."""
        self.check()
        self._sent = number
        self._process.send_signal(number)

    async def stop(self) -> None:
        """SIGTERM unless a signal was sent, and what is left of the starts.

        Raises BenchError unless it exits with 0, or was killed and is gone.
        """
        if self._sent is None:
            self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                status = await self._process.wait()
        except TimeoutError:
            raise BenchError(f"delayq run did not stop: {self.log_tail()}") from None
        if status != (-signal.SIGKILL if self._sent is signal.SIGKILL else 0):
            raise BenchError(f"delayq run exited with {status}: {self.log_tail()}")


@asynccontextmanager
async def worker(
    folder: Path, env: Mapping[str, str], name: str = "worker", *, at_once: bool = False
) -> AsyncIterator[Worker]:
    """Start `delayq run`; killed at the end of the block unless it was stopped.

    `at_once`: each start is written as it happens, for workers that are to be killed.
    """
    events, log = folder / f"{name}.events", folder / f"{name}.log"
    recording = {EVENTS: str(events)} | ({AT_ONCE: "1"} if at_once else {})
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "delayq", "run", APPLICATION),
            env={**env, **recording},
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield Worker(process, events, log)
    finally:
        await _end(process)


class Child:
    """A process that obeys commands, one at a time."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def ready(self) -> None:
        """Return once it has started and obeys: on a busy machine that takes a while."""
        await self.ask("ready")

    async def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Its answer to a command. Raises BenchError with what it says went wrong."""
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError("a child without pipes")
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        await self._process.stdin.drain()
        async with asyncio.timeout(_COMMAND_LIMIT_S):
            while line := await self._process.stdout.readline():
                text = line.decode()
                if text.startswith(MARK):
                    return self._checked(do, json.loads(text.removeprefix(MARK)))
        raise BenchError(
            f"{do}: the process ended: {self._log.read_text(errors='replace')[-1000:]}"
        )

    @staticmethod
    def _checked(do: str, answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            raise BenchError(f"{do}: {answer['error']}")
        return answer


@asynccontextmanager
async def child(
    module: str, folder: Path, env: Mapping[str, str], *, python: str = sys.executable, of: str = ""
) -> AsyncIterator[Child]:
    """Start `PYTHON -m bench_suite.MODULE [OF]`; it ends with the block."""
    log = folder / f"{module}.log"
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *filter(None, (python, "-m", f"bench_suite.{module}", of)),
            env=env,
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LINE_LIMIT,
        )
    try:
        yield Child(process, log)
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def until(condition: Callable[[], bool], limit_s: float, *workers: Worker) -> bool:
    """True once the condition holds; False if it does not in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not condition():
        for worker in workers:
            worker.check()
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_LOOK_S)
    return True
