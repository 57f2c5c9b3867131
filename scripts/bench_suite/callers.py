"""Makes calls one after another, or by many callers at once, and counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")


async def rate_for(seconds: float, callers: int, call: Callable[[], Awaitable[object]]) -> float:
    """Calls a second."""
    began = perf_counter()
    done = 0

    async def caller() -> None:
        nonlocal done
        while perf_counter() - began < seconds:
            await call()
            done += 1

    await asyncio.gather(*(caller() for _ in range(callers)))
    return done / (perf_counter() - began)


async def rate_over(items: list[T], callers: int, call: Callable[[T], Awaitable[object]]) -> float:
    """Calls a second, one for each item."""
    left: Iterator[T] = iter(items)

    async def caller() -> None:
        for item in left:
            await call(item)

    began = perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(items) / (perf_counter() - began)
