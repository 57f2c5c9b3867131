"""How long a node that leaves waits for what: every wait has an end, and a stop cuts it short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from delayq.errors import DelayQError
from delayq.log import log

_GRACE_S: Final = 0.5
"""Told to stop at once, each step of leaving gets so long."""


class Patience:
    """The waits of one incarnation; `stop_now` is set when it is told to stop at once."""

    def __init__(self, node: int, stop_now: asyncio.Event) -> None:
        self._node = node
        self._stop_now = stop_now

    async def until_stopped(self, wait: Awaitable[None], seconds: float) -> None:
        """Wait for it, for so long at the most, or until told to stop at once."""
        waiting = [asyncio.ensure_future(wait), asyncio.ensure_future(self._stop_now.wait())]
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def patiently(self, wait: Callable[[], Awaitable[None]], seconds: float) -> bool:
        """Wait so long, or from when told to stop at once half a second. False: in vain."""
        await self.until_stopped(wait(), seconds)
        return await self.briefly(wait())

    async def briefly(self, wait: Awaitable[None]) -> bool:
        """Wait half a second. False: in vain."""
        try:
            async with asyncio.timeout(_GRACE_S):
                await wait
        except TimeoutError:
            log.bind(node=self._node, waited_s=_GRACE_S).warning("node.left_behind")
            return False
        return True

    async def bounded(self, step: str, call: Awaitable[None], seconds: float) -> None:
        """Let a statement take so long; told to stop at once, half a second. It may fail."""
        try:
            async with asyncio.timeout(_GRACE_S if self._stop_now.is_set() else seconds):
                await call
        except (DelayQError, TimeoutError) as error:
            # peers will find out by themselves, one TTL later
            log.bind(step=step, error=str(error)).warning("node.step_failed")
