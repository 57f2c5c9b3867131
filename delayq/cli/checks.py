"""The findings of `doctor`: what was found in, a sentence and an advice out. Pure.

`ok` is as it should be, `warn` will hurt some day or some figures, `fail` hurts now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from delayq.cli.figures import Due, NodeFigures, Row, unserved
from delayq.cli.text import clipped, span
from delayq.settings import Settings

Status: TypeAlias = Literal["ok", "warn", "fail"]

OLDEST_SERVER: Final = 14
NEWEST_SERVER: Final = 18
_S: Final = 1_000_000
# What a node opens beside its effects and its clients: lease, settle, sweep, look, upkeep, beat,
# listen.
CONTROL_CONNECTIONS: Final = 7


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `advice` is empty if there is nothing to do."""

    name: str
    status: Status
    finding: str
    advice: str = ""

    def document(self) -> dict[str, str]:
        """For JSON."""
        return {
            "check": self.name,
            "status": self.status,
            "finding": self.finding,
            "advice": self.advice,
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on a finding is worth a warning, or is a failure."""

    clock_warn_us: int = 1 * _S
    overdue_warn_us: int = 5 * _S
    overdue_fail_us: int = 60 * _S
    transaction_warn_s: float = 300
    transaction_fail_s: float = 3_600
    slot_fail_bytes: int = 10 * 2**30
    dead_rows: int = 200_000
    notify_warn: float = 0.1
    notify_fail: float = 0.5
    partitions_ahead: int = 2


def worst(checks: Iterable[Check]) -> Status:
    """The worst status of all."""
    found = {check.status for check in checks}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"


# --- the server ---------------------------------------------------------------------------------


def server_version(server: Row) -> Check:
    """Is it one of the versions that delayq is tested with, and may it be written to?"""
    major = server["version"] // 10_000
    text = f"PostgreSQL {major}.{server['version'] % 10_000}"
    if server["standby"]:
        advice = "point DELAYQ_DSN at the primary (target_session_attrs=primary finds it)"
        return Check("server", "fail", f"{text}, a read-only standby", advice)
    if server["encoding"] != "UTF8":
        advice = "create the database with ENCODING 'UTF8'; others cannot hold every payload"
        return Check("server", "fail", f"{text}, encoding {server['encoding']}", advice)
    if major < OLDEST_SERVER:
        return Check("server", "fail", f"{text} is too old", f"upgrade to {OLDEST_SERVER} or newer")
    if major > NEWEST_SERVER:
        advice = (
            f"delayq was tested with {OLDEST_SERVER} to {NEWEST_SERVER}: try it on a copy first"
        )
        return Check("server", "warn", f"{text} is newer than this delayq", advice)
    return Check("server", "ok", f"{text}, writable, UTF8")


def clock_offset(offset_us: int, round_trip_us: int, limits: Limits) -> Check:
    """How far the database's clock is from this computer's. Nothing depends on it."""
    side = "ahead of" if offset_us >= 0 else "behind"
    text = (
        f"the database's clock is {span(abs(offset_us))} {side} this computer's, "
        f"give or take {span(round_trip_us // 2)}"
    )
    if abs(offset_us) <= max(limits.clock_warn_us, round_trip_us):
        return Check("clock", "ok", text)
    advice = "tasks fire by the database's clock alone, but logs will not match: synchronise both"
    return Check("clock", "warn", text, advice)


def time_zone(zone: Row) -> Check:
    """What an instant without an offset means to this role."""
    if zone["naive"]:
        text = f"{zone['naive']} columns of the schema have no time zone"
        return Check("time zone", "fail", text, "somebody changed the tables: restore their types")
    text = (
        f"all columns have a time zone; sessions of this role read bare instants as {zone['zone']}"
    )
    if str(zone["zone"]).upper() in ("UTC", "ETC/UTC", "GMT", "ETC/GMT", "UCT", "ETC/UCT", "ZULU"):
        return Check("time zone", "ok", text)
    advice = (
        "in hand-written SQL give instants with an offset ('… 09:00+00'), or "
        "ALTER ROLE … SET timezone = 'UTC'; delayq itself is not affected"
    )
    return Check("time zone", "warn", text, advice)


def connections(found: Row, settings: Settings) -> Check:
    """Is there room for one more node?"""
    needed = CONTROL_CONNECTIONS + settings.effect_connections + settings.client_connections
    rooms = {
        scope: found[f"{scope}_limit"] - found[f"{scope}_used"]
        for scope in ("server", "database", "role")
        if found[f"{scope}_limit"] >= 0
    }
    scope, free = min(rooms.items(), key=lambda room: room[1])
    limit = found[f"{scope}_limit"]
    text = (
        f"{max(free, 0)} of {limit} connections of the {scope} are free; one node may need {needed}"
    )
    if free >= needed:
        return Check("connections", "ok", text)
    advice = (
        f"raise the limit of the {scope}, or lower DELAYQ_EFFECT_CONNECTIONS and "
        "DELAYQ_CLIENT_CONNECTIONS: a rolling restart needs room for the old and the new nodes"
    )
    return Check("connections", "warn", text, advice)


def notify_queue(server: Row, limits: Limits) -> Check:
    """A listener that does not read lets the queue grow; when it is full, commits fail."""
    usage = float(server["notify_usage"])
    text = f"the notification queue is {usage:.0%} full"
    if usage < limits.notify_warn:
        return Check("notify queue", "ok", text)
    advice = (
        "a session LISTENs and does not read (a stopped process, a transaction left open): "
        "find the oldest in pg_stat_activity and end it"
    )
    return Check("notify queue", "fail" if usage >= limits.notify_fail else "warn", text, advice)


# --- the way to it ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """What stands between us and the server. None: it could not be told."""

    pooler: bool
    settings_dropped: bool
    transaction_mode: bool | None
    prepared_survive: bool | None


def pooler(route: Route) -> Check:
    """Does a session stay a session on the way?"""
    if route.transaction_mode:
        text = "a pooler in transaction mode stands between: " + _lost(route)
        advice = (
            "point the DSN of the nodes straight at PostgreSQL, or at a pool in session mode; "
            "through this one hints do not arrive, and short delays are up to one sweep late"
        )
        return Check("pooler", "warn", text, advice)
    if route.settings_dropped or route.prepared_survive is False:
        advice = "let the pooler pass settings on, or connect the nodes to PostgreSQL directly"
        return Check("pooler", "warn", f"a pooler stands between: {_lost(route)}", advice)
    if route.pooler:
        return Check("pooler", "ok", "a pooler in session mode stands between: nothing is lost")
    return Check("pooler", "ok", "no pooler: settings arrive and prepared statements last")


def _lost(route: Route) -> str:
    lost = [
        "start-up settings are dropped" if route.settings_dropped else "",
        "prepared statements fail" if route.prepared_survive is False else "",
    ]
    return ", ".join(filter(None, lost)) or "nothing else is lost"


def listening(answer_us: int | None, waited_s: float) -> Check:
    """Did a notification that we sent ourselves arrive?"""
    if answer_us is not None:
        return Check("listen", "ok", f"a notification to ourselves arrived after {span(answer_us)}")
    advice = (
        "a pooler in transaction mode swallows them: connect the nodes directly. Until then "
        "everything runs, tasks with short delays up to one sweep late"
    )
    text = f"a notification to ourselves did not arrive within {waited_s:g} s"
    return Check("listen", "warn", text, advice)


def privileges(missing: Row, role: str) -> Check:
    """What may this role do: schedule (app), run tasks (node)?"""
    who = f"role {clipped(role, 63)}"
    if missing["app"]:
        text = f"{who} may not even schedule: it lacks {_few(missing['app'])}"
        return Check("privileges", "fail", text, _grant("app", role))
    if missing["node"]:
        text = f"{who} may schedule but not run tasks: it lacks {_few(missing['node'])}"
        return Check("privileges", "warn", text, _grant("node", role))
    return Check("privileges", "ok", f"{who} may schedule and run tasks")


def _grant(what: str, role: str) -> str:
    return (
        f"as the owner of the schema: select delayq.grant_{what}('{clipped(role, 63)}'), or grant "
        f"the role that has it (delayq_{what})"
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# --- the tasks ----------------------------------------------------------------------------------


def served_kinds(due: Due, nodes: Sequence[NodeFigures]) -> Check:
    """Do tasks wait whose kind no live node serves?"""
    lonely = unserved(due.waiting, nodes)
    if not lonely:
        return Check("kinds", "ok", "every kind with due tasks is served by a live node")
    shown = _few([clipped(kind) for kind in lonely])
    tasks = sum(due.waiting[kind] for kind in lonely)
    advice = (
        "start a node that has their handlers (`delayq run MODULE:APP`), add the old name to a "
        "handler's aliases, or cancel them; they wait for ever and are never failed"
    )
    text = f"{tasks}{'+' if due.cut else ''} due tasks of kinds that nobody serves: {shown}"
    return Check("kinds", "fail", text, advice)


def overdue(
    due: Due, nodes: Sequence[NodeFigures], paused: Iterable[str], now_us: int, limits: Limits
) -> Check:
    """Do tasks wait that somebody should have fired long ago?"""
    excused = {*paused, *unserved(due.waiting, nodes)}
    late_us = now_us - min(
        (at for kind, at in due.oldest_us.items() if kind not in excused), default=now_us
    )
    waiting = sum(tasks for kind, tasks in due.waiting.items() if kind not in excused)
    text = f"{waiting}{'+' if due.cut else ''} served tasks are due, the oldest for {span(late_us)}"
    if late_us < limits.overdue_warn_us:
        return Check("overdue", "ok", text if waiting else "no served task is overdue")
    advice = (
        "the nodes cannot keep up or are stuck: look at longest running and at the nodes in "
        "`delayq stats`, raise DELAYQ_MAX_WORKERS, or start more nodes"
    )
    return Check("overdue", "fail" if late_us >= limits.overdue_fail_us else "warn", text, advice)


def node_states(nodes: Sequence[NodeFigures]) -> Check:
    """Who is there, who is dead, who is silent?"""
    live = [node for node in nodes if node.live]
    dead = [node for node in nodes if node.state == "dead"]
    silent = [node for node in nodes if not node.live and node.state != "dead"]
    text = f"{len(live)} live, {len(dead)} dead, {len(silent)} silent for longer than their TTL"
    if not nodes:
        return Check("nodes", "warn", "no node is registered", _START)
    if not live:
        return Check("nodes", "fail", text, _START)
    if silent or dead:
        names = _few([clipped(node.name, 30) for node in [*silent, *dead]])
        advice = f"{names}: peers bury and forget them by themselves; if they stay, read the logs"
        return Check("nodes", "warn", text, advice)
    return Check("nodes", "ok", text)


_START: Final = "nothing fires until a node runs: `delayq run MODULE:APP`"


def orphans(due: Due, nodes: Sequence[NodeFigures]) -> Check:
    """Do tasks run on nodes that are gone, or longer than they may?"""
    here = {node.id for node in nodes if node.state != "dead"}
    lost = sum(tasks for node, tasks in due.running_on.items() if node not in here)
    if lost:
        text = f"{lost} running tasks belong to nodes that are dead or gone"
        advice = "live nodes adopt them within a minute; if none runs, start one"
        return Check("running", "warn", text, advice)
    if due.past_deadline:
        text = f"{due.past_deadline} running tasks are past their deadline"
        advice = "peers adopt them soon after; if they stay, their node hangs: restart it"
        return Check("running", "warn", text, advice)
    return Check("running", "ok", f"{due.count_running()} tasks run, all on nodes that exist")


# --- upkeep -------------------------------------------------------------------------------------


def partitions(found: Row, limits: Limits) -> Check:
    """Are the partitions of the coming days there, and is the default one empty?"""
    days, strays = found["days"], found["in_default"]
    text = f"history partitions for today and {max(days - 1, 0)} days ahead"
    if not days:
        text, status = "today has no history partition", "fail"
    elif strays:
        text, status = f"{text}, and {strays} rows in the default one", "warn"
    elif days <= limits.partitions_ahead:
        status = "warn"
    else:
        return Check("partitions", "ok", text)
    advice = (
        "nodes make them: run one, or select * from delayq.make_partitions(7). Rows in the default "
        "one stay until they pass DELAYQ_HISTORY_DAYS, and bar the partition of their day till then"
    )
    return Check("partitions", "fail" if status == "fail" else "warn", text, advice)


def vacuum_holders(found: Iterable[Row], sees_all: bool, limits: Limits) -> Check:
    """Does something old keep vacuum from removing dead rows?"""
    rows = [row for row in found if _holds(row, limits)]
    blind = "" if sees_all else " (transactions of other roles are not visible to this one)"
    if not rows:
        return Check("old snapshots", "ok", f"nothing holds back vacuum{blind}")
    worst_first = sorted(rows, key=lambda row: -_age_s(row))
    text = "; ".join(_holder(row) for row in worst_first[:3])
    fails = any(_is_grave(row, limits) for row in rows)
    advice = (
        "dead rows stay until it ends and every scan grows with them: pg_terminate_backend(pid), "
        "ROLLBACK PREPARED 'name', or pg_drop_replication_slot('name')"
    )
    return Check("old snapshots", "fail" if fails else "warn", text + blind, advice)


def _holds(row: Row, limits: Limits) -> bool:
    return row["what"] == "slot" or _age_s(row) >= limits.transaction_warn_s


def _is_grave(row: Row, limits: Limits) -> bool:
    kept = row["wal_bytes"] or 0
    return _age_s(row) >= limits.transaction_fail_s or kept >= limits.slot_fail_bytes


def _age_s(row: Row) -> float:
    return float(row["age_s"] or 0)


def _holder(row: Row) -> str:
    name = clipped(row["name"], 63)
    if row["what"] == "slot":
        kept = (row["wal_bytes"] or 0) / 2**20
        return f"replication slot {name} has no reader and keeps {kept:.0f} MB of WAL"
    age = span(round(_age_s(row)) * _S)
    if row["what"] == "prepared":
        return f"prepared transaction {name} is {age} old"
    return f"transaction of pid {name} ({clipped(row['detail'], 40) or 'no name'}) is {age} old"


def vacuum(tables: Iterable[Row], server: Row, limits: Limits) -> Check:
    """Is autovacuum on, and does it keep up?"""
    rows = list(tables)
    off = [row["name"] for row in rows if not row["autovacuum"]]
    behind = [row for row in rows if row["dead_rows"] > max(limits.dead_rows, row["live_rows"])]
    if not server["autovacuum"]:
        text, advice = (
            "autovacuum is off on this server",
            "set autovacuum = on and track_counts = on",
        )
        return Check("vacuum", "fail", text, advice)
    if off:
        advice = f"alter table delayq.{off[0]} reset (autovacuum_enabled)"
        return Check("vacuum", "fail", f"autovacuum is off for {', '.join(off)}", advice)
    if behind:
        found = ", ".join(f"{row['name']} has {row['dead_rows']} dead rows" for row in behind)
        advice = (
            "see old snapshots; if there are none, vacuum the table by hand and give it workers"
        )
        return Check("vacuum", "warn", found, advice)
    dead = sum(row["dead_rows"] for row in rows)
    return Check("vacuum", "ok", f"autovacuum is on for all tables; about {dead} dead rows")
