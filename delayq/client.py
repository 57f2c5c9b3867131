"""The client: schedules tasks and changes its mind about them, without running any.

Here is its life; what it can do is in `verbs`, and how that reaches the database in `transport`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, cast

from delayq.errors import DelayQError, InvalidArgument
from delayq.migrate import check_schema
from delayq.transport import Transport
from delayq.verbs import Verbs

if TYPE_CHECKING:
    from delayq.database import Connection, Database, Pool
    from delayq.settings import Settings

_APPLICATION: Final = "delayq client"


class Client(Verbs):
    """Every verb of delayq but running tasks. `async with client:` opens and closes it.

    Give a `database`, here or to `open`, or a `pool` of your own (it is not closed). A client
    belongs to one event loop at a time.
    """

    def __init__(
        self, database: Database | None, settings: Settings, *, pool: Pool | None = None
    ) -> None:
        self._database = database
        self._settings = settings
        self._given_pool = pool
        self._transport: Transport | None = None

    @property
    def transport(self) -> Transport:
        """What the verbs go through; DelayQError unless the client is open."""
        if self._transport is None:
            raise DelayQError("the client is not open: use `async with`")
        return self._transport

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self, database: Database | None = None) -> None:
        """Check that the schema is this program's; connections are made as they are needed.

        Raises SchemaMissing, SchemaTooOld or SchemaTooNew, and what connecting raises.
        """
        if self._transport is not None:
            raise DelayQError("this client is open already")
        transport = await self._connect(database or self._database)
        try:
            await transport.look(lambda c: check_schema(cast("Connection", c)))
        except BaseException:
            await transport.let_go()
            raise
        self._transport = transport

    async def close(self) -> None:
        """Wait for the calls in flight, then close the pool unless it was given. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def _connect(self, database: Database | None) -> Transport:
        if self._given_pool is not None:
            return Transport(self._given_pool, self._settings)
        if database is None:
            raise InvalidArgument("dsn", "the client needs a database or a pool")
        pool = await database.create_pool(
            0, self._settings.client_connections, _APPLICATION, shared=False
        )
        return Transport(pool, self._settings, owner=database)
