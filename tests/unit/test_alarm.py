"""One handle for many instants: rings at the earliest, may ring early, never forgets."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from delayq.alarm import Alarm
from delayq.clock import Clock, DatabaseClock
from tests.helpers import wait_for

WHO: ContextVar[str] = ContextVar("WHO", default="nobody")


class Bell:
    """Counts rings."""

    def __init__(self) -> None:
        self.rings = 0
        self.who: list[str] = []

    def __call__(self) -> None:
        self.rings += 1
        self.who.append(WHO.get())


@pytest.fixture
def clock() -> DatabaseClock:
    clock = Clock()
    database_clock = DatabaseClock(clock)
    now_us = clock.monotonic_us()
    database_clock.observe(1_790_000_000_000_000, now_us, now_us)
    return database_clock


async def test_it_rings_once_at_its_instant(clock: DatabaseClock) -> None:
    bell = Bell()
    alarm = Alarm(clock, bell)
    at_us = clock.now_us() + 20_000
    alarm.set(at_us)
    await asyncio.sleep(0)
    assert bell.rings == 0
    await wait_for(lambda: bell.rings, "a ring")
    assert clock.now_us() >= at_us - 1_000  # the loop's clock is coarse; whoever hears it looks
    await asyncio.sleep(0)
    assert bell.rings == 1


async def test_an_instant_that_has_passed_rings_at_the_next_turn(clock: DatabaseClock) -> None:
    bell = Bell()
    Alarm(clock, bell).set(0)
    assert bell.rings == 0  # not inside set(): the caller is not ready for that
    await wait_for(lambda: bell.rings == 1, "a ring")


async def test_the_earliest_of_many_instants_counts(clock: DatabaseClock) -> None:
    bell = Bell()
    alarm = Alarm(clock, bell)
    far_us = clock.now_us() + 3_600_000_000
    alarm.set(far_us)
    alarm.set(clock.now_us())
    alarm.set(far_us)
    await wait_for(lambda: bell.rings == 1, "a ring at the earliest")


async def test_only_one_handle_is_kept_however_often_it_is_set(clock: DatabaseClock) -> None:
    loop = asyncio.get_running_loop()
    alarm = Alarm(clock, Bell())
    at_us = clock.now_us() + 60_000_000
    before = len(loop._scheduled)  # type: ignore[attr-defined]  # asyncio's own heap
    for later in range(1_000):
        alarm.set(at_us + later)
    assert len(loop._scheduled) == before + 1  # type: ignore[attr-defined]  # asyncio's own heap
    alarm.clear()


async def test_it_can_be_set_again_from_its_own_ring(clock: DatabaseClock) -> None:
    rings: list[int] = []

    def ring() -> None:
        rings.append(clock.now_us())
        if len(rings) < 3:
            alarm.set(clock.now_us())

    alarm = Alarm(clock, ring)
    alarm.set(clock.now_us())
    await wait_for(lambda: len(rings) == 3, "three rings")


async def test_cleared_it_does_not_ring_and_can_be_set_anew(clock: DatabaseClock) -> None:
    bell = Bell()
    alarm = Alarm(clock, bell)
    alarm.set(0)
    alarm.clear()
    alarm.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    assert bell.rings == 0
    alarm.set(0)
    await wait_for(lambda: bell.rings == 1, "a ring")


async def test_it_rings_in_a_context_of_its_own_not_in_that_of_whoever_set_it(
    clock: DatabaseClock,
) -> None:
    bell = Bell()
    alarm = Alarm(clock, bell)
    WHO.set("who set it")
    alarm.set(0)
    await wait_for(lambda: bell.rings == 1, "a ring")
    assert bell.who == ["nobody"]


async def test_an_instant_thousands_of_years_ahead_is_no_overflow(clock: DatabaseClock) -> None:
    alarm = Alarm(clock, Bell())
    alarm.set(221_845_392_000_000_000)
    alarm.clear()
