"""What the schema was shaped for: leases are HOT, ranges use the index, plans never go stale."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from delayq.instants import instant_from_us
from delayq.settings import load_settings
from delayq.store import Cursors, LeaseTerms, Store
from tests.conftest import SHORT
from tests.helpers import connected, wait_for
from tests.nodes import Application, ended, life, no_live_tasks, schedule, stopped_at_once

if TYPE_CHECKING:
    from delayq.database import Connection, Database
    from delayq.metrics import Counters
    from delayq.settings import Settings

LEASES = 20_000
BUCKETS = list(range(256))
BEGINNING_US = 946_684_800_000_000
KINDS = ["k"]
TERMS = LeaseTerms(KINDS, [5], [None], [True], [])


# --- HOT ----------------------------------------------------------------------------------------


@pytest.mark.alone  # another test's open transaction, in whatever database, stops all pruning
async def test_leases_with_retries_and_adoption_under_way_are_hot(dsn: str) -> None:
    """C090. At least 95 % of them: an index on what a lease changes would cost a factor of five.

    With errors of a kilobyte, as real ones are. Where nothing is pruned, the longer rows of what
    is retried fill the pages of their neighbours, and only nine tenths are HOT.
    """
    counters, share = await _run_all(dsn, failing=0.5)
    assert counters.retried > LEASES / 50
    assert share >= 0.95, f"{share:.1%} of {counters.fired} leases were HOT"


async def test_leases_are_hot_while_an_open_transaction_keeps_every_dead_version(
    conn: Connection, dsn: str
) -> None:
    """Somebody's long report or backup: each page has room for a lease of each of its rows."""
    async with conn.transaction(isolation="repeatable_read"):
        await conn.execute("select from delayq.tasks")
        counters, share = await _run_all(dsn, failing=0.0)
    assert share >= 0.95, f"{share:.1%} of {counters.fired} leases were HOT"


async def _run_all(dsn: str, *, failing: float) -> tuple[Counters, float]:
    """Run a backlog of which a dead node held a part and a tenth fails at this rate; what the
    node counted, and the share of its leases that were HOT."""
    app = Application(load_settings(dsn=dsn, embedded=False, **SHORT))

    @app.task(max_attempts=50)
    async def k(n: int) -> None:
        if n % 10 == 0 and random.random() < failing:
            raise ValueError("because of this and that, " * 30)

    async with connected(dsn) as conn:
        await conn.execute("set delayq.hints = off")
        await conn.execute(
            "insert into delayq.tasks (kind, payload)"
            " select 'k', jsonb_build_object('n', n) from generate_series(1, $1) as n",
            LEASES,
        )
        # what a dead node left running, spread among the others
        await conn.execute(
            "update delayq.tasks set state = 'running', lease_owner = 7, lease_token = id,"
            " attempt = 1, attempt_limit = 50 where id % 20 = 0"
        )
        async with app.node() as node:
            life(node)._maintenance.run_now("orphans")
            await no_live_tasks(conn, 50)
            counters = life(node).counters
        adopted = LEASES // 20
        assert counters.adopted == adopted
        leases = counters.fired + counters.released
        # by us above, by leases, by retries, by adoption, and by what was leased and given back
        updates = adopted + leases + counters.retried + adopted + counters.released
        total, hot = await _when_counted(conn, updates)
    # a retry moves execute_at, which is what the index is for: it cannot be HOT
    not_hot = total - hot - counters.retried
    return counters, 1 - not_hot / leases


async def _updates(conn: Connection) -> tuple[int, int, int]:
    row = await conn.fetchrow(
        "select n_tup_upd, n_tup_hot_upd, n_tup_del from pg_stat_user_tables"
        " where relid = 'delayq.tasks'::regclass"
    )
    assert row is not None
    return row["n_tup_upd"], row["n_tup_hot_upd"], row["n_tup_del"]


