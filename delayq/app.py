"""DelayQ: the handlers, the client and the node of one application in one face.

Only three things happen here: functions become handlers, the database is found (or started), and
client and node are opened on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from pydantic import SecretStr

from delayq.client import Client
from delayq.errors import InvalidArgument
from delayq.handler_policy import PolicyDefaults
from delayq.handlers import Registry, TaskDecorator, make_task_decorator
from delayq.node import Node
from delayq.place import named_database, open_database
from delayq.process import run_node, run_process
from delayq.settings import Settings, load_settings
from delayq.verbs import Verbs

if TYPE_CHECKING:
    from delayq.database import Pool
    from delayq.transport import Transport

_US: Final = 1_000_000


class DelayQ(Verbs):
    """A scheduler for one application: `@dq.task` makes handlers, `async with dq:` a client.

    The database is that of `dsn`, or else of DELAYQ_DSN or `.env`; or a client alone works on
    an asyncpg `pool` of your own. Without any of them an embedded PostgreSQL is started in a
    folder of the project and migrated; any other database is only checked. `settings` replaces
    what the environment says. Raises InvalidSettings or InvalidArgument.
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
        self._named = named_database(self.settings)
        self._pool = pool
        self._gate = asyncio.Lock()
        self._users = 0
        self._opened = AsyncExitStack()
        self._place = self._named

    @property
    def transport(self) -> Transport:
        """What the client's verbs go through; DelayQError outside of the block."""
        return self.client.transport

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
        chosen = settings or self.settings
        return run_process(self._run(kinds, settings), chosen.event_loop)

    async def _run(self, kinds: Iterable[str] | None, settings: Settings | None) -> int:
        async with self:
            return await run_node(self._node(kinds, settings))

    def _node(self, kinds: Iterable[str] | None, settings: Settings | None) -> Node:
        if self._place is None:
            raise InvalidArgument("dsn", "a node needs one: its connections come from no pool")
        return Node(self._place, self.registry, settings or self.settings, kinds=kinds)

    async def _open(self) -> None:
        async with AsyncExitStack() as stack:
            if self._named is None and self._pool is None:
                self._place = await stack.enter_async_context(open_database(self.settings))
            await self.client.open(self._place)
            stack.push_async_callback(self.client.close)
            self._opened = stack.pop_all()


def _chosen(dsn: str | None, settings: Settings | None) -> Settings:
    if settings is None:
        return load_settings(dsn=dsn)
    return settings if dsn is None else settings.model_copy(update={"dsn": SecretStr(dsn)})


def _defaults(settings: Settings) -> PolicyDefaults:
    return PolicyDefaults(
        max_attempts=settings.max_attempts,
        backoff_base_us=round(settings.backoff_base_s * _US),
        backoff_max_us=round(settings.backoff_max_s * _US),
    )
