"""What a timer that waits costs in memory, in delayq's heap and as a bare handle of asyncio."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import tracemalloc
from collections.abc import Callable, Mapping

from delayq.timer_heap import TimerHeap

from .commands import obey
from .usage import MB, rss_mb

_SPAN_US = 15_000_000
_FIRST_US = 1_800_000_000_000_000
_FAR_S = 86_400.0


def _instants(count: int) -> list[int]:
    """As a window holds them: in no order, since it is read bucket by bucket."""
    return [_FIRST_US + random.randrange(_SPAN_US) for _ in range(count)]


def _heap(instants: list[int]) -> object:
    heap = TimerHeap(len(instants))
    for number, at_us in enumerate(instants):
        heap.push(_ID + number, at_us, "noop")
    return heap


_ID = 1_000_000_000
"""Ids of a table that has been in use: small ones are smaller in Python."""


def _handles(instants: list[int]) -> object:
    loop = asyncio.get_running_loop()
    return [
        loop.call_at(loop.time() + _FAR_S + (at_us - _FIRST_US) / 1e6, print) for at_us in instants
    ]


_SORTS: dict[str, Callable[[list[int]], object]] = {"heap": _heap, "handles": _handles}


async def traced(*, sort: str, count: int) -> Mapping[str, object]:
    """Bytes that Python allocated for each timer."""
    instants = _instants(count)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        held = _SORTS[sort](instants)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del held
    return {"bytes": (after - before) / count}


async def resident(*, sort: str, count: int) -> Mapping[str, object]:
    """Bytes by which the process grew for each timer; to be asked once in a process."""
    instants = _instants(count)
    gc.collect()
    before_mb = rss_mb(os.getpid())
    held = _SORTS[sort](instants)
    after_mb = rss_mb(os.getpid())
    del held
    return {"bytes": (after_mb - before_mb) * MB / count}


if __name__ == "__main__":
    asyncio.run(obey({"traced": traced, "resident": resident}))
