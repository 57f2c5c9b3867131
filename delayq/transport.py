"""How a client's verbs reach the database: what an open client has.

A verb runs on the caller's own connection, inside its transaction, or else in one of the lanes
of the pool (see `lanes`), alone or shared with other callers (see `sharing`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from delayq.bulk import Bulk
from delayq.failures import DRIVER_ERRORS, by_field, translate
from delayq.lanes import ASK_AGAIN, Lanes
from delayq.sharing import Sharing
from delayq.task_store import TaskStore

if TYPE_CHECKING:
    from delayq.database import Database, Pool
    from delayq.settings import Settings
    from delayq.task_store import AnyConnection

    T = TypeVar("T")
    Work: TypeAlias = Callable[[AnyConnection], Awaitable[T]]
    PatientWork: TypeAlias = Callable[[AnyConnection, int | None], Awaitable[T]]

_GRACE_S: Final = 5.0  # the server's own limit goes first: its error says more
_CLOSE_S: Final = 10.0


class Transport:
    """The statements, the lanes they run in, and who shares them. For one event loop."""

    def __init__(self, pool: Pool, settings: Settings, owner: Database | None = None) -> None:
        """`owner`: whom the client had the pool made by; None: it was given."""
        self._pool = pool
        self._owns_pool = owner is not None
        self._lanes = Lanes(
            pool,
            acquire_limit_s=settings.connect_timeout_s,
            lock_limit_s=settings.lock_timeout_s,
            # Behind a pooler the session's settings are SET at each taking.
            may_keep=lambda: owner is not None and not owner.behind_pooler,
        )
        self.store = TaskStore(settings.statement_timeout_s + _GRACE_S)
        self.sharing = Sharing(self._lanes, self.store)
        self.bulk = Bulk(self._lanes, self.store)
        self.payload_max_bytes = settings.payload_max_bytes

    async def perform(self, work: Work[T], conn: AnyConnection | None = None) -> T:
        """Run a statement that waits for locks as long as the session allows."""
        if conn is None:
            return await self._lanes.patient(work)
        with _in_their_words():
            return await work(conn)

    async def look(self, work: Work[T], conn: AnyConnection | None = None) -> T:
        """The same for what meets no lock: it need not queue with those who wait for one."""
        if conn is None:
            return await self._lanes.brief(work)
        with _in_their_words():
            return await work(conn)

    async def alone(
        self, work: PatientWork[T], conn: AnyConnection | None, doubt: str = ASK_AGAIN
    ) -> T:
        """Run a statement that may meet a stranger's lock; it is told how long to wait."""
        if conn is None:
            return await self._lanes.alone(work, doubt)
        with _in_their_words():
            return await work(conn, None)

    async def close(self) -> None:
        """Wait for the calls in flight, then close the pool unless it was given."""
        try:
            await self.sharing.close()
        finally:
            await self.let_go()

    async def let_go(self) -> None:
        """Close the pool, unless it was given."""
        if not self._owns_pool:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._lanes.let_go()
                await self._pool.close()
        except DRIVER_ERRORS:
            self._pool.terminate()


@contextmanager
def _in_their_words() -> Iterator[None]:
    """Errors on the caller's own connection, in delayq's words."""
    try:
        yield
    except DRIVER_ERRORS as error:
        raise by_field(translate(error)) from None
