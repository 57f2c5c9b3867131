"""The client's half of the rooms that speak SQL: one method a statement, nothing decided.

Every method takes the connection to run on. It may be the caller's own, in its transaction and
with whatever codecs and settings it has, so instants travel as integers and JSON as text. Errors
are the driver's: whoever calls translates them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from delayq.errors import KeyTaken
from delayq.instants import instant_from_us
from delayq.model import (
    Cancel,
    Discard,
    NodeInfo,
    NodeState,
    Reschedule,
    Revive,
    ScheduledTask,
    Task,
    TaskRequest,
    TaskState,
)
from delayq.request import MAX_ID
from delayq.statements import statement

if TYPE_CHECKING:
    import asyncpg

    from delayq.database import Connection, PooledConnection

    AnyConnection: TypeAlias = Connection | PooledConnection
    Row: TypeAlias = asyncpg.Record

A = TypeVar("A", bound=StrEnum)

_MAX_NODES = 10_000
_INSTANTS = ("leased_at", "deadline_at", "started_at", "finished_at")
_AS_THEY_ARE = (
    "id kind key idempotency_key priority attempt max_attempts timeout_ms misfire_grace_ms"
    " interruptions cancel_requested node lateness_us follow_up"
).split()


class Move(NamedTuple):
    """Where one task is to be moved: so long from now, or to an instant."""

    id: int
    delay_us: int | None
    execute_at_us: int | None


class TaskStore:
    """The client's statements. No call takes longer than `limit_s`.

    `patience_ms` bounds the wait for a lock that a stranger holds (then the driver's
    LockNotAvailableError); None: as long as the session allows.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    # --- scheduling ---------------------------------------------------------------------------

    async def schedule_plain(self, conn: AnyConnection, request: TaskRequest) -> ScheduledTask:
        """Write one task that has neither key nor idempotency key: waits for nobody."""
        row = await self._row(
            conn, "schedule_plain", request.kind, request.delay_us, request.execute_at_us,
            request.payload, request.headers, request.priority, request.max_attempts,
            request.timeout_ms, request.misfire_grace_ms,
        )  # fmt: skip
        return _written(request.kind, row)

    async def schedule_one(
        self, conn: AnyConnection, request: TaskRequest, patience_ms: int | None = None
    ) -> ScheduledTask:
        """Write one task, or find the one that holds its key; or else KeyTaken."""
        if not request.alone:
            return await self.schedule_plain(conn, request)
        row = await self._row(
            conn, "schedule_one", request.kind, request.payload, request.delay_us,
            request.execute_at_us, request.key, str(request.on_conflict),
            request.idempotency_key, request.priority, request.max_attempts, request.timeout_ms,
            request.misfire_grace_ms, request.headers, _text(patience_ms),
        )  # fmt: skip
        if row["outcome"] == "conflict":
            raise KeyTaken(request.kind, row["id"])
        return ScheduledTask(
            id=row["id"],
            kind=request.kind,
            created=row["outcome"] not in ("kept", "repeated"),
            state=None if row["state"] is None else TaskState(row["state"]),
            execute_at=_instant(row["execute_at_us"]),
            follow_up=row["follow_up"],
        )

    async def schedule_many(
        self, conn: AnyConnection, requests: Sequence[TaskRequest]
    ) -> list[ScheduledTask]:
        """Write tasks that have neither key nor idempotency key, in this order."""
        rows = await self._rows(
            conn,
            "schedule_many",
            [r.kind for r in requests],
            [r.payload for r in requests],
            [r.delay_us for r in requests],
            [r.execute_at_us for r in requests],
            [r.priority for r in requests],
            [r.max_attempts for r in requests],
            [r.timeout_ms for r in requests],
            [r.misfire_grace_ms for r in requests],
            [r.headers for r in requests],
        )
        return [_written(r.kind, row) for r, row in zip(requests, rows, strict=True)]

    # --- changing one's mind ------------------------------------------------------------------

    async def cancel_many(self, conn: AnyConnection, ids: Sequence[int]) -> dict[int, Cancel]:
        """The answer for each id, waiting for whoever holds a lock on one of them."""
        rows = await self._rows(conn, "cancel_many", ids, True)
        return {row["id"]: Cancel(row["answer"]) for row in rows}

    async def cancel_unlocked(
        self, conn: AnyConnection, ids: Sequence[int]
    ) -> dict[int, Cancel | None]:
        """The answer for each id; None if a stranger holds a lock on the task."""
        rows = await self._rows(conn, "cancel_many", ids, False)
        return {row["id"]: _unless_locked(Cancel, row["answer"]) for row in rows}

    async def cancel_key(
        self, conn: AnyConnection, kind: str, key: str, patience_ms: int | None = None
    ) -> Cancel:
        """Cancel the holder of a key, and the successor that waits under it."""
        row = await self._row(conn, "cancel_key", kind, key, _text(patience_ms))
        return Cancel(row["answer"])

    async def reschedule_many(
        self, conn: AnyConnection, moves: Sequence[Move]
    ) -> dict[int, Reschedule]:
        """The answer for each id, waiting for whoever holds a lock on one of them.

        Of two moves of one task the later in the list counts.
        """
        rows = await self._rows(conn, "reschedule_many", *_columns(moves), True)
        return {row["id"]: Reschedule(row["answer"]) for row in rows}

    async def reschedule_unlocked(
        self, conn: AnyConnection, moves: Sequence[Move]
    ) -> dict[int, Reschedule | None]:
        """The answer for each id; None if a stranger holds a lock on the task."""
        rows = await self._rows(conn, "reschedule_many", *_columns(moves), False)
        return {row["id"]: _unless_locked(Reschedule, row["answer"]) for row in rows}

    async def reschedule_key(
        self,
        conn: AnyConnection,
        target: tuple[str, str],
        when: tuple[int | None, int | None],
        patience_ms: int | None = None,
    ) -> Reschedule:
        """Move the holder of (kind, key); `when` is (delay_us, execute_at_us), one of them None."""
        rows = await self._rows(conn, "reschedule_key", *target, *when, _text(patience_ms))
        return Reschedule(rows[0]["answer"]) if rows else Reschedule.NOT_FOUND

    async def revive_many(
        self, conn: AnyConnection, ids: Sequence[int], spread_us: int
    ) -> dict[int, Revive]:
        """Bring dead tasks back, due at random instants from now until `spread_us` later."""
        rows = await self._rows(conn, "revive_many", ids, spread_us)
        return {row["id"]: Revive(row["answer"]) for row in rows}

    async def discard_many(self, conn: AnyConnection, ids: Sequence[int]) -> dict[int, Discard]:
        """Remove dead tasks for good."""
        rows = await self._rows(conn, "discard_many", ids)
        return {row["id"]: Discard(row["answer"]) for row in rows}

    # --- looking ------------------------------------------------------------------------------

    async def get(self, conn: AnyConnection, task_id: int) -> Task | None:
        """The task, wherever it is now."""
        rows = await self._rows(conn, "get", task_id)
        return _task(rows[0]) if rows else None

    async def key_holder(self, conn: AnyConnection, kind: str, key: str) -> int | None:
        """The id of the live task that holds a key."""
        rows = await self._rows(conn, "key_holder", kind, key)
        return rows[0]["id"] if rows else None

    async def list_live(
        self,
        conn: AnyConnection,
        filters: tuple[str | None, str | None, str | None],
        after_id: int | None,
        limit: int,
    ) -> list[Task]:
        """A page of live tasks by id; `filters` are (kind, state, key), None for any."""
        rows = await self._rows(conn, "list_live", after_id or 0, *filters, limit)
        return [_task(row) for row in rows]

    async def list_dead(
        self,
        conn: AnyConnection,
        filters: tuple[str | None, str | None],
        after_id: int | None,
        limit: int,
    ) -> list[Task]:
        """A page of dead tasks by id; `filters` are (kind, key)."""
        rows = await self._rows(conn, "list_dead", after_id or 0, *filters, limit)
        return [_task(row) for row in rows]

    async def list_history(
        self,
        conn: AnyConnection,
        filters: tuple[str | None, str | None, str | None],
        after_id: int | None,
        limit: int,
    ) -> list[Task]:
        """A page of finished tasks, the highest ids first; `filters` are (kind, state, key)."""
        beyond = MAX_ID if after_id is None else after_id
        rows = await self._rows(conn, "list_history", beyond, *filters, limit)
        return [_task(row) for row in rows]

    # --- nodes and kinds ----------------------------------------------------------------------

    async def pause_kind(self, conn: AnyConnection, kind: str, *, paused: bool) -> None:
        """Let every node stop, or go on, firing tasks of a kind."""
        await self._rows(conn, "pause_kind", kind, paused)

    async def nodes(self, conn: AnyConnection) -> list[NodeInfo]:
        """Every node that has a row, oldest first."""
        return [_node(row) for row in await self._rows(conn, "nodes", _MAX_NODES)]

    async def ask_drain(self, conn: AnyConnection, node_id: int) -> bool:
        """Ask a node to drain; False if there is none that could."""
        return bool(await self._rows(conn, "ask_drain", node_id))

    # --- sending ------------------------------------------------------------------------------

    async def _rows(self, conn: AnyConnection, name: str, *arguments: object) -> Sequence[Row]:
        return await conn.fetch(statement(name), *arguments, timeout=self._limit_s)

    async def _row(self, conn: AnyConnection, name: str, *arguments: object) -> Row:
        (row,) = await conn.fetch(statement(name), *arguments, timeout=self._limit_s)
        return row


