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

_SCRIPTS: Final = Path(__file__).resolve().parents[1]
_PATH: Final = f"{_SCRIPTS}{os.pathsep}{_SCRIPTS.parent}"
APPLICATION: Final = "bench_suite.application:dq"
_COMMAND_LIMIT_S: Final = 600.0
_STOP_LIMIT_S: Final = 45.0
_LOOK_S: Final = 0.1
_LINE_LIMIT: Final = 64 * 2**20


class BenchError(Exception):
    """A run cannot go on; the text says why."""


def environment(dsn: str, settings: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without its settings of delayq and PostgreSQL."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("DELAYQ_", "PG"))
    }
    return {**kept, "PYTHONPATH": _PATH, "DELAYQ_DSN": dsn, **settings}


class Worker:
    """One `delayq run`, and what its handler wrote down."""

    def __init__(self, process: asyncio.subprocess.Process, events: Path, log: Path) -> None:
        self._process = process
        self._events = events
        self._log = log

    def starts(self) -> list[tuple[int, int]]:
        """(task number, nanoseconds since 1970) of every start that is in the file by now."""
        found = array("q")
        if self._events.exists():
            whole = self._events.read_bytes()
            found.frombytes(whole[: len(whole) // 16 * 16])
        return list(zip(found[::2], found[1::2], strict=True))

    def check(self) -> None:
        """Raises BenchError with the end of its log if it has ended by itself."""
        if self._process.returncode is not None:
            raise BenchError(f"delayq run ended with {self._process.returncode}: {self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines that it logged."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])

    async def stop(self) -> None:
        """SIGTERM, and what is left of the starts. Raises BenchError unless it exits with 0."""
        self.check()
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                status = await self._process.wait()
        except TimeoutError:
            raise BenchError(f"delayq run did not stop: {self.log_tail()}") from None
        if status != 0:
            raise BenchError(f"delayq run exited with {status}: {self.log_tail()}")


@asynccontextmanager
async def worker(
    folder: Path, env: Mapping[str, str], name: str = "worker"
) -> AsyncIterator[Worker]:
    """Start `delayq run`; killed at the end of the block unless it was stopped."""
    events, log = folder / f"{name}.events", folder / f"{name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "delayq", "run", APPLICATION),
            env={**env, "BENCH_EVENTS": str(events)},
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
async def child(module: str, folder: Path, env: Mapping[str, str]) -> AsyncIterator[Child]:
    """Start `python -m bench_suite.MODULE`; it ends with the block."""
    log = folder / f"{module}.log"
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"bench_suite.{module}"),
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


async def until(condition: Callable[[], bool], limit_s: float, worker: Worker) -> bool:
    """True once the condition holds; False if it does not in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not condition():
        worker.check()
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_LOOK_S)
    return True
