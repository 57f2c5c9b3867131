"""What a node does not serve is passed over within the index, however much of it lies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayq.store import Store

if TYPE_CHECKING:
    from delayq.database import Connection, Database

US = 1_000_000
VISITS = """
    select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables
     where relid = 'delayq.tasks'::regclass
"""


@pytest.mark.parametrize("analyzed", [True, False])
async def test_overdue_tasks_of_a_kind_that_is_not_served_cost_no_visit_to_their_rows(
    conn: Connection, database: Database, analyzed: bool
) -> None:
    """An index that only includes the kind would visit each row to find that it is not wanted."""
    await conn.execute("set delayq.hints = off")
    await conn.execute(
        "insert into delayq.tasks (kind, execute_at)"
        " select case when i % 400 = 0 then 'mail' else 'elsewhere' end,"
        "        delayq.clock() - interval '1 h' + i * interval '1 ms'"
        "   from generate_series(1, 20000) as i"
    )
    if analyzed:
        await conn.execute("vacuum analyze delayq.tasks")
    now_us = await conn.fetchval("select delayq.micros(delayq.clock())")
    store = Store(database, 7)
    try:
        session = await store._sweep.open()
        transaction = session.transaction()
        await transaction.start()
        rows = await store.overdue(
            list(range(256)), now_us - 7_200 * US, now_us, ["mail"], [], 1_000
        )
        visits = await session.fetchval(VISITS)
        await transaction.rollback()
    finally:
        await store.aclose()
    assert len(rows) == 50
    assert visits < 500
