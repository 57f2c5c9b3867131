"""What is measured, the same for every system."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from ..numbers import lateness, percentile
from ..processes import BenchError, until
from ..scenario import Figure
from .contract import Kind
from .drained import Drained, drained_of

if TYPE_CHECKING:
    from .options import Sizes
    from .stage import RivalWorker, Stage

_HOUR_US: Final = 3_600_000_000
_DAY_US: Final = 24 * _HOUR_US
_FAR_NUMBERS: Final = 1_000_000_000
_START_LIMIT_S: Final = 60.0
_PROBE: Final = 200
_MARGIN: Final = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run found."""

    figures: dict[str, float]
    """by their keys; one that is absent could not be found, and a note says why"""
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """by the same keys: what went otherwise than it should"""


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that is measured."""

    name: str
    about: str
    figures: tuple[Figure, ...]
    run: Callable[[Stage], Awaitable[Outcome]]
    together: bool = False
    """all systems at the same time, since they do little but wait"""


def measures_of(sizes: Sizes) -> dict[str, Measure]:
    """All of them by name, in the order in which they are run."""
    return {
        measure.name: measure
        for measure in (
            _throughput(sizes), _lateness(sizes), _burst(sizes),
            _backlog("backlog", sizes, sizes.backlog_tasks),
            _backlog("deep", sizes, sizes.deep_tasks),
            _transaction(sizes), _crash(sizes), _schedule(sizes),
        )
    }  # fmt: skip


# --- no-op tasks that are due already ---------------------------------------------------------


def _throughput(sizes: Sizes) -> Measure:
    return Measure(
        "throughput",
        f"{sizes.throughput_tasks:,} no-op tasks that are due before the one worker starts; from"
        " the first start until the database holds none that is not settled",
        (Figure("per_s", "no-op tasks a second, one worker", "/s"),),
        partial(run_throughput, sizes),
    )


async def run_throughput(sizes: Sizes, stage: Stage) -> Outcome:
    """The rate of all of them."""
    count = sizes.throughput_tasks
    await _schedule_due(stage, count)
    drained = await _drain(stage, count, sizes.limit_seconds)
    return Outcome({"per_s": drained.per_s}, {"per_s": drained.notes})


async def _schedule_due(stage: Stage, count: int) -> None:
    await stage.schedule(count, time.time_ns() // 1000 - 1_000_000 - count, 1)
    await stage.tidy()


async def _drain(stage: Stage, count: int, limit_s: float) -> Drained:
    async with stage.worker("drain") as worker:
        over_ns, all_settled = await stage.until_settled(worker, limit_s)
        await worker.stop()
        return drained_of(worker.starts(), count, over_ns, None if all_settled else limit_s)


# --- tasks with an instant --------------------------------------------------------------------


def _lateness(sizes: Sizes) -> Measure:
    count = round(sizes.lateness_rate * sizes.lateness_seconds)
    return Measure(
        "lateness",
        f"{count:,} tasks due evenly at {sizes.lateness_rate} a second, scheduled ahead by the bulk"
        f" call on a warm worker ({sizes.lead_seconds:g} s and twice what the call takes); the"
        " handler's first act against the instant that was asked for",
        _late_figures(f"lateness at {sizes.lateness_rate} tasks a second"),
        partial(run_lateness, sizes),
    )


def _late_figures(title: str) -> tuple[Figure, Figure]:
    return Figure("p50", f"{title}, median", "ms"), Figure("p99", f"{title}, p99", "ms")


async def run_lateness(sizes: Sizes, stage: Stage) -> Outcome:
    """Percentiles of those that started."""
    count = max(1, round(sizes.lateness_rate * sizes.lateness_seconds))
    late_ms, notes = await _timed(stage, count, 1_000_000 // sizes.lateness_rate, sizes)
    figures = {"p50": percentile(late_ms, 50), "p99": percentile(late_ms, 99)}
    return Outcome(figures, dict.fromkeys(figures, notes))


def _burst(sizes: Sizes) -> Measure:
    return Measure(
        "burst",
        f"{sizes.burst_tasks:,} tasks due at one instant, scheduled ahead in the same way; until"
        " the last of them has started",
        (Figure("all", f"{sizes.burst_tasks:,} tasks of one instant, all started after", "ms"),),
        partial(run_burst, sizes),
    )


async def run_burst(sizes: Sizes, stage: Stage) -> Outcome:
    """The last start."""
    late_ms, notes = await _timed(stage, sizes.burst_tasks, 0, sizes)
    return Outcome({"all": max(late_ms)}, {"all": notes})


async def _timed(
    stage: Stage, count: int, step_us: int, sizes: Sizes
) -> tuple[list[float], tuple[str, ...]]:
    """How late each start was, in milliseconds, and what went wrong."""
    async with stage.warm_worker("timed") as worker:
        lead_s = sizes.lead_seconds + await _time_to_schedule(stage, count)
        first_us = time.time_ns() // 1000 + round(lead_s * 1e6)
        await stage.schedule(count, first_us, step_us)
        ahead_s = first_us / 1e6 - time.time()
        if ahead_s < 0:
            raise BenchError("scheduling took longer than the lead; give a longer --lead-seconds")
        limit_s = ahead_s + count * step_us / 1e6 + sizes.grace_seconds
        await until(lambda: _started(worker) >= count, limit_s, worker)
        await worker.stop()
        late_ms, faults = lateness(
            worker.starts(), count, lambda number: first_us + number * step_us
        )
    if not late_ms:
        raise BenchError(f"nothing started within {sizes.grace_seconds:g} s of its instant")
    return late_ms, _faults(faults, count, sizes.grace_seconds)


async def _time_to_schedule(stage: Stage, count: int) -> float:
    """Seconds that leave it time to schedule so many, by a few that are not due today."""
    probe = min(count, _PROBE)
    took_s = await stage.schedule(probe, time.time_ns() // 1000 + _DAY_US, number=_FAR_NUMBERS)
    return _MARGIN * took_s * count / probe


def _faults(faults: dict[str, int], count: int, grace_s: float) -> tuple[str, ...]:
    words = {
        "lost": f"of {count:,} had not started {grace_s:g} s after the last instant",
        "twice": "started twice",
        "early": "started early",
    }
    return tuple(f"{found:,} {words[fault]}" for fault, found in faults.items() if found)


def _started(worker: RivalWorker) -> int:
    return sum(number >= 0 for number in worker.first_starts())


# --- the same, with many tasks pending --------------------------------------------------------


def _backlog(name: str, sizes: Sizes, pending: int) -> Measure:
    title = f"with {pending:,} pending"
    return Measure(
        name,
        f"lateness, then throughput, with {pending:,} tasks pending a day ahead, scheduled by the"
        " bulk call; vacuumed and analyzed first",
        (
            *_late_figures(f"lateness {title}"),
            Figure("per_s", f"no-op tasks a second {title}", "/s"),
        ),
        partial(run_backlog, sizes, pending),
    )


async def run_backlog(sizes: Sizes, pending: int, stage: Stage) -> Outcome:
    """Lateness first: nothing has been left behind by other tasks then."""
    await stage.schedule(pending, time.time_ns() // 1000 + _DAY_US, 1, number=_FAR_NUMBERS)
    await stage.tidy()
    late = await run_lateness(sizes, stage)
    rate = await run_throughput(sizes, stage)
    return Outcome({**late.figures, **rate.figures}, {**late.notes, **rate.notes})


# --- the same, with vacuum held back ----------------------------------------------------------


def _transaction(sizes: Sizes) -> Measure:
    title = "starts a second while a transaction stays open"
    return Measure(
        "transaction",
        f"{sizes.transaction_tasks:,} no-op tasks that are due, with a transaction open that holds"
        " back vacuum from before the worker starts; starts a second in the first and in the last"
        " quarter of those that were started",
        (
            Figure("first", f"{title}, first quarter", "/s"),
            Figure("last", f"{title}, last quarter", "/s"),
        ),
        partial(run_transaction, sizes),
    )


async def run_transaction(sizes: Sizes, stage: Stage) -> Outcome:
    """The rates of the first and the last quarter."""
    count = sizes.transaction_tasks
    await _schedule_due(stage, count)
    async with stage.transaction():
        drained = await _drain(stage, count, sizes.limit_seconds)
    rates = {"first": drained.quarter_per_s(0), "last": drained.quarter_per_s(3)}
    return Outcome(rates, dict.fromkeys(rates, drained.notes))


# --- a worker that dies -----------------------------------------------------------------------


def _crash(sizes: Sizes) -> Measure:
    return Measure(
        "crash",
        f"a worker is killed (SIGKILL) while it runs {sizes.held_tasks} tasks and another worker"
        " idles; until the last of them has started again. All systems side by side, each in a"
        " database of its own",
        (Figure("again", "a killed worker's tasks run again after", "s"),),
        partial(run_crash, sizes),
        together=True,
    )


async def run_crash(sizes: Sizes, stage: Stage) -> Outcome:
    """When the other worker has started all of them."""
    count = sizes.held_tasks
    async with stage.warm_worker("killed") as killed:
        await stage.schedule(count, time.time_ns() // 1000, kind=Kind.HOLD)
        if not await until(lambda: _started(killed) >= count, _START_LIMIT_S, killed):
            raise BenchError(f"not all tasks started: {killed.tail()}")
        # Only now, so that all of them run on the worker that is killed.
        async with stage.warm_worker("other") as other:
            killed_ns = time.time_ns()
            await killed.kill()
            again = await until(lambda: _started(other) >= count, sizes.crash_seconds, other)
            return _crashed(other, killed_ns, None if again else sizes.crash_seconds)


def _crashed(other: RivalWorker, killed_ns: int, waited_s: float | None) -> Outcome:
    starts = [at_ns for number, at_ns in other.first_starts().items() if number >= 0]
    if waited_s is not None:
        return Outcome({}, {"again": (f"{len(starts)} ran again within {waited_s:g} s",)})
    return Outcome({"again": (max(starts) - killed_ns) / 1e9})


# --- an application that schedules ------------------------------------------------------------


def _schedule(sizes: Sizes) -> Measure:
    return Measure(
        "schedule",
        f"tasks scheduled an hour ahead with a worker up: single calls, one after another, and"
        f" {sizes.bulk_tasks:,} by the bulk call, 5,000 at a time",
        (
            Figure("single", "scheduled a second, one call each", "/s"),
            Figure("bulk", "scheduled a second by the bulk call", "/s"),
        ),
        partial(run_schedule, sizes),
    )


async def run_schedule(sizes: Sizes, stage: Stage) -> Outcome:
    """The rates of both."""
    async with stage.warm_worker():
        answer = await stage.client.ask("single", seconds=sizes.schedule_seconds)
        first_us = time.time_ns() // 1000 + _HOUR_US
        took_s = await stage.schedule(sizes.bulk_tasks, first_us, 1)
    return Outcome({"single": answer["per_s"], "bulk": sizes.bulk_tasks / took_s})
