"""A process that installs a system and schedules through it, on command.

python -m bench_suite.peers.client NAME
"""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter, time_ns
from typing import TYPE_CHECKING

from ..callers import rate_for
from ..commands import obey
from .adapters import load
from .contract import Due, Kind

if TYPE_CHECKING:
    from .contract import Adapter, Client

_CHUNK = 5_000
_HOUR_US = 3_600_000_000
_NUMBER = 7


class Commands:
    """What the parent may ask for."""

    def __init__(self, adapter: Adapter, dsn: str, stack: AsyncExitStack) -> None:
        self._adapter = adapter
        self._dsn = dsn
        self._stack = stack
        self._opened: Client | None = None

    async def describe(self) -> Mapping[str, object]:
        """The adapter's description, and the versions that are installed."""
        description = self._adapter.DESCRIPTION
        versions = {name: _version(name) for name in description.packages}
        return {**asdict(description), "versions": versions, "python": platform.python_version()}

    async def install(self) -> Mapping[str, object]:
        """Make the system's tables."""
        await self._adapter.install(self._dsn)
        return {}

    async def many(
        self, *, kind: str, count: int, first_us: int, step_us: int, number: int
    ) -> Mapping[str, object]:
        """Tasks number, number + 1, …, the first due at `first_us`; how long that took."""
        client = await self._client()
        began = perf_counter()
        for start in range(0, count, _CHUNK):
            dues = [
                Due(number + i, first_us + i * step_us)
                for i in range(start, min(count, start + _CHUNK))
            ]
            await client.schedule_many(Kind(kind), dues)
        return {"seconds": perf_counter() - began}

    async def single(self, *, seconds: float) -> Mapping[str, object]:
        """Single calls one after another, an hour ahead; how many a second."""
        client = await self._client()
        return {
            "per_s": await rate_for(
                seconds, 1, lambda: client.schedule(Due(_NUMBER, time_ns() // 1000 + _HOUR_US))
            )
        }

    async def _client(self) -> Client:
        # only once the tables are there: some systems look for them when they connect
        if self._opened is None:
            self._opened = await self._stack.enter_async_context(self._adapter.client(self._dsn))
        return self._opened


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # delayq itself, run from its clone without having been installed
        return str(importlib.import_module(package).__version__)


async def main(name: str) -> None:
    """Obey until standard input ends."""
    async with AsyncExitStack() as stack:
        commands = Commands(load(name), os.environ["BENCH_DSN"], stack)
        await obey({
            "describe": commands.describe,
            "install": commands.install,
            "many": commands.many,
            "single": commands.single,
        })  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
