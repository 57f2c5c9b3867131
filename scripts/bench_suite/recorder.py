"""What the handlers of a node started, and when: kept in memory, written to a file now and then.

A start costs its handler a fraction of a microsecond. Every quarter of a second the event loop
hands what has gathered to a thread, which writes it; so nothing grows with the number of tasks.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from array import array
from pathlib import Path
from queue import SimpleQueue
from time import time_ns
from typing import Protocol

AT_ONCE = "BENCH_AT_ONCE"
EVENTS = "BENCH_EVENTS"
_FLUSH_S = 0.25
_END_S = 10.0


class Note(Protocol):
    """Says that the handler of a task started."""

    def __call__(self, number: int, /) -> None: ...


class Recorder:
    """Pairs of (task number, nanoseconds since 1970)."""

    def __init__(self, path: Path) -> None:
        self._fresh = array("q")
        self._full: SimpleQueue[array[int] | None] = SimpleQueue()
        self._path = path
        self._writer = threading.Thread(target=self._write, daemon=True, name="bench-events")
        self._writer.start()
        atexit.register(self.end)

    def __call__(self, number: int, /) -> None:
        at_ns = time_ns()
        if not self._fresh:
            asyncio.get_running_loop().call_later(_FLUSH_S, self._hand_over)
        self._fresh.extend((number, at_ns))

    def _hand_over(self) -> None:
        # in the loop's thread, as the handlers: no start falls between the two lines
        full, self._fresh = self._fresh, array("q")
        self._full.put(full)

    def _write(self) -> None:
        with self._path.open("ab", buffering=0) as file:
            while (full := self._full.get()) is not None:
                file.write(full.tobytes())

    def end(self) -> None:
        """Write what is left."""
        self._hand_over()
        self._full.put(None)
        self._writer.join(_END_S)


class AtOnce:
    """The same, each start in a write of its own: nothing is lost if the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __call__(self, number: int, /) -> None:
        self._file.write(array("q", (number, time_ns())).tobytes())


def _nowhere(_number: int, /) -> None:
    """For processes that only schedule."""


def chosen() -> Note:
    """As the environment says; without a file nothing is recorded."""
    path = os.environ.get(EVENTS)
    if not path:
        return _nowhere
    return AtOnce(Path(path)) if os.environ.get(AT_ONCE) else Recorder(Path(path))
