"""The clockwork of a node: what a wall clock that is set must not stop.

APScheduler reads the wall clock; here the test owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from delayq.clock import Clock
from delayq.errors import DatabaseUnavailable
from delayq.maintenance import Maintenance
from tests.helpers import wait_for

if TYPE_CHECKING:
    from tests.conftest import Logged
    from tests.wall_clock import WallClock

HOUR = 3600


class Job:
    """Counts its runs; each may be held open."""

    def __init__(self) -> None:
        self.runs = 0
        self.at_once = self.most_at_once = 0
        self.cancelled = 0
        self.open = asyncio.Event()
        self.open.set()
        self.fails: BaseException | None = None

    async def __call__(self) -> None:
        self.runs += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1
        if self.fails is not None:
            raise self.fails

    async def more_runs(self, count: int = 2) -> None:
        before = self.runs
        await wait_for(lambda: self.runs >= before + count, f"{count} more runs")


@asynccontextmanager
async def clockwork(**jobs: tuple[Job, float]) -> AsyncIterator[Maintenance]:
    maintenance = Maintenance(Clock())
    for name, (job, every_s) in jobs.items():
        maintenance.add(name, job, every_s)
    maintenance.start()
    yield maintenance
    await maintenance.stop()


async def test_a_job_runs_again_and_again(wall: WallClock) -> None:
    job = Job()
    async with clockwork(sweep=(job, 0.02)):
        await job.more_runs(4)


@pytest.mark.parametrize("step_s", [-HOUR, HOUR, -25 * HOUR])
async def test_a_wall_clock_that_was_set_stops_no_job(wall: WallClock, step_s: float) -> None:
    job = Job()
    async with clockwork(sweep=(job, 0.05)) as maintenance:
        await job.more_runs(1)
        wall.ahead_s += step_s
        await asyncio.sleep(0.1)  # the clockwork looks at the wrong time, and waits for it
        maintenance.check_wall_clock()  # each beat does
        await job.more_runs(4)


async def test_without_the_check_the_jobs_would_stand_still_for_an_hour(wall: WallClock) -> None:
    """So that the test above is known to be able to fail."""
    job = Job()
    async with clockwork(sweep=(job, 0.05)):
        await job.more_runs(1)
        wall.ahead_s -= HOUR
        await asyncio.sleep(0.2)
        before = job.runs
        await asyncio.sleep(0.4)
        assert job.runs <= before + 1


async def test_a_clock_that_is_merely_disciplined_retimes_nothing(
    wall: WallClock, logged: list[Logged]
) -> None:
    job = Job()
    async with clockwork(sweep=(job, HOUR)) as maintenance:
        for _ in range(100):
            wall.ahead_s += 0.01
            maintenance.check_wall_clock()
        assert not [event for event in logged if event.event == "wall_clock.jumped"]
        wall.ahead_s += 5
        maintenance.check_wall_clock()
        maintenance.check_wall_clock()
        assert len([event for event in logged if event.event == "wall_clock.jumped"]) == 1


async def test_a_job_that_is_late_is_run_once_and_never_dropped(wall: WallClock) -> None:
    """The default grace of a second would drop it without a word, until the next hour."""
    job = Job()
    async with clockwork(sweep=(job, HOUR)) as maintenance:
        wall.ahead_s += 3.5 * HOUR  # a loop that was held up: three runs are due by now
        maintenance._scheduler.wakeup()
        await wait_for(lambda: job.runs, "the run")
        await asyncio.sleep(0.02)
        assert job.runs == 1


async def test_a_job_never_runs_twice_at_once(wall: WallClock) -> None:
    job = Job()
    job.open.clear()
    async with clockwork(sweep=(job, 0.01)) as maintenance:
        await wait_for(lambda: job.runs == 1, "it runs")
        maintenance.run_now("sweep")
        await asyncio.sleep(0.05)
        assert (job.runs, job.most_at_once) == (1, 1)
        job.open.set()
        await job.more_runs(2)
        assert job.most_at_once == 1


async def test_a_run_that_is_asked_for_comes_at_once(wall: WallClock) -> None:
    job = Job()
    async with clockwork(orphans=(job, HOUR)) as maintenance:
        maintenance.run_now("orphans")
        await wait_for(lambda: job.runs == 1, "the run")
        maintenance.run_now("unknown")


async def test_a_run_that_is_asked_for_while_the_job_runs_comes_after_it(wall: WallClock) -> None:
    """What a burial asks for must not be dropped because the last look is not over yet."""
    job = Job()
    job.open.clear()
    async with clockwork(orphans=(job, HOUR)) as maintenance:
        maintenance.run_now("orphans")
        await wait_for(lambda: job.runs == 1, "the first run")
        for _ in range(3):
            maintenance.run_now("orphans")
        await asyncio.sleep(0.02)
        assert job.runs == 1
        job.open.set()
        await wait_for(lambda: job.runs == 2, "the second run")
        await asyncio.sleep(0.02)
        assert (job.runs, job.most_at_once) == (2, 1)


@pytest.mark.parametrize("error", [DatabaseUnavailable("away"), ValueError("a bug")])
async def test_a_failure_is_told_and_the_next_run_comes(
    wall: WallClock, logged: list[Logged], error: Exception
) -> None:
    job = Job()
    job.fails = error
    async with clockwork(sweep=(job, 0.02)):
        await job.more_runs(3)
    assert {event.event for event in logged} & {"job.failed", "job.crashed"}


async def test_stopping_cancels_what_runs_and_nothing_runs_afterwards(wall: WallClock) -> None:
    job, other = Job(), Job()
    job.open.clear()
    async with clockwork(sweep=(job, 0.01), upkeep=(other, 0.01)) as maintenance:
        await wait_for(lambda: job.runs == 1, "it runs")
        await maintenance.stop()
        assert (job.cancelled, job.at_once) == (1, 0)
        runs = other.runs
        await asyncio.sleep(0.05)
        assert (job.runs, other.runs) == (1, runs)
        await maintenance.stop()


async def test_stopping_what_was_never_started_is_fine(wall: WallClock) -> None:
    maintenance = Maintenance(Clock())
    maintenance.add("sweep", Job(), 1.0)
    maintenance.run_now("sweep")
    await maintenance.stop()
