# mypy: disable-error-code="import-not-found"
"""procrastinate, on psycopg."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import procrastinate

from .. import starts
from ..contract import Description, Due, Kind

CONCURRENCY = 50
POLLING_S = 0.02
STALLED_CRON = "* * * * * */10"
DESCRIPTION = Description(
    packages=("procrastinate", "psycopg"),
    settings=f"concurrency={CONCURRENCY}, fetch_job_polling_interval={POLLING_S} (default 5),"
    f" pool of 10; retry_stalled_jobs with cron {STALLED_CRON!r}",
    documented="API reference, App.run_worker_async; how-to guides, Retry stalled jobs and"
    " Launch a task periodically",
    left="select exists (select from procrastinate_jobs where task_name in ('noop', 'hold')"
    " and (status = 'doing' or status = 'todo' and scheduled_at <= now()))",
    remarks={
        "lateness": "an instant in the future is found by polling",
        "crash": "nothing runs again by default: its users add a periodic task",
    },
)


def _app(dsn: str) -> tuple[Any, dict[Kind, Any]]:
    connector = procrastinate.PsycopgConnector(conninfo=dsn, min_size=1, max_size=10)
    app = procrastinate.App(connector=connector)
    tasks = {
        Kind.NOOP: app.task(name="noop")(starts.noop),
        Kind.HOLD: app.task(name="hold")(starts.hold),
    }

    async def retry_stalled_jobs(context: Any, timestamp: int) -> None:  # noqa: ARG001 - its shape
        for job in await app.job_manager.get_stalled_jobs():
            await app.job_manager.retry_job(job)

    lock = "retry_stalled_jobs"
    periodic = app.task(name=lock, queueing_lock=lock, pass_context=True)(retry_stalled_jobs)
    app.periodic(cron=STALLED_CRON)(periodic)
    return app, tasks


async def install(dsn: str) -> None:
    """`procrastinate schema --apply`."""
    app, _ = _app(dsn)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


def serve(dsn: str) -> None:
    """`procrastinate worker`."""
    app, _ = _app(dsn)
    app.run_worker(concurrency=CONCURRENCY, fetch_job_polling_interval=POLLING_S)


class Client:
    """Defers."""

    def __init__(self, app: Any, tasks: dict[Kind, Any]) -> None:
        self._app = app
        self._tasks = tasks

    async def schedule(self, due: Due) -> None:
        """`task.configure(schedule_at=…).defer_async`."""
        await self._tasks[Kind.NOOP].configure(schedule_at=due.at).defer_async(n=due.number)

    async def schedule_many(self, kind: Kind, dues: Sequence[Due]) -> None:
        """`task.batch_defer_async` has one instant for all; what it calls has one for each."""
        task = self._tasks[kind]
        jobs = [task.configure(schedule_at=due.at).make_new_job(n=due.number) for due in dues]
        await self._app.job_manager.batch_defer_jobs_async(jobs)


@asynccontextmanager
async def client(dsn: str) -> AsyncIterator[Client]:
    """An application that only defers."""
    app, tasks = _app(dsn)
    async with app.open_async():
        yield Client(app, tasks)
