"""Delays and instants that no clock shows, or shows twice."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

from delayq import DelayQ, InvalidArgument
from tests.nodes import ended

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings
    from tests.conftest import Logged

NEW_YORK = ZoneInfo("America/New_York")
WEST = timezone(timedelta(hours=-5))
FAR: list[Any] = [
    timedelta(days=25), 2**31 / 1000 + 5, 10**9, timedelta(days=365 * 5_000),
    datetime(2500, 1, 1, tzinfo=UTC), datetime(8999, 12, 31, 18, 59, 59, 999_999, tzinfo=WEST),
]  # fmt: skip
BEYOND: list[Any] = [
    10**400, 1e300, timedelta.max, datetime(9000, 1, 1, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, tzinfo=UTC), datetime.max.replace(tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, tzinfo=WEST),
]  # fmt: skip


@pytest.fixture
def dq(settings: Settings) -> DelayQ:
    dq = DelayQ(settings=settings)

    @dq.task
    async def tick() -> None:
        pass

    return dq


async def _send(dq: DelayQ, when: Any) -> Any:
    which = "at" if isinstance(when, datetime) else "delay"
    return await dq.send("tick", {}, **{which: when})


async def test_the_far_future_waits_quietly_and_what_lies_beyond_it_is_refused(
    dq: DelayQ, conn: Connection, logged: list[Logged]
) -> None:
    """C009. On a loop of asyncio, which is what a node runs on."""
    async with dq.node():
        tasks = [await _send(dq, when) for when in FAR]
        for when in BEYOND:
            with pytest.raises(InvalidArgument, match=r"^(delay|at): "):
                await _send(dq, when)
        control = await dq.send("tick", {}, delay=1.0)
        end = await ended(conn, control.id)
        assert 0 <= (end.lateness_us or 0) < 1_000_000
        before = time.thread_time()
        await asyncio.sleep(0.5)  # nothing is due: the loop has nothing to do
        assert time.thread_time() - before < 0.25
        listed = {task.id: task for task in await dq.list()}
        assert set(listed) == {task.id for task in tasks}
        for task, when in zip(tasks, FAR, strict=True):
            assert task.execute_at == listed[task.id].execute_at
            if isinstance(when, datetime):
                assert task.execute_at == when
            assert await dq.cancel(task.id)
    assert not [e for e in logged if e.level in ("WARNING", "ERROR", "CRITICAL")]


NO_DELAYS: list[Any] = [
    -0.001, -5, -1e18, float("nan"), float("inf"), float("-inf"), True, "5", None, Decimal("NaN"),
    timedelta(microseconds=-1), timedelta(days=-1), -(10**400), b"5", [5], datetime.now(UTC),
]  # fmt: skip


async def test_what_is_no_delay_schedules_nothing_and_moves_nothing(
    dq: DelayQ, conn: Connection
) -> None:
    """C010."""
    async with dq:
        held = await dq.send("tick", {}, delay=3_600, key="held")
        for value in NO_DELAYS:
            for call in (
                dq.send("tick", {}, delay=value),
                dq.reschedule(held.id, delay=value),
                dq.reschedule(kind="tick", key="held", delay=value),
            ):
                with pytest.raises(InvalidArgument) as refused:
                    await call
                assert refused.value.field == "delay"
        (task,) = await dq.list()
        assert (task.id, task.execute_at) == (held.id, held.execute_at)
        for nothing in (0, -0.0, 0.0, timedelta()):
            now = await dq.send("tick", {}, delay=nothing)
            due = await conn.fetchval(
                "select execute_at <= delayq.clock() from delayq.tasks where id = $1", now.id
            )
            assert due


async def test_the_hour_that_repeats_is_two_instants_and_the_one_that_is_missing_is_the_next(
    dq: DelayQ, conn: Connection
) -> None:
    """C012. What Python's zoneinfo says: the first by default, the second with fold=1."""
    twice = datetime(2026, 11, 1, 1, 30, tzinfo=NEW_YORK)
    missing = datetime(2026, 3, 8, 2, 30, tzinfo=NEW_YORK)
    wanted = [
        (twice, "2026-11-01 05:30:00+00"),
        (twice.replace(fold=1), "2026-11-01 06:30:00+00"),
        (missing, "2026-03-08 07:30:00+00"),
        (missing.replace(fold=1), "2026-03-08 06:30:00+00"),
    ]
    await conn.execute("set timezone = 'UTC'")
    async with dq:
        for instant, utc in wanted:
            task = await dq.send("tick", {}, at=instant)
            stored = await conn.fetchval(
                "select execute_at::text from delayq.tasks where id = $1", task.id
            )
            assert stored == utc
            assert task.execute_at is not None
            shown = task.execute_at.astimezone(NEW_YORK)
            assert shown.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S+00") == utc
