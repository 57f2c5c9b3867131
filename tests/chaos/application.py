"""The application under chaos: handlers that behave in every way, each telling the ledger.

`delayq run tests.chaos.application:dq` runs it; customers import it to schedule. CHAOS_VERSION
says which version of the code this is: `1` knows `leaver`, `2` knows `newcomer`, `both` both.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from delayq import Context, DelayQ, EffectAlreadyApplied, Snooze
from delayq.handlers import TaskOptions
from tests.chaos.ledger import note
from tests.chaos.promises import NEXT
from tests.chaos.world import VERSION

EFFECT = """
    insert into chaos.effects (task, token, ref, request, follows) values ($1, $2, $3, $4, $5)
"""
LASTING: TaskOptions = {"max_attempts": 1_000, "backoff_base": 0.05, "backoff_max": 0.5}
"""So many attempts that no fault exhausts them: whatever is dead was given up by delayq."""

SHORT: TaskOptions = {**LASTING, "timeout": 1}

dq = DelayQ()
task = dq.task(**LASTING)
_snoozed: set[int] = set()
_version = os.environ.get(VERSION, "both")


@contextmanager
def attempt(ctx: Context, ref: str) -> Iterator[None]:
    """Tells the ledger when an attempt starts, and how it ends."""
    token, node = int(ctx.lease_token), ctx._attempt.node
    execute_us, number = ctx._attempt.execute_us, ctx.attempt
    note("start", task=ctx.id, token=token, node=node, attempt=number, kind=ctx.kind, ref=ref,
         execute=execute_us)  # fmt: skip
    how = "returned"
    try:
        yield
    except EffectAlreadyApplied:
        how = "already"
        raise
    except BaseException as error:
        how = type(error).__name__
        raise
    finally:
        note("end", task=ctx.id, token=token, how=how)


@task
async def work(ctx: Context, ref: str, ms: int) -> None:
    """Takes a while."""
    with attempt(ctx, ref):
        await asyncio.sleep(ms / 1000)


@task
async def keyed(ctx: Context, ref: str, ms: int) -> None:
    """The same; its tasks have keys."""
    with attempt(ctx, ref):
        await asyncio.sleep(ms / 1000)


@task
async def charge(ctx: Context, ref: str, ms: int, follows: bool) -> None:
    """Writes a row with its completion, and may schedule a follow-up task in there too."""
    with attempt(ctx, ref):
        await asyncio.sleep(ms / 1000)
        async with ctx.effect() as conn:
            await conn.execute(EFFECT, ctx.id, int(ctx.lease_token), ref, None, follows)
            if follows:
                await work.options(conn=conn).after(0.1, ref + NEXT, ms=5)


@task
def plain(ctx: Context, ref: str, ms: int) -> None:
    """An effect from a thread."""
    with attempt(ctx, ref):
        time.sleep(ms / 1000)
        with ctx.effect() as conn:
            conn.execute(EFFECT, ctx.id, int(ctx.lease_token), ref, None, False)


@task
async def order_once(ctx: Context, ref: str, request: str, ms: int) -> None:
    """The effect of a request that several customers send."""
    with attempt(ctx, ref):
        await asyncio.sleep(ms / 1000)
        async with ctx.effect() as conn:
            await conn.execute(EFFECT, ctx.id, int(ctx.lease_token), ref, request, False)


@task
async def flaky(ctx: Context, ref: str, times: int) -> None:
    """Fails some times."""
    with attempt(ctx, ref):
        await asyncio.sleep(0.02)
        if ctx.attempt <= times:
            raise RuntimeError("not yet")


@dq.task(max_attempts=2)
async def doomed(ctx: Context, ref: str) -> None:
    """Fails for good."""
    with attempt(ctx, ref):
        raise RuntimeError("never")


@dq.task(**SHORT)
async def hang(ctx: Context, ref: str) -> None:
    """Does not end before its timeout, at first."""
    with attempt(ctx, ref):
        await asyncio.sleep(3600 if ctx.attempt == 1 else 0.02)


@task
async def stall(ctx: Context, ref: str, ms: int) -> None:
    """Blocks the event loop of its node, at first."""
    with attempt(ctx, ref):
        if ctx.attempt == 1:
            time.sleep(ms / 1000)  # noqa: ASYNC251 - the fault


@task
async def crash(ctx: Context, ref: str) -> None:
    """Takes its process down, at first."""
    with attempt(ctx, ref):
        if ctx.attempt == 1:
            os._exit(70)


@task
async def drowsy(ctx: Context, ref: str) -> None:
    """Is snoozed once by each process that it comes to."""
    with attempt(ctx, ref):
        if ctx.id not in _snoozed:
            _snoozed.add(ctx.id)
            raise Snooze(0.3)


if _version in ("1", "both"):

    @task
    async def leaver(ctx: Context, ref: str) -> None:
        """Only the old version knows it."""
        with attempt(ctx, ref):
            await asyncio.sleep(0.05)


if _version in ("2", "both"):

    @task
    async def newcomer(ctx: Context, ref: str) -> None:
        """Only the new version knows it."""
        with attempt(ctx, ref):
            await asyncio.sleep(0.05)
