"""What a node does to a task, without a node: lease it, settle it, bury whoever ran it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from delayq.statements import statement

if TYPE_CHECKING:
    from delayq.database import Connection

NODE = 77
_nonces = itertools.count(1)


async def register(conn: Connection, node: int = NODE) -> None:
    """Make the row of a node that serves whatever is asked of it."""
    await conn.execute(statement("register"), node, "node", "host", 1, "0", ["k"], 60_000)


async def lease(conn: Connection, task_id: int, *, max_attempts: int = 5, kind: str = "k") -> int:
    """Lease a task as the node would, due or not; the fencing token."""
    if not await conn.fetchval("select exists (select from delayq.nodes where id = $1)", NODE):
        await register(conn)
    await conn.execute(
        "update delayq.tasks set execute_at = delayq.clock() where id = $1"
        " and execute_at > delayq.clock()",
        task_id,
    )
    rows = await conn.fetch(
        statement("lease"), f"{{{task_id}}}", NODE, next(_nonces), [kind], [max_attempts],
        [None], [True], 0, 16_384, [], task_id, True,
    )  # fmt: skip
    assert len(rows) == 1, "the task was not leased"
    return int(rows[0]["lease_token"])


async def settle(
    conn: Connection, task_id: int, token: int, outcome: str = "succeeded", delay_us: int = 0
) -> str | None:
    """Settle a lease, waiting for locks; the verdict, or None if it is not ours."""
    rows = await conn.fetch(
        statement("settle"), [task_id], [token], [0], [outcome], [delay_us], [None], 5, True
    )
    return rows[0]["verdict"] if rows else None


async def ran(conn: Connection, task_id: int, outcome: str = "succeeded") -> None:
    """Lease a task and settle it, in its last attempt."""
    token = await lease(conn, task_id, max_attempts=1)
    assert await settle(conn, task_id, token, outcome) is not None