def _written(kind: str, row: Row) -> ScheduledTask:
    at = instant_from_us(row["execute_at_us"])
    return ScheduledTask(row["id"], kind, created=True, state=TaskState.PENDING, execute_at=at)


def _columns(moves: Sequence[Move]) -> tuple[list[int], list[int | None], list[int | None]]:
    return (
        [move.id for move in moves],
        [move.delay_us for move in moves],
        [move.execute_at_us for move in moves],
    )


def _unless_locked(answers: type[A], answer: str) -> A | None:
    return None if answer == "locked" else answers(answer)


def _task(row: Row) -> Task:
    fields: dict[str, Any] = {name: row[name] for name in _AS_THEY_ARE}
    fields |= {name: _instant(row[f"{name}_us"]) for name in _INSTANTS}
    return Task(
        state=TaskState(row["state"]),
        payload=_read(row["payload"]),
        headers=_read(row["headers"]),
        errors=_read(row["errors"]),
        due_at=instant_from_us(row["due_at_us"]),
        execute_at=instant_from_us(row["execute_at_us"]),
        created_at=instant_from_us(row["created_at_us"]),
        **fields,
    )


def _node(row: Row) -> NodeInfo:
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


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _read(text: str | None) -> Any:
    """JSON that anybody may have inserted: what Python cannot read stays text."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text
