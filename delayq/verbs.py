"""Every verb of delayq but running tasks: the face that the client and the application share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, TypeAlias, Unpack

from delayq.instants import Delay, delay_to_us
from delayq.looking import Looking
from delayq.model import Cancel, Discard, Reschedule, Revive, ScheduledTask, TaskRequest
from delayq.payload import encode_payload
from delayq.request import (
    MISSING,
    NOW,
    Maybe,
    RequestOptions,
    Target,
    When,
    build_request,
    check_id,
    check_name,
    check_node,
    check_target,
    check_targets,
    parse_when,
)
from delayq.sharing import doubt_about
from delayq.task_rows import Move

if TYPE_CHECKING:
    from delayq.passes import Progress
    from delayq.task_store import AnyConnection

# `list` is a verb, so inside the class the type has another name.
Scheduled: TypeAlias = list[ScheduledTask]


class Verbs(Looking):
    """What can be done to tasks without running any.

    Every verb raises InvalidArgument before anything is sent, and DatabaseUnavailable or
    DatabaseTimeout if the database does not answer; with `conn=`, the caller's own connection,
    it commits or vanishes with the caller's transaction, and also raises TransactionConflict, if
    that has to be run again.
    """

    # --- scheduling ---------------------------------------------------------------------------

    async def schedule(
        self, request: TaskRequest, conn: AnyConnection | None = None
    ) -> ScheduledTask:
        """Schedule a task, or find the one that holds its key; the surviving task comes back.

        Raises KeyTaken if that was to be an error. If the connection breaks before the answer
        came, the error says that the outcome is unknown.
        """
        transport = self.transport
        if conn is None and not request.alone:
            return await transport.sharing.schedule(request)
        return await transport.alone(
            lambda c, ms: transport.store.schedule_one(c, request, ms),
            conn,
            doubt_about([request]),
        )

    async def schedule_many(
        self,
        requests: Iterable[TaskRequest],
        *,
        progress: Progress | None = None,
        conn: AnyConnection | None = None,
    ) -> Scheduled:
        """Schedule very many tasks; the surviving ones come back, in the order of the requests.

        They go in statements of at most 1,000 rows and 4 MiB, and are taken from `requests`
        (a generator, say) as they are needed. `progress` is called with how many are stored,
        after each batch. With `conn` it is all or nothing, as part of the caller's transaction.
        Without, every statement commits by itself: an error that comes when some are stored is
        raised as BulkStopped, which tells which ones; before that, as it is, and nothing is
        stored. KeyTaken undoes its statement. A key that a stranger is just taking is waited
        for after all others were stored.
        """
        return await self.transport.bulk.schedule(requests, progress, conn)

    async def send(
        self,
        kind: str,
        payload: Mapping[str, object],
        *,
        delay: Delay | Maybe = MISSING,
        at: datetime | Maybe = MISSING,
        conn: AnyConnection | None = None,
        **options: Unpack[RequestOptions],
    ) -> ScheduledTask:
        """Schedule a task whose handler lives in another program; nothing knows its arguments.

        `payload` maps argument names to JSON values.
        """
        text = encode_payload(payload, self.transport.payload_max_bytes)
        return await self.schedule(build_request(kind, text, delay=delay, at=at, **options), conn)

    # --- changing one's mind ------------------------------------------------------------------

    async def cancel(
        self,
        id: int | None = None,
        *,
        kind: str | None = None,
        key: str | None = None,
        conn: AnyConnection | None = None,
    ) -> Cancel:
        """Cancel a task, by id or by kind and key. The answer is final.

        A running task is asked to end (CANCEL_REQUESTED). By key, a successor that waits
        behind the running holder goes too.
        """
        return await self.cancel_target(check_target(id, kind, key), conn)

    async def cancel_target(self, target: Target, conn: AnyConnection | None = None) -> Cancel:
        """Cancel a task that was named, and checked, already; what handlers call."""
        transport, store = self.transport, self.transport.store
        if not isinstance(target, int):
            return await transport.alone(lambda c, ms: store.cancel_key(c, *target, ms), conn)
        if conn is None:
            return await transport.sharing.cancel(target)
        return (await transport.perform(lambda c: store.cancel_many(c, [target]), conn))[target]

    async def cancel_many(
        self,
        ids: Iterable[int] | None = None,
        *,
        kind: str | None = None,
        key_prefix: str | None = None,
        progress: Progress | None = None,
        conn: AnyConnection | None = None,
    ) -> dict[int, Cancel]:
        """Cancel very many tasks: those with these ids, or every live one of `kind` whose key
        begins with `key_prefix` (plain text, no wildcards). The final answer for each, by id.

        Each task is treated as by `cancel`. They go in statements of at most 1,000; `progress`
        is called with how many were answered, after each. With `conn` it is all or nothing, as
        part of the caller's transaction. Without, every statement commits by itself, locked
        tasks are waited for after all others, and an error that comes half-way is raised as
        BulkStopped, which has the answers so far; doing the same again is safe.
        """
        targets = check_targets(ids, kind, key_prefix)
        return await self.transport.bulk.cancel(targets, progress, conn)

    async def reschedule(
        self,
        id: int | None = None,
        *,
        kind: str | None = None,
        key: str | None = None,
        delay: Delay | Maybe = MISSING,
        at: datetime | Maybe = MISSING,
        conn: AnyConnection | None = None,
    ) -> Reschedule:
        """Move a pending task to `delay` from now, or to the instant `at`. The answer is final."""
        target = check_target(id, kind, key)
        return await self.move_target(target, parse_when(delay, at), conn)

    async def move_target(
        self, target: Target, when: When, conn: AnyConnection | None = None
    ) -> Reschedule:
        """Move a task that was named, and checked, already; what handlers call."""
        transport, store = self.transport, self.transport.store
        if not isinstance(target, int):
            return await transport.alone(
                lambda c, ms: store.reschedule_key(c, target, when, ms), conn
            )
        move = Move(target, *when)
        if conn is None:
            return await transport.sharing.move(move)
        return (await transport.perform(lambda c: store.reschedule_many(c, [move]), conn))[target]

    async def reschedule_many(
        self,
        ids: Iterable[int] | None = None,
        *,
        kind: str | None = None,
        key_prefix: str | None = None,
        delay: Delay | Maybe = MISSING,
        at: datetime | Maybe = MISSING,
        progress: Progress | None = None,
        conn: AnyConnection | None = None,
    ) -> dict[int, Reschedule]:
        """Move very many pending tasks to `delay` from now (from when their own statement runs),
        or to the instant `at`. Otherwise like `cancel_many`.
        """
        targets, when = check_targets(ids, kind, key_prefix), parse_when(delay, at)
        return await self.transport.bulk.move(targets, when, progress, conn)

    async def run_now(
        self,
        id: int | None = None,
        *,
        kind: str | None = None,
        key: str | None = None,
        conn: AnyConnection | None = None,
    ) -> Reschedule:
        """Make a pending task due at once."""
        return await self.move_target(check_target(id, kind, key), NOW, conn)

    async def revive(self, id: int, conn: AnyConnection | None = None) -> Revive:
        """Bring a dead task back under its id, due now, with all its attempts."""
        return (await self.revive_many([id], conn=conn))[id]

    async def revive_many(
        self, ids: Iterable[int], *, spread: Delay = 0, conn: AnyConnection | None = None
    ) -> dict[int, Revive]:
        """Bring dead tasks back, due at random instants from now until `spread` later."""
        wanted, spread_us = [check_id(id) for id in ids], delay_to_us(spread, "spread")
        store = self.transport.store
        return await self.transport.perform(lambda c: store.revive_many(c, wanted, spread_us), conn)

    async def discard(self, id: int, conn: AnyConnection | None = None) -> Discard:
        """Remove a dead task for good."""
        return (await self.discard_many([id], conn=conn))[id]

    async def discard_many(
        self, ids: Iterable[int], *, conn: AnyConnection | None = None
    ) -> dict[int, Discard]:
        """Remove dead tasks for good: the answer for each."""
        wanted, store = [check_id(id) for id in ids], self.transport.store
        return await self.transport.perform(lambda c: store.discard_many(c, wanted), conn)

    # --- kinds and nodes ----------------------------------------------------------------------

    async def pause(self, kind: str) -> None:
        """Let no node fire tasks of a kind, until `resume`; those that run go on. PrivilegeMissing
        for roles that are no node's."""
        checked, store = check_name(kind, "kind"), self.transport.store
        await self.transport.perform(lambda c: store.pause_kind(c, checked, paused=True))

    async def resume(self, kind: str) -> None:
        """Let nodes fire tasks of a paused kind again."""
        checked, store = check_name(kind, "kind"), self.transport.store
        await self.transport.perform(lambda c: store.pause_kind(c, checked, paused=False))

    async def drain_node(self, id: int) -> bool:
        """Ask a node to drain and leave. False: there is none of that id that could."""
        store, node = self.transport.store, check_node(id)
        return await self.transport.perform(lambda c: store.ask_drain(c, node))
