"""What both forms of `stats` say: figures derived from what was collected."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from delayq.cli.collect import WINDOW, Stats
from delayq.cli.figures import COUNTED, Count, capped
from delayq.cli.text import instant

FINISHED: Final = ("succeeded", "cancelled", "missed")


def kinds_of(stats: Stats) -> list[str]:
    """Every kind that was seen anywhere, those with most pending tasks first."""
    live = stats.live.by_kind if stats.live else {}
    seen = set(live) | set(stats.dead or ()) | set(stats.paused or ())
    for due in (stats.due, stats.soon):
        seen |= {*due.waiting, *due.running} if due else set()
    if stats.paces is not None:
        seen |= set(stats.paces.by_kind)
    return sorted(seen, key=lambda kind: (-live.get(kind, Count()).value, kind))


def figures_of_kind(stats: Stats, kind: str) -> dict[str, Count | None]:
    """The counts of one kind by name; None if they could not be read."""
    live, due, soon = stats.live, stats.due, stats.soon
    return {
        "pending": live and live.by_kind.get(kind, Count(0, live.pending.precision)),
        "overdue": due and capped(due.waiting[kind], due.cut),
        "due_soon": soon and capped(soon.waiting[kind], soon.cut),
        "running": due and capped(due.running[kind], due.cut),
        "dead": _dead_of(stats, kind),
    }


def _dead_of(stats: Stats, kind: str) -> Count | None:
    total = dead_count(stats)
    return total and Count((stats.dead or {}).get(kind, 0), total.precision)


def dead_count(stats: Stats) -> Count | None:
    """Dead tasks of all kinds."""
    if stats.dead is None:
        return None
    total = sum(stats.dead.values())
    return capped(total, total > COUNTED)


def finished_count(stats: Stats, state: str) -> Count:
    """How many tasks ended so in the last hour."""
    counts = stats.finished or {}
    cut = any(count.precision != "exact" for count in counts.values())
    return counts.get(state, Count(0, "at_least" if cut else "exact"))


def recent_since(stats: Stats) -> datetime:
    """From when on lateness and run times were measured."""
    first = stats.paces.all.first_us if stats.paces and stats.paces.cut else None
    return instant(first) or stats.at - WINDOW
