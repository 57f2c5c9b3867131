"""DelayQ: the handlers, the client and the node of one application in one face.

Only three things happen here: functions become handlers, the database is found (or started), and
the client's verbs are handed through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from pydantic import SecretStr

from delayq.client import Client
from delayq.database import Database, close, parse_dsn
from delayq.embedded import embedded_server
from delayq.errors import InvalidArgument, InvalidSettings
from delayq.handler_policy import PolicyDefaults
from delayq.handlers import Registry, TaskDecorator, make_task_decorator
from delayq.migrate import migrate
from delayq.node import Node, run_node, run_process
from delayq.settings import Settings, load_settings

if TYPE_CHECKING:
    from delayq.database import Pool

_NOBODY: Final = 0  # no node: incarnations are never 0
_US: Final = 1_000_000


class DelayQ:
    """A scheduler for one application: `@dq.task` makes handlers, `async with dq:` a client.

    The database is that of `dsn`, or else of DELAYQ_DSN or `.env`; or a client alone works on
    an asyncpg `pool` of your own. Without any of them an embedded PostgreSQL is started in a
    folder of the project and migrated; any other database is only checked. `settings` replaces
    what the environment says. Raises InvalidSettings or InvalidArgument.

    The verbs are the client's: schedule, schedule_many, send, cancel, cancel_many, reschedule,
    run_now, revive, revive_many, discard, discard_many, get, list, pause, resume, nodes,
    drain_node.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: Pool | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.settings = _chosen(dsn, settings)
        self.registry = Registry()
        self.client = client = Client(None, self.settings, pool=pool)
        self.task: TaskDecorator = make_task_decorator(
            self.registry, client, _defaults(self.settings), self.settings.payload_max_bytes
        )
        self._pool = pool
        self._database = _database(self.settings)
        self._gate = asyncio.Lock()
        self._users = 0
        self._opened = AsyncExitStack()
        self._place: Database | None = None

        self.schedule = client.schedule
        self.schedule_many = client.schedule_many
        self.send = client.send
        self.cancel = client.cancel
        self.cancel_many = client.cancel_many
        self.reschedule = client.reschedule
        self.run_now = client.run_now
        self.revive = client.revive
        self.revive_many = client.revive_many
        self.discard = client.discard
        self.discard_many = client.discard_many
        self.get = client.get
        self.list = client.list
        self.pause = client.pause
        self.resume = client.resume
        self.nodes = client.nodes
        self.drain_node = client.drain_node

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with self._gate:
            if self._users == 0:
                await self._open()
            self._users += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        async with self._gate:
            self._users -= 1
            if self._users == 0:
                await self._opened.aclose()

    @asynccontextmanager
    async def node(
        self, *, kinds: Iterable[str] | None = None, settings: Settings | None = None
    ) -> AsyncIterator[Node]:
        """Client and node: the handlers of `kinds` (default: all) run in the block.

        Leaving it drains. `settings` are the node's alone. Raises what starting a node raises.
        """
        async with self, self._node(kinds, settings) as node:
            yield node

    def run(self, *, kinds: Iterable[str] | None = None, settings: Settings | None = None) -> int:
        """Run a node until SIGTERM or SIGINT, and return the exit status. Blocks.

        The first signal drains (status 0), a second one stops at once (128 + its number).
        """
        return run_process(self._run(kinds, settings))

    async def _run(self, kinds: Iterable[str] | None, settings: Settings | None) -> int:
        async with self:
            return await run_node(self._node(kinds, settings))

    def _node(self, kinds: Iterable[str] | None, settings: Settings | None) -> Node:
        if self._place is None:
            raise InvalidArgument("dsn", "a node needs one: its connections come from no pool")
        return Node(self._place, self.registry, settings or self.settings, kinds=kinds)

    async def _open(self) -> None:
        async with AsyncExitStack() as stack:
            self._place = await stack.enter_async_context(self._find_database())
            await self.client.open(self._place)
            stack.push_async_callback(self.client.close)
            self._opened = stack.pop_all()

    @asynccontextmanager
    async def _find_database(self) -> AsyncIterator[Database | None]:
        if self._database is not None or self._pool is not None:
            yield self._database
            return
        async with open_embedded(self.settings) as database:
            yield database


@asynccontextmanager
async def open_embedded(settings: Settings) -> AsyncIterator[Database]:
    """The embedded PostgreSQL of the project, started unless somebody has it running; migrated.

    Raises InvalidSettings if it is switched off, EmbeddedError that names the ways out.
    """
    if settings.embedded is False:
        raise InvalidSettings("DELAYQ_DSN: is not set; name the database there")
    server = embedded_server(
        settings.embedded_dir, pg_bin=settings.pg_bin, allow_system=settings.embedded is True
    )
    async with server as running:
        database = Database(parse_dsn(running.dsn), settings)
        conn = await database.connect_control(_NOBODY, "migration")
        try:
            await migrate(conn)
        finally:
            await close(conn)
        yield database


def _chosen(dsn: str | None, settings: Settings | None) -> Settings:
    if settings is None:
        return load_settings(dsn=dsn)
    return settings if dsn is None else settings.model_copy(update={"dsn": SecretStr(dsn)})


def _database(settings: Settings) -> Database | None:
    if settings.dsn is None:
        return None
    return Database(parse_dsn(settings.dsn.get_secret_value()), settings)


def _defaults(settings: Settings) -> PolicyDefaults:
    return PolicyDefaults(
        max_attempts=settings.max_attempts,
        backoff_base_us=round(settings.backoff_base_s * _US),
        backoff_max_us=round(settings.backoff_max_s * _US),
    )
