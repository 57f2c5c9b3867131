"""The bulk verbs: bounded statements, held up by no lock, and true about what they did."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from delayq import batches, passes
from delayq.batches import BATCH_BYTES
from delayq.bulk import MAX_GLANCES
from delayq.client import Client
from delayq.errors import (
    BulkStopped,
    DatabaseError,
    DatabaseTimeout,
    DatabaseUnavailable,
    InvalidArgument,
    KeyTaken,
)
from delayq.model import Cancel, Reschedule, TaskRequest
from delayq.request import build_request
from delayq.statements import statement
from delayq.task_store import TaskStore
from tests.helpers import connected, wait_for, wait_until_blocked
from tests.leases import lease, ran, settle

if TYPE_CHECKING:
    from delayq.database import Connection, Database
    from delayq.model import ScheduledTask
    from delayq.settings import Settings

HOUR = timedelta(hours=1)
AT = datetime(2_100, 1, 1, tzinfo=UTC)
NOBODY = 10**15
SOON = 5.0  # seconds: less than the patience for a lock in these tests, more than the work needs
PATIENCE_S = 10.0
ROWS = 100  # in a batch, here
REAL_ROWS = batches.BATCH_ROWS
Sent = list[str]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches of few rows; two tests go back to the real ones."""
    _batches_of(ROWS, monkeypatch)


