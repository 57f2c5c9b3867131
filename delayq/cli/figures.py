"""Puts the figures of `stats` together from rows. Pure: rows in, report out.

A number may be exact, a lower bound or an estimate, and always says which.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, Protocol, TypeAlias, final

Precision: TypeAlias = Literal["exact", "at_least", "estimate"]

COUNTED: Final = 10_000
COUNTERS: Final = tuple(
    "fired succeeded retried dead missed snoozed leases_lost adopted foreign missed_leases".split()
)
_LONGEST_COUNTER: Final = 2**63


class Row(Protocol):
    """A row of an answer: values by column name."""

    def __getitem__(self, column: str, /) -> Any: ...


@final
@dataclass(frozen=True, slots=True)
class Count:
    """A number of tasks, and how far to trust it."""

    value: int = 0
    precision: Precision = "exact"

    def __str__(self) -> str:
        if self.precision == "estimate":
            return f"~{_rounded(self.value)}"
        return f"{self.value}+" if self.precision == "at_least" else str(self.value)

    def document(self) -> dict[str, object]:
        """For JSON."""
        return {"count": self.value, "precision": self.precision}


def _rounded(value: int) -> int:
    """Three figures: an estimate that shows more of them lies."""
    return int(float(f"{value:.3g}"))


def capped(value: int, is_capped: bool, cap: int = COUNTED) -> Count:
    """A count that stopped at `cap`, or earlier if something else cut it short."""
    if value >= cap and is_capped:
        return Count(cap, "at_least")
    return Count(value, "at_least" if is_capped else "exact")


@final
@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a duration in microseconds."""

    p50_us: int
    p95_us: int
    p99_us: int
    max_us: int

    @classmethod
    def of(cls, values: Sequence[int | None] | None) -> Percentiles | None:
        """From an array of four; None if there was nothing to measure."""
        known = [value for value in values or () if value is not None]
        return cls(*known) if len(known) == 4 else None

    def document(self) -> dict[str, int]:
        """For JSON."""
        return {
            "p50": self.p50_us,
            "p95": self.p95_us,
            "p99": self.p99_us,
            "max": self.max_us,
        }


@final
@dataclass(slots=True)
class Live:
    """Live tasks by kind: all of them, or what a sample says."""

    pending: Count = field(default_factory=Count)
    by_kind: dict[str, Count] = field(default_factory=dict)


@final
@dataclass(slots=True)
class Due:
    """What is due (or due soon): waiting and running, by kind and by node."""

    waiting: Counter[str] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)
    running_on: Counter[int] = field(default_factory=Counter)
    oldest_us: dict[str, int] = field(default_factory=dict)
    longest: tuple[int, str, int] | None = None
    """(leased_us, kind, node) of the running task that was leased first"""
    past_deadline: int = 0
    cut: bool = False

    def count_waiting(self) -> Count:
        """Pending tasks in it."""
        return capped(self.waiting.total(), self.cut)

    def count_running(self) -> Count:
        """Running tasks in it."""
        return capped(self.running.total(), self.cut)

    def oldest(self) -> int | None:
        """The instant of the first pending task."""
        return min(self.oldest_us.values(), default=None)


@final
@dataclass(slots=True)
class Pace:
    """What finished lately: lateness and run time of one kind, of one node, or of all."""

    tasks: int = 0
    succeeded: int = 0
    cancelled: int = 0
    missed: int = 0
    retried: int = 0
    first_us: int | None = None
    lateness: Percentiles | None = None
    run: Percentiles | None = None


@final
@dataclass(slots=True)
class Paces:
    """Pace in all, by kind and by node. `cut`: only the newest of the window were read."""

    all: Pace = field(default_factory=Pace)
    by_kind: dict[str, Pace] = field(default_factory=dict)
    by_node: dict[int, Pace] = field(default_factory=dict)
    cut: bool = False


@final
@dataclass(frozen=True, slots=True)
class NodeFigures:
    """A node and what it counted since it started."""

    id: int
    name: str
    host: str
    pid: int
    version: str
    kinds: tuple[str, ...]
    state: str
    live: bool
    started_us: int | None
    expires_us: int | None
    counters: dict[str, int]

    @property
    def serves(self) -> bool:
        """True if tasks of its kinds can count on it."""
        return self.live and self.state in ("joining", "active")


# --- from rows ----------------------------------------------------------------------------------


