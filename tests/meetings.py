"""Two who meet at one task (or node): what each of them asks, and what there is to ask about.

The first holds its locks in an open transaction, the second comes while it is open. A verb is what
either of them says, with the answer as a word. Those in `NODES_OWN` run on delayq's connections
alone; the others may as well be an application's, inside a transaction of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg

from delayq.errors import KeyTaken
from delayq.failures import translated
from delayq.model import OnConflict, ScheduledTask, TaskRequest
from delayq.statements import statement
from delayq.store import LeaseTerms, Store
from delayq.task_store import TaskStore
from tests.helpers import wait_until_blocked
from tests.world import read_tables

if TYPE_CHECKING:
    from delayq.database import Connection, Database

HOUR_US = 3_600_000_000
NODE, PEER = 77, 88
KIND, KEY = "mail", "order"
TTL_MS = 60_000
CONFLICT = "conflict"  # the caller's transaction has to be run again
TERMS = LeaseTerms(
    kinds=[KIND], max_attempts=[3], timeouts_ms=[None], deadlines=[True], with_grace=[]
)
_nonces = itertools.count(1)


@dataclass
class Place:
    """What the two meet at."""

    database: Database
    conn: Connection
    """of somebody who only looks, and waits for nobody"""
    task: int = 0
    token: int = 0
    other: int = 0
    other_token: int = 0
    follow_up: int | None = None
    seen_us: int = 0
    """when the node's row expires, as a judge saw it"""

    @property
    def known(self) -> tuple[int | None, ...]:
        """Tasks that the two know of."""
        return self.task, self.other, self.follow_up


Verb: TypeAlias = Callable[[Place, "Connection"], Awaitable[str]]
Scene: TypeAlias = Callable[[Place], Awaitable[None]]

_client = TaskStore(limit_s=30)


def store_on(at: Place, conn: Connection, node: int) -> Store:
    """The statements of a node, on this very connection and in its transaction."""
    store = Store(at.database, node)
    for control in store._connections():
        control._conn = conn
    return store


def _or_nothing(answers: Sequence[object]) -> str:
    return str(answers[0]) if answers else "nothing"


# --- what nodes say ---------------------------------------------------------------------------


async def _lease(at: Place, conn: Connection, node: int, task_id: int) -> str:
    rows = await store_on(at, conn, node).lease([task_id], next(_nonces), TERMS, 0, 1_000)
    return "leased" if rows else "nothing"


async def lease(at: Place, conn: Connection) -> str:
    return await _lease(at, conn, NODE, at.task)


async def lease_elsewhere(at: Place, conn: Connection) -> str:
    return await _lease(at, conn, PEER, at.task)


async def lease_follow_up(at: Place, conn: Connection) -> str:
    assert at.follow_up is not None
    return await _lease(at, conn, PEER, at.follow_up)


async def _settle(at: Place, conn: Connection, outcome: str) -> str:
    store = store_on(at, conn, NODE)
    rows = await store.settle([at.task], [at.token], [0], [outcome], [0], ['{"error": "E"}'], 5)
    return _or_nothing([row.verdict for row in rows])


async def succeed(at: Place, conn: Connection) -> str:
    """As the settler does: the hot path, and the long way for what it leaves."""
    settled = await store_on(at, conn, NODE).settle_succeeded([at.task], [at.token], [0])
    return "succeeded" if settled else await _settle(at, conn, "succeeded")


async def retry(at: Place, conn: Connection) -> str:
    return await _settle(at, conn, "retry")


async def give_up(at: Place, conn: Connection) -> str:
    return await _settle(at, conn, "dead")


async def release(at: Place, conn: Connection) -> str:
    return await _settle(at, conn, "release")


async def tell_apart(at: Place, conn: Connection) -> str:
    found = await store_on(at, conn, NODE).tell_apart([at.task], [at.token])
    return found[at.task]


async def adopt(at: Place, conn: Connection) -> str:
    rows = await store_on(at, conn, PEER).adopt([at.task], HOUR_US)
    return _or_nothing([row.verdict for row in rows])


