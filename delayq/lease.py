"""One leased task on its way through a node, from the lease to its settlement."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import asyncpg

    from delayq.bridge import AnyConnection
    from delayq.handlers import AnyHandler

_SMALL: Final = 512
"""Characters of payload that are not worth a copy of the rest of the row."""


class Home(Protocol):
    """Where a lease runs: what it needs from its executor."""

    node: int
    loop: asyncio.AbstractEventLoop

    def effect(self, lease: Lease) -> AbstractAsyncContextManager[AnyConnection]:
        """The one effect of this attempt."""
        ...


class Outcome(StrEnum):
    """How an attempt ended, as far as the node is concerned; the database has the last word."""

    SUCCEEDED = "succeeded"
    MISSED = "missed"
    DEAD = "dead"
    RETRY = "retry"
    SNOOZE = "snooze"
    RELEASE = "release"
    """interrupted (by shutdown, or a conflict undid its effect): the attempt is given back"""
    UNSTARTED = "unstarted"
    """leased and given back without being started"""


class Interruption(StrEnum):
    """Why a running handler is cancelled from outside."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    SHUTDOWN = "shutdown"
    FENCED = "fenced"
    """no beat got through for so long that peers may take this node for dead"""
    LOST = "lost"


class Lease:
    """What the lease statement returned, and what happens to it here. Instants by the database.

    It is the `Attempt` that a handler's context speaks to. One is made for every task, so the
    columns that few tasks need are read from the row when somebody asks.
    """

    __slots__ = (
        "_row",
        "cancel_requested",
        "deadline_mono_us",
        "deadline_us",
        "effect_committed",
        "effect_conflicted",
        "effect_entered",
        "execute_us",
        "handler",
        "home",
        "id",
        "interruption",
        "kind",
        "lateness_us",
        "payload",
        "runner",
        "token",
    )

    def __init__(self, row: asyncpg.Record, handler: AnyHandler, home: Home) -> None:
        self._row: asyncpg.Record | dict[str, Any] = row
        self.id: int = row[0]
        self.token: int = row[1]
        self.kind: str = row[2]
        self.payload: str | None = row[3]
        self.execute_us: int = row[4]
        self.handler = handler
        self.home = home
        self.lateness_us: int | None = None
        self.deadline_us: int | None = None
        self.deadline_mono_us: int | None = None
        self.runner: asyncio.Task[None] | None = None
        self.interruption: Interruption | None = None
        self.cancel_requested = False
        self.effect_entered = False
        self.effect_committed = False
        self.effect_conflicted = False

    def drop_payload(self) -> None:
        """Nobody needs it any more; a lease that waits for its settlement must not pin it."""
        payload, self.payload = self.payload, None
        if payload is not None and len(payload) > _SMALL:  # the row has it too
            self._row = {name: part for name, part in self._row.items() if name != "payload"}

    @property
    def timeout_ms(self) -> int | None:
        """The task's own time-out, else the handler's."""
        timeout_ms: int | None = self._row["timeout_ms"]
        return self.handler.policy.timeout_ms if timeout_ms is None else timeout_ms

    @property
    def misfire_grace_ms(self) -> int | None:
        """The task's own grace, else the handler's."""
        grace_ms: int | None = self._row["misfire_grace_ms"]
        return self.handler.policy.misfire_grace_ms if grace_ms is None else grace_ms

    @property
    def never_leased(self) -> bool:
        """True at the first lease; known only for tasks with a grace."""
        return bool(self._row["never_leased"])

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return int(self._row["attempt"])

    @property
    def due_us(self) -> int:
        """When the task was asked to run."""
        due_us: int | None = self._row["due_at"]
        return self.execute_us if due_us is None else due_us

    @property
    def headers_json(self) -> str | None:
        """Its headers as JSON; None if it has none."""
        headers: str | None = self._row["headers"]
        return headers

    @property
    def idempotency_key(self) -> str | None:
        """The caller's name for its one effect."""
        key: str | None = self._row["idempotency_key"]
        return key

    @property
    def priority(self) -> int:
        """Higher first."""
        return int(self._row["priority"])

    @property
    def node(self) -> int:
        """The incarnation that runs it."""
        return self.home.node

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that its effect lives on."""
        return self.home.loop

    def effect(self) -> AbstractAsyncContextManager[AnyConnection]:
        """The one transaction of this attempt; see `effects`."""
        return self.home.effect(self)


@dataclass(frozen=True, slots=True)
class Settlement:
    """One lease and how it is to end. `error` is a JSON object as text."""

    lease: Lease
    outcome: Outcome
    delay_us: int | None = None
    error: str | None = None
