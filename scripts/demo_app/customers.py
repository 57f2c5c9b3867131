"""What the customers do: all place an order; some pay, some ask for more time, some forget it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import asyncpg

from .orders import TooLateError, extend_order, pay_order, place_order
from .screen import Screen

ORDERS = 60
FIRST_EXPIRY_S, EXPIRIES_S = 2.5, 6.0
ARRIVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class Customer:
    """One customer and what becomes of the order. None: does not happen."""

    order: int
    within: timedelta
    extends_by: timedelta | None
    pays_before_expiry: timedelta | None
    restock_s: float
    closed_first: bool


def customer(order: int) -> Customer:
    """The same sixty characters in every run; only their timing is up to the machine."""
    spread = (order * 37 % ORDERS) / ORDERS
    pays = order % 3 == 0
    in_the_last_moment = order % 12 == 0
    early = timedelta(seconds=0.5 + spread)
    last_moment = timedelta(milliseconds=4 * (order % 5))
    return Customer(
        order,
        within=timedelta(seconds=FIRST_EXPIRY_S + EXPIRIES_S * spread),
        extends_by=timedelta(seconds=1.25) if order % 5 == 1 else None,
        pays_before_expiry=(last_moment if in_the_last_moment else early) if pays else None,
        restock_s=2.5 if order % 4 in (1, 2) else 0.02,
        closed_first=order % 10 == 7 and not pays,
    )


async def serve_customers(pool: asyncpg.Pool, screen: Screen) -> None:
    async with asyncio.TaskGroup() as group:
        for order in range(1, ORDERS + 1):
            group.create_task(serve(customer(order), pool, screen))
            await asyncio.sleep(ARRIVAL_S)


async def serve(customer: Customer, pool: asyncpg.Pool, screen: Screen) -> None:
    async with pool.acquire() as conn:
        await place_order(
            conn, customer.order, customer.within, customer.restock_s, customer.closed_first
        )
    if customer.extends_by is not None:
        await asyncio.sleep(1)
        await extend(customer.order, customer.extends_by, pool, screen)
    if customer.pays_before_expiry is not None:
        await pay(customer.order, customer.pays_before_expiry, pool, screen)


async def extend(order: int, by: timedelta, pool: asyncpg.Pool, screen: Screen) -> None:
    try:
        async with pool.acquire() as conn:
            await extend_order(conn, order, by)
    except TooLateError:
        screen.event(f"order {order} wanted more time: too late")
    else:
        screen.event(f"order {order} is given {by.total_seconds()} s more: moved")


async def pay(order: int, before: timedelta, pool: asyncpg.Pool, screen: Screen) -> None:
    async with pool.acquire() as conn:
        expires_at = await conn.fetchval("select expires_at from orders where id = $1", order)
    await sleep_until(expires_at - before)
    try:
        async with pool.acquire() as conn:
            await pay_order(conn, order)
    except TooLateError:
        screen.event(f"order {order} was to be paid in the last moment: too late")
    else:
        screen.event(f"order {order} is paid: cancelled")


async def sleep_until(instant: datetime) -> None:
    left = instant - datetime.now(UTC)
    await asyncio.sleep(max(0.0, left.total_seconds()))
