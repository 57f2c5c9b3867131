"""Plain asyncio: timers that are called, and the memory of timers that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import time_ns

from .numbers import spread
from .work import spin


class Bare:
    """Bare `loop.call_at` timers that do the work of a handler; how late each was called."""

    def __init__(self, work: str, ms: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._after: dict[str, Callable[[], None]] = {
            "noop": lambda: None, "wait": self._wait, "compute": lambda: spin(ms),
        }  # fmt: skip
        self._work = self._after[work]
        self._s = ms / 1000
        self._waiting: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self.late_ms: list[float] = []

    async def run(self, dues_us: Sequence[float]) -> None:
        """Return when all have been called."""
        ahead_s = self._loop.time() - time_ns() / 1e9
        for due_us in dues_us:
            self._loop.call_at(due_us / 1e6 + ahead_s, self._fire, due_us, len(dues_us))
        await self._over.wait()
        await asyncio.gather(*self._waiting)

    def _fire(self, due_us: float, count: int) -> None:
        self.late_ms.append((time_ns() / 1000 - due_us) / 1000)
        if len(self.late_ms) == count:
            self._over.set()
        self._work()

    def _wait(self) -> None:
        task = self._loop.create_task(asyncio.sleep(self._s))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)


async def timers(
    *, count: int, first_us: float, step_us: float, work: str = "noop", ms: float = 0.0
) -> Mapping[str, object]:
    """Timers that are due evenly; their lateness."""
    bare = Bare(work, ms)
    await bare.run([first_us + i * step_us for i in range(count)])
    return spread(bare.late_ms)


async def timers_at(*, dues_us: list[list[float]]) -> Mapping[str, object]:
    """Timers at any instants, in groups; the lateness of each group."""
    groups = [Bare("noop", 0) for _ in dues_us]
    await asyncio.gather(*(bare.run(dues) for bare, dues in zip(groups, dues_us, strict=True)))
    return {"groups": [spread(bare.late_ms) for bare in groups]}
