"""How much of everything: by default as much as some minutes allow, or what the targets name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeAlias, cast

Value: TypeAlias = int | float | tuple[int, ...]

_AS_MUCH_AGAIN = 12_000
"""tasks, for which the lead is doubled"""


def _count(default: int, about: str, full: int | None = None) -> int:
    count: int = field(default=default, metadata={"about": about, "full": full})
    return count


def _seconds(default: float, about: str, full: float | None = None) -> float:
    seconds: float = field(default=default, metadata={"about": about, "full": full})
    return seconds


def _counts(
    default: tuple[int, ...], about: str, full: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    counts: tuple[int, ...] = field(default=default, metadata={"about": about, "full": full})
    return counts


@dataclass(frozen=True, slots=True)
class Sizes:
    """Each is an option of `scripts/bench`."""

    throughput_tasks: int = _count(50_000, "no-op tasks that are due before the worker starts")
    nodes: tuple[int, ...] = _counts((1, 4), "how many nodes share the work", (1, 2, 4))
    nodes_tasks: int = _count(20_000, "no-op tasks of one instant that they share", 50_000)
    miss_rate: int = _count(500, "tasks a second, due evenly, to count missed leases")
    miss_seconds: float = _seconds(3.0, "for how long", 20.0)
    scale_nodes: int = _count(4, "nodes that share tasks whose handlers wait", 8)
    scale_rate: int = _count(400, "tasks a second, due evenly, that they share")
    scale_seconds: float = _seconds(3.0, "for how long", 20.0)

    lateness_rate: int = _count(200, "tasks a second, due evenly")
    lateness_fast_rate: int = _count(2_000, "the same, where they come fast")
    lateness_cpu_rate: int = _count(50, "the same, where handlers compute")
    lateness_seconds: float = _seconds(4.0, "for how long", 10.0)
    work_ms: float = _seconds(5.0, "milliseconds that handlers with work wait or compute")
    burst_tasks: int = _count(5_000, "tasks due at one instant")
    burst_large_tasks: int = _count(50_000, "the same, many")
    lone_tasks: int = _count(30, "lone tasks, one after another", 100)
    lone_spacing_seconds: float = _seconds(0.1, "between two of them")
    lead_seconds: float = _seconds(
        1.5, "how far ahead timed tasks are scheduled, many of them further", 2.5
    )
    sustained_rate: int = _count(300, "tasks a second that are scheduled and run at a time")
    sustained_seconds: float = _seconds(2.0, "for how long", 20.0)

    schedule_seconds: float = _seconds(1.0, "for how long calls are counted", 2.0)
    cancel_tasks: int = _count(500, "tasks to cancel, or move, in each way of calling", 2_000)
    callers: int = _count(50, "concurrent callers")
    bulk_tasks: int = _count(20_000, "tasks of one call in bulk", 100_000)

    idle_nodes: int = _count(3, "nodes that idle")
    idle_pending: int = _count(100_000, "tasks pending far ahead meanwhile", 10_000_000)
    idle_seconds: float = _seconds(12.0, "for how long statements are counted", 30.0)
    deep_pending: tuple[int, ...] = _counts(
        (0, 100_000),
        "tasks pending far ahead, for lateness, load and memory",
        (0, 100_000, 1_000_000, 10_000_000),
    )
    backlog_tasks: int = _count(50_000, "tasks overdue at the start of a node", 1_000_000)
    snapshot_tasks: int = _count(20_000, "no-op tasks beside an open snapshot", 1_000_000)
    memory_timers: int = _count(100_000, "timers whose memory is weighed")

    leave_nodes: int = _count(3, "nodes, one of which leaves or is killed")
    leave_rate: int = _count(100, "tasks a second meanwhile, due evenly")
    leave_seconds: float = _seconds(4.0, "for how long", 20.0)
    leave_work_ms: float = _seconds(50.0, "milliseconds that their handlers wait")
    crash_wait_seconds: float = _seconds(
        0.0, "how long to wait for what ran on the killed node to run again", 30.0
    )

    def lead_s(self, tasks: int) -> float:
        """How far ahead so many tasks are scheduled."""
        return self.lead_seconds * (1 + tasks / _AS_MUCH_AGAIN)


@dataclass(frozen=True, slots=True)
class Size:
    """One of them, as an option."""

    name: str
    about: str
    default: Value
    full: Value | None

    def chosen(self, given: Value | None, *, full: bool) -> Value:
        """What was given, or else the default."""
        if given is not None:
            return given
        return self.default if self.full is None or not full else self.full

    @property
    def told(self) -> str:
        """For the help."""
        more = "" if self.full is None else f"; {text_of(self.full)}"
        return f"{self.about} ({text_of(self.default)}{more})"


def all_sizes() -> list[Size]:
    """In the order of the help."""
    return [
        Size(size.name, size.metadata["about"], cast("Value", size.default), size.metadata["full"])
        for size in fields(Sizes)
    ]


def text_of(value: Value) -> str:
    """As it would be given."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:.12g}"
