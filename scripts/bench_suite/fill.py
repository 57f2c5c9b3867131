"""Puts many tasks into a fresh database, as any client in any language would write them.

Without hints: no node is up yet, and one that starts reads the table anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayq.database import Connection

_A_STATEMENT = 250_000
OVERDUE_FROM = 1_000_000_000  # as in the statement below
"""Numbers of tasks that are overdue; others are below."""
_MUTED = "set delayq.hints = off"
_FAR_AHEAD = """
    insert into delayq.tasks (kind, payload, execute_at)
    select 'noop', jsonb_build_object('n', n), now() + interval '30 days' + n * interval '1 ms'
      from generate_series($1::integer, $2::integer - 1) n
"""
_OVERDUE = """
    insert into delayq.tasks (kind, payload, execute_at)
    select 'noop', jsonb_build_object('n', 1000000000 + n),
           now() - interval '2 days' + n * interval '1 ms'
      from generate_series($1::integer, $2::integer - 1) n
"""


async def fill_far_ahead(conn: Connection, count: int) -> None:
    """Tasks that are due a month ahead, a millisecond apart."""
    await _fill(conn, _FAR_AHEAD, count)


async def fill_overdue(conn: Connection, count: int) -> None:
    """Tasks that were due two days ago, a millisecond apart."""
    await _fill(conn, _OVERDUE, count)


async def remove_others(conn: Connection, count: int) -> None:
    """What came after the first `count` tasks, and the rows of nodes that were killed."""
    await conn.execute("delete from delayq.tasks where id > $1", count)
    await conn.execute("delete from delayq.nodes")


async def vacuum(conn: Connection) -> None:
    """As autovacuum would find the time for, and nothing left to write."""
    await conn.execute("vacuum analyze delayq.tasks")
    await conn.execute("checkpoint")


async def _fill(conn: Connection, statement: str, count: int) -> None:
    await conn.execute(_MUTED)
    try:
        for start in range(0, count, _A_STATEMENT):
            await conn.execute(statement, start, min(count, start + _A_STATEMENT))
    finally:
        await conn.execute("reset delayq.hints")
