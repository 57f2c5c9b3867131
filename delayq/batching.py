"""Natural batching: while one call is in flight, the next batch gathers.

No timers: one item alone is sent at once, ten thousand share a few calls. A call that fails is
split in halves until the bad item fails alone. Every submitter gets the answer for its own item,
is made to wait when too many are waiting, and may be cancelled without harming the others.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import copy_context
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from delayq.errors import DatabaseTimeout, DelayQError

T = TypeVar("T")
R = TypeVar("R")

_Run = Callable[[list[T]], Awaitable[list[R | Exception]]]
_Batch = list[tuple["asyncio.Future[R]", T]]


def _splittable(_error: Exception) -> bool:
    return False


class Weight(NamedTuple, Generic[T]):
    """What an item adds to a call, and how much one call may carry."""

    size_of: Callable[[T], int]
    max_bytes: int


class Batcher(Generic[T, R]):
    """Gathers items from many callers into calls of `run`.

    `run` gets 1 to `max_size` items and returns as many results in the same order; a result
    that is an exception is raised to that item's submitter alone. If `run` raises, the batch
    is split in halves and tried again, unless `unsplittable` says that the error has nothing
    to do with the items (the connection was lost). `run` must have a time limit of its own.

    At most `max_waiting` items wait to be sent and `in_flight` calls run at a time. Where several
    may, and at least `share_above` items wait, a call leaves the others their share: who waits for
    one answer does not make ready the next call, and so the database would idle meanwhile. With
    a `weight`, a batch of more than one item stays within its bytes.
    """

    def __init__(
        self,
        run: _Run[T, R],
        *,
        max_size: int,
        max_waiting: int,
        in_flight: int = 1,
        share_above: float = math.inf,
        unsplittable: Callable[[Exception], bool] = _splittable,
        weight: Weight[T] | None = None,
    ) -> None:
        self._run = run
        self._max_size = max_size
        self._in_flight = in_flight
        self._share_above = share_above
        self._unsplittable = unsplittable
        self._weight = weight
        # Workers live longer than the submitter that launched them: they must not inherit
        # its context variables (a trace, a tenant).
        self._context = copy_context()
        self._waiting: dict[asyncio.Future[R], T] = {}
        # Slots, handed over directly: each is free, or granted to a turn, or holds an item.
        self._free = max_waiting
        self._turns: deque[asyncio.Future[None]] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._active = 0
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many items wait to be sent."""
        return len(self._waiting)

    async def submit(self, item: T) -> R:
        """Send the item with others and return its result, or raise its error.

        Waits while `max_waiting` others wait. Cancelled before the item was sent, it withdraws
        the item; cancelled later, the item is on its way and its result is dropped. Raises
        `DelayQError` after `close`.
        """
        if self._closed:
            raise _closed()
        if self._free > 0:
            self._free -= 1
        else:
            await self._turn()
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting[future] = item
        if self._active < self._in_flight and self._starting is None:
            self._launch()
        try:
            return await future
        except asyncio.CancelledError:
            self._withdraw(future)
            raise

    async def close(self) -> None:
        """Take nothing more, and return when everything taken has its answer.

        Cancelled, it abandons what is on its way: those submitters get `DatabaseTimeout`.
        """
        self._closed = True
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_exception(_closed())
        try:
            while self._workers:
                await asyncio.wait(self._workers)
        except asyncio.CancelledError:
            for worker in self._workers:
                worker.cancel()
            raise

    # --- room -----------------------------------------------------------------------------

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The slot may have been granted in the same turn of the loop: pass it on.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._grant(1)
            raise
        if self._closed:
            self._grant(1)
            raise _closed()

    def _grant(self, slots: int) -> None:
        while slots and self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                slots -= 1
        self._free += slots

    def _withdraw(self, future: asyncio.Future[R]) -> None:
        if future in self._waiting:
            del self._waiting[future]
            self._grant(1)

    # --- workers --------------------------------------------------------------------------

    def _launch(self) -> None:
        worker = asyncio.get_running_loop().create_task(self._work(), context=self._context)
        self._active += 1
        self._starting = worker
        self._workers.add(worker)
        worker.add_done_callback(self._ended)

    async def _work(self) -> None:
        self._starting = None
        try:
            while self._waiting:
                batch = self._take()
                if self._waiting and self._active < self._in_flight:
                    self._launch()
                try:
                    await self._send(batch)
                finally:
                    _abandon(future for future, _ in batch)
        finally:
            # Here and not in the callback below, which comes a turn of the loop later: an item
            # submitted in between would wait for a worker that has gone.
            self._active -= 1

    def _ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if worker is self._starting:  # cancelled before its first step
            self._starting = None
            self._active -= 1
        if not self._active:  # a worker leaves nothing waiting unless it was cancelled
            _abandon(self._waiting)
            self._grant(len(self._waiting))
            self._waiting.clear()

    def _take(self) -> _Batch[R, T]:
        batch = list(islice(self._waiting.items(), min(self._max_size, self._share())))
        if self._weight is not None:
            batch = batch[: _fitting(batch, self._weight)]
        if len(batch) == len(self._waiting):
            self._waiting.clear()
        else:
            for future, _ in batch:
                del self._waiting[future]
        self._grant(len(batch))
        return batch

    def _share(self) -> int:
        """How many of those that wait are for one call: all, or its part."""
        waiting, free = len(self._waiting), self._in_flight - self._active + 1
        return waiting if waiting < self._share_above else -(-waiting // free)

    async def _send(self, batch: _Batch[R, T]) -> None:
        # Withdrawn while it waited here: its submitter has not had time to say so yet.
        batch = [entry for entry in batch if not entry[0].done()]
        if not batch:
            return
        try:
            results = await self._run([item for _, item in batch])
        except Exception as error:  # noqa: BLE001 - every failure belongs to the submitters
            await self._split(batch, error)
        else:
            _answer(batch, results)

    async def _split(self, batch: _Batch[R, T], error: Exception) -> None:
        if len(batch) == 1 or self._unsplittable(error):
            _fail(batch, error)
            return
        middle = len(batch) // 2
        await self._send(batch[:middle])
        await self._send(batch[middle:])


def _fitting(batch: _Batch[R, T], weight: Weight[T]) -> int:
    total = 0
    for count, (_, item) in enumerate(batch):
        total += weight.size_of(item)
        if total > weight.max_bytes:
            return max(count, 1)
    return len(batch)


def _answer(batch: _Batch[R, T], results: list[R | Exception]) -> None:
    if len(results) != len(batch):
        count = f"{len(batch)} items were sent and {len(results)} results came back"
        _fail(batch, RuntimeError(count))
        return
    for (future, _), result in zip(batch, results, strict=True):
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _fail(batch: _Batch[R, T], error: Exception) -> None:
    for future, _ in batch:
        if not future.done():
            future.set_exception(error)


def _abandon(futures: Iterable[asyncio.Future[R]]) -> None:
    """Whoever has no answer by now will never get one."""
    for future in futures:
        if not future.done():
            future.set_exception(DatabaseTimeout("abandoned on its way: the outcome is unknown"))


def _closed() -> DelayQError:
    return DelayQError("closed: nothing more is taken")
