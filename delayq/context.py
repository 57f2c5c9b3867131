"""What a handler is given: its attempt's facts and the one effect it may have.

One `Context` is made for every attempt, so making it stores one reference; everything else
is read or built when the handler asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Protocol

from pydantic_core import from_json

from delayq.bridge import AnyConnection, BlockingConnection, EffectBridge
from delayq.errors import EffectMisused
from delayq.instants import instant_from_us
from delayq.log import log
from delayq.request import HeaderValue

if TYPE_CHECKING:
    from datetime import datetime

    from loguru import Logger


class Attempt(Protocol):
    """What a context needs from the executor: one leased attempt. Read-only, but for the flag.

    Instants are microseconds since 1970 by the database's clock. `effect()` opens the attempt's
    one effect on `loop`; it raises EffectMisused the second time, LeaseLost if the token is no
    longer the task's, EffectAlreadyApplied if the idempotency key was stamped before.
    """

    @property
    def id(self) -> int:
        """The task's id."""
        ...

    @property
    def token(self) -> int:
        """The fencing token of its lease."""
        ...

    @property
    def kind(self) -> str:
        """The kind in the row."""
        ...

    @property
    def attempt(self) -> int:
        """From 1."""
        ...

    @property
    def due_us(self) -> int:
        """When the task was asked to run."""
        ...

    @property
    def execute_us(self) -> int:
        """When this attempt was to fire."""
        ...

    @property
    def deadline_us(self) -> int | None:
        """When it times out, if ever."""
        ...

    @property
    def headers_json(self) -> str | None:
        """JSON object text; None for no headers."""
        ...

    @property
    def idempotency_key(self) -> str | None:
        """The one that was given, if any."""
        ...

    @property
    def node(self) -> int:
        """The incarnation that runs it."""
        ...

    @property
    def cancel_requested(self) -> bool:
        """May become True while the handler runs."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the node, on which effects live."""
        ...

    def effect(self) -> AbstractAsyncContextManager[AnyConnection]:
        """Settle and effect in one transaction, once."""
        ...


class Context:
    """One attempt of one task, as its handler sees it."""

    __slots__ = ("_attempt", "_headers", "_logger")

    _headers: Mapping[str, HeaderValue]
    _logger: Logger

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def __repr__(self) -> str:
        return f"<Context task={self.id} kind={self.kind!r} attempt={self.attempt}>"

    @property
    def id(self) -> int:
        """The task's id, the same on every attempt."""
        return self._attempt.id

    @property
    def kind(self) -> str:
        """The kind as it was scheduled, which may be an alias of the handler's."""
        return self._attempt.kind

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._attempt.attempt

    @property
    def due_at(self) -> datetime:
        """When the task was asked to run, in UTC by the database's clock."""
        return instant_from_us(self._attempt.due_us)

    @property
    def execute_at(self) -> datetime:
        """When this attempt was to fire: `due_at`, or later after a retry or a snooze."""
        return instant_from_us(self._attempt.execute_us)

    @property
    def deadline(self) -> datetime | None:
        """When this attempt times out, by the database's clock; None without a timeout."""
        deadline_us = self._attempt.deadline_us
        return None if deadline_us is None else instant_from_us(deadline_us)

    @property
    def headers(self) -> Mapping[str, HeaderValue]:
        """The headers that were scheduled with the task; read-only."""
        try:
            return self._headers
        except AttributeError:
            self._headers = MappingProxyType(from_json(self._attempt.headers_json or "{}"))
            return self._headers

    @property
    def idempotency_key(self) -> str:
        """A name for this task's one effect, the same on every attempt, to send elsewhere."""
        return self._attempt.idempotency_key or f"delayq:{self._attempt.id}"

    @property
    def lease_token(self) -> str:
        """The fencing token of this attempt as text, new at every lease."""
        return str(self._attempt.token)

    @property
    def cancel_requested(self) -> bool:
        """True once somebody asked to cancel this running task. Raise to end it as cancelled."""
        return self._attempt.cancel_requested

    @property
    def logger(self) -> Logger:
        """A logger whose records carry task_id, kind, attempt and node."""
        try:
            return self._logger
        except AttributeError:
            self._logger = log.bind(
                task_id=self.id, kind=self.kind, attempt=self.attempt, node=self._attempt.node
            )
            return self._logger

    def effect(self) -> Effect:
        """The one transaction that commits together with this task's completion, or not at all.

        `async with ctx.effect() as conn:` on the event loop, `with ctx.effect() as conn:` in a
        plain handler. Raises EffectMisused, LeaseLost or EffectAlreadyApplied when entered.
        """
        return Effect(self._attempt)


class Effect:
    """The effect before it is entered: by `async with` on the loop, by `with` in a thread."""

    __slots__ = ("_attempt", "_bridge", "_manager")

    _bridge: EffectBridge
    _manager: AbstractAsyncContextManager[AnyConnection]

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    async def __aenter__(self) -> AnyConnection:
        if asyncio.get_running_loop() is not self._attempt.loop:
            raise EffectMisused("this is another event loop; use `with ctx.effect()` in a thread")
        self._manager = self._attempt.effect()
        return await self._manager.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Swallows nothing, whatever the manager says: type checkers then know that too.
        await self._manager.__aexit__(kind, error, traceback)

    def __enter__(self) -> BlockingConnection:
        if _turns_here(self._attempt.loop):
            raise EffectMisused("this would block the event loop; use `async with ctx.effect()`")
        self._bridge = EffectBridge(self._attempt.effect, self._attempt.loop)
        return self._bridge.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bridge.leave(error)


def _turns_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
