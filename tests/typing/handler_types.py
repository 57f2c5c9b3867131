"""What a type checker must say about handlers. Never run: `test_handler_types.py` has mypy read it.

Each `type: ignore` is an error that mypy must report; one that it no longer reports is unused,
and that is an error too.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import assert_type

from delayq.context import Context
from delayq.handlers import (
    BoundHandler,
    PlainHandler,
    TaskDecorator,
)
from delayq.model import Cancel, Reschedule, ScheduledTask, TaskRequest


async def verbs_are_typed_by_the_handler(task: TaskDecorator, ctx: Context) -> None:
    @task(max_attempts=5, timeout=timedelta(seconds=20), retry_on=(OSError,), aliases=("old",))
    async def expire_order(ctx: Context, order_id: int, note: str = "") -> None: ...

    five = timedelta(minutes=5)
    assert_type(await expire_order.after(five, order_id=42), ScheduledTask)
    assert_type(await expire_order.after(five, 42, "late"), ScheduledTask)
    assert_type(await expire_order.at(datetime.now(UTC), 42), ScheduledTask)
    assert_type(await expire_order.cancel(key="order:42"), Cancel)
    assert_type(await expire_order.reschedule(7, delay=5), Reschedule)
    await expire_order.after(five, order_id="x")  # type: ignore[arg-type]  # text for a number
    await expire_order.after(five)  # type: ignore[call-arg]  # an argument is missing
    await expire_order.after(five, 42, order=1)  # type: ignore[call-arg]  # no such parameter
    await expire_order.after("5 minutes", 42)  # type: ignore[arg-type]  # text is no delay
    await expire_order.at(5, 42)  # type: ignore[arg-type]  # a number is no instant
    await expire_order.after(five, ctx, 42)  # type: ignore[arg-type]  # the node gives the context


async def options_are_typed(task: TaskDecorator) -> None:
    @task
    async def expire_order(ctx: Context, order_id: int) -> None: ...

    bound = expire_order.options(key="order:42", on_conflict="replace", priority=3)
    assert_type(await bound.after(5, order_id=42), ScheduledTask)
    assert_type(bound.request_after(5, 42), TaskRequest)
    await bound.after(5, order_id="x")  # type: ignore[arg-type]  # text for a number
    expire_order.options(on_conflict="bogus")  # type: ignore[arg-type]  # no such answer to a taken key
    expire_order.options(prioriti=3)  # type: ignore[call-arg]  # no such option
    task(max_atempts=3)  # type: ignore[call-overload]  # no such option


async def handlers_stay_callable_as_they_were(task: TaskDecorator, ctx: Context) -> None:
    @task
    async def with_context(ctx: Context, order_id: int) -> str:
        return ""

    @task
    async def without_context(order_id: int) -> str:
        return ""

    @task(kind="plain")
    def plain_with_context(ctx: Context, order_id: int) -> bytes:
        return b""

    @task()
    def plain(order_id: int) -> bytes:
        return b""

    assert_type(await with_context(ctx, 42), str)
    assert_type(await without_context(order_id=42), str)
    assert_type(plain_with_context(ctx, order_id=42), bytes)
    assert_type(plain(42), bytes)
    await with_context(42)  # type: ignore[arg-type, call-arg]  # called here, it needs its context
    plain(ctx, 42)  # type: ignore[call-arg, arg-type]  # it takes no context
    await plain.after(5, 42)
    await plain_with_context.after(5, "x")  # type: ignore[arg-type]  # text for a number


async def effects_are_typed(ctx: Context) -> None:
    async with ctx.effect() as conn:
        assert_type(await conn.execute("select 1"), str)
    with ctx.effect() as blocking:
        assert_type(blocking.execute("select 1"), str)


async def effects_swallow_nothing(ctx: Context) -> str:
    async with ctx.effect() as conn:
        return await conn.execute("select 1")


def blocking_effects_swallow_nothing(ctx: Context) -> str:
    with ctx.effect() as conn:
        return conn.execute("select 1")


def any_handler_can_be_bound(handler: PlainHandler[[int], object]) -> BoundHandler[[int]]:
    return handler.options(key="k")
