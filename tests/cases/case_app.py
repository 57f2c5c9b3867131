"""The application of tests/process, with handlers that misbehave: `python -m tests.cases.case_app`.

For what has to happen in a process of its own: a loop that stands still, a thread that does not
end, an attempt that fails after its lease was lost.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from delayq.context import Context
from delayq.process import run_process
from tests.conftest import SHORT
from tests.process import crew
from tests.process.worker_app import EFFECT, main, note, task

if TYPE_CHECKING:
    from delayq.database import Connection


@task
async def blocks(ctx: Context, ms: int) -> None:
    """Stops the loop of its node, then writes the effect."""
    note(ctx, "start")
    time.sleep(ms / 1000)  # noqa: ASYNC251 - this is what it is for
    async with ctx.effect() as conn:
        await conn.execute(EFFECT, ctx.id, ctx.attempt, ctx._attempt.node)
    note(ctx, "end")


@task
async def fails_late(ctx: Context, ms: int) -> None:
    """Fails after a while at its first attempt; the second one takes its time and succeeds."""
    note(ctx, "start")
    if ctx.attempt == 1:
        until = time.monotonic() + ms / 1000
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue  # it does not take a hint
        note(ctx, "fails")
        raise ValueError("the loser's own error")
    await asyncio.sleep(ms / 1000)
    async with ctx.effect() as conn:
        await conn.execute(EFFECT, ctx.id, ctx.attempt, ctx._attempt.node)
    note(ctx, "end")


class CaseCrew(crew.Crew):
    """Processes of this application."""

    application = "tests.cases.case_app"


@asynccontextmanager
async def case_crew(
    conn: Connection, dsn: str, folder: Path, **settings: object
) -> AsyncIterator[CaseCrew]:
    """A crew with short intervals whose processes end with the block."""
    await conn.execute(crew._TABLES)
    them = CaseCrew(conn, dsn, folder, SHORT | settings)
    try:
        yield them
    finally:
        them.end_all()


if __name__ == "__main__":
    sys.exit(run_process(main()))
