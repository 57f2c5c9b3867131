"""Whether the event loop of a node turns, seen from another thread; and if not, what blocks it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from delayq.clock import Clock
from delayq.log import log

Whose: TypeAlias = Callable[["asyncio.Task[Any]"], Mapping[str, object]]
"""The task of delayq, as fields of an event, that an asyncio task runs; nothing if it runs none."""

_WORTH_TELLING_US: Final = 1_000_000


class Stalls:
    """Made in the loop's own thread, which also calls `turned`; asked by another."""

    def __init__(self, clock: Clock, node: int, limit_us: int, whose: Whose) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock = clock
        self._node = node
        self._limit_us = limit_us
        self._whose = whose
        self._turned_us = clock.boottime_us()
        self._told: tuple[int, Mapping[str, object]] | None = None

    def turned(self) -> None:
        """The loop turns."""
        self._turned_us = self._clock.boottime_us()

    def forgive(self) -> None:
        """The other thread stood still too: suspend, or SIGSTOP."""
        self._turned_us = self._clock.boottime_us()

    def look(self) -> bool:
        """Tell of a stall of more than a second and of its end; True once it exceeds the limit."""
        since_us = self._turned_us
        stalled_us = self._clock.boottime_us() - since_us
        if self._told is not None and since_us > self._told[0]:
            began_us, who = self._told
            self._told = None
            self._tell("loop.turns_again", since_us - began_us, who)
        if stalled_us > self._limit_us:
            log.bind(
                node=self._node, stalled_s=round(stalled_us / 1e6), **self._blocker()
            ).critical("loop.stalled")
            return True
        if stalled_us > _WORTH_TELLING_US and self._told is None:
            who = self._blocker()
            self._told = since_us, who
            self._tell("loop.blocked", stalled_us, who)
        return False

    def _tell(self, event: str, blocked_us: int, who: Mapping[str, object]) -> None:
        log.bind(node=self._node, blocked_s=round(blocked_us / 1e6, 1), **who).warning(event)

    def _blocker(self) -> Mapping[str, object]:
        task = asyncio.current_task(self._loop)
        return {**({} if task is None else self._whose(task)), "where": self._place()}

    def _place(self) -> str:
        # documented in spite of its name; a thread that has ended has no frame
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - see above
        return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
