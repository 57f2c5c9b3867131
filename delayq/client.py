"""The client: schedules tasks and changes its mind about them, without running any.

Concurrent calls share statements where they wait for nobody (see `sharing`); what may meet a
stranger's lock goes alone (see `lanes`). With `conn=` a call runs on the caller's connection
instead, inside its transaction, and commits or vanishes with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeAlias, TypeVar, Unpack

from delayq.errors import DelayQError, InvalidArgument
from delayq.failures import translated
from delayq.instants import Delay
from delayq.lanes import ASK_AGAIN, Lanes
from delayq.migrate import check_schema
from delayq.model import (
    Cancel,
    Discard,
    NodeInfo,
    Reschedule,
    Revive,
    ScheduledTask,
    Task,
    TaskRequest,
    TaskState,
)
from delayq.payload import encode_payload
from delayq.request import (
    MISSING,
    Maybe,
    RequestOptions,
    build_request,
    check_name,
    check_target,
    parse_when,
)
from delayq.sharing import MAY_BE_THERE, Sharing, chunks
from delayq.task_store import Move, TaskStore

if TYPE_CHECKING:
    from delayq.database import Database, Pool
    from delayq.settings import Settings
    from delayq.task_store import AnyConnection

    T = TypeVar("T")
    Work: TypeAlias = Callable[[AnyConnection], Awaitable[T]]

MAX_LISTED: Final = 1_000
_GRACE_S: Final = 5.0  # the server's own limit goes first: its error says more
_APPLICATION: Final = "delayq client"


class _Open(NamedTuple):
    """What an open client has."""

    pool: Pool
    lanes: Lanes
    sharing: Sharing
    owns_pool: bool


class Client:
    """Every verb of delayq but running tasks. `async with client:` opens and closes it.

    Give a `database`, here or to `open`, or a `pool` of your own (it is not closed). Every
    verb raises InvalidArgument before anything is sent, and DatabaseUnavailable or
    DatabaseTimeout if the database does not answer; with `conn=` also TransactionConflict, if
    the caller's transaction has to be run again. A client belongs to one event loop at a time.
    """

    def __init__(
        self, database: Database | None, settings: Settings, *, pool: Pool | None = None
    ) -> None:
        self._database = database
        self._settings = settings
        self._given_pool = pool
        self._store = TaskStore(settings.statement_timeout_s + _GRACE_S)
        self._state: _Open | None = None

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
        if self._state is not None:
            raise DelayQError("this client is open already")
        state = await self._connect(database or self._database)
        try:
            await state.lanes.shared(check_schema)
        except BaseException:
            await _discard(state)
            raise
        self._state = state

    async def close(self) -> None:
        """Wait for the calls in flight, then close the pool unless it was given. Idempotent."""
        state, self._state = self._state, None
        if state is not None:
            try:
                await state.sharing.close()
            finally:
                await _discard(state)
