"""Transactions that are prepared for two-phase commit: a hint forbids it, so hints can be muted."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.helpers import absent
from tests.nodes import Application, ended

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings

SOON = "select id from delayq.schedule('mail', delay => '1 second')"


async def test_a_transaction_that_schedules_can_be_prepared_once_its_hints_are_muted(
    conn: Connection, settings: Settings
) -> None:
    if await conn.fetchval("show max_prepared_transactions") == "0":
        absent("prepared transactions (max_prepared_transactions is 0)")
    application, name = Application(settings), f"two-phase-{secrets.token_hex(6)}"

    @application.task
    async def mail() -> None:
        return None

    async with application.node():
        await conn.execute("begin")
        await conn.fetchval(SOON)
        with pytest.raises(asyncpg.FeatureNotSupportedError):
            await conn.execute(f"prepare transaction '{name}'")
        await conn.execute("rollback")

        await conn.execute("begin")
        await conn.execute("set local delayq.hints = off")
        task_id = await conn.fetchval(SOON)
        await conn.execute(f"prepare transaction '{name}'")
        await conn.execute(f"commit prepared '{name}'")
        assert (await ended(conn, task_id)).state == "succeeded"  # a sweep finds it
