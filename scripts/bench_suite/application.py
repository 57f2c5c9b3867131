"""What is measured: the module that `delayq run` is given, with three handlers.

The first act of each is to write down its number and the time; then it returns, waits or computes.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from delayq import DelayQ

from .recorder import chosen
from .work import spin

dq = DelayQ()
_started = chosen()
_LIMIT = timedelta(seconds=30)


@dq.task(timeout=_LIMIT)
async def noop(n: int) -> None:
    """Says when it started."""
    _started(n)


@dq.task(timeout=_LIMIT)
async def wait(n: int, ms: float) -> None:
    """The same, then waits as for an answer from somewhere."""
    _started(n)
    await asyncio.sleep(ms / 1000)


@dq.task(timeout=_LIMIT)
async def compute(n: int, ms: float) -> None:
    """The same, then keeps the event loop for itself."""
    _started(n)
    spin(ms)
