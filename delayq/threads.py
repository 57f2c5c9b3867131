"""Threads for handlers that are plain functions.

Daemon threads, since a thread cannot be cancelled and must not keep the process from leaving;
the standard library's executor joins its threads at exit and would hang on a stuck handler.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, TypeVar

R = TypeVar("R")

_Job = tuple[Callable[[], Any], "asyncio.AbstractEventLoop", "asyncio.Future[Any]"]


class Threads:
    """At most `limit` threads, made when no idle one is there; they stay until `close`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._idle = Semaphore(0)
        self._threads = 0

    @property
    def alive(self) -> int:
        """How many threads were made."""
        return self._threads

    def submit(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Run `function` in a thread, with the caller's context variables.

        The future belongs to the running loop. Cancelling it does not end the thread.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        context = contextvars.copy_context()
        self._jobs.put((lambda: context.run(function), loop, future))
        if not self._idle.acquire(blocking=False) and self._threads < self.limit:
            self._threads += 1
            Thread(target=self._work, name="delayq-handler", daemon=True).start()
        return future

    def close(self) -> None:
        """Let the threads go, each when its job ends."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job  # or an idle thread keeps the last job's objects alive
            self._idle.release()

    @staticmethod
    def _do(
        function: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        if future.cancelled():
            return  # given back before it began: it may run elsewhere by now
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as caught:  # noqa: BLE001 - a thread hands on whatever ended it
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(_deliver, future, result, error)


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):
        # a future refuses it, and would leave the waiter waiting
        wrapped = RuntimeError("the handler raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)
