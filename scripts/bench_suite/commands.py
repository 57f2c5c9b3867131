"""Child processes that obey: JSON lines in, JSON lines out.

{"do": "insert", "seconds": 2}   ->   {"per_s": 1234.5}   or   {"error": "…"}
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Command = Callable[..., Awaitable[Mapping[str, object]]]
MARK = "@@"
"""Starts each answer, so that a stray print is no answer."""


async def obey(commands: Mapping[str, Command]) -> None:
    """Carry out commands from standard input until it ends; `ready` is known to all."""
    loop = asyncio.get_running_loop()
    commands = {"ready": _ready, **commands}
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order: dict[str, Any] = json.loads(line)
        try:
            answer = await commands[order.pop("do")](**order)
        except Exception as error:  # noqa: BLE001 - the parent is told, and decides
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(MARK + json.dumps(answer), flush=True)


async def _ready() -> Mapping[str, object]:
    return {}
