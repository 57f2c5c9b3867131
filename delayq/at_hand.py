"""The connections of the client's own pool that stay at hand from one statement to the next.

The pool's taking and giving back costs a call more than delayq's own work on it. A pool that was
given is asked each time: its connections are the application's as well, and so is what it wants
done to each.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import asyncpg

from delayq.failures import DRIVER_ERRORS, translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq.database import Pool, PooledConnection

_KEPT_S: Final = 30.0
"""What nobody wanted for so long goes back to the pool, which closes it after a while: whatever
stands in between forgets connections that say nothing for minutes."""


class AtHand:
    """Takes connections from a pool, within a time limit, and keeps up to `most` of them.

    `may_keep` says whether one may stay: not where the pool has something to do at each taking.
    For one event loop.
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
        self._unused = 0  # so many were at hand, and not taken, since the last look
        self._look: asyncio.TimerHandle | None = None
        self._letting_go: asyncio.Task[None] | None = None

    async def take(self) -> PooledConnection:
        """A connection; raises what connecting raises, or DatabaseTimeout if all are in use."""
        while self._idle:
            conn = self._idle.pop()
            self._unused = min(self._unused, len(self._idle))
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
            if self._look is None:
                self._look_later()
        else:
            await self._release(conn)

    async def let_go(self) -> None:
        """Give the pool all that were kept, and keep none from now on."""
        self._most = 0
        if self._look is not None:
            self._look.cancel()
        if self._letting_go is not None:
            await self._letting_go
        await self._release_first(len(self._idle))

    # --- what nobody wants -------------------------------------------------------------------

    def _look_later(self) -> None:
        self._unused = len(self._idle)
        self._look = asyncio.get_running_loop().call_later(_KEPT_S, self._look_now)

    def _look_now(self) -> None:
        self._look = None
        # The last one that came is the first to go out, so these are the first of the list.
        self._letting_go = asyncio.create_task(self._release_first(self._unused))
        if len(self._idle) > self._unused:
            self._look_later()

    async def _release_first(self, count: int) -> None:
        unused, self._idle[:count] = self._idle[:count], []
        for conn in unused:
            await self._release(conn)

    async def _release(self, conn: PooledConnection) -> None:
        # The answer is here: a connection that breaks now must not take it away again.
        with suppress(*DRIVER_ERRORS):
            await self._pool.release(conn)


def _is_open(conn: PooledConnection) -> bool:
    try:
        return not conn.is_closed()
    except asyncpg.InterfaceError:  # the pool itself took it back when the server ended it
        return False
