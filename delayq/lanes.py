"""How the client's statements share a pool so that nobody waits behind a stranger's lock.

Three lanes, and room kept for each: statements that wait for nobody and are shared by callers;
single ones that may meet a lock, and are given up after a moment; and those which then wait for
it in earnest. So many callers may hang on locked tasks, and all others still find a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import asyncpg

from delayq.at_hand import AtHand
from delayq.errors import DatabaseError, DatabaseTimeout, DelayQError, TransactionConflict
from delayq.failures import DRIVER_ERRORS, by_field, sqlstate_of, translate

if TYPE_CHECKING:
    from delayq.database import Pool, PooledConnection

    T = TypeVar("T")
    Work: TypeAlias = Callable[[PooledConnection], Awaitable[T]]
    PatientWork: TypeAlias = Callable[[PooledConnection, int], Awaitable[T]]

ASK_AGAIN: Final = "the outcome is unknown; asking again is safe"

_TRIES: Final = 4  # at a deadlock or a serialization failure of our own statement
_BRIEFLY_MS: Final = 50
_SHARED: Final = 4  # two for the shared schedules, one each for the cancels and moves
_LOCKED: Final = "another transaction holds a lock on the task; nothing was done"


class Lanes:
    """Runs statements on a pool. A pool of fewer than six connections has no room to spare."""

    def __init__(
        self,
        pool: Pool,
        *,
        acquire_limit_s: float,
        lock_limit_s: float,
        may_keep: Callable[[], bool],
    ) -> None:
        size = pool.get_max_size()
        patient = max(1, (size - _SHARED) // 2)
        self._connections = AtHand(pool, limit_s=acquire_limit_s, most=_SHARED, may_keep=may_keep)
        self._lock_limit_ms = round(lock_limit_s * 1000)
        self._patient = asyncio.Semaphore(patient)
        self._brief = asyncio.Semaphore(max(1, size - _SHARED - patient))

    async def shared(self, work: Work[T], doubt: str = ASK_AGAIN) -> T:
        """Run what waits for nobody. `doubt` is said if the answer got lost on its way."""
        for _ in range(_TRIES - 1):
            with suppress(TransactionConflict):
                return await self._once(work, doubt)
        return await self._once(work, doubt)

    async def brief(self, work: Work[T], doubt: str = ASK_AGAIN) -> T:
        """Run what waits for nobody and is one caller's own."""
        async with self._brief:
            return await self.shared(work, doubt)

    async def alone(self, work: PatientWork[T], doubt: str = ASK_AGAIN) -> T:
        """Run what may meet a lock: briefly at first, then with the patience of the settings.

        `work` is given the connection and how long it may wait, in milliseconds.
        """
        with suppress(LockHeld):
            return await self.brief(lambda conn: work(conn, _BRIEFLY_MS), doubt)
        return await self.patient(lambda conn: work(conn, self._lock_limit_ms), doubt)

    async def patient(self, work: Work[T], doubt: str = ASK_AGAIN) -> T:
        """Run what may wait for a lock, within the limit of the session."""
        async with self._patient:
            return await self.shared(work, doubt)

    async def _once(self, work: Work[T], doubt: str) -> T:
        conn = await self._connections.take()
        sound = False
        try:
            answer = await work(conn)
            sound = True
        except asyncpg.LockNotAvailableError:
            raise LockHeld(_LOCKED) from None
        except DRIVER_ERRORS as error:
            raise _told(error, doubt) from None
        finally:
            await self._connections.give_back(conn, sound=sound)
        return answer

    async def let_go(self) -> None:
        """Give the pool the connections that were kept."""
        await self._connections.let_go()


class LockHeld(DatabaseTimeout):
    """A lock was not given in the time allowed; the statement did nothing."""


def _told(error: Exception, doubt: str) -> DelayQError:
    """The error in delayq's words, and what to do if nobody knows whether it was done."""
    told = by_field(translate(error))
    if not _is_doubtful(error):
        return told
    doubted = type(told)(f"{told}; {doubt}")
    if isinstance(doubted, DatabaseError):
        doubted.in_doubt, doubted.sqlstate = True, sqlstate_of(error)
    return doubted


def _is_doubtful(error: Exception) -> bool:
    """True if the statement may have been committed although no answer came.

    A server that answers with an error has undone it; one that goes away may have done either.
    """
    if isinstance(error, asyncpg.PostgresError):
        return sqlstate_of(error).startswith(("08", "57P", "40003"))
    return not isinstance(error, asyncpg.DataError)
