"""The process of a node: its event loop, its signals and its exit status."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from delayq.errors import InvalidSettings
from delayq.log import log
from delayq.loops import EventLoop, new_event_loop

if TYPE_CHECKING:
    from delayq.node import Node

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_STUCK_S: Final = 1.0


async def run_node(node: Node) -> int:
    """Run a node until it leaves; the exit status.

    First SIGTERM or SIGINT: drain, then 0. Second: stop at once, then 128 + its number; one more
    once it has left ends the process on the spot with that.
    """
    received: list[int] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            log.bind(signal=number.name).info("signal.drain")
            node.request_drain()
        else:
            log.bind(signal=number.name).warning("signal.stop")
            node.request_stop()
        if node.id is None or len(received) > 1:
            starting.cancel()  # the database does not answer, and nothing runs yet

    def status() -> int:
        return 0 if len(received) < 2 else 128 + received[1]

    starting = asyncio.ensure_future(node.start())
    with _signals_to(on_signal, status):
        try:
            await starting
            await node.wait()
        except asyncio.CancelledError:
            if not (received and starting.cancelled()):
                raise
    return status()


@contextmanager
def _signals_to(
    on_signal: Callable[[signal.Signals], None], status: Callable[[], int]
) -> Iterator[None]:
    """Both signals go there, and then to whom they went before; or end the process, if it is
    to end with a `status` that is not 0."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(status())

    try:
        yield
    finally:
        # held back meanwhile: what the loop leaves behind is the default, which kills
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if status():
                signal.signal(number, leave)
            elif handler is not None:  # None: it is not Python's
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_process(main: Coroutine[None, None, int], event_loop: EventLoop = "auto") -> int:
    """Run `main` in an event loop of its own; its result. Raises as `new_event_loop`.

    If handlers are left that ignore their cancellation, the process leaves on the spot with that
    status: waiting for them is what `drain_timeout` was for.
    """
    try:
        loop = new_event_loop(event_loop)
    except InvalidSettings:
        main.close()
        raise
    _spare_the_collector()
    atexit.register(_ignore_signals)
    status = 1
    try:
        status = loop.run_until_complete(main)
        return status
    finally:
        _cancel_all(loop, status)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _ignore_signals() -> None:
    """The interpreter puts the default back before it is gone, and the status would be its."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _spare_the_collector() -> None:
    """Collect garbage less often, in a process of our own.

    What was imported stays for good, and a task makes some fifty objects that reference counting
    frees: looking for cycles among them every 700 took a seventh of the node's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def _cancel_all(loop: asyncio.AbstractEventLoop, status: int) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if not left:
        return
    _, stuck = loop.run_until_complete(asyncio.wait(left, timeout=_STUCK_S))
    if stuck:
        log.bind(count=len(stuck)).warning("handlers.left_behind")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
