"""Whether the event loop of a node turns, seen from another thread; and if not, what blocks it.

The other thread asks the loop to call back, and looks how long that has taken. What it tells is
written by threads that live just for it: a log that cannot be written (the loop may be blocked in
that very write) must not stop the beat too.
"""

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
_LATE_ITSELF_US: Final = 250_000
_LAST_WORDS_S: Final = 1.0


class Stalls:
    """Made in the loop's own thread, which also calls `turned`; the rest is another's."""

    def __init__(self, clock: Clock, node: int, limit_us: int, whose: Whose) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock = clock
        self._node = node
        self._limit_us = limit_us
        self._whose = whose
        self._asked_us: int | None = None
        self._turned_us = 0
        self._told: tuple[int, Mapping[str, object]] | None = None

    def turned(self) -> None:
        """The loop turns."""
        self._turned_us = self._clock.boottime_us()
        self._asked_us = None

    def asks(self) -> None:
        """The loop is asked to call `turned`; the first time counts until it does."""
        if self._asked_us is None:
            self._asked_us = self._clock.boottime_us()

    def forgive(self) -> None:
        """The asking thread stood still too: suspend, or SIGSTOP."""
        if self._asked_us is not None:
            self._asked_us = self._clock.boottime_us()

    def look(self, late_us: int) -> bool:
        """Tell of a stall of more than a second and of its end; True once it exceeds the limit.

        `late_us`: how late the asking thread is itself. A second in which it did not run either
        says nothing about the loop.
        """
        if self._told is not None and self._turned_us > self._told[0]:
            self._tell_of_the_end(*self._told)  # it may have been asked again since
        asked_us = self._asked_us
        if asked_us is None:
            return False
        stalled_us = self._clock.boottime_us() - asked_us
        if stalled_us > self._limit_us:
            said = {"stalled_s": round(stalled_us / 1e6), **self._blocker()}
            self._tell("CRITICAL", "loop.stalled", said).join(_LAST_WORDS_S)
            return True
        if stalled_us > _WORTH_TELLING_US and late_us < _LATE_ITSELF_US and self._told is None:
            who = self._blocker()
            self._told = asked_us, who
            self._tell("WARNING", "loop.blocked", {"blocked_s": _seconds(stalled_us), **who})
        return False

    def _tell_of_the_end(self, asked_us: int, who: Mapping[str, object]) -> None:
        self._told = None
        blocked_s = _seconds(self._turned_us - asked_us)
        self._tell("WARNING", "loop.turns_again", {"blocked_s": blocked_s, **who})

    def _tell(self, level: str, event: str, fields: Mapping[str, object]) -> threading.Thread:
        write = log.bind(node=self._node, **fields).log
        teller = threading.Thread(target=write, args=(level, event), daemon=True)
        teller.start()
        return teller

    def _blocker(self) -> Mapping[str, object]:
        task = asyncio.current_task(self._loop)
        return {**({} if task is None else self._whose(task)), "where": self._place()}

    def _place(self) -> str:
        # documented in spite of its name; a thread that has ended has no frame
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - see above
        return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _seconds(microseconds: int) -> float:
    return round(microseconds / 1e6, 1)
