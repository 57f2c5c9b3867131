"""Idle is free: what three nodes send while a pile of tasks waits far ahead."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from delayq import DelayQ, Settings
from delayq.control import ControlConnection
from delayq.listener import Listener
from tests.helpers import wait_for

if TYPE_CHECKING:
    from delayq.database import Connection

SPEED = 10
"""Every interval of the settings a tenth of its default: six seconds stand for a minute."""
SECONDS = 6
NODES = 3


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement that a node sends: on its control connections, and the listener's pings."""
    sent: list[str] = []
    fetch, ping = ControlConnection.fetch, Listener._ping

    async def counted_fetch(self: ControlConnection, sql: str, *args: object) -> object:
        sent.append(sql.partition("\n")[0])
        return await fetch(self, sql, *args)

    async def counted_ping(self: Listener, link: object) -> bool:
        sent.append("ping")
        return await ping(self, link)  # type: ignore[arg-type]  # of the listener's own

    monkeypatch.setattr(ControlConnection, "fetch", counted_fetch)
    monkeypatch.setattr(Listener, "_ping", counted_ping)
    return sent


async def test_an_idle_node_sends_less_than_one_statement_a_second(
    settings: Settings, conn: Connection, statements: list[str]
) -> None:
    quick = settings.model_copy(
        update={
            "beat_interval_s": 4 / SPEED,
            "lease_ttl_s": 15 / SPEED,
            "sweep_interval_s": 5 / SPEED,
            "horizon_s": 15 / SPEED,
        }
    )
    await conn.execute(
        "insert into delayq.tasks (kind, execute_at)"
        "  select 'noop', delayq.clock() + interval '1 hour' from generate_series(1, 10000)"
    )
    async with AsyncExitStack() as stack:
        for _ in range(NODES):
            await stack.enter_async_context(_application(quick).node())
        await wait_for(
            lambda: sum("heartbeat" in sql for sql in statements) >= 3 * NODES, "all beat"
        )
        statements.clear()
        await asyncio.sleep(SECONDS)  # what is measured is a rate: it takes its time
        sent = len(statements)
    rate = sent / NODES / SECONDS / SPEED
    assert sent > NODES, "nothing was counted"
    assert rate < 1, f"{rate:.2f} statements a second: {sorted(set(statements))}"


def _application(settings: Settings) -> DelayQ:
    dq = DelayQ(settings=settings)

    @dq.task
    async def noop() -> None:
        pass

    return dq
