"""Two nodes, their customers, and the replacement of one node in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import asyncpg

from . import orders
from .customers import ORDERS, serve_customers
from .nodes import Fleet, Held, NodeProcess, first_busy
from .reckoning import Restart, gather, reckon, table_of
from .screen import Screen, show_fires
from .waiting import until

LIMIT_S = 50.0
PATIENCE_S = 15.0
RESTART_AFTER_S = 2.5
RUNNING_WANTED, PENDING_WANTED = 2, 5
_SHOWN_S = 0.1
_OPEN = "select count(*) from delayq.tasks"
_UNPAID = "select count(*) from orders where state = 'unpaid'"


async def play(folder: Path, screen: Screen) -> list[str]:
    """What is wrong with the table; nothing, if every promise was kept."""
    with Fleet(folder) as fleet:
        async with (
            asyncio.timeout(LIMIT_S),
            asyncpg.create_pool(os.environ["DELAYQ_DSN"], min_size=1) as pool,
            orders.dq,
        ):
            await pool.execute(orders.SCHEMA)
            nodes = await start_nodes(fleet, pool, screen)
            screen.heading(f"{ORDERS} orders; each expires seconds later unless it is paid")
            screen.fires_heading()
            restart = await run_orders(pool, fleet, nodes, folder / "ledger", screen)
            await end_of(fleet)
            return await settle_accounts(pool, folder / "ledger", restart, screen)


async def start_nodes(fleet: Fleet, pool: asyncpg.Pool, screen: Screen) -> dict[int, NodeProcess]:
    """The two nodes by incarnation, once they take their shares."""
    screen.heading("two processes of: delayq run demo_app.orders:dq")
    started = [fleet.start("node-1"), fleet.start("node-2")]
    nodes = {}
    async with pool.acquire() as conn:
        for node in started:
            incarnation = await node.active(conn)
            nodes[incarnation] = node
            screen.event(f"{node.name} is active as {incarnation}")
    return nodes


async def run_orders(
    pool: asyncpg.Pool, fleet: Fleet, nodes: dict[int, NodeProcess], path: Path, screen: Screen
) -> Restart:
    """Return once every order is paid or expired, and one node was replaced meanwhile."""
    watching = asyncio.create_task(show_fires(screen, path))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(serve_customers(pool, screen))
            replacing = group.create_task(replace_one(pool, fleet, nodes, path, screen))
        await nothing_left(pool)
        await asyncio.sleep(_SHOWN_S)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return replacing.result()


async def replace_one(
    pool: asyncpg.Pool, fleet: Fleet, nodes: dict[int, NodeProcess], path: Path, screen: Screen
) -> Restart:
    """SIGTERM to a node while it holds both running and pending tasks; another one takes over."""
    async with pool.acquire() as conn:
        await asyncio.sleep(RESTART_AFTER_S)
        held = await first_busy(conn, nodes, path, is_busy)
        leaver = nodes[held.node]
        leaver.terminate()
        screen.event(
            f"SIGTERM to {leaver.name}, which runs {len(held.running)} tasks "
            f"and holds {len(held.pending)} pending ones"
        )
        newcomer = fleet.start("node-3")
        incarnation = await newcomer.active(conn)
        screen.event(f"{newcomer.name} is active as {incarnation}")
        status = await leaver.left()
        screen.event(f"{leaver.name} has left with exit status {status}")
    return Restart(leaver.name, held, status)


def is_busy(held: Held) -> bool:
    return len(held.running) >= RUNNING_WANTED and len(held.pending) >= PENDING_WANTED


async def nothing_left(pool: asyncpg.Pool) -> None:
    """Return once nothing is open, or when that takes too long: the table will say what is."""

    async def look() -> bool | None:
        return None if await pool.fetchval(_OPEN) or await pool.fetchval(_UNPAID) else True

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            await until(look)


async def end_of(fleet: Fleet) -> None:
    for node in fleet.nodes:
        node.terminate()
    for node in fleet.nodes:
        await node.left()


async def settle_accounts(
    pool: asyncpg.Pool, path: Path, restart: Restart, screen: Screen
) -> list[str]:
    async with pool.acquire() as conn:
        told = reckon(await gather(conn, path, restart))
    screen.heading("from the orders table, delayq's history and the handlers' ledger")
    screen.table(table_of(told, restart))
    return told.faults()
