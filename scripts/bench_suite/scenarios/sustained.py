"""Scheduling and running at the same time, with delays below and above the horizon."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayq.settings import Settings

from ..cluster import Cluster, until_empty, warm
from ..numbers import late_by_number, spread
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .calls import POOL

if TYPE_CHECKING:
    from ..processes import Child
    from ..server import Ground
    from ..sizes import Sizes

_NEAR_S = (0.2, 5.0)
_BEYOND_S = (0.5, 2.5)
_FLOOD_AHEAD_S = 1.0
_GROUPS = ("near", "far")


@dataclass(frozen=True, slots=True)
class _Stream:
    """When each task is scheduled, and when it is due, in microseconds since 1970.

    Near and far ones by turns: below the horizon, found by hints, and above it, by sweeps.
    """

    call_us: list[float]
    due_us: list[float]

    def of(self, group: int) -> list[float]:
        """The due instants of a group."""
        return self.due_us[group :: len(_GROUPS)]


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run: the raw flood, then tasks at a set rate beside bare timers, then the flood."""
    raw_per_s = await _raw_flood(ground, sizes)
    async with warm(ground) as cluster, cluster.place.child("raw_process") as timers:
        await timers.ready()
        stream = _stream(sizes, _horizon_s(ground))
        bare = await _stream_beside_timers(cluster, timers, stream)
        per_s, flooded = await _flood(cluster, sizes, len(stream.due_us))
        starts = await cluster.stop()
    late = late_by_number(starts, len(stream.due_us), stream.due_us.__getitem__)
    numbers = {number for number, _ in starts if number >= 0}
    faults = {
        "lost": len(stream.due_us) + flooded - len(numbers),
        "twice": sum(number >= 0 for number, _ in starts) - len(numbers),
        "early": sum(late_ms < 0 for late_ms in late.values()),
    }
    ours = {"per_s": per_s}
    raw = {"per_s": raw_per_s}
    for place, group in enumerate(_GROUPS):
        found = spread([ms for number, ms in late.items() if number % len(_GROUPS) == place])
        ours |= {f"{group}_{key}": value for key, value in found.items()}
        raw |= {f"{group}_{key}": value for key, value in bare[place].items()}
    return Sample(ours, raw, faults)


def _horizon_s(ground: Ground) -> float:
    default = Settings.model_fields["horizon_s"].default
    return float(ground.settings.get("DELAYQ_HORIZON_S", default))


def _stream(sizes: Sizes, horizon_s: float) -> _Stream:
    count = max(2, round(sizes.sustained_rate * sizes.sustained_seconds))
    first_us = time.time_ns() / 1000 + sizes.lead_seconds * 1e6
    call_us = [first_us + number * 1e6 / sizes.sustained_rate for number in range(count)]
    delays = (_NEAR_S, (horizon_s + _BEYOND_S[0], horizon_s + _BEYOND_S[1]))
    due_us = [
        float(round(at_us + random.uniform(*delays[number % 2]) * 1e6))
        for number, at_us in enumerate(call_us)
    ]
    return _Stream(call_us, due_us)


async def _stream_beside_timers(
    cluster: Cluster, timers: Child, stream: _Stream
) -> list[dict[str, float]]:
    """Percentiles of bare timers of the same instants, near and far."""
    dues_us = [stream.of(group) for group in range(len(_GROUPS))]
    bare = asyncio.create_task(timers.ask("timers_at", dues_us=dues_us))
    try:
        await cluster.producer.ask("stream", call_us=stream.call_us, due_us=stream.due_us)
        groups: list[dict[str, float]] = (await bare)["groups"]
    finally:
        bare.cancel()
    await cluster.all_started(len(stream.due_us))
    return groups


async def _flood(cluster: Cluster, sizes: Sizes, number: int) -> tuple[float, int]:
    """Tasks a second that were scheduled and run, and how many there were."""
    answer = await cluster.producer.ask(
        "flood", seconds=sizes.schedule_seconds, callers=sizes.callers,
        ahead_s=_FLOOD_AHEAD_S, number=number,
    )  # fmt: skip
    async with cluster.place.connection() as conn:
        over_ns = await until_empty(conn, cluster.workers)
    return _per_s(answer["count"], answer["began_ns"], over_ns), answer["count"]


async def _raw_flood(ground: Ground, sizes: Sizes) -> float:
    async with ground.raw() as (feeder, dsn), ground.raw() as (follower, _):
        await follower.ready()
        await feeder.ask("fill", dsn=dsn, rows=0)
        fed, followed = await asyncio.gather(
            feeder.ask(
                "feed", dsn=dsn, seconds=sizes.schedule_seconds, callers=sizes.callers,
                pool=POOL, ahead_s=_FLOOD_AHEAD_S,
            ),
            follower.ask(
                "follow", dsn=dsn,
                until_ns=time.time_ns() + round((sizes.schedule_seconds + 1) * 1e9),
            ),
        )  # fmt: skip
    return _per_s(fed["count"], fed["began_ns"], followed["ended_ns"])


def _per_s(count: int, began_ns: int, ended_ns: int) -> float:
    """From the first due instant on: before it nothing could be run."""
    return count / ((ended_ns - began_ns) / 1e9 - _FLOOD_AHEAD_S)


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    about = f"lateness, scheduled and run at {sizes.sustained_rate:,}/s"
    return (
        Figure("per_s", "scheduled and run at the same time", "/s"),
        Figure("near_p50", f"{about}, near, p50", "ms", Target(Measure.DIFFERENCE, most=1.0)),
        Figure("near_p99", f"{about}, near, p99", "ms", Target(Measure.DIFFERENCE, most=5.0)),
        Figure("far_p50", f"{about}, far, p50", "ms", Target(Measure.DIFFERENCE, most=1.0)),
        Figure("far_p99", f"{about}, far, p99", "ms", Target(Measure.DIFFERENCE, most=5.0)),
        Figure("far_max", f"{about}, far, max", "ms"),
    )


SCENARIO = Scenario(
    "sustained",
    "single calls of handler.at at a set rate, by turns with a delay below the horizon"
    f" ({_NEAR_S[0]:g} to {_NEAR_S[1]:g} s) and above it (by {_BEYOND_S[0]:g} to"
    f" {_BEYOND_S[1]:g} s), run meanwhile. Then as many as the callers can, due a second later:"
    " from the first due instant until the table is empty",
    "bare loop.call_at timers of the same instants in a process of their own; the callers insert"
    f" on a pool of {POOL} while another process leases and settles in turn what becomes due",
    _figures,
    run,
    brief=False,
)