async def _when_counted(conn: Connection, updates: int) -> tuple[int, int]:
    """All updates and the HOT ones; other sessions report what they did with a delay."""
    for _ in range(300):
        total, hot, deleted = await _updates(conn)
        if total >= updates and deleted >= LEASES:
            return total, hot
        await asyncio.sleep(0.05)
    raise AssertionError(f"the statistics did not come: {await _updates(conn)}, {updates}")


# --- plans ----------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A statement as the store would send it, and the session that it would go to."""

    conn: Connection
    sql: str
    arguments: tuple[Any, ...]


class Statements:
    """The statements of a node with the arguments that its store gives them, on its sessions."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._asked: list[Asked] = []
        self._prepared: dict[str, tuple[str, list[str]]] = {}

    async def listen(self) -> None:
        """Note what is sent from now on, instead of sending it."""
        for control in self.store._connections():
            note = functools.partial(self._note, await control.open())
            control.fetch = note  # type: ignore[method-assign]  # noted instead of sent
            control.execute = note  # type: ignore[method-assign,assignment]  # the same

    async def _note(self, conn: Connection, sql: str, *arguments: object) -> list[Any]:
        self._asked.append(Asked(conn, sql, arguments))
        raise _Noted

    async def of(self, call: Awaitable[object]) -> Asked:
        """What a call of the store would send."""
        with pytest.raises(_Noted):
            await call
        return self._asked.pop()

    async def run(self, asked: Asked) -> None:
        """Run it; nothing that it did stays."""
        execute = await self._execute(asked)
        async with _undone(asked.conn):
            await asked.conn.execute(execute)

    async def explain(self, asked: Asked) -> dict[str, Any]:
        """The plan as it runs, with its buffers. Nothing that it did stays."""
        options = "analyze, buffers, costs off, timing off, format json"
        execute = await self._execute(asked)
        async with _undone(asked.conn):
            text = await asked.conn.fetchval(f"explain ({options}) {execute}")
        plan: dict[str, Any] = json.loads(text)[0]["Plan"]
        return plan

    async def _execute(self, asked: Asked) -> str:
        """EXECUTE of the statement, prepared once: a server may have cached its plan."""
        if asked.sql not in self._prepared:
            described = await asked.conn.prepare(asked.sql)
            kinds = [kind.name for kind in described.get_parameters()]
            name = f"statement_{len(self._prepared)}"
            await asked.conn.execute(f"prepare {name} ({', '.join(kinds)}) as {asked.sql}")
            self._prepared[asked.sql] = (name, kinds)
        name, kinds = self._prepared[asked.sql]
        pairs = zip(asked.arguments, kinds, strict=True)
        return f"execute {name} ({', '.join(_literal(*pair) for pair in pairs)})"


@asynccontextmanager
async def _undone(conn: Connection) -> AsyncIterator[None]:
    transaction = conn.transaction()
    await transaction.start()
    try:
        yield
    finally:
        await transaction.rollback()


def _literal(value: Any, kind: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "'{" + ",".join(_text(part, kind) for part in value) + f"}}'::{kind}"
    return f"'{_text(value, kind)}'::{kind}"


def _text(value: Any, kind: str) -> str:
    if value is None:
        return "null"
    if kind.startswith("timestamptz"):
        return instant_from_us(value).isoformat()
    return f'"{value}"' if kind.endswith("[]") else str(value)


class _Noted(Exception):
    pass


@pytest.fixture
async def statements(store: Store) -> Statements:
    statements = Statements(store)
    await statements.listen()
    return statements


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in _nodes(child))]


def _buffers(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


FILL = """
    insert into delayq.tasks (kind, payload, execute_at)
    select 'k', jsonb_build_object('n', n),
           delayq.clock() + case when n <= 500 then interval '-1 s' else interval '1 h' end
                          + n * interval '1 ms'
      from generate_series(1, $1) as n
