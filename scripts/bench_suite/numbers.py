"""Percentiles and medians, and lateness made of starts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

Starts = Sequence[tuple[int, int]]
"""(task number, nanoseconds since 1970 by this host's clock)"""


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank; NaN if there are no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


def spread(values_ms: Sequence[float]) -> dict[str, float]:
    """The percentiles that are reported, in milliseconds."""
    return {
        "p50": percentile(values_ms, 50),
        "p90": percentile(values_ms, 90),
        "p99": percentile(values_ms, 99),
        "max": percentile(values_ms, 100),
    }


def median(values: Sequence[float]) -> float:
    """Of the runs; NaN if there are none."""
    return statistics.median(values) if values else float("nan")


def mean_of(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """A raw figure that was taken before and after what it is compared with."""
    return {key: (before[key] + after[key]) / 2 for key in before}


def lateness(
    starts: Starts, count: int, due_us: Callable[[int], float]
) -> tuple[list[float], dict[str, int]]:
    """Milliseconds from due to the first start of each task, and what went wrong."""
    late_ms = late_by_number(starts, count, due_us)
    counted = sum(0 <= number < count for number, _ in starts)
    early = sum(late < 0 for late in late_ms.values())
    faults = {"lost": count - len(late_ms), "twice": counted - len(late_ms), "early": early}
    return list(late_ms.values()), faults


def late_by_number(starts: Starts, count: int, due_us: Callable[[int], float]) -> dict[int, float]:
    """The same milliseconds, by the number of the task."""
    first: dict[int, int] = {}
    for number, at_ns in sorted(starts, key=itemgetter(1)):
        if 0 <= number < count:
            first.setdefault(number, at_ns)
    return {number: (at_ns / 1000 - due_us(number)) / 1000 for number, at_ns in first.items()}
