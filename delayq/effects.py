"""The effect of an attempt: one transaction that commits with the completion, or not at all.

    begin; is the idempotency key stamped already? -> the body; settle under the token; commit

The settle is the last statement, so the row of the task is locked for a moment only. If the
token is no longer the task's, everything is rolled back. So it is if the settle is chosen to end
a deadlock: the attempt is given back then, since only the handler could run the body again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from delayq.bridge import AnyConnection
from delayq.database import DRIVER_ERRORS, Database, Pool, translated
from delayq.errors import EffectAlreadyApplied, EffectMisused, LeaseLost, TransactionConflict
from delayq.statements import statement

if TYPE_CHECKING:
    from delayq.lease import Lease

_ACQUIRE_S: Final = 30.0


class Effects:
    """The bounded pool that effects run on: user code cannot starve leases and settlements."""

    def __init__(self, database: Database, incarnation: int, connections: int) -> None:
        self._database = database
        self._name = f"delayq/{incarnation}"
        self._connections = connections
        self._pool: Pool | None = None
        self._opening = asyncio.Lock()
        self._applied_sql = statement("effect_applied")
        self._settle_sql = statement("settle_effect")

    async def aclose(self) -> None:
        """End the pool; connections in use are cut."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.terminate()

    @asynccontextmanager
    async def effect(self, lease: Lease) -> AsyncIterator[AnyConnection]:
        """The effect of this attempt.

        Raises EffectMisused, LeaseLost, EffectAlreadyApplied, DatabaseUnavailable or
        DatabaseTimeout on entering; LeaseLost, EffectAlreadyApplied or TransactionConflict on
        leaving, after the roll-back.
        """
        if lease.effect_entered:
            raise EffectMisused("one effect an attempt: put everything into one block")
        lease.effect_entered = True
        pool = await self._ready()
        with translated("effect"):
            conn = await pool.acquire(timeout=_ACQUIRE_S)
        try:
            async with self._transaction(conn, lease) as inside:
                yield inside
        except TransactionConflict:
            lease.effect_conflicted = True  # undone for a statement of ours: the handler did well
            raise
        finally:
            await self._give_back(pool, conn)

    @asynccontextmanager
    async def _transaction(self, conn: AnyConnection, lease: Lease) -> AsyncIterator[AnyConnection]:
        transaction = conn.transaction()
        with translated("effect"):
            await transaction.start()
        try:
            await self._refuse_a_second_time(conn, lease)
            yield conn
            await self._settle(conn, lease)
        except BaseException:
            await _roll_back(transaction)
            raise
        # From here on a failure leaves the outcome unknown; the settler finds out by the token.
        with translated("commit of the effect"):
            await transaction.commit()
        lease.effect_committed = True

    async def _refuse_a_second_time(self, conn: AnyConnection, lease: Lease) -> None:
        if lease.idempotency_key is None:
            return
        with translated("effect"):
            applied = await conn.fetchval(self._applied_sql, lease.kind, lease.idempotency_key)
        if applied:
            raise EffectAlreadyApplied

    async def _settle(self, conn: AnyConnection, lease: Lease) -> None:
        with translated("settlement in the effect"):
            answer = await conn.fetchval(self._settle_sql, lease.id, lease.token, lease.lateness_us)
        if answer == "already_applied":
            raise EffectAlreadyApplied
        if answer != "settled":
            raise LeaseLost(
                f"task {lease.id} is no longer leased to this node; the effect was rolled back"
            )

    async def _ready(self) -> Pool:
        async with self._opening:
            if self._pool is None:
                self._pool = await self._database.create_pool(0, self._connections, self._name)
            return self._pool

    async def _give_back(self, pool: Pool, conn: AnyConnection) -> None:
        with suppress(*DRIVER_ERRORS):  # a broken one was dropped; the pool opens another
            await pool.release(conn)  # type: ignore[arg-type]  # acquired from this very pool


async def _roll_back(transaction: object) -> None:
    with suppress(*DRIVER_ERRORS):  # the connection is gone, and the transaction with it
        await transaction.rollback()  # type: ignore[attr-defined]  # started two lines up
