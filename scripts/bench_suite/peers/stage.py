"""One system on one fresh database: its client, its workers, and what is asked of both."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..processes import BenchError, Child, Worker, child, environment, until
from ..recorder import EVENTS
from .contract import Kind

if TYPE_CHECKING:
    from delayq.database import Connection

    from ..server import Ground, Place
    from .systems import System

WARM: Final = -1
"""the number of tasks that only show that a worker is up"""
_CHUNK: Final = 20_000
_STOP_LIMIT_S: Final = 20.0
_START_LIMIT_S: Final = 60.0
_LOOK_S: Final = 0.02
_LEAST_SHARE: Final = 10
"""a look at the database may take a tenth of the time, and no more"""


@dataclass(frozen=True, slots=True)
class Ready:
    """A system that can be run here."""

    system: System
    python: Path
    facts: Mapping[str, Any]
    """its adapter's description, with the versions that are installed"""

    @property
    def left(self) -> str:
        """SQL that is true while a task that is due has not been settled."""
        return str(self.facts["left"])


class RivalWorker(Worker):
    """A worker of whatever system; it need not end as well as delayq's."""

    def check(self) -> None:
        """Raises BenchError with the end of its log if it has ended by itself."""
        if self._process.returncode is not None and self._sent is None:
            raise BenchError(f"its worker ended with {self._process.returncode}: {self.tail()}")

    def tail(self) -> str:
        """The last lines that it logged, on one line."""
        return " / ".join(self.log_tail().splitlines())

    async def stop(self) -> None:
        """SIGTERM; SIGKILL if that is not obeyed. What it wrote down is in the file then."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
        await self._process.wait()

    def first_starts(self) -> dict[int, int]:
        """The first start of each task that is in the file by now, in nanoseconds since 1970."""
        first: dict[int, int] = {}
        for number, at_ns in self.starts():
            first.setdefault(number, at_ns)
        return first


class Stage:
    """A system with its tables in a database of its own."""

    def __init__(self, ready: Ready, place: Place, conn: Connection, client: Child) -> None:
        self.ready = ready
        self._place = place
        self.conn = conn
        self.client = client

    @asynccontextmanager
    async def worker(self, name: str = "worker") -> AsyncIterator[RivalWorker]:
        """A worker that has been started; killed at the end of the block."""
        ready, events = self.ready, self._place.folder / f"{name}.events"
        log = self._place.folder / f"{name}.log"
        env = {**_environment(self._place), EVENTS: str(events)}
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(str(ready.python), "-m", "bench_suite.peers.worker", ready.system.name),
                env=env,
                cwd=self._place.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        worker = RivalWorker(process, events, log)
        try:
            yield worker
        finally:
            await worker.kill()

    @asynccontextmanager
    async def warm_worker(self, name: str = "worker") -> AsyncIterator[RivalWorker]:
        """A worker that has run a task already."""
        async with self.worker(name) as worker:
            await self.warmed(worker)
            yield worker

    async def warmed(self, worker: RivalWorker) -> None:
        """Return once this worker has run a task; others may take some of those that are sent."""
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline:
            await self.schedule(1, time.time_ns() // 1000, number=WARM)
            if await until(lambda: WARM in worker.first_starts(), 1.0, worker):
                return
        raise BenchError(f"a worker ran nothing within {_START_LIMIT_S:g} s: {worker.tail()}")

    async def schedule(
        self, count: int, first_us: int, step_us: int = 0, number: int = 0,
        kind: Kind = Kind.NOOP,
    ) -> float:  # fmt: skip
        """Tasks number, number + 1, … by the bulk call, `step_us` apart; how many seconds it took.

        In parts, so that no part takes longer than a command may.
        """
        seconds = 0.0
        for start in range(0, count, _CHUNK):
            answer = await self.client.ask(
                "many", kind=kind, count=min(_CHUNK, count - start), step_us=step_us,
                first_us=first_us + start * step_us, number=number + start,
            )  # fmt: skip
            seconds += answer["seconds"]
        return seconds

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """A transaction that is open meanwhile, with a snapshot: vacuum may remove nothing."""
        async with self._place.connection() as conn, conn.transaction(isolation="repeatable_read"):
            await conn.fetchval("select count(*) from pg_class")
            yield

    async def tidy(self) -> None:
        """As if the tables had been there for long: vacuumed, analyzed, checkpointed."""
        await self.conn.execute("vacuum analyze")
        await self.conn.execute("checkpoint")

    async def until_settled(self, worker: RivalWorker, limit_s: float) -> tuple[int, bool]:
        """When nothing that is due was left (ns since 1970); or the end of the limit, and False."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            began = time.monotonic()
            if not await self.conn.fetchval(self.ready.left):
                return time.time_ns(), True
            worker.check()
            took = time.monotonic() - began
            await asyncio.sleep(max(_LOOK_S, _LEAST_SHARE * took))
        return time.time_ns(), False


@asynccontextmanager
async def staged(ground: Ground, ready: Ready) -> AsyncIterator[Stage]:
    """The system, installed in a fresh database."""
    async with (
        ground.database(migrated=False) as place,
        place.connection() as conn,
        _client(ready, place.folder, _environment(place)) as client,
    ):
        await client.ask("install")
        yield Stage(ready, place, conn, client)


async def described(ground: Ground, system: System, python: Path) -> Ready:
    """What the system's adapter says about it. Raises BenchError if it cannot be imported."""
    folder = ground.folder / f"describe_{system.name}"
    folder.mkdir()
    env = environment(ground.dsn, {"BENCH_DSN": ground.dsn})
    async with _client(Ready(system, python, {}), folder, env) as client:
        return Ready(system, python, await client.ask("describe"))


def _client(
    ready: Ready, folder: Path, env: Mapping[str, str]
) -> AbstractAsyncContextManager[Child]:
    return child("peers.client", folder, env, python=str(ready.python), of=ready.system.name)


def _environment(place: Place) -> dict[str, str]:
    return environment(place.dsn, {**place.ground.settings, "BENCH_DSN": place.dsn})
