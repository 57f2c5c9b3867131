"""The figures of `stats` for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from delayq.cli.collect import SOON, WINDOW, Stats
from delayq.cli.figures import NodeFigures, Percentiles, since_start
from delayq.cli.output import write_fields, write_line, write_table
from delayq.cli.stats_view import (
    FINISHED,
    dead_count,
    figures_of_kind,
    finished_count,
    kinds_of,
    recent_since,
)
from delayq.cli.text import clipped, instant, neutral, span
from delayq.instants import MICROSECOND

_KINDS_SHOWN: Final = 50
_TELLING: Final = ("retried", "missed", "leases_lost", "adopted")
_NODE_COUNTERS: Final = (
    "fired", "succeeded", "retried", "dead", "missed", "leases_lost", "adopted",
)  # fmt: skip
_KIND_COLUMNS: Final = (
    "KIND", "PENDING", "OVERDUE", "DUE SOON", "RUNNING", "DEAD", "LATE p50/p99", "RUN p50/p99", "",
)  # fmt: skip
_NODE_COLUMNS: Final = (
    "NODE", "NAME", "STATE", "RUNNING", "FIRED", "SUCCEEDED", "RETRIED", "DEAD", "MISSED", "LOST",
    "ADOPTED", "LATE p50/p99",
)  # fmt: skip


def show(stats: Stats) -> None:
    """The figures as text."""
    write_fields(list(_overview(stats)))
    write_line("")
    _show_kinds(stats)
    write_line("")
    _show_nodes(stats)
    for kind in stats.unserved:
        write_line(f"! no live node serves kind {clipped(kind)}")
    for part in stats.unavailable:
        write_line(f"! not known: {neutral(part)}")


def _overview(stats: Stats) -> Iterable[tuple[str, object]]:
    due, soon = stats.due, stats.soon
    yield "pending", stats.live and stats.live.pending
    yield f"due in {span(SOON // MICROSECOND)}", soon and soon.count_waiting()
    yield "overdue", due and due.count_waiting()
    yield "oldest due", due and _age(stats, due.oldest())
    yield "running", due and due.count_running()
    yield "longest running", _longest_text(stats)
    yield "past their deadline", due and (due.past_deadline or None)
    yield "dead", dead_count(stats)
    for state in FINISHED if stats.finished is not None else ():
        yield f"{state} in {span(WINDOW // MICROSECOND)}", finished_count(stats, state)
    yield "since the nodes started", _counters(stats)
    if stats.paces is not None:
        yield "lateness", _percentiles(stats.paces.all.lateness)
        yield "run time", _percentiles(stats.paces.all.run)
        yield "measured", _measured(stats)


def _show_kinds(stats: Stats) -> None:
    kinds = kinds_of(stats)
    rows = [_kind_row(stats, kind) for kind in kinds[:_KINDS_SHOWN]]
    write_table(_KIND_COLUMNS, rows, "no tasks of any kind")
    if len(kinds) > len(rows):
        write_line(f"… and {len(kinds) - len(rows)} more kinds (see --json)")


def _kind_row(stats: Stats, kind: str) -> list[object]:
    pace = stats.paces.by_kind.get(kind) if stats.paces else None
    marks = [
        "unserved" if kind in stats.unserved else "",
        "paused" if kind in (stats.paused or ()) else "",
    ]
    return [
        clipped(kind),
        *figures_of_kind(stats, kind).values(),
        _percentile(pace and pace.lateness),
        _percentile(pace and pace.run),
        " ".join(filter(None, marks)),
    ]


def _show_nodes(stats: Stats) -> None:
    rows = [_node_row(stats, node) for node in stats.nodes or ()]
    write_table(_NODE_COLUMNS, rows, "no node has ever registered, or all have left")


def _node_row(stats: Stats, node: NodeFigures) -> list[object]:
    pace = stats.paces.by_node.get(node.id) if stats.paces else None
    counters = (node.counters[name] for name in _NODE_COUNTERS)
    return [
        node.id,
        clipped(node.name, 30),
        node.state if node.live or node.state == "dead" else f"{node.state}, silent",
        stats.due.running_on[node.id] if stats.due else None,
        *counters,
        _percentile(pace and pace.lateness),
    ]


def _counters(stats: Stats) -> str:
    totals = since_start(stats.nodes or ())
    return "  ".join(f"{name.replace('_', ' ')} {totals[name]}" for name in _TELLING)


def _measured(stats: Stats) -> str:
    if stats.paces is None or not stats.paces.all.tasks:
        return f"nothing finished in the last {span(WINDOW // MICROSECOND)}"
    taken = (stats.at - recent_since(stats)) // MICROSECOND
    newest = "the newest " if stats.paces.cut else "all "
    return f"{newest}{stats.paces.all.tasks} tasks of the last {span(taken)}"


def _percentiles(percentiles: Percentiles | None) -> str | None:
    if percentiles is None:
        return None
    return "  ".join(f"{name} {span(us)}" for name, us in percentiles.document().items())


def _percentile(percentiles: Percentiles | None) -> str | None:
    return percentiles and f"{span(percentiles.p50_us)} / {span(percentiles.p99_us)}"


def _longest_text(stats: Stats) -> str | None:
    if stats.due is None or stats.due.longest is None:
        return None
    leased_us, kind, node = stats.due.longest
    return f"{_age(stats, leased_us)} ({clipped(kind)} on node {node})"


def _age(stats: Stats, us: int | None) -> str | None:
    since = instant(us)
    return None if since is None else f"{span((stats.at - since) // MICROSECOND)} ago"
