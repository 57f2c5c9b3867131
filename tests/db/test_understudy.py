"""The understudy stands by: half a second after T it fires what the owner did not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayq.ranks import Role, bucket_of
from tests.helpers import wait_for
from tests.nodes import Application, ended, life, schedule

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.node import Node
    from delayq.settings import Settings

GHOST = 4242
NOISE_US = 300_000


@pytest.fixture
async def node(settings: Settings, conn: Connection) -> AsyncIterator[Node]:
    """A node beside one that is active, as its row says, and fires nothing."""
    app = Application(settings)

    @app.task
    async def quick() -> None:
        pass

    async with app.node() as node:
        await conn.execute(
            "insert into delayq.nodes (id, name, host, pid, version, kinds, state, expires_at)"
            " values ($1, 'ghost', 'h', 1, 'v', '{quick}', 'active', now() + interval '1 hour')",
            GHOST,
        )
        await conn.execute("select delayq.notify('join 4242')")
        await wait_for(lambda: len(life(node)._timers.roles.understudied) > 20, "it is known")
        yield node


async def _of_the_ghost(conn: Connection, node: Node, delay: timedelta) -> int:
    """A task that the other one owns; those that fall to the node itself are left to run."""
    while True:
        task_id = await schedule(conn, "quick", delay=delay)
        if life(node)._timers.roles.role("quick", bucket_of(task_id)) is Role.UNDERSTUDY:
            return task_id


async def test_the_understudy_fires_what_the_owner_leaves_lying(
    conn: Connection, node: Node
) -> None:
    end = await ended(conn, await _of_the_ghost(conn, node, timedelta(seconds=0.2)))
    assert end.lateness_us is not None
    assert 500_000 <= end.lateness_us < 550_000 + NOISE_US
    assert life(node).counters.understudied == 1


async def test_reading_the_table_again_does_not_put_the_understudy_off(
    conn: Connection, node: Node
) -> None:
    """A sweep in the half second after T must not make it wait for another half."""
    task_id = await _of_the_ghost(conn, node, timedelta(seconds=0.2))

    async def read_again() -> None:
        while True:
            await conn.execute("select delayq.notify('scan 0')")
            await asyncio.sleep(0.1)

    reading = asyncio.create_task(read_again())
    await asyncio.sleep(1.0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    end = await ended(conn, task_id)
    assert end.lateness_us is not None
    assert end.lateness_us < 550_000 + NOISE_US
