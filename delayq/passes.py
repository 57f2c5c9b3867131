"""Going through very many items in bounded statements, held up by none that is locked.

The first pass sends batch after batch and gathers the next one while the database works; items
that a stranger holds locked are left out. These are waited for at the end, one at a time and
with nothing else in the statement; whenever one was let go, all others are tried again at once,
since what had locked it may have locked them too. The first wait that is in vain is the last.

Each statement commits by itself. What stops the work in the middle takes nothing back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

from delayq.batches import BATCH_ROWS
from delayq.errors import BulkStopped
from delayq.lanes import LockHeld

T = TypeVar("T")
R = TypeVar("R")

Progress: TypeAlias = Callable[[int], object]
Answers: TypeAlias = list[R | None]


class Passes(Generic[T, R]):
    """One bulk verb on its way.

    `send` does a batch and fills in the answers in its order, leaving None for what is locked;
    `wait` does one item and waits for its lock (in vain: LockHeld, or None). `progress` is told
    how many are done, after each batch that did some.
    """

    def __init__(
        self,
        send: Callable[[Sequence[T], Answers[R]], Awaitable[None]],
        wait: Callable[[T], Awaitable[R | None]],
        progress: Progress | None,
    ) -> None:
        self.answers: Answers[R] = []
        """in the order of the items; None: not done"""
        self._send = send
        self._wait = wait
        self._progress = progress
        self._done = 0
        self._later: list[tuple[int, T]] = []

    async def run(self, batches: AsyncIterator[Sequence[T]]) -> None:
        """Do everything. What stops it leaves as it is if nothing was done, else as BulkStopped."""
        try:
            upcoming = await anext(batches, None)
            while upcoming is not None:
                upcoming = await self._send_and_gather(upcoming, batches)
            while self._later:
                await self._wait_for_first_and_try_the_others()
        except Exception as error:
            if self._done == 0:
                raise
            raise BulkStopped(self._done, error) from error

    async def _send_and_gather(
        self, batch: Sequence[T], batches: AsyncIterator[Sequence[T]]
    ) -> Sequence[T] | None:
        """Send a batch; come back with the next one, gathered meanwhile."""
        places = range(len(self.answers), len(self.answers) + len(batch))
        self.answers += [None] * len(batch)
        sending = asyncio.create_task(self._send_to(places, batch))
        try:
            return await anext(batches, None)
        except asyncio.CancelledError:
            sending.cancel()
            raise
        finally:
            await sending

    async def _wait_for_first_and_try_the_others(self) -> None:
        (place, item), *others = self._later
        self._later = []
        answer: R | None = None
        with suppress(LockHeld):
            answer = await self._wait(item)
        self._put([place], [item], [answer])
        for start in range(0, len(others), BATCH_ROWS):
            places, batch = zip(*others[start : start + BATCH_ROWS], strict=True)
            await self._send_to(places, batch)
        if answer is None:
            raise LockHeld(
                f"other transactions hold locks on {len(self._later)} of the tasks; nothing was "
                "done about these"
            )

    async def _send_to(self, places: Sequence[int], batch: Sequence[T]) -> None:
        """Send a batch, and put the answers in their places, also those before a failure."""
        answers: Answers[R] = [None] * len(batch)
        try:
            await self._send(batch, answers)
        finally:
            self._put(places, batch, answers)

    def _put(self, places: Sequence[int], batch: Sequence[T], answers: Answers[R]) -> None:
        for place, item, answer in zip(places, batch, answers, strict=True):
            self.answers[place] = answer
            if answer is None:
                self._later.append((place, item))
        done = sum(answer is not None for answer in answers)
        self._done += done
        if done and self._progress is not None:
            self._progress(self._done)
