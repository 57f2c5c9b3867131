"""Reads the evidence of a run: the ledger from its files, the rest from the database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.chaos.cluster import steps_of
from tests.chaos.evidence import Call, Effect, End, Evidence, Fate, Lease, Row, Span, Start
from tests.chaos.ledger import Line
from tests.chaos.timeline import Timeline
from tests.chaos.world import EFFECT_KINDS, MAY_DIE

if TYPE_CHECKING:
    import asyncpg

    from delayq.database import Connection

READ_LIMIT_S = 600.0
_ROWS = """
    select id as task, kind, state, payload ->> 'ref' as ref, key, lease_token as token,
           nullif(lease_owner, 0) as node, attempt, misfire_grace_ms is not null as has_grace,
           (next ->> 'id')::bigint as successor, null::bigint as finished_reading_us
      from delayq.tasks
    union all
    select id, kind, state, payload ->> 'ref', key, lease_token, node, attempt,
           payload ->> 'ref' = any ($1), successor, delayq.micros(finished_at)
      from delayq.task_history
    union all
    select id, kind, 'dead', payload ->> 'ref', key, lease_token, node, attempt,
           misfire_grace_ms is not null, successor, delayq.micros(finished_at)
      from delayq.dead_tasks
"""
_LEASES = """
    select task, token, owner, seq, delayq.micros(execute_at) as execute_reading_us,
           delayq.micros(at) as at_reading_us
      from chaos.leases order by seq
"""
_EFFECTS = "select task, token, ref, request, follows from chaos.effects"
_NODES = "select name || ' ' || state from delayq.nodes where state <> 'dead'"


async def gather(conn: Connection, lines: list[Line], spans: list[Span]) -> Evidence:
    """All of it. To be called when nothing runs any more."""
    orders = {row["name"] for row in await _all(conn, "select name from chaos.orders")}
    graced = [line["ref"] for line in lines if line["what"] == "call" and line.get("grace")]
    return Evidence(
        calls=calls_of(lines, orders),
        starts=[
            Start(line["task"], line["token"], line["node"], line["attempt"], line["kind"],
                  line["ref"], line["execute"], line["at"])
            for line in lines if line["what"] == "start"
        ],
        ends=[
            End(line["task"], line["token"], line["how"], line["at"])
            for line in lines if line["what"] == "end"
        ],
        effects=[Effect(**dict(row)) for row in await _all(conn, _EFFECTS)],
        leases=[Lease(**dict(row)) for row in await _all(conn, _LEASES)],
        rows=[Row(**dict(row)) for row in await _all(conn, _ROWS, graced)],
        spans=spans,
        nodes_left=[row[0] for row in await _all(conn, _NODES)],
        orders_lost=orders_lost(lines, orders),
        effect_kinds=EFFECT_KINDS,
        may_die=MAY_DIE,
        timeline=Timeline(steps_of(lines)),
    )  # fmt: skip


async def _all(conn: Connection, sql: str, *arguments: object) -> list[asyncpg.Record]:
    return await conn.fetch(sql, *arguments, timeout=READ_LIMIT_S)


def calls_of(lines: Iterable[Line], orders: set[str]) -> list[Call]:
    """The calls, each with its answer and with what became of its transaction.

    A commit without an answer is decided by its order, which is there or not.
    """
    asked: dict[str, Line] = {}
    answers: dict[str, Line] = {}
    committed: dict[str, int] = {}
    rolled_back: set[str] = set()
    last_us = 0
    for line in lines:
        last_us = max(last_us, line["at"])
        match line["what"]:
            case "call":
                asked[line["name"]] = line
            case "answer":
                answers[line["name"]] = line
            case "committed":
                committed[line["tx"]] = line["at"]
            case "rolled_back":
                rolled_back.add(line["tx"])
    for line in asked.values():
        tx = line.get("tx")
        if tx is not None and tx not in committed and tx in orders:
            committed[tx] = last_us
    return [_call(line, answers.get(name), committed, rolled_back) for name, line in asked.items()]


def _call(
    asked: Line, answer: Line | None, committed: dict[str, int], rolled_back: set[str]
) -> Call:
    tx = asked.get("tx")
    fate, sure_us = Fate.COMMITTED, None if answer is None else answer["at"]
    if tx is not None:
        fate = Fate.COMMITTED if tx in committed else Fate.ROLLED_BACK
        sure_us = committed.get(tx) if answer is not None else None
    elif answer is None:
        fate = Fate.UNKNOWN
    told = answer or {}
    return Call(
        name=asked["name"], verb=asked["verb"], kind=asked["kind"], asked_us=asked["at"],
        answered_us=told.get("at"), sure_us=sure_us, answer=told.get("answer"), fate=fate,
        task=told.get("task", asked.get("task")), follow_up=told.get("follow_up"),
        ref=asked.get("ref"), key=asked.get("key"), on_conflict=asked.get("on_conflict"),
        request=asked.get("request"), delay_us=asked.get("delay_us"),
    )  # fmt: skip


def orders_lost(lines: Iterable[Line], orders: set[str]) -> list[str]:
    """Transactions whose commit was acknowledged, and that the database has forgotten."""
    said = [line["tx"] for line in lines if line["what"] == "committed"]
    return [tx for tx in said if tx not in orders]


def errors_of(lines: Iterable[Line]) -> dict[str, int]:
    """How often callers got which error."""
    counts: dict[str, int] = defaultdict(int)
    for line in lines:
        if line["what"] == "failed":
            counts[line["error"]] += 1
    return dict(counts)