def _batches_of(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (batches, passes):
        monkeypatch.setattr(room, "BATCH_ROWS", rows)


@pytest.fixture
async def client(database: Database, settings: Settings) -> AsyncIterator[Client]:
    patient = settings.model_copy(update={"lock_timeout_s": PATIENCE_S})
    async with Client(database, patient) as client:
        yield client


@pytest.fixture
async def hasty(database: Database, settings: Settings) -> AsyncIterator[Client]:
    """A client that waits for no lock for long."""
    quick = settings.model_copy(update={"lock_timeout_s": 0.2})
    pool = await type(database)(database.dsn, quick).create_pool(1, 6, "hasty", shared=False)
    async with pool, Client(None, quick, pool=pool) as client:
        yield client


def request(n: int = 0, kind: str = "k", **options: Any) -> TaskRequest:
    return build_request(kind, json.dumps({"n": n}), delay=HOUR, **options)


def requests(count: int) -> list[TaskRequest]:
    return [request(n) for n in range(count)]


def keyed(count: int, prefix: str = "order:", **options: Any) -> list[TaskRequest]:
    """Requests with keys, whose order is that of their numbers."""
    return [request(n, key=f"{prefix}{n:05}", **options) for n in range(count)]


async def numbers(conn: Connection, table: str = "tasks") -> dict[int, int]:
    """The number in the payload of each task, by id."""
    rows = await conn.fetch(f"select id, (payload ->> 'n')::int as n from delayq.{table}")
    return {row["id"]: row["n"] for row in rows}


async def live_ids(conn: Connection) -> set[int]:
    return {row["id"] for row in await conn.fetch("select id from delayq.tasks")}


async def moved_ids(conn: Connection) -> set[int]:
    rows = await conn.fetch("select id from delayq.tasks where execute_at = $1", AT)
    return {row["id"] for row in rows}


async def soon(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, SOON)


# --- schedule_many ------------------------------------------------------------------------------


async def test_many_requests_go_in_bounded_statements_and_progress_is_told_after_each(
    conn: Connection, client: Client, sent: Sent
) -> None:
    progress: list[int] = []
    count = 2 * ROWS + 10
    tasks = await client.schedule_many(requests(count), progress=progress.append)
    assert progress == [ROWS, 2 * ROWS, count]
    assert sent == ["schedule_many"] * 3
    assert await numbers(conn) == {task.id: n for n, task in enumerate(tasks)}
    assert [task.id for task in tasks] == sorted(task.id for task in tasks)


async def test_statements_are_bounded_in_bytes_too(client: Client, sent: Sent) -> None:
    large = json.dumps({"text": "x" * (BATCH_BYTES // 4)})
    wanted = [build_request("k", large, delay=HOUR) for _ in range(7)]
    progress: list[int] = []
    await client.schedule_many(wanted, progress=progress.append)
    assert progress == [3, 6, 7]  # the braces around them are too much for a fourth


async def test_a_generator_is_read_as_its_requests_are_needed(client: Client) -> None:
    drawn = 0
    most_ahead = 0

    def made() -> Iterator[TaskRequest]:
        nonlocal drawn
        for n in range(5 * ROWS):
            drawn += 1
            yield request(n)

    def note(stored: int) -> None:
        nonlocal most_ahead
        most_ahead = max(most_ahead, drawn - stored)

    assert len(await client.schedule_many(made(), progress=note)) == 5 * ROWS
    # one batch gathers while another one is on its way
    assert most_ahead <= ROWS + 1


@pytest.mark.parametrize(
    "count",
    [pytest.param(3 * REAL_ROWS), pytest.param(100 * REAL_ROWS, marks=pytest.mark.slow)],
)
@pytest.mark.timeout(300)
async def test_a_hundred_thousand_are_scheduled_moved_and_cancelled_in_one_call_each(
    conn: Connection, client: Client, monkeypatch: pytest.MonkeyPatch, sent: Sent, count: int
) -> None:
    _batches_of(REAL_ROWS, monkeypatch)
    progress: list[int] = []
    made = (request(n, key=f"order:{n}") for n in range(count))
    tasks = await client.schedule_many(made, progress=progress.append)
    assert progress == list(range(REAL_ROWS, count + 1, REAL_ROWS))
    assert sent == ["schedule_keyed"] * (count // REAL_ROWS)
    ids = {task.id for task in tasks}
    assert len(ids) == count
    moved = await client.reschedule_many(kind="k", key_prefix="order:", at=AT)
    assert moved == dict.fromkeys(ids, Reschedule.MOVED)
    assert await client.cancel_many(ids) == dict.fromkeys(ids, Cancel.CANCELLED)
    assert await live_ids(conn) == set()


async def test_requests_of_every_sort_are_answered_in_their_order(
    conn: Connection, client: Client, sent: Sent
) -> None:
    holder = await client.schedule(request(-1, key="held"))
    done = await client.schedule(request(-2, idempotency_key="done"))
    await ran(conn, done.id)
    sent.clear()
    wanted = [
        request(0),
        request(1, key="b"),
        request(2, key="held"),
        request(3, key="held", on_conflict="replace"),
        request(4, idempotency_key="done"),
        request(5, idempotency_key="new"),
        request(6, key="a", idempotency_key="both"),
        request(7, key="b"),
        request(8, idempotency_key="new"),
        request(9),
    ]
    tasks = await client.schedule_many(wanted)
    assert sent == ["schedule_keyed"]
    told = [(task.created, task.state) for task in tasks]
    new, kept, over = (True, "pending"), (False, "pending"), (False, "succeeded")
    assert told == [new, new, kept, new, over, new, new, kept, kept, new]
    assert tasks[2].id == tasks[3].id == holder.id
    assert tasks[4].id == done.id
    assert tasks[7].id == tasks[1].id
    assert tasks[8].id == tasks[5].id
    assert await numbers(conn) == {tasks[n].id: n for n in (0, 1, 3, 5, 6, 9)}
    drawn = [tasks[n].id for n in (0, 1, 5, 6, 9)]
    assert drawn == sorted(drawn)
    claims = await conn.fetch("select idempotency_key, task_id from delayq.idempotency")
    ids = {"done": done.id, "new": tasks[5].id, "both": tasks[6].id}
    assert {row["idempotency_key"]: row["task_id"] for row in claims} == ids


async def test_what_is_scheduled_in_bulk_is_like_what_is_scheduled_singly(
    conn: Connection, client: Client
) -> None:
    options: dict[str, Any] = {
        "priority": 7, "max_attempts": 3, "timeout": 5, "misfire_grace": 6, "headers": {"a": 1},
    }  # fmt: skip
    extras: list[dict[str, Any]] = [
        {}, {"key": "x"}, {"idempotency_key": "x"}, {"key": "y", "idempotency_key": "y"},
    ]  # fmt: skip
    times: list[dict[str, Any]] = [{"at": AT}, {"delay": HOUR}]
    for extra in extras:
        for when in times:
            await conn.execute("delete from delayq.tasks; delete from delayq.idempotency")
            wanted = build_request("k", '{"n": 1}', **when, **options, **extra)
            single = await client.get((await client.schedule(wanted)).id)
            await conn.execute("delete from delayq.tasks; delete from delayq.idempotency")
            (task,) = await client.schedule_many([wanted])
            bulk = await client.get(task.id)
            assert bulk is not None
            assert single is not None
            assert task.execute_at == bulk.execute_at
            for name in ("payload", "headers", "key", "idempotency_key", "priority"):
                assert getattr(bulk, name) == getattr(single, name), (name, extra)
            for name in ("max_attempts", "timeout_ms", "misfire_grace_ms", "state", "attempt"):
                assert getattr(bulk, name) == getattr(single, name), (name, extra)
            assert abs(bulk.execute_at - single.execute_at) < timedelta(minutes=1)


async def test_a_taken_key_that_is_an_error_undoes_its_statement_and_no_earlier_one(
    conn: Connection, client: Client
) -> None:
    holder = await client.schedule(request(key="order:00150"))
    wanted = keyed(2 * ROWS, on_conflict="error")
    with pytest.raises(BulkStopped) as stopped:
        await client.schedule_many(wanted)
    assert isinstance(stopped.value.__cause__, KeyTaken)
    assert stopped.value.__cause__.task_id == holder.id
    tasks = stopped.value.tasks
    assert stopped.value.done == ROWS
    assert [task is not None for task in tasks] == [True] * ROWS + [False] * ROWS
    assert not stopped.value.in_doubt
    stored = {task.id for task in tasks if task is not None}
    assert await live_ids(conn) == stored | {holder.id}


@pytest.mark.parametrize("alone", [False, True])
async def test_doing_it_again_with_idempotency_keys_stores_the_rest_and_nothing_twice(
    conn: Connection, client: Client, alone: bool
) -> None:
    """A row that the database refuses fails its statement; then all can simply be sent again."""
    count = 2 * ROWS + 10
    wanted = [
        request(n, idempotency_key=f"r-{n}", key=f"order:{n}" if alone else None)
        for n in range(count)
    ]
    bad = wanted.copy()
    bad[ROWS + 7] = TaskRequest("k", delay_us=0, priority=1_000)  # past the checks
    with pytest.raises(BulkStopped) as stopped:
        await client.schedule_many(bad)
    assert isinstance(stopped.value.__cause__, DatabaseError)
    assert "_sane" in str(stopped.value)
    first = stopped.value.tasks[:ROWS]
    assert stopped.value.done == ROWS
    assert None not in first
    again = await client.schedule_many(wanted)
    assert [task.created for task in again] == [False] * ROWS + [True] * (ROWS + 10)
    assert [task.id for task in again[:ROWS]] == [task.id for task in first if task]
    assert await numbers(conn) == {task.id: n for n, task in enumerate(again)}


async def test_a_connection_lost_on_the_way_leaves_one_statement_in_doubt(
    conn: Connection, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TaskStore.schedule_keyed
    calls = itertools.count(1)

    async def lost(store: TaskStore, own: Any, *arguments: Any) -> Any:
        answer = await whole(store, own, *arguments)
        if next(calls) == 2:  # it is committed, but nobody hears of it
            await conn.execute("select pg_terminate_backend($1)", own.get_server_pid())
            await wait_for(own.is_closed, "the pool sees it too")
            raise asyncpg.ConnectionDoesNotExistError("closed in the middle of operation")
        return answer

    wanted = [request(n, idempotency_key=f"r-{n}") for n in range(3 * ROWS)]
    with monkeypatch.context() as patch:
        patch.setattr(TaskStore, "schedule_keyed", lost)
        with pytest.raises(BulkStopped, match="outcome is unknown; schedule again") as stopped:
            await client.schedule_many(wanted)
    assert isinstance(stopped.value.__cause__, DatabaseUnavailable)
    assert stopped.value.in_doubt
    assert stopped.value.done == ROWS
    assert stopped.value.tasks[ROWS:] == [None] * ROWS
    assert len(await live_ids(conn)) == 2 * ROWS
    again = await client.schedule_many(wanted)
    assert await numbers(conn) == {task.id: n for n, task in enumerate(again)}


async def test_requests_that_cannot_be_made_stop_it_and_what_is_stored_is_told(
    conn: Connection, client: Client
) -> None:
    def made(fails_at: int) -> Iterator[TaskRequest]:
        for n in range(3 * ROWS):
            if n == fails_at:
                raise OSError("the file of orders ends here")
            yield request(n)

    with pytest.raises(OSError, match="the file of orders"):
        await client.schedule_many(made(7))
    assert await live_ids(conn) == set()
    with pytest.raises(BulkStopped, match="the file of orders") as stopped:
        await client.schedule_many(made(2 * ROWS + 7))
    assert isinstance(stopped.value.__cause__, OSError)
    assert len(stopped.value.tasks) == stopped.value.done == 2 * ROWS
    assert await live_ids(conn) == {task.id for task in stopped.value.tasks if task}


async def test_something_that_is_no_request_is_refused(conn: Connection, client: Client) -> None:
    wanted: list[Any] = [request(), client.schedule]
    with pytest.raises(InvalidArgument, match="requests"):
        await client.schedule_many(wanted)
    assert await live_ids(conn) == set()
    assert await client.schedule_many([]) == []
    assert await client.schedule_many(iter(())) == []


async def test_a_progress_that_raises_stops_it(conn: Connection, client: Client) -> None:
    def no_more(done: int) -> None:
        if done >= 2 * ROWS:
            raise RuntimeError("enough")

    with pytest.raises(BulkStopped, match="enough") as stopped:
        await client.schedule_many(requests(5 * ROWS), progress=no_more)
    assert stopped.value.done == 2 * ROWS
    assert len(await live_ids(conn)) == 2 * ROWS


async def test_a_caller_who_gives_up_leaves_the_client_in_order(
    conn: Connection, client: Client, stranger: Connection
) -> None:
    async with stranger.transaction():
        await stranger.execute("lock table delayq.tasks in share mode")
        work = asyncio.create_task(client.schedule_many(requests(3 * ROWS)))
        await wait_until_blocked(conn)
        work.cancel()
        await asyncio.wait([work], timeout=SOON)
        assert work.cancelled()
    assert len(await client.schedule_many(requests(10))) == 10
    assert len(await live_ids(conn)) == 10


# --- schedule_many and strangers ----------------------------------------------------------------


async def test_a_key_that_a_stranger_is_taking_holds_up_none_of_the_others(
    conn: Connection, client: Client, stranger: Connection
) -> None:
    wanted = keyed(2 * ROWS)
    progress: list[int] = []
    async with stranger.transaction():
        for n in (0, 7, 199):
            await client.schedule(request(-1, key=f"order:{n:05}"), conn=stranger)
        work = asyncio.create_task(client.schedule_many(wanted, progress=progress.append))
        await wait_for(lambda: progress[-1:] == [2 * ROWS - 3], "the others", SOON)
        await wait_until_blocked(conn)
        assert not work.done()
    tasks = await soon(work)
    assert progress[-1] == 2 * ROWS
    assert [n for n, task in enumerate(tasks) if not task.created] == [0, 7, 199]
    assert len(await live_ids(conn)) == 2 * ROWS


async def test_a_wait_for_a_key_in_vain_is_told_and_the_others_are_stored(
    conn: Connection, hasty: Client, stranger: Connection
) -> None:
    wanted = keyed(ROWS)
    async with stranger.transaction():
        await hasty.schedule(request(-1, key="order:00007"), conn=stranger)
        with pytest.raises(BulkStopped, match="locks on 1 of the tasks") as stopped:
            await hasty.schedule_many(wanted)
    assert isinstance(stopped.value.__cause__, DatabaseTimeout)
    assert not stopped.value.in_doubt
    assert stopped.value.done == ROWS - 1
    assert [n for n, task in enumerate(stopped.value.tasks) if task is None] == [7]
    again = await hasty.schedule_many(wanted)
    assert sum(task.created for task in again) == 0


async def test_all_that_one_stranger_holds_costs_one_wait(
    conn: Connection, client: Client, stranger: Connection, sent: Sent
) -> None:
    wanted = keyed(ROWS)
    async with stranger.transaction():
        await client.schedule_many(wanted, conn=stranger)
        sent.clear()
        work = asyncio.create_task(client.schedule_many(wanted))
        await wait_for(lambda: "schedule_one" in sent, "it waits for the first", SOON)
        await wait_until_blocked(conn)
        assert sent.count("schedule_keyed") <= MAX_GLANCES
        sent.clear()
    tasks = await soon(work)
    assert not any(task.created for task in tasks)
    assert sent.count("schedule_keyed") == 1  # all that were left, together


@pytest.mark.parametrize("own", [False, True])
async def test_two_bulks_of_the_same_keys_do_not_wait_in_a_circle(
    conn: Connection, client: Client, dsn: str, own: bool
) -> None:
    """In opposite orders. Nobody retries for them: with connections of their own, at least."""
    forward = [*keyed(500), *(request(n, idempotency_key=f"r-{n}") for n in range(200))]
    tries: list[list[ScheduledTask]] = []

    async def schedule(wanted: list[TaskRequest]) -> None:
        if not own:
            tries.append(await client.schedule_many(wanted))
            return
        async with connected(dsn) as mine, mine.transaction():
            tries.append(await client.schedule_many(wanted, conn=mine))

    await asyncio.wait_for(
        asyncio.gather(schedule(forward), schedule(forward[::-1])), 3 * PATIENCE_S
    )
    one, other = ({task.id for task in tasks} for tasks in tries)
    assert one == other == await live_ids(conn)
    assert sum(task.created for tasks in tries for task in tasks) == len(forward)


# --- on a connection of the caller's ------------------------------------------------------------


async def test_on_a_connection_of_the_callers_all_is_in_its_transaction(
    conn: Connection, client: Client, sent: Sent
) -> None:
    wanted = [*requests(ROWS + 5), *keyed(ROWS + 5), *requests(3)]
    progress: list[int] = []
    transaction = conn.transaction()
    await transaction.start()
    tasks = await client.schedule_many(iter(wanted), progress=progress.append, conn=conn)
    # plain ones as they come, those with keys in the order of their keys at the end
    assert sent == ["schedule_many"] * 3 + ["schedule_keyed"] * 2
    assert progress[-1] == len(wanted)
    numbered = [json.loads(one.payload)["n"] for one in wanted]
    assert await numbers(conn) == {t.id: n for t, n in zip(tasks, numbered, strict=True)}
    ids = [task.id for task in tasks]
    moved = await client.reschedule_many(ids, at=AT, conn=conn)
    assert moved == dict.fromkeys(ids, Reschedule.MOVED)
    keys = await client.cancel_many(kind="k", key_prefix="order:", conn=conn)
    assert len(keys) == ROWS + 5
    assert await client.list() == []  # nobody else sees anything
    await transaction.rollback()
    assert await live_ids(conn) == set()
    assert await conn.fetchval("select count(*) from delayq.task_history") == 0


async def test_on_a_connection_of_the_callers_it_is_all_or_nothing_and_that_stays_usable(
    conn: Connection, client: Client
) -> None:
    taken = await client.schedule(request(key="order:00150"))
    plain = [*requests(ROWS + 5), TaskRequest("k", delay_us=0, priority=1_000)]
    async with conn.transaction():
        before = await client.schedule(request(), conn=conn)
        with pytest.raises(KeyTaken):
            await client.schedule_many(keyed(200, on_conflict="error"), conn=conn)
        with pytest.raises(DatabaseError, match="_sane"):
            await client.schedule_many(plain, conn=conn)
        with pytest.raises(InvalidArgument):
            await client.schedule_many([*requests(3), None], conn=conn)  # type: ignore[list-item]  # nonsense on purpose
        assert await client.cancel(before.id, conn=conn) is Cancel.CANCELLED
    assert await live_ids(conn) == {taken.id}
    with pytest.raises(KeyTaken):  # without a transaction around it there is one all the same
        await client.schedule_many(keyed(200, on_conflict="error"), conn=conn)
    assert await live_ids(conn) == {taken.id}


async def test_a_file_that_cannot_be_read_is_no_fault_of_the_database(
    conn: Connection, client: Client
) -> None:
    def made() -> Iterator[TaskRequest]:
        yield from requests(ROWS + 5)
        raise FileNotFoundError("orders.csv")

    with pytest.raises(FileNotFoundError):
        await client.schedule_many(made(), conn=conn)
    assert await live_ids(conn) == set()


# --- cancel_many and reschedule_many by ids -----------------------------------------------------


async def test_many_ids_go_in_bounded_statements_and_each_has_its_answer(
    conn: Connection, client: Client, sent: Sent
) -> None:
    tasks = [task.id for task in await client.schedule_many(requests(2 * ROWS + 10))]
    done, running, failed = tasks[:3]
    await ran(conn, done)
    await lease(conn, running)
    await conn.execute("update delayq.tasks set attempt = 1 where id = $1", failed)
    sent.clear()
    progress: list[int] = []
    given = [*reversed(tasks), NOBODY, *tasks[:50]]
    moved = await client.reschedule_many(iter(given), at=AT, progress=progress.append)
    assert progress == [ROWS, 2 * ROWS, 2 * ROWS + 11]
    assert sent == ["reschedule_many"] * 3
    expected = dict.fromkeys(tasks, Reschedule.MOVED) | {
        done: Reschedule.ALREADY_FINISHED,
        running: Reschedule.RUNNING,
        failed: Reschedule.RETRY_MOVED,
        NOBODY: Reschedule.NOT_FOUND,
    }
    assert moved == expected
    assert await moved_ids(conn) == set(tasks[2:])
    cancelled = await client.cancel_many(given, progress=progress.append)
    assert progress[3:] == progress[:3]
    assert cancelled == dict.fromkeys(tasks, Cancel.CANCELLED) | {
        done: Cancel.ALREADY_FINISHED,
        running: Cancel.CANCEL_REQUESTED,
        NOBODY: Cancel.NOT_FOUND,
    }
    assert await live_ids(conn) == {running}
    assert await client.cancel_many([]) == {}


async def test_a_bulk_move_by_a_delay_counts_from_now(conn: Connection, client: Client) -> None:
    tasks = [task.id for task in await client.schedule_many(requests(20))]
    await client.reschedule_many(tasks, delay=timedelta(days=2))
    ahead = "select bool_and(execute_at - delayq.clock() between $1 and $2) from delayq.tasks"
    assert await conn.fetchval(ahead, timedelta(days=1, hours=23), timedelta(days=2))
    assert await conn.fetchval("select bool_and(due_at = execute_at) from delayq.tasks")


async def test_waiting_successors_are_moved_and_cancelled_in_bulk_too(
    conn: Connection, client: Client, sent: Sent
) -> None:
    running, waiting = [], []
    for n in range(15):
        task = await client.schedule(request(n, key=f"order:{n}"))
        running.append((task.id, await lease(conn, task.id)))
        after = await client.schedule(request(n, key=f"order:{n}", on_conflict="replace"))
        assert after.follow_up is not None
        waiting.append(after.follow_up)
    sent.clear()
    assert await client.reschedule_many(waiting, at=AT) == dict.fromkeys(waiting, Reschedule.MOVED)
    await settle(conn, *running[0])
    assert await moved_ids(conn) == {waiting[0]}
    assert await client.cancel_many(waiting) == dict.fromkeys(waiting, Cancel.CANCELLED)
    assert sent == ["reschedule_many", "cancel_many"]
    for one in running[1:]:
        await settle(conn, *one)
    assert await live_ids(conn) == set()


@pytest.mark.parametrize("verb", ["cancel", "move"])
async def test_a_locked_task_holds_up_none_of_the_others(
    conn: Connection, client: Client, stranger: Connection, sent: Sent, verb: str
) -> None:
    tasks = [task.id for task in await client.schedule_many(requests(2 * ROWS))]
    locked = [tasks[0], *tasks[50:54], tasks[-1]]
    progress: list[int] = []
    act, good = _bulk(client, verb)
    async with stranger.transaction():
        await stranger.execute(
            "select from delayq.tasks where id = any($1::bigint[]) for update", locked
        )
        work = asyncio.create_task(act(ids=tasks, progress=progress.append))
        others = len(tasks) - len(locked)
        await wait_for(lambda: progress[-1:] == [others], "the others", SOON)
        await wait_until_blocked(conn)
        assert not work.done()
        sent.clear()
    assert await soon(work) == dict.fromkeys(tasks, good)
    assert progress[-1] == len(tasks)
    assert len(sent) <= 2  # whoever let one of them go let all of them go


Bulk = Callable[..., Coroutine[Any, Any, Any]]


def _bulk(client: Client, verb: str) -> tuple[Bulk, str]:
    """A bulk verb, and the answer that is hoped for."""

    async def move(**given: Any) -> dict[int, Reschedule]:
        return await client.reschedule_many(**given, at=AT)

    return (client.cancel_many, Cancel.CANCELLED) if verb == "cancel" else (move, Reschedule.MOVED)


@pytest.mark.parametrize("verb", ["cancel", "move"])
@pytest.mark.parametrize("by", ["ids", "prefix"])
async def test_a_wait_for_a_lock_in_vain_is_told_and_the_others_are_done(
    conn: Connection, hasty: Client, stranger: Connection, verb: str, by: str
) -> None:
    tasks = [task.id for task in await hasty.schedule_many(keyed(ROWS + 5))]
    which = {"ids": tasks} if by == "ids" else {"kind": "k", "key_prefix": "order:"}
    act, good = _bulk(hasty, verb)
    async with stranger.transaction():
        await stranger.execute(
            "select from delayq.tasks where id = any($1::bigint[]) for update", tasks[:2]
        )
        with pytest.raises(BulkStopped, match="locks on 2 of the tasks") as stopped:
            await act(**which)
    assert isinstance(stopped.value.__cause__, DatabaseTimeout)
    assert stopped.value.answers == dict.fromkeys(tasks[2:], good)
    assert stopped.value.done == len(tasks) - 2
    # nothing was done about these, and doing it again does the rest
    assert set(tasks[:2]) <= await live_ids(conn)
    assert await moved_ids(conn) & set(tasks[:2]) == set()
    again: dict[int, str] = await act(**which)
    assert {again[task] for task in tasks[:2]} == {good}


async def test_of_two_bulks_that_cancel_the_same_tasks_each_task_has_one_that_did(
    client: Client,
) -> None:
    tasks = [task.id for task in await client.schedule_many(keyed(350))]
    one, other, third = await asyncio.gather(
        client.cancel_many(tasks),
        client.cancel_many(tasks[::-1]),
        client.cancel_many(kind="k", key_prefix="order:"),
    )
    did = [[a.get(task) for a in (one, other, third)].count(Cancel.CANCELLED) for task in tasks]
    assert set(did) == {1}
    left = {Cancel.CANCELLED, Cancel.ALREADY_FINISHED}
    assert set(one.values()) | set(other.values()) <= left


# --- by kind and key prefix ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "meant"),
    [
        ("a%", ["a%", "a%b"]),
        ("a_", ["a_", "a_b"]),
        ("a\\", ["a\\", "a\\%"]),
        ("a", ["a", "a%", "a%b", "a\\", "a\\%", "a_", "a_b", "axb", "aé", "a\U0010ffff"]),
        ("aé", ["aé"]),
        ("é", ["é", "éa", "é\U0010ffffz"]),
        ("\U0010ffff", ["\U0010ffff", "\U0010ffff\U0010ffff"]),
        ("A", ["A"]),
        (" ", [" a"]),
        ("axbc", []),
        ("'", ["'; drop"]),
    ],
)
async def test_a_prefix_is_plain_text(
    conn: Connection, client: Client, prefix: str, meant: list[str]
) -> None:
    keys = "a a% a%b a\\ a\\% a_ a_b axb aé a\U0010ffff é éa é\U0010ffffz A b".split()
    keys += ["\U0010ffff", "\U0010ffff\U0010ffff", " a", "'; drop", "b a"]
    tasks = await client.schedule_many([request(n, key=key) for n, key in enumerate(keys)])
    await client.schedule_many([request(key=key, kind="other") for key in keys])
    await client.schedule_many(requests(3))
    ids = {key: task.id for key, task in zip(keys, tasks, strict=True)}
    wanted = {ids[key] for key in meant}
    moved = await client.reschedule_many(kind="k", key_prefix=prefix, at=AT)
    assert moved == dict.fromkeys(wanted, Reschedule.MOVED)
    assert await moved_ids(conn) == wanted
    cancelled = await client.cancel_many(kind="k", key_prefix=prefix)
    assert cancelled == dict.fromkeys(wanted, Cancel.CANCELLED)
    assert len(await live_ids(conn)) == 2 * len(keys) + 3 - len(meant)


async def test_keys_with_a_prefix_go_page_by_page(
    conn: Connection, client: Client, sent: Sent
) -> None:
    for count, pages in ((ROWS, 2), (2 * ROWS + 1, 3)):
        tasks = [task.id for task in await client.schedule_many(keyed(count))]
        await client.schedule_many(keyed(10, "ordes:"))
        sent.clear()
        progress: list[int] = []
        moved = await client.reschedule_many(
            kind="k", key_prefix="order:", at=AT, progress=progress.append
        )
        assert moved == dict.fromkeys(tasks, Reschedule.MOVED)
        assert progress == [*range(ROWS, count, ROWS), count]
        assert sent.count("keys_page") == pages
        assert sent.count("reschedule_keys") == len(progress)
        cancelled = await client.cancel_many(kind="k", key_prefix="order:")
        assert cancelled == dict.fromkeys(tasks, Cancel.CANCELLED)
    assert len(await live_ids(conn)) == 10


async def test_running_holders_are_asked_to_end_and_what_waits_behind_them_goes(
    conn: Connection, client: Client
) -> None:
    first = await client.schedule(request(key="order:1"))
    token = await lease(conn, first.id)
    await client.schedule(request(key="order:1", on_conflict="replace"))
    second = await client.schedule(request(key="order:2"))
    moved = await client.reschedule_many(kind="k", key_prefix="order:", at=AT)
    assert moved == {first.id: Reschedule.RUNNING, second.id: Reschedule.MOVED}
    cancelled = await client.cancel_many(kind="k", key_prefix="order:")
    assert cancelled == {first.id: Cancel.CANCEL_REQUESTED, second.id: Cancel.CANCELLED}
    again = await client.cancel_many(kind="k", key_prefix="order:")
    assert again == {first.id: Cancel.CANCEL_REQUESTED}
    assert await settle(conn, first.id, token, "retry") == "cancelled"
    assert await live_ids(conn) == set()
    assert await client.cancel_many(kind="k", key_prefix="order:") == {}


@pytest.mark.parametrize("verb", ["cancel", "move"])
@pytest.mark.parametrize("own", [False, True])
async def test_a_successor_that_a_settle_in_flight_inserts_is_not_missed(
    conn: Connection, client: Client, stranger: Connection, dsn: str, verb: str, own: bool
) -> None:
    tasks = await client.schedule_many(keyed(20))
    holder = tasks[7].id
    token = await lease(conn, holder)
    after = await client.schedule(request(key="order:00007", on_conflict="replace"))
    assert after.follow_up is not None
    act, good = _bulk(client, verb)
    which = {"kind": "k", "key_prefix": "order:"}
    async with connected(dsn) as mine:
        async with stranger.transaction():
            assert await settle(stranger, holder, token) == "succeeded"
            extra = {"conn": mine} if own else {}
            work = asyncio.create_task(act(**which, **extra))
            await wait_until_blocked(conn)
        answers = await soon(work)
    others = {task.id for task in tasks} - {holder}
    assert answers == dict.fromkeys(others | {after.follow_up}, good)


async def test_a_locked_key_holds_up_none_of_the_others(
    conn: Connection, client: Client, stranger: Connection
) -> None:
    tasks = [task.id for task in await client.schedule_many(keyed(ROWS + 10))]
    progress: list[int] = []
    async with stranger.transaction():
        await stranger.execute("select from delayq.tasks where id = $1 for update", tasks[3])
        work = asyncio.create_task(
            client.cancel_many(kind="k", key_prefix="order:", progress=progress.append)
        )
        await wait_for(lambda: progress[-1:] == [len(tasks) - 1], "the others", SOON)
        await wait_until_blocked(conn)
        assert await live_ids(conn) == {tasks[3]}
    assert await soon(work) == dict.fromkeys(tasks, Cancel.CANCELLED)


@pytest.mark.parametrize("given", [{}, {"ids": [1], "kind": "k"}, {"kind": "k", "key_prefix": ""}])
async def test_tasks_that_are_not_named_are_refused_before_anything_is_sent(
    client: Client, sent: Sent, given: dict[str, Any]
) -> None:
    for call in (client.cancel_many(**given), client.reschedule_many(**given, at=AT)):
        with pytest.raises(InvalidArgument):
            await call
    with pytest.raises(InvalidArgument, match="delay"):
        await client.reschedule_many([1])
    with pytest.raises(InvalidArgument, match="id"):
        await client.cancel_many(n if n < 200 else 0 for n in range(1, 201))
    assert sent == []


@pytest.mark.parametrize("known", [True, False])
async def test_no_page_of_keys_reads_more_than_itself(conn: Connection, known: bool) -> None:
    """Neither what follows the prefix, nor other kinds, nor the table: also if nobody knows that it
    was filled after it had run empty."""
    await conn.execute("alter table delayq.tasks set (autovacuum_enabled = off)")
    await conn.execute("vacuum analyze delayq.tasks")
    await conn.execute("set plan_cache_mode = force_generic_plan; set enable_seqscan = off")
    types = "text, text, text, integer"
    await conn.execute(f"prepare page ({types}) as {statement('keys_page')}")
    await conn.execute("execute page ('k', 'b:', '', 10)")  # planned for a table without rows
    await conn.execute(
        "insert into delayq.tasks (kind, key, execute_at)"
        " select kind, prefix || i, delayq.clock() + interval '1 hour'"
        "   from unnest(array['j', 'k', 'l']) as kind, unnest(array['a:', 'b:', 'c:']) as prefix,"
        "        generate_series(1, 3000) as i"
    )
    if known:
        await conn.execute("analyze delayq.tasks")
    for prefix, beyond, rows in (("b:", "", 10), ("b:299", "b:2998", 1), ("b:", "b:9999", 0)):
        assert len(await conn.fetch(statement("keys_page"), "k", prefix, beyond, 10)) == rows
        values = "".join(f"'{value}'," for value in ("k", prefix, beyond))
        plan = await conn.fetchval(
            f"explain (analyze, buffers, format json) execute page ({values} 10)"
        )
        read = json.loads(plan)[0]["Plan"]
        assert read["Shared Hit Blocks"] + read["Shared Read Blocks"] < 100, prefix


async def test_a_given_pool_of_one_connection_is_enough(dsn: str, settings: Settings) -> None:
    async with (
        asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool,
        Client(None, settings, pool=pool) as client,
    ):
        tasks = [task.id for task in await client.schedule_many(keyed(2 * ROWS))]
        moved = await client.reschedule_many(kind="k", key_prefix="order:", at=AT)
        assert set(moved) == set(tasks)
        assert set(await client.cancel_many(tasks)) == set(tasks)
