"""What an adapter has to offer. Runs inside the rivals' environments: nothing but Python itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple, Protocol

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Due(NamedTuple):
    """A task to schedule: its number, and its instant in microseconds since 1970."""

    number: int
    at_us: int

    @property
    def at(self) -> datetime:
        """The instant, aware."""
        return _EPOCH + timedelta(microseconds=self.at_us)


class Kind(StrEnum):
    """Which handler a task is for."""

    NOOP = "noop"
    """returns at once"""
    HOLD = "hold"
    """runs until its worker dies"""


@dataclass(frozen=True, slots=True)
class Description:
    """What the table says about a system, and what the measurements must know of it."""

    packages: tuple[str, ...]
    """distributions whose versions are shown, the system itself first"""
    settings: str
    """what was set, in the system's own words"""
    documented: str
    """where its documentation says so"""
    left: str
    """SQL that is true while a task that is due has not been settled"""
    cannot: Mapping[str, str] = field(default_factory=dict)
    """by scenario: why it is not measured"""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """by scenario: what a reader of the figure has to know"""


class Client(Protocol):
    """An application that schedules."""

    async def schedule(self, due: Due) -> None:
        """One no-op task by the call that is made for one."""

    async def schedule_many(self, kind: Kind, dues: Sequence[Due]) -> None:
        """All of them by the call that is made for many."""


class Adapter(Protocol):
    """One file in adapters/; the only place that knows the system."""

    DESCRIPTION: Description

    async def install(self, dsn: str) -> None:
        """Make its tables in an empty database, tuned as documented."""

    def serve(self, dsn: str) -> None:
        """Run one worker in this process, as documented, until SIGTERM."""

    def client(self, dsn: str) -> AbstractAsyncContextManager[Client]:
        """Open an application that schedules one call after another."""
