"""The connections of the client's own pool that stay at hand from one statement to the next.

The pool's taking and giving back costs a call more than delayq's own work on it. A pool that was
given is asked each time: its connections are the application's as well, and so is what it wants
done to each.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import asyncpg

from delayq.failures import DRIVER_ERRORS, translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq.database import Pool, PooledConnection


class AtHand:
    """Takes connections from a pool, within a time limit, and keeps up to `most` of them.

    `may_keep` says whether one may stay: not where the pool has something to do at each taking.
    """

    def __init__(
        self, pool: Pool, *, limit_s: float, most: int, may_keep: Callable[[], bool]
    ) -> None:
        self._pool = pool
        self._limit_s = limit_s
        self._most = most
        self._may_keep = may_keep
        self._idle: list[PooledConnection] = []
        self._wanted = 0

    async def take(self) -> PooledConnection:
        """A connection; raises what connecting raises, or DatabaseTimeout if all are in use."""
        while self._idle:
            conn = self._idle.pop()
            if _is_open(conn):
                return conn
            await self._release(conn)
        self._wanted += 1
        try:
            with translated():
                async with asyncio.timeout(self._limit_s):
                    return await self._pool.acquire()
        finally:
            self._wanted -= 1

    async def give_back(self, conn: PooledConnection, *, sound: bool) -> None:
        """What was taken; `sound`: its statement ended well. Raises nothing of the driver's."""
        # Whoever waits for the pool is woken by a release alone.
        if sound and not self._wanted and len(self._idle) < self._most and self._may_keep():
            self._idle.append(conn)
        else:
            await self._release(conn)

    async def let_go(self) -> None:
        """Give the pool all that were kept."""
        while self._idle:
            await self._release(self._idle.pop())

    async def _release(self, conn: PooledConnection) -> None:
        # The answer is here: a connection that breaks now must not take it away again.
        with suppress(*DRIVER_ERRORS):
            await self._pool.release(conn)


def _is_open(conn: PooledConnection) -> bool:
    try:
        return not conn.is_closed()
    except asyncpg.InterfaceError:  # the pool itself took it back when the server ended it
        return False
