"""Starts nodes as processes, ends them in every way, and reads what they did."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.conftest import SHORT
from tests.nodes import eventually
from tests.process.worker_app import LEDGER

if TYPE_CHECKING:
    from delayq.database import Connection

REPOSITORY = Path(__file__).resolve().parents[2]
START_LIMIT_S = 20.0
_TABLES = """
    create table public.effects (task_id bigint not null, attempt integer not null,
                                 node bigint not null,
                                 at timestamptz not null default clock_timestamp());
    create table public.stock (left_over integer not null);
    insert into public.stock values (1000)
"""
_LATENESS = """
    select h.id, delayq.micros(h.execute_at) as execute_us, h.state, h.attempt
      from delayq.task_history h where h.id = any($1::bigint[])
"""


class Line(NamedTuple):
    """One line of the ledger. `at_us` by this machine's wall clock, which is the database's."""

    task_id: int
    attempt: int
    event: str
    node: int
    at_us: int


class Process:
    """One node as a process."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen = popen
        self.log = log
        self.node = 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.popen.send_signal(number)

    async def exit_status(self, limit_s: float = 15.0) -> int:
        """Wait until the process has ended; its status, negative for a signal."""
        deadline = time.monotonic() + limit_s
        while (status := self.popen.poll()) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"it still runs after {limit_s} s: {self.said()}")
            await asyncio.sleep(0.01)
        return status

    def said(self) -> str:
        """The end of what it logged."""
        return self.log.read_text(errors="replace")[-3000:]


class Crew:
    """The processes of one test, on one database. `settings` are those of every node."""

    application = "tests.process.worker_app"

    def __init__(self, conn: Connection, dsn: str, folder: Path, settings: dict[str, object]):
        self.conn = conn
        self.dsn = dsn
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self._folder = folder
        self._settings = settings
        self.processes: list[Process] = []

    def launch(self, dsn: str | None = None, **changes: Any) -> Process:
        """Start a process, without waiting for it."""
        settings = self._settings | {"dsn": dsn or self.dsn, "embedded": "0"} | changes
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONDONTWRITEBYTECODE": "1",
            LEDGER: str(self.ledger),
            **{f"DELAYQ_{name.upper()}": str(value) for name, value in settings.items()},
        }
        log = self._folder / f"node-{len(self.processes)}.log"
        with log.open("wb") as out:
            popen = subprocess.Popen(
                [sys.executable, "-m", self.application],
                cwd=self._folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        process = Process(popen, log)
        self.processes.append(process)
        return process

    async def active(self, process: Process) -> Process:
        """Wait until it takes its share."""

        async def look() -> int | None:
            assert process.popen.poll() is None, process.said()
            node: int | None = await self.conn.fetchval(
                "select id from delayq.nodes where pid = $1 and state = 'active'",
                process.popen.pid,
            )
            return node

        process.node = await eventually(look, "the node is active", START_LIMIT_S)
        return process

    async def start(self, **changes: Any) -> Process:
        """Start one and wait until it takes its share."""
        return await self.active(self.launch(**changes))

    async def start_many(self, count: int, **changes: Any) -> list[Process]:
        """Start several at once."""
        launched = [self.launch(**changes) for _ in range(count)]
        return [await self.active(process) for process in launched]

    def lines(self) -> list[Line]:
        """The ledger so far."""
        lines = []
        for text in self.ledger.read_text().splitlines():
            task_id, attempt, event, node, at_us = text.split()
            lines.append(Line(int(task_id), int(attempt), event, int(node), int(at_us)))
        return lines

    def starts(self, task_id: int | None = None) -> list[Line]:
        """The starts so far, of one task if wanted."""
        return [line for line in self.lines() if line.event == "start"
                and task_id in (None, line.task_id)]  # fmt: skip

    async def saw(self, event: str, ids: Iterable[int], limit_s: float = 15.0) -> list[Line]:
        """Wait until the ledger holds an event of each of these tasks; all its lines of them."""
        wanted = set(ids)

        async def look() -> list[Line]:
            found = [line for line in self.lines() if line.event == event
                     and line.task_id in wanted]  # fmt: skip
            return found if {line.task_id for line in found} == wanted else []

        what = f"{event} of {len(wanted)} tasks"
        # seldom: reading takes time that nodes on the same machine would be late by
        found: list[Line] = await eventually(look, what, limit_s, every_s=0.05)
        return found

    async def effects(self) -> Counter[int]:
        """How often each task's effect was committed."""
        rows = await self.conn.fetch("select task_id, count(*) as n from public.effects group by 1")
        return Counter({row["task_id"]: row["n"] for row in rows})

    async def lateness_us(self, ids: Iterable[int]) -> dict[int, int]:
        """By how much the first start of each task came after its instant."""
        rows = await self.conn.fetch(_LATENESS, list(ids))
        due_us = {row["id"]: row["execute_us"] for row in rows}
        first: dict[int, int] = {}
        for line in self.starts():
            first.setdefault(line.task_id, line.at_us)
        return {task_id: first[task_id] - at_us for task_id, at_us in due_us.items()}

    def end_all(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            if process.popen.poll() is None:
                with suppress(ProcessLookupError):
                    process.popen.send_signal(signal.SIGCONT)
                    process.popen.kill()
            process.popen.wait()


@asynccontextmanager
async def crew(
    conn: Connection, dsn: str, folder: Path, *, short: bool = True, **settings: object
) -> AsyncIterator[Crew]:
    """A crew whose processes end with the block. `short`: with the tests' short intervals."""
    await conn.execute(_TABLES)
    them = Crew(conn, dsn, folder, (SHORT if short else {}) | settings)
    try:
        yield them
    finally:
        them.end_all()


async def spread(
    conn: Connection, kind: str, count: int, *, first_s: float, every_ms: float, payload: str
) -> list[int]:
    """Schedule tasks one after another from `first_s` from now on; their ids in that order."""
    rows = await conn.fetch(
        """
        insert into delayq.tasks (kind, payload, execute_at)
        select $1, $2::jsonb, clock_timestamp() + $3::float8 * interval '1 s'
                              + n * $4::float8 * interval '1 ms'
          from generate_series(0, $5 - 1) as n order by n
        returning id
        """,
        kind, payload, first_s, every_ms, count,
    )  # fmt: skip
    return [row["id"] for row in rows]


def percentile(values: Iterable[int], share: float) -> int:
    """The smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@asynccontextmanager
async def bare_timer() -> AsyncIterator[list[int]]:
    """By how many microseconds a bare asyncio timer is late meanwhile: what the machine adds."""
    late_us: list[int] = []

    async def measure() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.01
            fired = asyncio.Event()
            loop.call_at(due, fired.set)
            await fired.wait()
            late_us.append(max(0, round((loop.time() - due) * 1e6)))

    measuring = asyncio.create_task(measure())
    try:
        yield late_us
    finally:
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
