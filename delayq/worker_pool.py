"""Workers that grow on demand and retire when idle. Usable alone: no database in here.

A worker is one persistent task of the event loop that takes items from a shared queue, so that
handing over an item costs half a microsecond, not the five of a new task. A worker that takes an
item while others wait wakes (or launches) the next one first, and only then runs its own: if the
items never suspend, one worker does them all in a row, and if they do, the pool is as wide as it
has to be a moment later.

                launch            item
    (none) --> LAUNCHING --> WORKING <--> WAITING --> STOPPED
                                |            idle too long, or close ^
                                '--------------- drain --------------'
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from time import monotonic
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_TURN_S: Final = 0.002
"""Workers whose items never suspend let the loop turn after so long, all of them together."""
_PASSED_OVER: Final = 8
"""A worker that had no go in so many turns in a row is not needed: others take all the time."""
_CLOSE_S: Final = 1.0


class WorkerState(Enum):
    """Where a worker is in its life."""

    LAUNCHING = "launching"
    WORKING = "working"
    WAITING = "waiting"
    STOPPED = "stopped"


class _Worker:
    __slots__ = ("idle_since", "state", "task", "wake")

    def __init__(self) -> None:
        self.state = WorkerState.LAUNCHING
        self.wake: asyncio.Future[bool] | None = None
        self.idle_since = 0.0
        self.task: asyncio.Task[None] | None = None


class _Turn:
    """How long the workers may go on, all together, before the loop must turn.

    Each for itself would do: but then a hundred of them take a hundred turns in a row.
    """

    __slots__ = ("_ends", "_on_next")

    def __init__(self, on_next: Callable[[], None]) -> None:
        self._on_next = on_next
        self._ends: float | None = None

    def over(self) -> bool:
        """Before each item: whether it must wait for the next turn, which `on_next` tells."""
        if self._ends is None:
            self._ends = monotonic() + _TURN_S
            asyncio.get_running_loop().call_soon(self._next)
            return False
        return monotonic() > self._ends

    def _next(self) -> None:
        self._ends = None
        self._on_next()


class WorkerPool(Generic[T]):
    """At most `max_workers` items run at once; `min_workers` stay when there is nothing to do.

    `run(item, task)` handles one item, inside the asyncio task that it is told (to be cancelled
    from elsewhere), and must not raise; if it does, `on_crash` is told and the worker goes on.
    `on_free()` is called after each item: there may be room for another.
    """

    def __init__(
        self,
        run: Callable[[T, asyncio.Task[None]], Awaitable[None]],
        *,
        min_workers: int,
        max_workers: int,
        idle_s: float,
        on_free: Callable[[], None] = lambda: None,
        on_crash: Callable[[T, BaseException], None] = lambda _item, _error: None,
    ) -> None:
        self._run = run
        self._min = min_workers
        self._max = max_workers
        self._idle_s = idle_s
        self._on_free = on_free
        self._on_crash = on_crash
        self._queue: deque[T] = deque()
        self._ahead = 0  # how many at its front go ahead of the others
        self._workers: set[_Worker] = set()
        self._waiting: deque[_Worker] = deque()
        self._busy = 0
        self._waking = 0
        self._reaper: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._turn = _Turn(self._go_on)
        self._context = contextvars.copy_context()
        self.finished = 0
        """items handled since the start"""

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def busy(self) -> int:
        """How many items run now."""
        return self._busy

    @property
    def queued(self) -> int:
        """How many items wait for a worker."""
        return len(self._queue)

    @property
    def free(self) -> int:
        """How many more items would start at once; negative if some wait already."""
        return self._max - self._busy - len(self._queue)

    def open(self) -> None:
        """Launch the first `min_workers`."""
        for _ in range(self._min):
            self._launch()

    def submit(self, item: T, *, ahead: bool = True) -> None:
        """Hand over one item. It starts as soon as a worker is free; the caller bounds the queue.

        One that goes `ahead` starts before all that do not, and after those that came before it.
        Raises RuntimeError once the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        self._idle.clear()
        if ahead:
            self._queue.insert(self._ahead, item)
            self._ahead += 1
        else:
            self._queue.append(item)
        if not self._waking:
            self._wake_one()

    def withdraw(self) -> list[T]:
        """Take back what has not been started."""
        items = list(self._queue)
        self._queue.clear()
        self._ahead = 0
        self._note_idle()
        return items

    async def drained(self) -> None:
        """Return when nothing runs and nothing waits."""
        await self._idle.wait()

    async def aclose(self) -> None:
        """Stop the workers; items that still run are cancelled, and left behind after a second."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        tasks = [worker.task for worker in self._workers if worker.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            # one that ignores its cancellation must not keep the others from leaving
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        self._workers.clear()
        self._waiting.clear()

    # --- the workers ----------------------------------------------------------------------

    def _wake_one(self) -> None:
        """Wake a waiting worker, else launch one, else leave it to the first that gets free."""
        while self._waiting:
            # the one that waited least: the others may retire
            worker = self._waiting.pop()
            if worker.wake is not None and not worker.wake.done():
                worker.wake.set_result(True)
                self._waking += 1
                return
        if len(self._workers) < self._max:
            self._launch()
            self._waking += 1

    def _launch(self) -> None:
        worker = _Worker()
        self._workers.add(worker)
        # eager start would run the item inside submit(): the caller is not ready for that
        # in the context of whoever made the pool: the present one may be that of an item
        worker.task = asyncio.get_running_loop().create_task(
            self._work(worker), context=self._context.copy()
        )

    async def _work(self, worker: _Worker) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a worker is a task
        copy_context = contextvars.copy_context
        clean = copy_context()
        # counted by whoever woke or launched it; `open` launches without counting
        self._waking = max(0, self._waking - 1)
        passed_over = 0
        try:
            while not self._closed:
                over = bool(self._queue) and self._turn.over()
                if over and passed_over < _PASSED_OVER:
                    passed_over += 1
                    await asyncio.sleep(0)
                elif over or not self._queue:
                    passed_over = 0
                    if not await self._wait(worker):
                        return
                else:
                    passed_over = 0
                    await self._handle(worker, task)
                    if copy_context() != clean or task.cancelling():
                        return  # what the item left (context variables, a cancel) ends here
        finally:
            self._stopped(worker)

    async def _handle(self, worker: _Worker, task: asyncio.Task[None]) -> None:
        item = self._queue.popleft()
        if self._ahead:
            self._ahead -= 1
        worker.state = WorkerState.WORKING
        self._busy += 1
        if self._queue and not self._waking:
            self._wake_one()
        try:
            await self._run(item, task)
        except asyncio.CancelledError as error:
            if self._closed:
                raise
            self._on_crash(item, error)
        except BaseException as error:  # noqa: BLE001 - a crash of one item is not the pool's
            self._on_crash(item, error)
        finally:
            self._busy -= 1
            self.finished += 1
        self._on_free()

    def _stopped(self, worker: _Worker) -> None:
        worker.state = WorkerState.STOPPED
        self._workers.discard(worker)
        if self._queue and not self._closed and not self._waking:
            self._wake_one()
        self._note_idle()

    async def _wait(self, worker: _Worker) -> bool:
        """Wait for work; False if it is time to retire."""
        self._note_idle()
        worker.state = WorkerState.WAITING
        worker.idle_since = monotonic()
        worker.wake = asyncio.get_running_loop().create_future()
        self._waiting.append(worker)
        self._arm_reaper()
        stay = await worker.wake
        worker.wake = None
        if stay:
            self._waking = max(0, self._waking - 1)
        return stay

    def _go_on(self) -> None:
        """The loop has turned: one worker is enough to go on with what waits."""
        if self._queue and not self._waking and not self._closed:
            self._wake_one()

    def _note_idle(self) -> None:
        if not self._busy and not self._queue:
            self._idle.set()

    def _arm_reaper(self) -> None:
        if self._reaper is None and len(self._workers) > self._min:
            self._reaper = asyncio.get_running_loop().call_later(self._idle_s, self._reap)

    def _reap(self) -> None:
        """Retire those that have waited too long; the longest waiting stand in front."""
        self._reaper = None
        ripe = monotonic() - self._idle_s
        while self._waiting and len(self._workers) > self._min:
            worker = self._waiting[0]
            if worker.idle_since > ripe:
                break
            self._waiting.popleft()
            self._workers.discard(worker)
            if worker.wake is not None and not worker.wake.done():
                worker.wake.set_result(False)
        if self._waiting:
            self._arm_reaper()