def live_of(rows: Iterable[Row]) -> Live:
    """Exact figures, of a table that was read whole."""
    pending: Counter[str] = Counter()
    for row in rows:
        if row["state"] != "running":
            pending[row["kind"]] += row["tasks"]
    return Live(
        Count(pending.total()), {kind: Count(tasks) for kind, tasks in pending.most_common()}
    )


def live_estimate(rows: Iterable[Row]) -> Live:
    """Figures from a sample of the table's pages; never below what was counted for sure."""
    pending: Counter[str] = Counter()
    for row in rows:
        if row["state"] != "running" and row["share"] > 0:
            pending[row["kind"]] += round(row["tasks"] / row["share"])
    total = pending.total()
    known = Count(COUNTED, "at_least") if total < COUNTED else Count(total, "estimate")
    return Live(known, {kind: Count(n, "estimate") for kind, n in pending.most_common()})


def due_of(rows: Iterable[Row]) -> Due:
    """The figures of a window of the table."""
    due = Due()
    for row in rows:
        kind, node, tasks = row["kind"], row["node"], row["tasks"]
        due.cut = due.cut or row["capped"]
        due.past_deadline += row["past_deadline"]
        if row["state"] == "running":
            due.running[kind] += tasks
            due.running_on[node or 0] += tasks
            _first_leased(due, row)
        else:
            due.waiting[kind] += tasks
            due.oldest_us[kind] = min(row["oldest_us"], due.oldest_us.get(kind, row["oldest_us"]))
    return due


def _first_leased(due: Due, row: Row) -> None:
    leased_us = row["leased_us"]
    if leased_us is not None and (due.longest is None or leased_us < due.longest[0]):
        due.longest = (leased_us, row["kind"], row["node"] or 0)


def paces_of(rows: Iterable[Row]) -> Paces:
    """From the grouping sets: all, by kind, by node."""
    paces = Paces()
    for row in rows:
        pace = _pace(row)
        match row["grouping"]:
            case 3:
                paces.all = pace
            case 1:
                paces.by_kind[row["kind"]] = pace
            case _ if row["node"] is not None:
                paces.by_node[row["node"]] = pace
    return paces


def _pace(row: Row) -> Pace:
    return Pace(
        tasks=row["tasks"],
        succeeded=row["succeeded"],
        cancelled=row["cancelled"],
        missed=row["missed"],
        retried=row["retried"],
        first_us=row["first_us"],
        lateness=Percentiles.of(row["lateness_us"]),
        run=Percentiles.of(row["run_us"]),
    )


def node_of(row: Row) -> NodeFigures:
    """One node; counters that are no numbers count as nothing."""
    return NodeFigures(
        id=row["id"],
        name=row["name"],
        host=row["host"],
        pid=row["pid"],
        version=row["version"],
        kinds=tuple(kind for kind in row["kinds"] if kind is not None),
        state=row["state"],
        live=bool(row["live"]),
        started_us=row["started_us"],
        expires_us=row["expires_us"],
        counters=counters_of(row["counters"]),
    )


def counters_of(text: str | None) -> dict[str, int]:
    """What a node said of itself; whatever a stranger wrote there, numbers come out."""
    try:
        said = json.loads(text or "{}")
    except (ValueError, RecursionError):
        said = {}
    known = said if isinstance(said, dict) else {}
    return {name: _number(known.get(name)) for name in COUNTERS}


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(value) if 0 <= value < _LONGEST_COUNTER else 0


def since_start(nodes: Iterable[NodeFigures]) -> dict[str, int]:
    """The counters of all nodes, summed."""
    total: Counter[str] = Counter()
    for node in nodes:
        total.update(node.counters)
    return {name: total[name] for name in COUNTERS}


def unserved(kinds: Iterable[str], nodes: Iterable[NodeFigures]) -> list[str]:
    """Those of the kinds that no live node serves, sorted."""
    served = {kind for node in nodes if node.serves for kind in node.kinds}
    return sorted(set(kinds) - served)


def begin_of(pages: int, tail: int) -> str:
    """Where the last `tail` pages of a table begin, as the database writes a place."""
    return f"({max(0, pages - tail)},0)"


def is_cut(leaves: Row, since: datetime, tail: int, older: bool) -> bool:
    """True if the last `tail` pages of a day do not reach back to `since`."""
    if since >= leaves["midnight"]:
        return bool(leaves["today"] > tail and not older)
    return bool(leaves["today"] > tail or (leaves["yesterday"] > tail and not older))


def totals(rows: Iterable[Row], by: str) -> dict[str, int]:
    """Tasks by the value of a column."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row[by]] += row["tasks"]
    return dict(found)
