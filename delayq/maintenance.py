"""Periodic work as APScheduler interval jobs: sweep, orphan check, full scan, upkeep.

APScheduler reads the wall clock, and a node's wall clock must not matter: set back an hour it
would stop every job for an hour. So each beat compares the wall clock with the monotonic one,
and after a jump the jobs are timed anew. Its default grace of one second silently drops a late
run: it is set to None here, with coalescing and one instance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from delayq.clock import Clock
from delayq.errors import DelayQError
from delayq.log import log

_JUMP_US: Final = 1_000_000

Job = Callable[[], Awaitable[None]]


class Maintenance:
    """The jobs of one incarnation."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._scheduler: Any = AsyncIOScheduler(timezone=UTC)
        self._intervals: dict[str, float] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._offset_us = self._wall_offset_us()
        self._stopping = False

    def add(self, name: str, job: Job, every_s: float) -> None:
        """Run `job` every so many seconds, jittered by a tenth: nodes do not march in step."""
        self._intervals[name] = every_s
        self._scheduler.add_job(
            self._guarded,
            "interval",
            args=(name, job),
            seconds=every_s,
            jitter=every_s / 10,
            id=name,
            misfire_grace_time=None,
            coalesce=True,
            max_instances=1,
        )

    def start(self) -> None:
        """Start the clockwork."""
        self._scheduler.start()

    def run_now(self, name: str) -> None:
        """Run a job out of turn, as soon as it does not run already."""
        if name in self._running:
            self._again.add(name)  # one at a time: the scheduler would drop this run
        elif self._scheduler.running and name in self._intervals:
            self._scheduler.modify_job(name, next_run_time=datetime.now(UTC))

    async def stop(self) -> None:
        """Stop it, and wait for jobs that run."""
        if not self._scheduler.running:
            return
        self._stopping = True
        self._scheduler.remove_all_jobs()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._scheduler.shutdown(wait=False)

    def check_wall_clock(self) -> None:
        """Called with each beat: after a jump of the wall clock every job is timed anew."""
        offset_us = self._wall_offset_us()
        jumped_us, self._offset_us = offset_us - self._offset_us, offset_us
        if abs(jumped_us) < _JUMP_US:
            return
        log.bind(jump_s=jumped_us / 1e6).warning("wall_clock.jumped")
        for name, every_s in self._intervals.items():
            self._scheduler.modify_job(
                name, next_run_time=datetime.now(UTC) + timedelta(seconds=every_s / 10)
            )

    def _wall_offset_us(self) -> int:
        return time.time_ns() // 1000 - self._clock.boottime_us()

    async def _guarded(self, name: str, job: Job) -> None:
        """One run, and another if it was asked for meanwhile; stopping cancels it."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - APScheduler runs coroutine jobs in tasks
        self._running[name] = task
        try:
            await self._run(name, job)
            while name in self._again:
                self._again.discard(name)
                await self._run(name, job)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            # our own: the scheduler would print it as an error of the job
        finally:
            del self._running[name]

    async def _run(self, name: str, job: Job) -> None:
        """A failure is told, and the next run comes."""
        try:
            await job()
        except DelayQError as error:
            log.bind(job=name, error=str(error)).warning("job.failed")
        except Exception as error:  # noqa: BLE001 - the clockwork must outlive a bug in one job
            log.bind(job=name, error=type(error).__name__).error("job.crashed")