"""
RUNNING = """
    update delayq.tasks set state = 'running', lease_owner = 7, lease_token = id, attempt = 1,
                            attempt_limit = 5
     where id = any (array(select id from delayq.tasks order by execute_at limit 200))
"""
HOURS_US = 2 * 3_600_000_000


def _cursors(now_us: int) -> Cursors:
    count = len(BUCKETS)
    return Cursors(
        BUCKETS, [BEGINNING_US] * count, [""] * count, [0] * count, [now_us + HOURS_US] * count
    )


async def _now_us(conn: Connection) -> int:
    return int(await conn.fetchval("select delayq.micros(delayq.clock())"))


async def test_the_window_is_read_by_its_index(conn: Connection, statements: Statements) -> None:
    await conn.execute("set delayq.hints = off")
    await conn.execute(FILL, 20_000)
    cursors = _cursors(await _now_us(conn))
    asked = await statements.of(statements.store.window(cursors, KINDS, 8, None))
    plan = await statements.explain(asked)
    scans = [node for node in _nodes(plan) if node.get("Index Name") == "tasks_window"]
    assert len(scans) == 1
    condition = scans[0]["Index Cond"]
    assert "= b.bucket" in condition
    assert "execute_at" in condition
    assert not [node for node in _nodes(plan) if node["Node Type"] == "Seq Scan"]
    # 8 rows a bucket: the page is bounded, however much lies beyond
    assert scans[0]["Actual Loops"] == 256
    assert _buffers(plan) < 256 * 20


async def _all_statements(conn: Connection, statements: Statements) -> dict[str, Asked]:
    """Every statement on the way of a task, for 100 tasks that are there."""
    rows = await conn.fetch(
        "select id from delayq.tasks where state = 'pending' order by execute_at, id limit 100"
    )
    pending = [row["id"] for row in rows]
    rows = await conn.fetch(
        "select id, lease_token from delayq.tasks where state = 'running' order by id limit 100"
    )
    ids, tokens = [row["id"] for row in rows], [row["lease_token"] for row in rows]
    now_us = await _now_us(conn)
    store, nothing, zeros = statements.store, [None] * len(ids), [0] * len(ids)
    calls = {
        "window": store.window(_cursors(now_us), KINDS, 8, None),
        "overdue": store.overdue(BUCKETS, now_us - 60_000_000, now_us, KINDS, pending, 100),
        "lease": store.lease(pending, 5, TERMS, 0, 1000),
        "look": store.look(pending),
        "holds": store.holds(pending, 5),
        "payloads": store.payloads(ids, tokens, 1 << 20),
        "cancel_flags": store.cancel_flags(ids),
        "tell_apart": store.tell_apart(ids, tokens),
        "settle": store.settle(
            ids, tokens, list(nothing), ["retry"] * len(ids), list(nothing), list(nothing), 5
        ),
        "settle_succeeded": store.settle_succeeded(ids, tokens, zeros),
        "adopt": store.adopt(ids, 0),
        "running": store.running((0, 0), 255, now_us, 100),
    }
    return {name: await statements.of(call) for name, call in calls.items()}


@pytest.mark.timeout(120)
async def test_no_statement_runs_on_a_plan_of_the_emptied_table(
    conn: Connection, statements: Statements
) -> None:
    """A queue that ran empty and then fills, before anybody has analyzed it (300,000 rows)."""
    await conn.execute("set delayq.hints = off")
    await conn.execute("alter table delayq.tasks set (autovacuum_enabled = off)")
    await conn.execute(FILL, 2_000)
    await conn.execute(RUNNING)
    asked = await _all_statements(conn, statements)
    for _ in range(6):  # a server would turn to a generic plan by now
        for one in asked.values():
            await statements.run(one)
    await conn.execute("delete from delayq.tasks")
    await conn.execute("vacuum (truncate on, analyze) delayq.tasks")
    for one in asked.values():
        await statements.run(one)
    await conn.execute(FILL, 300_000)
    await conn.execute(RUNNING)

    asked = await _all_statements(conn, statements)
    stale = {name: _buffers(await statements.explain(asked[name])) for name in asked}
    await conn.execute("vacuum analyze delayq.tasks")
    fresh = {name: _buffers(await statements.explain(asked[name])) for name in asked}
    for name in asked:
        # what dead rows and catalogs add is small beside what a wrong plan reads
        assert stale[name] < 3 * fresh[name] + 1_500, (name, stale[name], fresh[name])
    assert max(stale.values()) < 15_000, stale


# --- who may lease and settle ---------------------------------------------------------------------


@pytest.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    store = Store(database, 41)
    await store.open()
    await store.register("n", "h", 1, "v", KINDS, 15_000)
    assert await store.activate()
    yield store
    await store.aclose()


async def _lease(store: Store, ids: list[int]) -> list[tuple[int, int]]:
    rows = await store.lease(ids, random.getrandbits(60), TERMS, 0, 1000)
    return [(row[0], row[1]) for row in rows]


async def test_a_buried_node_leases_nothing(conn: Connection, store: Store) -> None:
    first, second, third = [await schedule(conn, "k") for _ in range(3)]
    assert [task_id for task_id, _ in await _lease(store, [first])] == [first]
    await conn.execute("update delayq.nodes set state = 'dead' where id = 41")
    assert await _lease(store, [second]) == []
    await conn.execute("delete from delayq.nodes where id = 41")
    assert await _lease(store, [second, third]) == []
    pending = await conn.fetchval("select count(*) from delayq.tasks where state = 'pending'")
    assert pending == 2


async def test_a_draining_node_leases_nothing(conn: Connection, store: Store) -> None:
    task_id = await schedule(conn, "k")
    await store.drain()
    assert await _lease(store, [task_id]) == []


async def test_a_buried_node_that_still_beats_in_memory_is_told_and_comes_back(
    settings: Settings, conn: Connection
) -> None:
    app = Application(settings)

    @app.task
    async def k() -> None:
        pass

    async with stopped_at_once(app.node()) as node:
        before = node.id
        await conn.execute("update delayq.nodes set state = 'dead' where id = $1", before)
        await wait_for(lambda: node.id != before, "it noticed", 5)
        end = await ended(conn, await schedule(conn, "k"))
        assert end.node == node.id


async def test_settling_with_a_stale_token_changes_nothing(conn: Connection, store: Store) -> None:
    task_id = await schedule(conn, "k")
    [(_, stale)] = await _lease(store, [task_id])
    released = await store.settle([task_id], [stale], [None], ["release"], [None], [None], 5)
    assert [answer.verdict for answer in released] == ["release"]
    [(_, valid)] = await _lease(store, [task_id])
    assert valid != stale
    before = await conn.fetchrow("select t.*, t.ctid, t.xmin from delayq.tasks t")
    assert await store.settle_succeeded([task_id], [stale], [0]) == 0
    for outcome in ("succeeded", "retry", "dead", "snooze", "release", "missed", "adopt"):
        answers = await store.settle([task_id], [stale], [0], [outcome], [None], ["{}"], 5)
        assert answers == [], outcome
    assert await conn.fetchval("select delayq.settle($1, $2)", task_id, stale) == "lost"
    assert await conn.fetchrow("select t.*, t.ctid, t.xmin from delayq.tasks t") == before
    assert await conn.fetchval("select count(*) from delayq.task_history") == 0
    # nor with a token that another task of the same batch holds
    other = await schedule(conn, "k")
    [(_, others)] = await _lease(store, [other])
    swapped = ([task_id, other], [others, valid])
    for outcome in ("succeeded", "retry"):
        answers = await store.settle(*swapped, [0, 0], [outcome] * 2, [None] * 2, [None] * 2, 5)
        assert answers == [], outcome
    assert await conn.fetchval("select count(*) from delayq.tasks") == 2
