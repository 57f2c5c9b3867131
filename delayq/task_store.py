"""The client's half of the rooms that speak SQL: one method a statement, nothing decided.

Every method takes the connection to run on. It may be the caller's own, in its transaction and
with whatever codecs and settings it has, so instants travel as integers and JSON as text. Errors
are the driver's: whoever calls translates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from delayq.model import (
    Cancel,
    Discard,
    NodeInfo,
    OnConflict,
    Reschedule,
    Revive,
    ScheduledTask,
    Task,
    TaskRequest,
)
from delayq.request import MAX_ID, When
from delayq.statements import statement
from delayq.task_rows import (
    Move,
    Said,
    in_order,
    move_columns,
    node_of,
    request_columns,
    said_of,
    surviving,
    task_of,
    unless_locked,
    written,
)

if TYPE_CHECKING:
    from delayq.database import Connection, PooledConnection
    from delayq.task_rows import Row

    AnyConnection: TypeAlias = Connection | PooledConnection

_MAX_NODES = 10_000


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
        return written(request.kind, row)

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
        return surviving(request.kind, row)

    async def schedule_many(
        self, conn: AnyConnection, requests: Sequence[TaskRequest]
    ) -> list[ScheduledTask]:
        """Write tasks that have neither key nor idempotency key, in this order."""
        rows = await self._rows(conn, "schedule_many", *request_columns(requests))
        return [written(r.kind, row) for r, row in zip(requests, rows, strict=True)]

    async def schedule_keyed(
        self, conn: AnyConnection, requests: Sequence[TaskRequest], patience_ms: int | None = None
    ) -> list[ScheduledTask]:
        """Write any tasks, or find those that hold their keys. KeyTaken undoes the statement."""
        columns = (
            *request_columns(requests),
            [r.key for r in requests],
            [str(r.on_conflict) for r in requests],
            [r.idempotency_key for r in requests],
            _text(patience_ms),
        )
        if any(r.on_conflict is OnConflict.ERROR for r in requests):
            async with conn.transaction():
                return in_order(requests, await self._rows(conn, "schedule_keyed", *columns))
        return in_order(requests, await self._rows(conn, "schedule_keyed", *columns))

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
        return {row["id"]: unless_locked(Cancel, row["answer"]) for row in rows}

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
        rows = await self._rows(conn, "reschedule_many", *move_columns(moves), True)
        return {row["id"]: Reschedule(row["answer"]) for row in rows}

    async def reschedule_unlocked(
        self, conn: AnyConnection, moves: Sequence[Move]
    ) -> dict[int, Reschedule | None]:
        """The answer for each id; None if a stranger holds a lock on the task."""
        rows = await self._rows(conn, "reschedule_many", *move_columns(moves), False)
        return {row["id"]: unless_locked(Reschedule, row["answer"]) for row in rows}

    async def reschedule_key(
        self,
        conn: AnyConnection,
        target: tuple[str, str],
        when: When,
        patience_ms: int | None = None,
    ) -> Reschedule:
        """Move the holder of (kind, key)."""
        row = await self._row(conn, "reschedule_key", *target, *when, _text(patience_ms))
        return Reschedule(row["answer"])

    async def cancel_keys(
        self, conn: AnyConnection, kind: str, keys: Sequence[str], *, wait: bool
    ) -> dict[str, Said[Cancel] | None]:
        """Cancel the holders of keys, and what waits under them. None: a stranger's lock."""
        rows = await self._rows(conn, "cancel_keys", kind, keys, wait)
        return {row["key"]: said_of(Cancel, row) for row in rows}

    async def reschedule_keys(
        self, conn: AnyConnection, kind: str, keys: Sequence[str], when: When, *, wait: bool
    ) -> dict[str, Said[Reschedule] | None]:
        """Move the holders of keys. None: a stranger holds a lock on the task."""
        rows = await self._rows(conn, "reschedule_keys", kind, keys, *when, wait)
        return {row["key"]: said_of(Reschedule, row) for row in rows}

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
        return task_of(rows[0]) if rows else None

    async def key_holder(self, conn: AnyConnection, kind: str, key: str) -> int | None:
        """The id of the live task that holds a key."""
        rows = await self._rows(conn, "key_holder", kind, key)
        return rows[0]["id"] if rows else None

    async def keys_page(
        self, conn: AnyConnection, target: tuple[str, str], beyond: str, limit: int
    ) -> list[str]:
        """The next keys of live tasks, in the order of their bytes; `target` is (kind, prefix)."""
        rows = await self._rows(conn, "keys_page", *target, beyond, limit)
        return [row["key"] for row in rows]

    async def list_live(
        self,
        conn: AnyConnection,
        filters: tuple[str | None, str | None, str | None],
        after_id: int | None,
        limit: int,
    ) -> list[Task]:
        """A page of live tasks by id; `filters` are (kind, state, key), None for any."""
        rows = await self._rows(conn, "list_live", after_id or 0, *filters, limit)
        return [task_of(row) for row in rows]

    async def list_dead(
        self,
        conn: AnyConnection,
        filters: tuple[str | None, str | None],
        after_id: int | None,
        limit: int,
    ) -> list[Task]:
        """A page of dead tasks by id; `filters` are (kind, key)."""
        rows = await self._rows(conn, "list_dead", after_id or 0, *filters, limit)
        return [task_of(row) for row in rows]

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
        return [task_of(row) for row in rows]

    # --- nodes and kinds ----------------------------------------------------------------------

    async def pause_kind(self, conn: AnyConnection, kind: str, *, paused: bool) -> None:
        """Let every node stop, or go on, firing tasks of a kind."""
        await self._rows(conn, "pause_kind", kind, paused)

    async def nodes(self, conn: AnyConnection) -> list[NodeInfo]:
        """Every node that has a row, oldest first."""
        return [node_of(row) for row in await self._rows(conn, "nodes", _MAX_NODES)]

    async def ask_drain(self, conn: AnyConnection, node_id: int) -> bool:
        """Ask a node to drain; False if there is none that could."""
        return bool(await self._rows(conn, "ask_drain", node_id))

    # --- sending ------------------------------------------------------------------------------

    async def _rows(self, conn: AnyConnection, name: str, *arguments: object) -> Sequence[Row]:
        return await conn.fetch(statement(name), *arguments, timeout=self._limit_s)

    async def _row(self, conn: AnyConnection, name: str, *arguments: object) -> Row:
        (row,) = await conn.fetch(statement(name), *arguments, timeout=self._limit_s)
        return row


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)
