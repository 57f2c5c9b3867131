"""What the client's statements take and give, as columns and rows, and as delayq's own types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from delayq.errors import KeyTaken
from delayq.instants import instant_from_us
from delayq.model import NodeInfo, NodeState, ScheduledTask, Task, TaskRequest, TaskState
from delayq.payload import MAX_DEPTH, depth_of

if TYPE_CHECKING:
    import asyncpg

    Row: TypeAlias = asyncpg.Record

A = TypeVar("A", bound=StrEnum)
A_co = TypeVar("A_co", bound=StrEnum, covariant=True)

_INSTANTS = ("leased_at", "deadline_at", "started_at", "finished_at")
_AS_THEY_ARE = (
    "id kind key idempotency_key priority attempt max_attempts timeout_ms misfire_grace_ms"
    " interruptions cancel_requested node lateness_us follow_up"
).split()


# Many tasks that are scheduled together are due at one instant.
_same_instant = lru_cache(maxsize=1)(instant_from_us)


class Move(NamedTuple):
    """Where one task is to be moved: so long from now, or to an instant."""

    id: int
    delay_us: int | None
    execute_at_us: int | None


class Said(NamedTuple, Generic[A_co]):
    """What was answered for a key, and for the task that held it (None: no live one did)."""

    id: int | None
    answer: A_co


def written(kind: str, row: Row) -> ScheduledTask:
    """A task that was written without having to look for another."""
    at = _same_instant(row["execute_at_us"])
    return ScheduledTask(row["id"], kind, created=True, state=TaskState.PENDING, execute_at=at)


def surviving(kind: str, row: Row) -> ScheduledTask:
    """What became of a request that has a key or an idempotency key; or else KeyTaken."""
    outcome, state, at_us = row["outcome"], row["state"], row["execute_at_us"]
    if outcome == "conflict":
        raise KeyTaken(kind, row["id"])
    return ScheduledTask(
        id=row["id"],
        kind=kind,
        created=outcome not in ("kept", "repeated"),
        state=None if state is None else TaskState(state),
        execute_at=None if at_us is None else _same_instant(at_us),
        follow_up=row["follow_up"],
    )


def in_order(requests: Sequence[TaskRequest], rows: Sequence[Row]) -> list[ScheduledTask]:
    """What became of each of many requests; the rows say by `nr` (from 1) which they are about."""
    by_place = {row["nr"]: row for row in rows}
    return [surviving(r.kind, by_place[nr]) for nr, r in enumerate(requests, start=1)]


def request_columns(requests: Sequence[TaskRequest]) -> tuple[Sequence[object] | None, ...]:
    """What every request has, as parallel arrays; none where nothing was said, as is usual."""
    return (
        [r.kind for r in requests],
        [r.payload for r in requests],
        _unless_empty([r.delay_us for r in requests]),
        _unless_empty([r.execute_at_us for r in requests]),
        [r.priority for r in requests],
        _unless_empty([r.max_attempts for r in requests]),
        _unless_empty([r.timeout_ms for r in requests]),
        _unless_empty([r.misfire_grace_ms for r in requests]),
        [r.headers for r in requests],
    )


def _unless_empty(column: Sequence[object]) -> Sequence[object] | None:
    """The column, or None if it is all nulls: neither side need then spell them out."""
    return None if column.count(None) == len(column) else column


def move_columns(moves: Sequence[Move]) -> tuple[list[int], list[int | None], list[int | None]]:
    """Moves as parallel arrays."""
    return (
        [move.id for move in moves],
        [move.delay_us for move in moves],
        [move.execute_at_us for move in moves],
    )


def unless_locked(answers: type[A], answer: str) -> A | None:
    """The answer as its enum; None if a stranger's lock was in the way."""
    return None if answer == "locked" else answers(answer)


def said_of(answers: type[A], row: Row) -> Said[A] | None:
    """What was said about a key; None if a stranger's lock was in the way."""
    answer = unless_locked(answers, row["answer"])
    return None if answer is None else Said(row["id"], answer)


def task_of(row: Row) -> Task:
    """A task, wherever its row came from."""
    fields: dict[str, Any] = {name: row[name] for name in _AS_THEY_ARE}
    fields |= {name: _instant(row[f"{name}_us"]) for name in _INSTANTS}
    return Task(
        state=TaskState(row["state"]),
        payload=_read(row["payload"]),
        headers=_read(row["headers"]),
        errors=_errors(row["errors"]),
        due_at=instant_from_us(row["due_at_us"]),
        execute_at=instant_from_us(row["execute_at_us"]),
        created_at=instant_from_us(row["created_at_us"]),
        **fields,
    )


def _errors(text: str) -> list[dict[str, Any]]:
    """The errors of a task; what somebody spoilt by hand must not hide the task, or others."""
    errors = _read(text)
    if errors is None:
        return []
    kept = errors if isinstance(errors, list) else [errors]
    return [error if isinstance(error, dict) else {"message": str(error)[:500]} for error in kept]


def node_of(row: Row) -> NodeInfo:
    """A node."""
    return NodeInfo(
        id=row["id"],
        name=row["name"],
        host=row["host"],
        pid=row["pid"],
        version=row["version"],
        kinds=list(row["kinds"]),
        state=NodeState(row["state"]),
        started_at=instant_from_us(row["started_at_us"]),
        expires_at=instant_from_us(row["expires_at_us"]),
        counters=_read(row["counters"]),
    )


def _instant(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else instant_from_us(microseconds)


def _read(text: str | None) -> Any:
    """JSON that anybody may have inserted: what Python cannot read, or walk through, stays text."""
    if text is None or depth_of(text) > MAX_DEPTH:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
