"""What every system is given to run: two handlers whose first act is to write down the time."""

from __future__ import annotations

import asyncio

from ..recorder import chosen

started = chosen()
_STAY_S = 86_400.0


async def noop(n: int) -> None:
    """Does nothing else."""
    started(n)


async def hold(n: int) -> None:
    """Is still running when its worker is killed."""
    started(n)
    await asyncio.sleep(_STAY_S)
