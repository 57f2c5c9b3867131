"""delayq itself: `delayq run` with default settings and logging, and delayq's own client."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec

import asyncpg

from delayq.dsn import parse_dsn
from delayq.migrate import migrate

from ..application import dq, hold, noop
from ..contract import Description, Due, Kind

APPLICATION = "bench_suite.peers.application:dq"
DESCRIPTION = Description(
    # `delayq run` takes uvloop where it finds it, and the figures depend on that
    packages=("delayq", "asyncpg", *(["uvloop"] if find_spec("uvloop") else [])),
    settings="defaults (max_workers=100, lease_ttl_s=15, beat_interval_s=4) and default logging;"
    " the no-op handler takes one typed argument and has a timeout",
    documented="README, Settings",
    left="select exists (select from delayq.tasks where execute_at <= now())",
)
_HANDLERS = {Kind.NOOP: noop, Kind.HOLD: hold}


async def install(dsn: str) -> None:
    """`delayq migrate`."""
    conn = await asyncpg.connect(**parse_dsn(dsn).connect_arguments())
    try:
        await migrate(conn)
    finally:
        await conn.close(timeout=5)


def serve(dsn: str) -> None:
    """Become `delayq run`."""
    os.environ["DELAYQ_DSN"] = dsn
    os.execv(sys.executable, [sys.executable, "-m", "delayq", "run", APPLICATION])  # noqa: S606 - our own words


class Client:
    """The verbs of the handlers."""

    async def schedule(self, due: Due) -> None:
        """`handler.at`."""
        await noop.at(due.at, due.number)

    async def schedule_many(self, kind: Kind, dues: Sequence[Due]) -> None:
        """`dq.schedule_many`."""
        bound = _HANDLERS[kind].options()
        await dq.schedule_many(bound.request_at(due.at, due.number) for due in dues)


@asynccontextmanager
async def client(dsn: str) -> AsyncIterator[Client]:
    """An application that only schedules."""
    os.environ["DELAYQ_DSN"] = dsn
    async with dq:
        yield Client()
