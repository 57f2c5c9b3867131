"""One leased task on its way through a node, from the lease to its settlement."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from delayq.bridge import AnyConnection
    from delayq.handlers import AnyHandler


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
    """interrupted by shutdown: back to pending at once, the attempt given back"""
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

    It is the `Attempt` that a handler's context speaks to.
    """

    __slots__ = (
        "attempt",
        "cancel_requested",
        "deadline_mono_us",
        "deadline_us",
        "due_us",
        "effect_committed",
        "effect_entered",
        "execute_us",
        "handed_us",
        "handler",
        "headers_json",
        "home",
        "id",
        "idempotency_key",
        "interruption",
        "kind",
        "lateness_us",
        "max_attempts",
        "misfire_grace_ms",
        "never_leased",
        "payload",
        "priority",
        "runner",
        "timeout_ms",
        "token",
    )

    def __init__(
        self,
        row: tuple[
            int, int, str, str | None, int, int, int, int | None, int | None, bool | None,
            int | None, str | None, str | None, int,
        ],
        handler: AnyHandler,
        home: Home,
    ) -> None:  # fmt: skip
        (
            self.id,
            self.token,
            self.kind,
            self.payload,
            self.attempt,
            self.max_attempts,
            self.execute_us,
            due_us,
            timeout_ms,
            self.never_leased,
            misfire_grace_ms,
            self.headers_json,
            self.idempotency_key,
            self.priority,
        ) = row
        self.due_us: int = self.execute_us if due_us is None else due_us
        self.handler = handler
        self.home = home
        self.timeout_ms: int | None = (
            handler.policy.timeout_ms if timeout_ms is None else timeout_ms
        )
        self.misfire_grace_ms: int | None = (
            handler.policy.misfire_grace_ms if misfire_grace_ms is None else misfire_grace_ms
        )
        self.lateness_us: int | None = None
        self.deadline_us: int | None = None
        self.deadline_mono_us: int | None = None
        self.handed_us = 0
        self.runner: asyncio.Task[None] | None = None
        self.interruption: Interruption | None = None
        self.cancel_requested = False
        self.effect_entered = False
        self.effect_committed = False

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