async def set_aside(at: Place, conn: Connection) -> str:
    done = await store_on(at, conn, PEER).set_aside(at.task, '{"error": "odd"}')
    return "set aside" if done else "nothing"


async def beat(at: Place, conn: Connection) -> str:
    state = await conn.fetchval(statement("beat"), NODE, TTL_MS, "{}", 0)
    return "buried" if state is None else str(state)


async def bury(at: Place, conn: Connection) -> str:
    rows = await conn.fetch(statement("bury"), NODE, at.seen_us)
    return "buried" if rows else "nothing"


async def register(at: Place, conn: Connection) -> str:
    await store_on(at, conn, NODE).register("node", "host", 1, "0", [KIND], TTL_MS)
    return "there"


async def activate(at: Place, conn: Connection) -> str:
    return "active" if await store_on(at, conn, NODE).activate() else "nothing"


async def drain(at: Place, conn: Connection) -> str:
    await store_on(at, conn, NODE).drain()
    return "there"


async def ask_drain(at: Place, conn: Connection) -> str:
    return "asked" if await _client.ask_drain(conn, NODE) else "nothing"


async def leave(at: Place, conn: Connection) -> str:
    await store_on(at, conn, NODE).leave(True)
    return "there"


async def leave_in_a_hurry(at: Place, conn: Connection) -> str:
    await store_on(at, conn, NODE).leave(False)
    return "there"


async def forget(at: Place, conn: Connection) -> str:
    return "forgotten" if await store_on(at, conn, PEER).forget([NODE]) else "nothing"


async def prune(at: Place, conn: Connection) -> str:
    await store_on(at, conn, PEER).prune_idempotency(30, ("", ""), 1_000)
    return "pruned"


NODES_OWN: frozenset[Verb] = frozenset(
    {
        lease, lease_elsewhere, lease_follow_up, succeed, retry, give_up,
        release, tell_apart, adopt, set_aside, beat, bury, register, activate, drain, leave,
        leave_in_a_hurry, forget, prune,
    }
)  # fmt: skip


# --- what callers say -------------------------------------------------------------------------


async def _schedule(at: Place, conn: Connection, request: TaskRequest) -> str:
    try:
        return _answer(at, await _client.schedule_one(conn, request))
    except KeyTaken as taken:
        return "taken" if taken.task_id in at.known else "taken by nobody that we know"


def _answer(at: Place, task: ScheduledTask) -> str:
    if not task.created:
        assert task.id in at.known
        return f"found {task.state}"
    if task.follow_up is not None:
        at.follow_up = task.follow_up
        return "waits behind"
    if task.id in at.known:
        return "replaced"
    at.other = task.id
    return "created"


async def keep(at: Place, conn: Connection) -> str:
    return await _schedule(at, conn, TaskRequest(KIND, delay_us=0, key=KEY))


async def replace(at: Place, conn: Connection) -> str:
    on_conflict = OnConflict.REPLACE
    return await _schedule(at, conn, TaskRequest(KIND, "{}", 0, None, KEY, on_conflict))


async def insist(at: Place, conn: Connection) -> str:
    """On a key of its own, or else an error."""
    return await _schedule(at, conn, TaskRequest(KIND, "{}", 0, None, KEY, OnConflict.ERROR))


async def request(at: Place, conn: Connection) -> str:
    """The same request as ever, without a key."""
    return await _schedule(at, conn, TaskRequest(KIND, delay_us=0, idempotency_key="r-1"))


async def insert(at: Place, conn: Connection) -> str:
    """What other clients do: a plain INSERT."""
    try:
        sql = "insert into delayq.tasks (kind, key) values ($1, $2)"
        await conn.execute(sql, KIND, KEY)
    except asyncpg.UniqueViolationError:
        return "taken"
    return "inserted"


async def cancel(at: Place, conn: Connection) -> str:
    return str((await _client.cancel_many(conn, [at.task]))[at.task])


