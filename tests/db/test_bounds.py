"""What is too long or too odd to be told in full is told in short, and refuses nothing."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.helpers import connected
from tests.rooms import ME, add_node, add_tasks, lease, make_commons

if TYPE_CHECKING:
    from delayq.database import Connection, Database
    from delayq.settings import Settings

LIMIT = 262_144


@pytest.mark.parametrize(
    ("letters", "kept", "found"),
    [
        (3_000, 5, [3, 4, 5, 6, 7]),
        (98_000, 5, [6, 7]),
        (98_000, 1, [7]),
        (3_000, 100, [0, 1, 2, 3, 4, 5, 6, 7]),
        (60_000, 100, [4, 5, 6, 7]),
    ],
)
async def test_errors_that_do_not_fit_make_room_for_the_last_one(
    conn: Connection, database: Database, settings: Settings,
    letters: int, kept: int, found: list[int],
) -> None:  # fmt: skip
    """A failure must not be refused for its own text: the task would never end."""
    await add_node(conn, ME)
    commons = await make_commons(database, settings)
    await add_tasks(conn, [1], after_s=-1)
    await conn.execute("update delayq.tasks set max_attempts = 100")
    for number in range(8):
        (one,) = await lease(commons, [1])
        error = json.dumps({"n": number, "message": "x" * letters})
        (settled,) = await commons.store.settle(
            [1], [one.token], [0], ["retry"], [None], [error], kept
        )
        assert settled.verdict == "retry"
    await commons.store.aclose()
    errors = json.loads(await conn.fetchval("select errors::text from delayq.tasks"))
    assert [error["n"] for error in errors] == found


async def test_an_error_that_is_too_long_by_itself_is_replaced(conn: Connection) -> None:
    with_it = "select delayq.errors_with('[{\"n\": 1}]', $1, 5)::text"
    (error,) = json.loads(await conn.fetchval(with_it, json.dumps({"message": "x" * LIMIT})))
    assert error["error"] == "TooLong"


@pytest.mark.parametrize("kind", ["two\nlines", "a\rb", "tab\there", "\x01", "\x7f"])
async def test_a_kind_that_would_break_the_lines_of_a_hint_is_hinted_as_a_scan(
    conn: Connection, dsn: str, kind: str
) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with connected(dsn) as listener:
        await listener.add_listener("delayq", lambda *told: heard.put_nowait(str(told[3])))
        await conn.execute(
            "insert into delayq.tasks (kind, execute_at)"
            " select k, delayq.clock() + nr * interval '1 s'"
            "   from unnest(array['plain', $1, 'plain']) with ordinality as t(k, nr)",
            kind,
        )
        first = await conn.fetchval("select delayq.micros(min(execute_at)) from delayq.tasks")
        async with asyncio.timeout(5):
            assert await heard.get() == f"scan {first}"


@pytest.mark.parametrize("kind", ["plain", "with spaces: and colons", "Straße", "日本"])
async def test_any_other_kind_is_named_in_the_hint(conn: Connection, dsn: str, kind: str) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with connected(dsn) as listener:
        await listener.add_listener("delayq", lambda *told: heard.put_nowait(str(told[3])))
        await conn.execute("insert into delayq.tasks (kind) values ($1)", kind)
        async with asyncio.timeout(5):
            assert (await heard.get()).endswith(f":{kind}")
