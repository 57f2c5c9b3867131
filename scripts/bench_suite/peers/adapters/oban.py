# mypy: disable-error-code="import-not-found,untyped-decorator"
"""oban for Python, on psycopg and uvloop as its own command line runs it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import uvloop
from oban import Job, Oban, job
from oban.schema import install as install_schema
from psycopg.types.json import set_json_dumps, set_json_loads

from .. import starts
from ..contract import Description, Due, Kind

LIMIT = 200
STAGER_S = 0.02
LIFELINE_S = 30.0
DESCRIPTION = Description(
    packages=("oban", "psycopg", "uvloop"),
    settings=f"limit={LIMIT} (default 10), stager interval {STAGER_S} (default 1.0), lifeline"
    f" interval {LIFELINE_S:g} (default 60), rescue_after 300 (default), pool of 1 to 10, uvloop,"
    " orjson, no telemetry log",
    documented="guides, Defining Queues and Ready for Production; API reference, Oban",
    left="select exists (select from oban_jobs where state in ('available', 'executing')"
    " or state in ('scheduled', 'retryable') and scheduled_at <= timezone('UTC', now()))",
    remarks={
        "lateness": "an instant in the future is found by the stager, every interval",
        "crash": "by age alone: what has run for rescue_after is started again, dead or alive",
    },
)


@job(queue="default")
async def noop(n: int) -> None:
    """Says when it started."""
    await starts.noop(n)


@job(queue="default")
async def hold(n: int) -> None:
    """Says when it started, and stays."""
    await starts.hold(n)


async def install(dsn: str) -> None:
    """`oban install`."""
    async with _pool(dsn) as pool:
        await install_schema(pool)


def serve(dsn: str) -> None:
    """`oban start`."""
    set_json_dumps(orjson.dumps)
    set_json_loads(orjson.loads)
    uvloop.run(_serve(dsn))


async def _serve(dsn: str) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with (
        _pool(dsn) as pool,
        Oban(
            pool=pool,
            queues={"default": LIMIT},
            stager={"interval": STAGER_S},
            lifeline={"interval": LIFELINE_S},
        ),
    ):
        await over.wait()


class Client:
    """Enqueues."""

    def __init__(self, oban: Any) -> None:
        self._oban = oban

    async def schedule(self, due: Due) -> None:
        """`enqueue`."""
        await self._oban.enqueue(_job(Kind.NOOP, due))

    async def schedule_many(self, kind: Kind, dues: Sequence[Due]) -> None:
        """`enqueue_many`."""
        await self._oban.enqueue_many([_job(kind, due) for due in dues])


def _job(kind: Kind, due: Due) -> Any:
    return Job(f"{__name__}.{kind}", args={"n": due.number}, scheduled_at=due.at)


@asynccontextmanager
async def _pool(dsn: str) -> AsyncIterator[Any]:
    pool = await Oban.create_pool(dsn)
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def client(dsn: str) -> AsyncIterator[Client]:
    """An application that only enqueues."""
    async with _pool(dsn) as pool:
        yield Client(Oban(pool=pool))
