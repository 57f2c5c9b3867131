"""delayq's handlers: the module that `delayq run` is given."""

from __future__ import annotations

from datetime import timedelta

from delayq import DelayQ

from . import starts

dq = DelayQ()


@dq.task(timeout=timedelta(seconds=30))
async def noop(n: int) -> None:
    """Says when it started."""
    starts.started(n)


@dq.task
async def hold(n: int) -> None:
    """Says when it started, and stays."""
    await starts.hold(n)