async def cancel_unlocked(at: Place, conn: Connection) -> str:
    """As shared statements do."""
    answer = (await _client.cancel_unlocked(conn, [at.task]))[at.task]
    return "locked" if answer is None else str(answer)


async def cancel_key(at: Place, conn: Connection) -> str:
    return str(await _client.cancel_key(conn, KIND, KEY))


async def cancel_keys_unlocked(at: Place, conn: Connection) -> str:
    """As bulk statements do."""
    said = (await _client.cancel_keys(conn, KIND, [KEY], wait=False))[KEY]
    return "locked" if said is None else str(said.answer)


async def cancel_follow_up(at: Place, conn: Connection) -> str:
    assert at.follow_up is not None
    return str((await _client.cancel_many(conn, [at.follow_up]))[at.follow_up])


async def _move(at: Place, conn: Connection, task_id: int, delay_us: int) -> str:
    sql = statement("reschedule_many")
    row = await conn.fetchrow(sql, [task_id], [delay_us], [None], True)
    assert row is not None
    return str(row["answer"])


async def reschedule(at: Place, conn: Connection) -> str:
    return await _move(at, conn, at.task, HOUR_US)


async def reschedule_unlocked(at: Place, conn: Connection) -> str:
    """As shared statements do."""
    sql = statement("reschedule_many")
    row = await conn.fetchrow(sql, [at.task], [HOUR_US], [None], False)
    assert row is not None
    return str(row["answer"])


async def reschedule_follow_up(at: Place, conn: Connection) -> str:
    assert at.follow_up is not None
    return await _move(at, conn, at.follow_up, HOUR_US)


async def reschedule_key(at: Place, conn: Connection) -> str:
    return str(await _client.reschedule_key(conn, (KIND, KEY), (HOUR_US, None)))


async def reschedule_keys_unlocked(at: Place, conn: Connection) -> str:
    """As bulk statements do."""
    said = (await _client.reschedule_keys(conn, KIND, [KEY], (HOUR_US, None), wait=False))[KEY]
    return "locked" if said is None else str(said.answer)


async def replace_many(at: Place, conn: Connection) -> str:
    """Among others, in one statement."""
    other = TaskRequest(KIND, delay_us=0, key="another")
    mine = TaskRequest(KIND, "{}", 0, None, KEY, OnConflict.REPLACE)
    return _answer(at, (await _client.schedule_keyed(conn, [other, mine]))[1])


async def run_now(at: Place, conn: Connection) -> str:
    return await _move(at, conn, at.task, 0)


async def revive(at: Place, conn: Connection) -> str:
    return str((await _client.revive_many(conn, [at.task], 0))[at.task])


async def revive_other(at: Place, conn: Connection) -> str:
    return str((await _client.revive_many(conn, [at.other], 0))[at.other])


async def discard(at: Place, conn: Connection) -> str:
    return str((await _client.discard_many(conn, [at.task]))[at.task])


async def effect(at: Place, conn: Connection) -> str:
    """The end of the transaction of an effect; a driver of another language does the same."""
    return str(await conn.fetchval(statement("settle_effect"), at.task, at.token, 0))


async def effect_of_other(at: Place, conn: Connection) -> str:
    return str(await conn.fetchval(statement("settle_effect"), at.other, at.other_token, 0))


async def come(at: Place, conn: Connection) -> str:
    """A task that was not there before."""
    at.task = await _new(conn)
    return "pending"


async def start(at: Place, conn: Connection) -> str:
    """It runs by now."""
    at.token = await _start(at, conn, at.task)
    return "running"


async def come_and_go(at: Place, conn: Connection) -> str:
    """It is over by now."""
    await come(at, conn)
    return await cancel(at, conn)


async def come_and_run(at: Place, conn: Connection) -> str:
    """It runs by now."""
    await come(at, conn)
    return await start(at, conn)


async def come_and_retry(at: Place, conn: Connection) -> str:
    """It failed once by now."""
    await come_and_run(at, conn)
    return await retry(at, conn)


async def come_and_die(at: Place, conn: Connection) -> str:
    """It is dead by now."""
    await come_and_run(at, conn)
    return await give_up(at, conn)


