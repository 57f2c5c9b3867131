"""Which event loop a node's own process runs on."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Literal

from delayq.errors import InvalidSettings

EventLoop = Literal["auto", "asyncio", "uvloop"]


def new_event_loop(choice: EventLoop = "auto") -> asyncio.AbstractEventLoop:
    """A new event loop: `auto` is uvloop if it is installed (the extra `fast`), else asyncio's.

    Raises InvalidSettings if uvloop is asked for and not installed.
    """
    if choice != "asyncio":
        try:
            loop: asyncio.AbstractEventLoop = import_module("uvloop").new_event_loop()
        except ImportError:
            if choice == "uvloop":
                raise InvalidSettings(
                    "DELAYQ_EVENT_LOOP is uvloop, which is not installed: install delayq[fast], "
                    "or set it to auto"
                ) from None
        else:
            return loop
    return asyncio.new_event_loop()
