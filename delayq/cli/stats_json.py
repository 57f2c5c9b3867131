"""The figures of `stats` as one JSON document."""

from __future__ import annotations

from delayq.cli.collect import Stats
from delayq.cli.figures import NodeFigures, Pace, since_start
from delayq.cli.stats_view import (
    FINISHED,
    dead_count,
    figures_of_kind,
    finished_count,
    kinds_of,
    recent_since,
)
from delayq.cli.text import instant, iso


def document(stats: Stats) -> dict[str, object]:
    """The figures as JSON. A figure that could not be read is null."""
    due, dead = stats.due, dead_count(stats)
    return {
        "at": iso(stats.at),
        "pending": stats.live and stats.live.pending.document(),
        "due_soon": stats.soon and stats.soon.count_waiting().document(),
        "overdue": due and due.count_waiting().document(),
        "oldest_due_at": due and iso(instant(due.oldest())),
        "running": due and due.count_running().document(),
        "longest_running": _longest_document(stats),
        "past_deadline": due and due.past_deadline,
        "dead": dead and dead.document(),
        "finished_last_hour": _finished_document(stats),
        "since_start": None if stats.nodes is None else since_start(stats.nodes),
        "recent": _recent_document(stats),
        "kinds": [_kind_document(stats, kind) for kind in kinds_of(stats)],
        "nodes": [node_document(node) | _on_node(stats, node) for node in stats.nodes or ()],
        "unserved_kinds": stats.unserved,
        "unavailable": stats.unavailable,
    }


def node_document(node: NodeFigures) -> dict[str, object]:
    """A node as JSON."""
    return {
        "id": str(node.id),
        "name": node.name,
        "host": node.host,
        "pid": node.pid,
        "version": node.version,
        "state": node.state,
        "live": node.live,
        "kinds": list(node.kinds),
        "started_at": iso(instant(node.started_us)),
        "expires_at": iso(instant(node.expires_us)),
        "counters": node.counters,
    }


def _on_node(stats: Stats, node: NodeFigures) -> dict[str, object]:
    pace = stats.paces.by_node.get(node.id) if stats.paces else None
    running = stats.due.running_on[node.id] if stats.due else None
    return {"running": running, "recent": pace and _pace_document(pace)}


def _kind_document(stats: Stats, kind: str) -> dict[str, object]:
    figures = figures_of_kind(stats, kind)
    pace = stats.paces.by_kind.get(kind) if stats.paces else None
    return {
        "kind": kind,
        "served": kind not in stats.unserved,
        "paused": kind in (stats.paused or ()),
        **{name: count and count.document() for name, count in figures.items()},
        "oldest_due_at": iso(instant(stats.due.oldest_us.get(kind))) if stats.due else None,
        "recent": pace and _pace_document(pace),
    }


def _recent_document(stats: Stats) -> dict[str, object] | None:
    if stats.paces is None:
        return None
    what = {"since": iso(recent_since(stats)), "whole_hour": not stats.paces.cut}
    return what | _pace_document(stats.paces.all)


def _pace_document(pace: Pace) -> dict[str, object]:
    return {
        "tasks": pace.tasks,
        "succeeded": pace.succeeded,
        "cancelled": pace.cancelled,
        "missed": pace.missed,
        "retried": pace.retried,
        "lateness_us": pace.lateness and pace.lateness.document(),
        "run_us": pace.run and pace.run.document(),
    }


def _finished_document(stats: Stats) -> dict[str, object] | None:
    if stats.finished is None:
        return None
    return {state: finished_count(stats, state).document() for state in FINISHED}


def _longest_document(stats: Stats) -> dict[str, object] | None:
    if stats.due is None or stats.due.longest is None:
        return None
    leased_us, kind, node = stats.due.longest
    return {"since": iso(instant(leased_us)), "kind": kind, "node": str(node)}
