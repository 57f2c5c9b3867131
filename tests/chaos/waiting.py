"""Waiting for other processes, which send no event across."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

LOOK_S = 0.1


async def until(look: Callable[[], Awaitable[bool]], limit_s: float) -> None:
    """Return when `look` says so; TimeoutError if it does not in time."""
    async with asyncio.timeout(limit_s):
        while not await look():  # noqa: ASYNC110 - no event crosses to here
            await asyncio.sleep(LOOK_S)
