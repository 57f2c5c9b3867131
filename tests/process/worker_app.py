"""A node as a process of its own, for tests that kill it: `python -m tests.process.worker_app`.

Settings come from DELAYQ_…; TESTS_OF_DELAYQ_LEDGER names the file to which every start and end
is appended, one write a line: task id, attempt, event, incarnation, microseconds since 1970. The
instants are of this machine's wall clock, which is the database's own: the server runs here.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import time
from typing import cast

from delayq.context import Context
from delayq.database import Database, parse_dsn
from delayq.handler_policy import PolicyDefaults
from delayq.handlers import Registry, Scheduler, make_task_decorator
from delayq.log import configure
from delayq.node import Node
from delayq.process import run_node, run_process
from delayq.settings import load_settings

LEDGER = "TESTS_OF_DELAYQ_LEDGER"
EFFECT = "insert into public.effects (task_id, attempt, node) values ($1, $2, $3)"

registry = Registry()
task = make_task_decorator(
    registry,
    cast(Scheduler, None),
    PolicyDefaults(max_attempts=5, backoff_base_us=20_000, backoff_max_us=100_000),
)


@functools.cache
def _ledger() -> int:
    return os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def note(ctx: Context, event: str) -> None:
    """One line in the ledger, written at once."""
    line = f"{ctx.id} {ctx.attempt} {event} {ctx._attempt.node} {time.time_ns() // 1000}\n"
    os.write(_ledger(), line.encode())


async def _effect(ctx: Context) -> None:
    async with ctx.effect() as conn:
        await conn.execute(EFFECT, ctx.id, ctx.attempt, ctx._attempt.node)


@task
async def brief(ctx: Context, ms: int) -> None:
    """Work for a while, then write the effect."""
    note(ctx, "start")
    await asyncio.sleep(ms / 1000)
    await _effect(ctx)
    note(ctx, "end")


@task
def plain(ctx: Context, ms: int) -> None:
    """The same in a thread."""
    note(ctx, "start")
    time.sleep(ms / 1000)
    with ctx.effect() as conn:
        conn.execute(EFFECT, ctx.id, ctx.attempt, ctx._attempt.node)
    note(ctx, "end")


@task
async def once_long(ctx: Context, ms: int) -> None:
    """Long at the first attempt, brief when it is run again."""
    note(ctx, "start")
    await asyncio.sleep(ms / 1000 if ctx.attempt == 1 else 0.01)
    await _effect(ctx)
    note(ctx, "end")


@task
async def inside(ctx: Context, ms: int) -> None:
    """Long inside of the effect, with a row of the application locked, at the first attempt."""
    note(ctx, "start")
    async with ctx.effect() as conn:
        await conn.execute(EFFECT, ctx.id, ctx.attempt, ctx._attempt.node)
        await conn.execute("update public.stock set left_over = left_over - 1")
        if ctx.attempt == 1:
            note(ctx, "inside")
            await asyncio.sleep(ms / 1000)
    note(ctx, "end")


@task(max_attempts=2)
async def poison(ctx: Context) -> None:
    """Takes its process down."""
    note(ctx, "start")
    os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(60)


@task
async def stubborn(ctx: Context) -> None:
    """Ignores every cancellation."""
    note(ctx, "start")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            note(ctx, "ignored")


async def main() -> int:
    """Run a node until a signal; its exit status."""
    settings = load_settings()
    configure("INFO", "human")
    assert settings.dsn is not None
    database = Database(parse_dsn(settings.dsn.get_secret_value()), settings)
    return await run_node(Node(database, registry, settings))


if __name__ == "__main__":
    sys.exit(run_process(main()))
