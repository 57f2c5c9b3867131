"""The client: schedules tasks and changes its mind about them, without running any.

Concurrent calls share statements where they wait for nobody (see `sharing`); what may meet a
stranger's lock goes alone (see `lanes`). With `conn=` a call runs on the caller's connection
instead, inside its transaction, and commits or vanishes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeAlias, TypeVar, Unpack, cast

from delayq.errors import DelayQError, InvalidArgument
from delayq.failures import DRIVER_ERRORS, translated
from delayq.instants import Delay, delay_to_us
from delayq.lanes import ASK_AGAIN, Lanes
from delayq.migrate import check_schema
from delayq.model import (
    Cancel,
    Discard,
    NodeInfo,
    Reschedule,
    Revive,
    ScheduledTask,
    Task,
    TaskRequest,
    TaskState,
)
from delayq.payload import encode_payload
from delayq.request import (
    MISSING,
    Maybe,
    RequestOptions,
    build_request,
    check_name,
    check_target,
    parse_when,
)
from delayq.sharing import MAX_ROWS, MAY_BE_THERE, Sharing, schedule_all
from delayq.task_store import Move, TaskStore

if TYPE_CHECKING:
    from delayq.database import Connection, Database, Pool
    from delayq.settings import Settings
    from delayq.task_store import AnyConnection

    T = TypeVar("T")
    Work: TypeAlias = Callable[[AnyConnection], Awaitable[T]]
    PatientWork: TypeAlias = Callable[[AnyConnection, int | None], Awaitable[T]]

# `list` is a verb of the client, so inside the class the type has other names.
Scheduled: TypeAlias = list[ScheduledTask]
Tasks: TypeAlias = list[Task]
Nodes: TypeAlias = list[NodeInfo]

MAX_LISTED: Final = 1_000
_GRACE_S: Final = 5.0  # the server's own limit goes first: its error says more
_CLOSE_S: Final = 10.0
_APPLICATION: Final = "delayq client"


class _Open(NamedTuple):
    """What an open client has."""

    pool: Pool
    lanes: Lanes
    sharing: Sharing
    owns_pool: bool


class Client:
    """Every verb of delayq but running tasks. `async with client:` opens and closes it.

    Give a `database`, here or to `open`, or a `pool` of your own (it is not closed). Every
    verb raises InvalidArgument before anything is sent, and DatabaseUnavailable or
    DatabaseTimeout if the database does not answer; with `conn=` also TransactionConflict, if
    the caller's transaction has to be run again. A client belongs to one event loop at a time.
    """

    def __init__(
        self, database: Database | None, settings: Settings, *, pool: Pool | None = None
    ) -> None:
        self._database = database
        self._settings = settings
        self._given_pool = pool
        self._store = TaskStore(settings.statement_timeout_s + _GRACE_S)
        self._state: _Open | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self, database: Database | None = None) -> None:
        """Check that the schema is this program's; connections are made as they are needed.

        Raises SchemaMissing, SchemaTooOld or SchemaTooNew, and what connecting raises.
        """
        if self._state is not None:
            raise DelayQError("this client is open already")
        state = await self._connect(database or self._database)
        try:
            await state.lanes.shared(lambda c: check_schema(cast("Connection", c)))
        except BaseException:
            await _let_go(state)
            raise
        self._state = state

    async def close(self) -> None:
        """Wait for the calls in flight, then close the pool unless it was given. Idempotent."""
        state, self._state = self._state, None
        if state is not None:
            try:
                await state.sharing.close()
            finally:
                await _let_go(state)

    # --- scheduling ---------------------------------------------------------------------------

    async def schedule(
        self, request: TaskRequest, conn: AnyConnection | None = None
    ) -> ScheduledTask:
        """Schedule a task, or find the one that holds its key; the surviving task comes back.

        Raises KeyTaken if that was to be an error. If the connection breaks before the answer
        came, the error says that the outcome is unknown.
        """
        if conn is None and not request.alone:
            return await self._opened.sharing.schedule(request)
        return await self._alone(
            lambda c, ms: self._store.schedule_one(c, request, ms), conn, _doubt([request])
        )

    async def schedule_many(
        self, requests: Iterable[TaskRequest], conn: AnyConnection | None = None
    ) -> Scheduled:
        """Schedule all of them or none, in one transaction. The answers are in their order."""
        wanted = [*requests]
        lane = self._perform if any(request.alone for request in wanted) else self._look
        return await lane(lambda c: schedule_all(c, self._store, wanted), conn, _doubt(wanted))

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
        text = encode_payload(payload, self._settings.payload_max_bytes)
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
        target = _target(id, kind, key)
        store = self._store
        if not isinstance(target, int):
            return await self._alone(lambda c, ms: store.cancel_key(c, *target, ms), conn)
        if conn is None:
            return await self._opened.sharing.cancel(target)
        return (await self._perform(lambda c: store.cancel_many(c, [target]), conn))[target]

    async def cancel_many(
        self, ids: Iterable[int], conn: AnyConnection | None = None
    ) -> dict[int, Cancel]:
        """Cancel tasks by id: the answer for each. Each stands for itself, unless with `conn`."""
        wanted = _ids(ids)
        if conn is not None:
            return await self._perform(lambda c: self._store.cancel_many(c, wanted), conn)
        answers: dict[int, Cancel] = {}
        for start in range(0, len(wanted), MAX_ROWS):
            part = wanted[start : start + MAX_ROWS]
            found = await asyncio.gather(*map(self._opened.sharing.cancel, part))
            answers |= zip(part, found, strict=True)
        return answers

    async def reschedule(  # noqa: PLR0913 - a task is named in two ways, an instant in four
        self,
        id: int | None = None,
        *,
        kind: str | None = None,
        key: str | None = None,
        delay: Delay | Maybe = MISSING,
        at: datetime | Maybe = MISSING,
        delay_us: int | None = None,
        execute_at_us: int | None = None,
        conn: AnyConnection | None = None,
    ) -> Reschedule:
        """Move a pending task to `delay` from now, or to the instant `at`. The answer is final.

        `delay_us` and `execute_at_us` are what handlers pass, who have checked it already.
        """
        target, store = _target(id, kind, key), self._store
        when = (delay_us, execute_at_us)
        if when == (None, None):
            when = parse_when(delay, at)
        if not isinstance(target, int):
            return await self._alone(lambda c, ms: store.reschedule_key(c, target, when, ms), conn)
        move = Move(target, *when)
        if conn is None:
            return await self._opened.sharing.move(move)
        return (await self._perform(lambda c: store.reschedule_many(c, [move]), conn))[target]

    async def run_now(
        self,
        id: int | None = None,
        *,
        kind: str | None = None,
        key: str | None = None,
        conn: AnyConnection | None = None,
    ) -> Reschedule:
        """Make a pending task due at once."""
        return await self.reschedule(id, kind=kind, key=key, delay_us=0, conn=conn)

    async def revive(self, id: int, conn: AnyConnection | None = None) -> Revive:
        """Bring a dead task back under its id, due now, with all its attempts."""
        return (await self.revive_many([id], conn=conn))[id]

    async def revive_many(
        self, ids: Iterable[int], *, spread: Delay = 0, conn: AnyConnection | None = None
    ) -> dict[int, Revive]:
        """Bring dead tasks back, due at random instants from now until `spread` later."""
        wanted, spread_us = _ids(ids), delay_to_us(spread, "spread")
        return await self._perform(lambda c: self._store.revive_many(c, wanted, spread_us), conn)

    async def discard(self, id: int, conn: AnyConnection | None = None) -> Discard:
        """Remove a dead task for good."""
        return (await self.discard_many([id], conn=conn))[id]

    async def discard_many(
        self, ids: Iterable[int], *, conn: AnyConnection | None = None
    ) -> dict[int, Discard]:
        """Remove dead tasks for good: the answer for each."""
        wanted = _ids(ids)
        return await self._perform(lambda c: self._store.discard_many(c, wanted), conn)

    # --- looking ------------------------------------------------------------------------------

    async def get(
        self,
        id: int | None = None,
        *,
        kind: str | None = None,
        key: str | None = None,
        conn: AnyConnection | None = None,
    ) -> Task | None:
        """The task as it stands, by id wherever it is now, or by the kind and key of a live one.

        None: there is no such task, or history has forgotten it.
        """
        target, store = _target(id, kind, key), self._store

        async def look(c: AnyConnection) -> Task | None:
            found = target if isinstance(target, int) else await store.key_holder(c, *target)
            return None if found is None else await store.get(c, found)

        return await self._look(look, conn)

    async def list(
        self,
        *,
        state: TaskState | str | None = None,
        kind: str | None = None,
        key: str | None = None,
        limit: int = 50,
        after_id: int | None = None,
        conn: AnyConnection | None = None,
    ) -> Tasks:
        """A page of at most `limit` tasks; the next page is `after_id` the last one's id.

        Live tasks (pending and running, unless `state` says otherwise) and dead ones come with
        the lowest ids first, finished ones with the highest. A filter that few tasks of many
        pass may take long: DatabaseTimeout.
        """
        wanted = None if state is None else _state(state)
        if limit not in range(1, MAX_LISTED + 1):
            raise InvalidArgument("limit", f"must be a whole number from 1 to {MAX_LISTED}")
        if after_id is not None:
            check_target(after_id, None, None)
        store = self._store
        if wanted is None or wanted.live:
            return await self._look(
                lambda c: store.list_live(c, (kind, wanted, key), after_id, limit), conn
            )
        if wanted is TaskState.DEAD:
            return await self._look(
                lambda c: store.list_dead(c, (kind, key), after_id, limit), conn
            )
        return await self._look(
            lambda c: store.list_history(c, (kind, wanted, key), after_id, limit), conn
        )

    # --- kinds and nodes ----------------------------------------------------------------------

    async def pause(self, kind: str) -> None:
        """Let no node fire tasks of a kind, until `resume`; those that run go on. PrivilegeMissing
        for roles that are no node's."""
        checked = check_name(kind, "kind")
        await self._perform(lambda c: self._store.pause_kind(c, checked, paused=True))

    async def resume(self, kind: str) -> None:
        """Let nodes fire tasks of a paused kind again."""
        checked = check_name(kind, "kind")
        await self._perform(lambda c: self._store.pause_kind(c, checked, paused=False))

    async def nodes(self) -> Nodes:
        """Every node that has a row, also dead ones of which tasks remain; oldest first."""
        return await self._look(self._store.nodes)

    async def drain_node(self, id: int) -> bool:
        """Ask a node to drain and leave. False: there is none of that id that could."""
        return await self._perform(lambda c: self._store.ask_drain(c, id))

    # --- inside -------------------------------------------------------------------------------

    @property
    def _opened(self) -> _Open:
        if self._state is None:
            raise DelayQError("the client is not open: use `async with`")
        return self._state

    async def _perform(
        self, work: Work[T], conn: AnyConnection | None = None, doubt: str = ASK_AGAIN
    ) -> T:
        """Run a statement on the caller's connection, or else on one of the pool."""
        if conn is None:
            return await self._opened.lanes.patient(work, doubt)
        with translated():
            return await work(conn)

    async def _look(
        self, work: Work[T], conn: AnyConnection | None = None, doubt: str = ASK_AGAIN
    ) -> T:
        """The same for what meets no lock: it need not queue with those who wait for one."""
        if conn is None:
            return await self._opened.lanes.brief(work, doubt)
        with translated():
            return await work(conn)

    async def _alone(
        self,
        work: PatientWork[T],
        conn: AnyConnection | None,
        doubt: str = ASK_AGAIN,
    ) -> T:
        """Run a statement that may meet a stranger's lock."""
        if conn is None:
            return await self._opened.lanes.alone(work, doubt)
        with translated():
            return await work(conn, None)

    async def _connect(self, database: Database | None) -> _Open:
        pool, settings = self._given_pool, self._settings
        if pool is None:
            if database is None:
                raise InvalidArgument("dsn", "the client needs a database or a pool")
            pool = await database.create_pool(
                0, settings.client_connections, _APPLICATION, reset=False
            )
        lanes = Lanes(
            pool, acquire_limit_s=settings.connect_timeout_s, lock_limit_s=settings.lock_timeout_s
        )
        return _Open(pool, lanes, Sharing(lanes, self._store), pool is not self._given_pool)


async def _let_go(state: _Open) -> None:
    """Close the pool, unless it was given."""
    if not state.owns_pool:
        return
    try:
        async with asyncio.timeout(_CLOSE_S):
            await state.pool.close()
    except DRIVER_ERRORS:
        state.pool.terminate()


def _doubt(requests: Iterable[TaskRequest]) -> str:
    """What to say if nobody knows whether these were scheduled."""
    if all(request.idempotency_key is not None for request in requests):
        return "the outcome is unknown; schedule again: the idempotency_key makes that safe"
    return MAY_BE_THERE


def _target(id: int | None, kind: str | None, key: str | None) -> int | tuple[str, str]:
    """The id, or the kind and key, of the task that a verb is about."""
    task_id, kind, key = check_target(id, kind, key)
    return (str(kind), str(key)) if task_id is None else task_id


def _ids(ids: Iterable[int]) -> list[int]:
    return [task_id for id in ids if (task_id := check_target(id, None, None)[0]) is not None]


def _state(state: TaskState | str) -> TaskState:
    for known in TaskState:
        if state == known:
            return known
    raise InvalidArgument("state", f"must be one of {', '.join(TaskState)}")
