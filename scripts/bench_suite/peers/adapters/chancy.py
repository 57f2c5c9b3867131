# mypy: disable-error-code="import-not-found"
"""chancy, on psycopg, with its asyncio executor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from chancy import Chancy, Job, Queue, Worker

from .. import starts
from ..contract import Description, Due, Kind

CONCURRENCY = 100
POLLING_S = 1
DESCRIPTION = Description(
    packages=("chancy", "psycopg"),
    settings=f"AsyncExecutor (default: processes), concurrency={CONCURRENCY},"
    f" polling_interval={POLLING_S} (default 5), eager_polling=True, pool of 1 to 10, log level"
    " WARNING, default plugins and time-outs",
    documented="guide, Queues and Executors; API reference, Queue and Worker; plugins, Recovery",
    left="select exists (select from chancy_jobs where state = 'running'"
    " or state in ('pending', 'retrying') and scheduled_at <= now())",
    remarks={
        "lateness": "polls; the interval is a whole number of seconds (a fraction of one is kept as"
        " 0, which polls without a pause)",
        "throughput": "writes down what has ended once a second",
        "crash": "a worker is dead 90 s after its last heartbeat; the leader looks every 60 s",
    },
)
_FUNCTIONS = {kind: f"{starts.__name__}.{kind}" for kind in Kind}


def _app(dsn: str) -> Any:
    log = logging.getLogger("chancy.bench")
    log.setLevel(logging.WARNING)
    return Chancy(dsn, log=log)


async def install(dsn: str) -> None:
    """`chancy misc migrate` and `chancy queue declare`."""
    async with _app(dsn) as app:
        await app.migrate()
        await app.declare(
            Queue(
                "default",
                concurrency=CONCURRENCY,
                polling_interval=POLLING_S,
                eager_polling=True,
                executor=Chancy.Executor.Async,
            )
        )


def serve(dsn: str) -> None:
    """`chancy worker start`."""
    asyncio.run(_serve(dsn))


async def _serve(dsn: str) -> None:
    async with _app(dsn) as app, Worker(app) as worker:
        await worker.wait_for_shutdown()


class Client:
    """Pushes."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def schedule(self, due: Due) -> None:
        """`push`."""
        await self._app.push(_job(Kind.NOOP, due))

    async def schedule_many(self, kind: Kind, dues: Sequence[Due]) -> None:
        """`push_many`."""
        async for _ in self._app.push_many([_job(kind, due) for due in dues]):
            pass


def _job(kind: Kind, due: Due) -> Any:
    return Job(func=_FUNCTIONS[kind], kwargs={"n": due.number}, scheduled_at=due.at)


@asynccontextmanager
async def client(dsn: str) -> AsyncIterator[Client]:
    """An application that only pushes."""
    async with _app(dsn) as app:
        yield Client(app)
