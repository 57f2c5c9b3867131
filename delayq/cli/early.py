"""SIGTERM and SIGINT from the first moment on, while everything else is still being imported.

Nothing that takes time to load may be imported here: until `listen` was called, a process that is
PID 1 ignores them. Outside an event loop a signal unwinds the stack, so that `with` blocks clean
up. Inside one it cancels every task, as the end of the loop would: an exception thrown into the
middle of a loop leaves coroutines behind that nobody finishes. A second signal does not wait.

`run` gives both signals to its node once that is there; then they drain.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_came: list[int] = []


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


def first_signal() -> int | None:
    """The number of the signal that cancels everything just now, or None."""
    return _came[0] if _came else None


def _leave(number: int, _frame: FrameType | None) -> None:
    loop = _running_loop()
    if loop is None:
        raise Signalled(number)
    if _came:
        os._exit(128 + number)
    _came.append(number)
    loop.call_soon_threadsafe(_cancel_all, loop)


def _running_loop() -> AbstractEventLoop | None:
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.get_running_loop() if asyncio else None
    except (AttributeError, RuntimeError):  # half imported; none runs
        return None


def _cancel_all(loop: AbstractEventLoop) -> None:
    import asyncio  # noqa: PLC0415 - there is a loop, so it is loaded

    for task in asyncio.all_tasks(loop):
        task.cancel()