async def revive_follow_up(at: Place, conn: Connection) -> str:
    assert at.follow_up is not None
    return str((await _client.revive_many(conn, [at.follow_up], 0))[at.follow_up])


async def discard_follow_up(at: Place, conn: Connection) -> str:
    assert at.follow_up is not None
    return str((await _client.discard_many(conn, [at.follow_up]))[at.follow_up])


BY_ID = (cancel, cancel_unlocked, reschedule, reschedule_unlocked, revive, discard)
BY_KEY = (cancel_key, reschedule_key, cancel_keys_unlocked, keep, replace, replace_many, insist)
BY_FOLLOW_UP = (cancel_follow_up, reschedule_follow_up, revive_follow_up, discard_follow_up)


# --- scenes -----------------------------------------------------------------------------------


async def nobody(at: Place) -> None:
    """Two nodes, and not a task."""
    for node in (NODE, PEER):
        store = store_on(at, at.conn, node)
        await store.register("node", "host", 1, "0", [KIND], TTL_MS)
        assert await store.activate()
    await _see(at)


async def no_node(at: Place) -> None:
    """Not even a node."""


async def joining(at: Place) -> None:
    """A node that loads its window."""
    await register(at, at.conn)
    await _see(at)


async def pending(at: Place) -> None:
    """A task that is due."""
    await nobody(at)
    at.task = await _new(at.conn)


async def two_pending(at: Place) -> None:
    """Two tasks, one of them without a key."""
    await pending(at)
    task = await _client.schedule_one(at.conn, TaskRequest(KIND, delay_us=0))
    at.other = task.id


async def far_ahead(at: Place) -> None:
    """A task that is not due for long."""
    await pending(at)
    assert await reschedule(at, at.conn) == "moved"


async def running(at: Place) -> None:
    """A task that runs."""
    await pending(at)
    at.token = await _start(at, at.conn, at.task)


async def orphaned(at: Place) -> None:
    """A task whose node is dead."""
    await running(at)
    assert await bury(at, at.conn) == "buried"


async def followed(at: Place) -> None:
    """A task that runs, and another that waits behind it."""
    await running(at)
    assert await replace(at, at.conn) == "waits behind"


async def orphaned_and_followed(at: Place) -> None:
    """The same, and the node is dead."""
    await followed(at)
    assert await bury(at, at.conn) == "buried"


async def asked_to_end(at: Place) -> None:
    """A task that runs and was asked to end."""
    await running(at)
    assert await cancel(at, at.conn) == "cancel_requested"


async def dead(at: Place) -> None:
    """A dead task."""
    await running(at)
    assert await give_up(at, at.conn) == "dead"


async def two_dead(at: Place) -> None:
    """Two dead tasks of one key."""
    await dead(at)
    at.other = at.task
    at.task = await _new(at.conn)
    at.token = await _start(at, at.conn, at.task)
    assert await give_up(at, at.conn) == "dead"


async def dead_and_followed(at: Place) -> None:
    """A dead task (the other), and one of the same key that runs and has a successor."""
    await dead(at)
    at.other = at.task
    at.task = await _new(at.conn)
    at.token = await _start(at, at.conn, at.task)
    assert await replace(at, at.conn) == "waits behind"


async def requested(at: Place) -> None:
    """A task that runs under an idempotency key."""
    await nobody(at)
    assert await request(at, at.conn) == "created"
    at.task, at.other = at.other, 0
    at.token = await _start(at, at.conn, at.task)


async def requested_twice(at: Place) -> None:
    """Two that run under one idempotency key: the second by the hand of an administrator."""
    await requested(at)
    sql = "insert into delayq.tasks (kind, idempotency_key) values ($1, 'r-1') returning id"
    at.other = await at.conn.fetchval(sql, KIND)
    at.other_token = await _start(at, at.conn, at.other)


async def requested_long_ago(at: Place) -> None:
    """An idempotency key whose task ended before its retention."""
    await requested(at)
    assert await succeed(at, at.conn) == "succeeded"
    await at.conn.execute(
        "update delayq.idempotency set scheduled_at = delayq.clock() - interval '40 days',"
        " ended_at = delayq.clock() - interval '31 days'"
    )


