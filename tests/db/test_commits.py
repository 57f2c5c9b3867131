"""What somebody was told is durable: every answer but that of a lease waits for the disk."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from delayq.client import Client
from delayq.effects import Effects
from delayq.model import OnConflict
from delayq.request import build_request
from tests.rooms import ME, PEER, add_node, add_tasks, lease, make_commons, run_by

if TYPE_CHECKING:
    from delayq.database import Connection, Database
    from delayq.settings import Settings
    from delayq.store import Settled, Store

HOUR = timedelta(hours=1)
# Deferred, it sees the setting by which the transaction is about to be committed.
WATCH = """
    create table public.commits (setting text);
    create function public.note_commit() returns trigger language plpgsql as $$
    begin
        insert into public.commits values (current_setting('synchronous_commit'));
        return null;
    end $$;
    create constraint trigger watch after insert or update or delete on delayq.tasks
        deferrable initially deferred for each row execute function public.note_commit()
"""


class Commits:
    """By which settings whatever was done last was committed."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    async def of(self, work: Awaitable[Any]) -> set[str]:
        await work
        rows = await self._conn.fetch("delete from public.commits returning setting")
        return {row["setting"] for row in rows}


def request(**options: Any) -> Any:
    return build_request("mail", json.dumps({}), delay=HOUR, **options)


def settle(store: Store, task_id: int, token: int, outcome: str) -> Awaitable[list[Settled]]:
    return store.settle([task_id], [token], [0], [outcome], [None], ["{}"], 5)


async def test_what_a_caller_was_told_is_durable(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await conn.execute(WATCH)
    commits = Commits(conn)
    async with Client(database, settings) as client:
        first = await client.schedule(request(key="a"))
        told = {
            "schedule": await commits.of(client.schedule(request())),
            "with a key": await commits.of(client.schedule(request(key="b"))),
            "many": await commits.of(client.schedule_many([request(), request(key="c")])),
            "replace": await commits.of(
                client.schedule(request(key="a", on_conflict=OnConflict.REPLACE))
            ),
            "move": await commits.of(client.reschedule(first.id, delay=HOUR)),
            "move by key": await commits.of(client.run_now(kind="mail", key="b")),
            "cancel": await commits.of(client.cancel(first.id)),
            "cancel by key": await commits.of(client.cancel(kind="mail", key="b")),
        }
    assert told == {name: {"on"} for name in told}


async def test_an_end_that_a_node_was_told_is_durable_and_a_lease_waits_for_no_disk(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_node(conn, ME)
    await conn.execute(WATCH)
    commits, commons = Commits(conn), await make_commons(database, settings)
    store, effects = commons.store, Effects(database, ME, 1)
    ids = await add_tasks(conn, range(1, 6), after_s=-1)
    await run_by(conn, PEER, [6])
    await conn.execute("delete from public.commits")
    # (losing a lease in a crash of the database means only that the task runs again)
    assert await commits.of(lease(commons, ids)) == {"off"}
    tokens = [row["lease_token"] for row in await conn.fetch(
        "select lease_token from delayq.tasks where id <= 5 order by id")]  # fmt: skip
    pool = await effects._ready()

    async def in_an_effect() -> None:
        async with pool.acquire() as effect, effect.transaction():
            answer = await effect.fetchval(effects._settle_sql, 4, tokens[3], 0)
            assert answer == "settled"

    told = {
        "success": await commits.of(store.settle_succeeded([1], tokens[:1], [0])),
        "retry": await commits.of(settle(store, 2, tokens[1], "retry")),
        "dead": await commits.of(settle(store, 3, tokens[2], "dead")),
        "effect": await commits.of(in_an_effect()),
        "set aside": await commits.of(store.set_aside(2, "{}")),
        "adoption": await commits.of(store.adopt([6], 0)),
    }
    await effects.aclose()
    await store.aclose()
    assert told == {name: {"on"} for name in told}
