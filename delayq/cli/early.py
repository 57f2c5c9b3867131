"""SIGTERM and SIGINT from the first moment on, while everything else is still being imported.

Outside an event loop they unwind the stack, so that `with` blocks clean up. Nothing that takes
time to load may be imported here: until `listen` was called a process that is PID 1 ignores them.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signalled(SystemExit):
    """A signal came: leave with 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


def listen() -> None:
    """Let both signals end the process with 128 + their number, without a traceback."""
    for number in SIGNALS:
        # One that the parent chose to ignore (nohup, a background job) stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise Signalled(number)
