"""The application: an unpaid order expires some seconds after it was placed, unless it is paid.

Run its tasks with `delayq run demo_app.orders:dq`. Placing an order and scheduling its expiry is
one transaction, so is paying and cancelling, so is expiring and completing the task.
"""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta

from delayq import Context, DelayQ
from delayq.bridge import AnyConnection

from . import ledger

SCHEMA = """
    create table orders (
        id           bigint primary key,
        state        text not null check (state in ('unpaid', 'paid', 'expired')),
        expires_at   timestamptz not null,
        task_id      bigint not null unique,
        moves        integer not null default 0,
        expirations  integer not null default 0     -- more than 1: expired twice
    )
"""

dq = DelayQ()  # the database is named by DELAYQ_DSN


class WarehouseClosedError(Exception):
    """The warehouse does not answer; a retry will find it open."""


class TooLateError(Exception):
    """The order has expired, or does just now."""


@dq.task(backoff_base=timedelta(milliseconds=400), timeout=timedelta(seconds=20))
async def expire_order(ctx: Context, order_id: int, restock_s: float, closed_first: bool) -> None:
    """Put the goods back, then expire the order: the effect, once."""
    note(ledger.STARTED, ctx, order_id)
    await asyncio.sleep(restock_s)
    if closed_first and ctx.attempt == 1:
        raise WarehouseClosedError
    async with ctx.effect() as conn:
        await conn.execute(
            "update orders set state = 'expired', expirations = expirations + 1"
            " where id = $1 and state = 'unpaid'",
            order_id,
        )
    note(ledger.EXPIRED, ctx, order_id)


def note(what: str, ctx: Context, order_id: int) -> None:
    due_us = round(ctx.execute_at.timestamp() * 1_000_000)
    node = os.environ.get("DELAYQ_NODE_NAME", "?")
    ledger.write(ledger.Entry(what, order_id, ctx.id, ctx.attempt, node, due_us, ledger.now_us()))


def key_of(order_id: int) -> str:
    return f"order:{order_id}"


async def place_order(
    conn: AnyConnection, order_id: int, within: timedelta, restock_s: float, closed_first: bool
) -> None:
    async with conn.transaction():
        task = await expire_order.options(key=key_of(order_id), conn=conn).after(
            within, order_id=order_id, restock_s=restock_s, closed_first=closed_first
        )
        await conn.execute(
            "insert into orders (id, state, expires_at, task_id) values ($1, 'unpaid', $2, $3)",
            order_id,
            task.execute_at,
            task.id,
        )


async def pay_order(conn: AnyConnection, order_id: int) -> None:
    """Raises TooLateError, and changes nothing, if the expiry cannot be cancelled any more."""
    async with conn.transaction():
        await conn.execute(
            "update orders set state = 'paid' where id = $1 and state = 'unpaid'", order_id
        )
        if not await expire_order.cancel(key=key_of(order_id), conn=conn):
            raise TooLateError


async def extend_order(conn: AnyConnection, order_id: int, by: timedelta) -> None:
    """Give the customer more time; raises TooLateError as `pay_order` does."""
    async with conn.transaction():
        expires_at = await conn.fetchval(
            "update orders set expires_at = expires_at + $2, moves = moves + 1"
            " where id = $1 and state = 'unpaid' returning expires_at",
            order_id,
            by,
        )
        if expires_at is None:
            raise TooLateError
        if not await expire_order.reschedule(key=key_of(order_id), at=expires_at, conn=conn):
            raise TooLateError
