"""SIGTERM and SIGINT for the whole life of the process, imports included.

Outside an event loop a signal unwinds the stack, so that `with` blocks clean up. Inside one it
cancels the command, which rolls back and disconnects; a second one does not wait for that. `run`
gives both signals to its node, which drains.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, TypeVar

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def listen() -> None:
    """Let both signals end the process with 128 + their number, without a traceback."""
    for number in _SIGNALS:
        # One that the parent chose to ignore (nohup, a background job) stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def run_until_signal(command: Coroutine[object, object, T]) -> T:
    """Run a command in an event loop of its own; a signal cancels it and raises SystemExit."""
    with asyncio.Runner() as runner:
        return runner.run(_cancelled_by_signals(command))


async def _cancelled_by_signals(command: Coroutine[object, object, T]) -> T:
    task = asyncio.get_running_loop().create_task(command)
    came: list[int] = []

    def stop(number: int) -> None:
        if came:
            os._exit(128 + number)
        came.append(number)
        task.cancel()

    with _handled_by(stop):
        try:
            return await task
        except asyncio.CancelledError:
            if came:
                raise SystemExit(128 + came[0]) from None
            task.cancel()
            raise


@contextmanager
def _handled_by(handler: Callable[[int], None]) -> Iterator[None]:
    """Both signals go to `handler`, in the loop, for the length of the block."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number, old in before.items():
            if loop.remove_signal_handler(number):
                signal.signal(number, old)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
