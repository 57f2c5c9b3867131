"""SIGTERM and SIGINT while a command runs in its event loop.

The first cancels the command, which rolls back and disconnects; a second one does not wait for
that. `run` gives both signals to its node instead, which drains.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

from delayq.cli.early import SIGNALS, Signalled

T = TypeVar("T")


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
                raise Signalled(came[0]) from None
            task.cancel()
            raise


@contextmanager
def _handled_by(handler: Callable[[int], None]) -> Iterator[None]:
    """Both signals go to `handler`, in the loop, for the length of the block."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number, old in before.items():
            if loop.remove_signal_handler(number):
                signal.signal(number, old)
