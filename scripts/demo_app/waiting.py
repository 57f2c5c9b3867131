"""Waiting for what gives no sign: other processes, and rows that they write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
_LOOK_S = 0.02


async def until(look: Callable[[], Awaitable[T | None]]) -> T:
    """What `look` finds, once that is not None."""
    while (found := await look()) is None:  # noqa: ASYNC110 -- no event crosses to here
        await asyncio.sleep(_LOOK_S)
    return found
