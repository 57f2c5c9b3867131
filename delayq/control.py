"""A control connection: one statement at a time, opened when needed, replaced when broken.

Each actor of a node owns one, so that nobody waits behind somebody else's statement. Instants on
it are integer microseconds since 1970, by a codec of its own: exact, cheap, and indifferent to
infinity and the year 12000. After any failure that leaves the connection in doubt it is thrown
away; the next statement opens a new one (which is what finds the new primary after a failover).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from delayq.database import DRIVER_ERRORS, Connection, Database, close, translate
from delayq.errors import DatabaseTimeout, DatabaseUnavailable
from delayq.failures import met_a_lock
from delayq.plans import CUSTOM

if TYPE_CHECKING:
    import asyncpg

T = TypeVar("T")

_POSTGRES_EPOCH_US: Final = 946_684_800_000_000  # 2000-01-01, from where PostgreSQL counts


class ControlConnection:
    """A dedicated connection for one purpose. For one event loop."""

    def __init__(
        self, database: Database, incarnation: int, purpose: str, plans: Mapping[str, str] = CUSTOM
    ) -> None:
        self._database = database
        self._incarnation = incarnation
        self._purpose = purpose
        self._plans = plans
        self._conn: Connection | None = None
        self._turn = asyncio.Lock()

    async def fetch(self, sql: str, *args: object) -> list[asyncpg.Record]:
        """The rows that the statement returns.

        Raises what `failures.translate` says. After `DatabaseUnavailable` or `DatabaseTimeout`
        it is unknown whether a statement that writes took effect.
        """
        return await self._take_turn(lambda conn: conn.fetch(sql, *args))

    async def execute(self, sql: str, *args: object) -> int:
        """How many rows the statement wrote, as its command tag says. Raises as `fetch`."""
        tag = await self._take_turn(lambda conn: conn.execute(sql, *args))
        return int(tag.rpartition(" ")[2])

    async def _take_turn(self, call: Callable[[Connection], Awaitable[T]]) -> T:
        async with self._turn:
            conn = await self.open()
            try:
                return await call(conn)
            except DRIVER_ERRORS as error:
                translated = translate(error, at=self._purpose)
                broken = isinstance(translated, DatabaseUnavailable | DatabaseTimeout)
                if broken and not met_a_lock(translated):
                    self._drop()
                raise translated from None
            except asyncio.CancelledError:
                # the driver sends its cancel request in the background: do not reuse the session
                self._drop()
                raise

    async def open(self) -> Connection:
        """The connection, opened now if there is none. Raises as `Database.connect_control`."""
        if self._conn is None or self._conn.is_closed():
            conn = await self._database.connect_control(
                self._incarnation, self._purpose, self._plans
            )
            await set_instant_codec(conn)
            self._conn = conn
        return self._conn

    async def aclose(self) -> None:
        """End the session, politely if the server answers soon."""
        conn, self._conn = self._conn, None
        if conn is not None:
            await close(conn)

    def _drop(self) -> None:
        if self._conn is not None:
            self._conn.terminate()
            self._conn = None


async def set_instant_codec(conn: Connection) -> None:
    """Let `timestamptz` be integer microseconds since 1970 on this connection of our own."""
    try:
        await conn.set_type_codec(
            "timestamptz",
            schema="pg_catalog",
            encoder=_encode,
            decoder=_decode,
            format="tuple",
        )
    except DRIVER_ERRORS as error:
        conn.terminate()
        raise translate(error) from None


def _encode(instant_us: int) -> tuple[int]:
    return (instant_us - _POSTGRES_EPOCH_US,)


def _decode(instant: tuple[int]) -> int:
    return instant[0] + _POSTGRES_EPOCH_US
