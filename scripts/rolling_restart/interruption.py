"""SIGINT and SIGTERM: between nodes they end all, and at a node they wait until it is done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from .words import Interrupted


class Interruption:
    """Both signals from now on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._first: int | None = None
        self._reason: str | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    @contextmanager
    def put_off(self, reason: str) -> Iterator[None]:
        """Let the first signal wait for the end of the block. Raises Interrupted there."""
        self._reason = reason
        try:
            yield
        finally:
            self._reason = None
        if self._first is not None:
            raise Interrupted(self._first)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self._reason is None or self._first is not None:
            raise Interrupted(number)
        self._first = number
        self._say(f"{self._reason}; once more to stop at once")
