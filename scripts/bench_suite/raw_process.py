"""The figures without delayq, in a process of its own, on command."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import perf_counter

from . import raw, raw_calls, raw_timers
from .commands import Command, obey

_LOOK = """
    select id from raw_task where state = 0 and execute_at <= now() order by execute_at limit 1
"""


async def poll(*, dsn: str, seconds: float, pollers: int) -> Mapping[str, object]:
    """Connections that each LISTEN, and look for due rows once a second."""
    async with raw.connections(dsn, pollers) as opened:
        await raw.prepare(opened[0])
        for conn in opened:
            await conn.execute("listen raw_task")
        until = perf_counter() + seconds
        while perf_counter() < until:
            for conn in opened:
                await conn.fetch(_LOOK)
            await asyncio.sleep(1)
    return {}


_ALL = (
    *(raw.drain, raw.fill, raw.share, raw.follow, raw.window),
    *(raw_calls.insert, raw_calls.insert_bulk, raw_calls.feed),
    *(raw_calls.change, raw_calls.change_bulk),
    *(raw_timers.timers, raw_timers.timers_at),
    poll,
)
COMMANDS: Mapping[str, Command] = {command.__name__: command for command in _ALL}

if __name__ == "__main__":
    asyncio.run(obey(COMMANDS))
