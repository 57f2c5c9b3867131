"""A database whose clock a test owns, and everybody who speaks to it: several nodes, and a client.

Everything is synchronous here, for drivers that are (a state machine): `run` waits for one call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from delayq.control import set_instant_codec
from delayq.database import Database, parse_dsn
from delayq.statements import statement
from delayq.store import Store
from delayq.task_store import TaskStore
from tests.helpers import connect
from tests.model import Row

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings

T = TypeVar("T")

NODES = (11, 22, 33, 44)
_OWN_CLOCK = """
    create table test_clock (now_us bigint not null);
    insert into test_clock values ({now_us});
    create table effects (task bigint, token bigint);
    create or replace function delayq.clock() returns timestamptz
        language sql volatile parallel safe
    as $$ select delayq.instant(now_us) from public.test_clock $$;
    select delayq.drop_partitions('infinity');  -- those of the real days
    select delayq.make_partitions(1);
"""
_AFRESH = """
    delete from delayq.tasks; delete from delayq.task_history; delete from delayq.dead_tasks;
    delete from delayq.idempotency; delete from delayq.nodes; delete from effects;
    update test_clock set now_us = {now_us};
    select setval(pg_get_serial_sequence('delayq.tasks', 'id'), 1, false);
"""
_NEXT_ID = """
    select last_value + is_called::integer from delayq.tasks_id_seq
"""
_TOLD = """
    select id, kind, payload, headers, key, idempotency_key, priority, {due_at} as due_at,
           delayq.micros(execute_at) as execute_at, delayq.micros(created_at) as created_at,
           attempt, interruptions, errors"""
_LIVE = f"""{_TOLD.format(due_at="delayq.micros(due_at)")},
           misfire_grace_ms, timeout_ms, max_attempts, state, lease_owner, lease_token,
           delayq.micros(leased_at) as leased_at, delayq.micros(deadline_at) as deadline_at,
           attempt_limit, cancel_requested, next
      from delayq.tasks order by id"""
_OVER = f"""{_TOLD.format(due_at="delayq.micros(due_at)")},
           node, lease_token, delayq.micros(started_at) as started_at,
           delayq.micros(finished_at) as finished_at, lateness_us, successor"""
_TABLES = {
    "tasks": _LIVE,
    "history": f"{_OVER}, state from delayq.task_history order by id",
    "dead": f"{_OVER}, misfire_grace_ms, timeout_ms, max_attempts from delayq.dead_tasks",
    "idempotency": """
        select kind, idempotency_key, task_id, delayq.micros(scheduled_at) as scheduled_at,
               delayq.micros(applied_at) as applied_at, delayq.micros(ended_at) as ended_at
          from delayq.idempotency""",
    "nodes": "select id, state, delayq.micros(expires_at) as expires_at from delayq.nodes",
}
_TABLES_SQL = "select json_build_object({})::text".format(
    ", ".join(
        f"'{name}', (select coalesce(json_agg(t), '[]') from ({sql}) t)"
        for name, sql in _TABLES.items()
    )
)


async def read_tables(conn: Connection) -> dict[str, list[Row]]:
    """Every row of every table, in one snapshot."""
    rows: dict[str, list[Row]] = json.loads(await conn.fetchval(_TABLES_SQL))
    return rows


class World:
    """One database, four nodes that may come to it, one client, and the hand on the clock."""

    def __init__(self, runner: asyncio.Runner, settings: Settings) -> None:
        assert settings.dsn is not None
        self._runner = runner
        self._dsn = settings.dsn.get_secret_value()
        database = Database(parse_dsn(self._dsn), settings)
        self.stores = {node: Store(database, node) for node in NODES}
        self.client = TaskStore(limit_s=30)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The answer."""
        return self._runner.run(work)

    def open(self, now_us: int) -> None:
        """Connect, and take the clock over."""
        self.conn = self.run(self._connect())
        self.run(self.conn.execute(_OWN_CLOCK.format(now_us=now_us)))

    async def _connect(self) -> Connection:
        """An application's own connection; instants on it are microseconds."""
        conn = await connect(self._dsn)
        await set_instant_codec(conn)
        return conn

    def close(self) -> None:
        """End every session."""
        for store in self.stores.values():
            self.run(store.aclose())
        self.run(self.conn.close(timeout=5))

    def begin_again(self, now_us: int) -> None:
        """Empty tables, ids from one, and this time."""
        self.run(self.conn.execute(_AFRESH.format(now_us=now_us)))

    def set_clock(self, now_us: int) -> None:
        """It is so late now."""
        self.run(self.conn.execute("update test_clock set now_us = $1", now_us))

    def tables(self) -> dict[str, list[Row]]:
        """Every row of every table."""
        return self.run(read_tables(self.conn))

    def effects(self) -> list[tuple[int, int]]:
        """(task, token) of every effect that was committed."""
        rows = self.run(self.conn.fetch("select task, token from effects order by task, token"))
        return [(row[0], row[1]) for row in rows]

    def next_id(self) -> int:
        """The id that will be drawn next."""
        return int(self.run(self.conn.fetchval(_NEXT_ID)))

    def fetch(self, name: str, *arguments: object) -> list[Any]:
        """The rows of a statement of delayq's."""
        return [tuple(row) for row in self.run(self.conn.fetch(statement(name), *arguments))]

    def call(self, sql: str, *arguments: object) -> Any:
        """The value that a function of the public SQL interface returns."""
        return self.run(self.conn.fetchval(f"select delayq.{sql}", *arguments))


@contextmanager
def opened(settings: Settings, now_us: int) -> Iterator[World]:
    """A world on this test's database."""
    # (A loop of its own making: the one that the test session has set is left alone.)
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        world = World(runner, settings)
        world.open(now_us)
        try:
            yield world
        finally:
            world.close()
