"""The application of tests/process, with handlers that misbehave: `python -m tests.cases.case_app`.

For what has to happen in a process of its own: a loop that stands still, a thread that does not
end, an attempt that fails after its lease was lost.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delayq.context import Context
from delayq.node import run_process
from tests.conftest import SHORT
from tests.process import crew
from tests.process.worker_app import EFFECT, LEDGER, main, note, task

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

    def launch(self, dsn: str | None = None, **changes: Any) -> crew.Process:
        """Start a process, without waiting for it."""
        settings = self._settings | {"dsn": dsn or self.dsn, "embedded": "0"} | changes
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": str(crew.REPOSITORY),
            "PYTHONDONTWRITEBYTECODE": "1",
            LEDGER: str(self.ledger),
            **{f"DELAYQ_{name.upper()}": str(value) for name, value in settings.items()},
        }
        log = self._folder / f"node-{len(self.processes)}.log"
        with log.open("wb") as out:
            popen = subprocess.Popen(
                [sys.executable, "-m", "tests.cases.case_app"],
                cwd=self._folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        process = crew.Process(popen, log)
        self.processes.append(process)
        return process


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
