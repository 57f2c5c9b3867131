"""A node: runs the tasks of its kinds until it is asked to leave.

It lives through incarnations: a node whose peers buried it (it was frozen, or cut off for
longer than the TTL) cancels everything and comes back as another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from delayq.clock import Clock
from delayq.database import close, is_transient
from delayq.errors import DatabaseError, DelayQError, InvalidArgument
from delayq.incarnation import Incarnation
from delayq.log import log
from delayq.migrate import check_schema

if TYPE_CHECKING:
    from delayq.database import Database
    from delayq.handlers import Registry
    from delayq.metrics import Counters
    from delayq.settings import Settings

_COME_BACK_S: Final = 0.5


class Node:
    """Runs handlers: `async with node:` starts it and drains it.

    `kinds` restricts what it serves to some of the registered kinds. Raises, on entering,
    SchemaMissing, SchemaTooOld or SchemaTooNew, DatabaseUnavailable and the like,
    PrivilegeMissing, or InvalidSettings if it may not sweep so slowly.
    """

    def __init__(
        self,
        database: Database,
        registry: Registry,
        settings: Settings,
        *,
        clock: Clock | None = None,
        kinds: Iterable[str] | None = None,
    ) -> None:
        self._database = database
        self._registry = registry
        self._settings = settings
        self._clock = clock or Clock()
        self._kinds = _served(registry, kinds)
        self._life: Incarnation | None = None
        self._task: asyncio.Task[None] | None = None
        self._leaving = False

    @property
    def id(self) -> int | None:
        """The present incarnation; None before the start."""
        return None if self._life is None else self._life.id

    @property
    def counters(self) -> Counters | None:
        """What the present incarnation counted."""
        return None if self._life is None else self._life.counters

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.request_drain()
        await self.wait()

    async def start(self) -> None:
        """Join, and return once the node takes its share."""
        conn = await self._database.connect_control(0, "start")
        try:
            await check_schema(conn)
        finally:
            await close(conn)
        if self._leaving:  # the signal came before there was anything to drain
            return
        self._life = self._new_life()
        self._task = asyncio.create_task(self._live(), name="delayq-node")
        active = asyncio.ensure_future(self._life.active.wait())
        try:
            await asyncio.wait({active, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            raise
        finally:
            active.cancel()
        if self._task.done():
            self._task.result()  # raises why it could not start

    async def wait(self) -> None:
        """Return when the node has left: asked to, here or from afar. Raises what ended it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def request_drain(self) -> None:
        """Stop firing, finish what runs for up to the drain time-out, hand over, leave."""
        self._leaving = True
        if self._life is not None:
            self._life.request_drain()

    def request_stop(self) -> None:
        """Leave at once: what runs is cancelled and released."""
        self._leaving = True
        if self._life is not None:
            self._life.request_stop()

    def _new_life(self) -> Incarnation:
        return Incarnation(self._database, self._registry, self._settings, self._clock, self._kinds)

    async def _live(self) -> None:
        first = life = self._life
        while life is not None:
            try:
                await life.run()
            except DelayQError as error:
                passing = isinstance(error, DatabaseError) or is_transient(error)
                if life is first or self._leaving or not passing:
                    raise
                # it ran before: that the database is away just now must not end it
                log.bind(error=str(error)).warning("node.comes_back_later")
                await asyncio.sleep(_COME_BACK_S)
            else:
                if not life.buried or self._leaving:
                    return
                log.bind(node=life.id).warning("node.comes_back")
                if not life.active.is_set():
                    await asyncio.sleep(_COME_BACK_S)  # whatever it is, it may happen again
            life = self._life = self._new_life()


def _served(registry: Registry, kinds: Iterable[str] | None) -> frozenset[str]:
    if kinds is None:
        served = registry.kinds
    else:
        served = frozenset(kinds)
        unknown = sorted(served - registry.kinds)
        if unknown:
            raise InvalidArgument("kinds", f"no handler of kind {unknown[0]!r} is registered")
    if not served:
        raise InvalidArgument("kinds", "no handler is registered: a node has nothing to run")
    return served
