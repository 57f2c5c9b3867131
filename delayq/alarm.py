"""One timer of the event loop for the earliest of many instants of the database's clock.

A loop keeps every cancelled handle until its time, and pins the context of whoever made it; so
there is one handle for a whole heap, moved only when something earlier comes in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Final

from delayq.clock import DatabaseClock

_LONGEST_S: Final = 3600.0


class Alarm:
    """Calls `ring` at (not before, by the loop's clock) the earliest instant it was set to."""

    def __init__(self, clock: DatabaseClock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self._at_us = 0
        self._context = Context()

    def set(self, at_us: int) -> None:
        """Ring at this instant, unless it is to ring earlier already."""
        if self._handle is not None:
            if self._at_us <= at_us:
                return
            self._handle.cancel()
        self._at_us = at_us
        wait_s = (at_us - self._clock.now_us()) / 1e6
        self._handle = asyncio.get_running_loop().call_later(
            min(max(0.0, wait_s), _LONGEST_S), self._rung, context=self._context
        )

    def clear(self) -> None:
        """Do not ring."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rung(self) -> None:
        self._handle = None
        self._ring()