async def _see(at: Place) -> None:
    sql = "select expires_at from delayq.nodes where id = $1"
    at.seen_us = await at.conn.fetchval(sql, NODE)


async def _new(conn: Connection) -> int:
    task = await _client.schedule_one(conn, TaskRequest(KIND, delay_us=0, key=KEY))
    assert task.created
    return task.id


async def _start(at: Place, conn: Connection, task_id: int) -> int:
    (row,) = await store_on(at, conn, NODE).lease([task_id], next(_nonces), TERMS, 0, 1_000)
    return int(row["lease_token"])


# --- a meeting --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waits:
    """The second waits for the first to end; the answers if it commits, and if it does not.

    A caller above read committed has a conflict if it commits.
    """

    commit: str
    rollback: str

    def above(self) -> Expected:
        """What comes of it in a transaction of a caller's above read committed."""
        return Waits(CONFLICT, self.rollback)


@dataclass(frozen=True)
class Collides(Waits):
    """The same, but a unique index decides, which knows no snapshots: so at every level."""

    def above(self) -> Expected:
        return self


@dataclass(frozen=True)
class AtOnce:
    """The second is answered while the first is still open; asked again afterwards, it says."""

    answer: str
    commit: str
    rollback: str

    def above(self) -> Expected:
        """What comes of it in a transaction of a caller's above read committed."""
        return self


@dataclass(frozen=True)
class Looks(AtOnce):
    """The same, but a caller above read committed waits, to see whether it is so still."""

    def above(self) -> Expected:
        return Waits(CONFLICT, self.answer)


Expected: TypeAlias = Waits | AtOnce


@dataclass(frozen=True)
class Meeting:
    """Who meets, where, in which order, and what comes of it."""

    scene: Scene
    first: Verb
    second: Verb
    expected: Expected
    left: tuple[str, str]
    """what became of task or node: if the first commits, and if it does not"""

    @property
    def name(self) -> str:
        """`scene: first | second`."""
        parts = self.scene, self.first, self.second
        names = [part.__name__.replace("_", " ") for part in parts]
        return f"{names[0]}: {names[1]} | {names[2]}"


async def seen_to_wait(at: Place, work: asyncio.Task[Any], second: int, first: int) -> None:
    """Return once the second (its pid) waits for the first, and for nobody else."""
    waiting = asyncio.create_task(wait_until_blocked(at.conn, second))
    await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        waiting.cancel()
        raise AssertionError(f"it did not wait but said: {work.result()}")
    assert await at.conn.fetchval("select pg_blocking_pids($1)", second) == [first]


async def in_words(conn: Connection, verb: Awaitable[str], *, transaction: bool) -> str:
    """The answer of a verb, in a transaction of its caller's or by itself."""
    with translated():
        if not transaction:
            return await verb
        async with conn.transaction():
            return await verb


async def left_of(at: Place) -> str:
    """What became of the task and of the one that follows it; how many there are, if of none."""
    if not at.task:
        live = len((await read_tables(at.conn))["tasks"])
        return f"{live or 'none'} live"
    words = await _state(at, at.task)
    if at.follow_up is not None:
        words += f", then {await _state(at, at.follow_up)}"
    return words


async def _state(at: Place, task_id: int) -> str:
    tables = await read_tables(at.conn)
    for task in tables["tasks"]:
        if task["id"] == task_id:
            return str(task["state"]) + (" (to end)" if task["cancel_requested"] else "")
        if task["next"] and task["next"]["id"] == task_id:
            return "waiting"
    for row in (*tables["history"], *tables["dead"]):
        if row["id"] == task_id:
            return str(row.get("state", "dead"))
    return "nowhere"


async def state_of_node(at: Place) -> str:
    """What the table of nodes says."""
    sql = "select state from delayq.nodes where id = $1"
    return str(await at.conn.fetchval(sql, NODE) or "nowhere")
