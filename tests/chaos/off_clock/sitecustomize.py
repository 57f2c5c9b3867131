"""Gives a process a wall clock of its own: the true one and an offset that a file holds.

Python imports this by itself when its folder is on PYTHONPATH. The file that CHAOS_CLOCK names is
mapped, so that the offset can change while the process runs. Monotonic clocks stay true.
"""

from __future__ import annotations

import datetime as dt
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

_true_ns = time.time_ns
_TrueDatetime = dt.datetime


def _falsify(path: Path) -> None:
    with path.open("rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)

    def time_ns() -> int:
        return _true_ns() + int(struct.unpack("=q", offset)[0])

    class AsIfTrue(type):
        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, _TrueDatetime)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, _TrueDatetime)

    class Datetime(_TrueDatetime, metaclass=AsIfTrue):
        __slots__ = ()  # as large as the true one: compiled modules look

        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return _TrueDatetime.fromtimestamp(time_ns() / 1e9, tz)

        @classmethod
        def utcnow(cls) -> Any:
            return _TrueDatetime.fromtimestamp(time_ns() / 1e9, dt.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9
    dt.datetime = Datetime  # type: ignore[misc]  # the point of it


if "CHAOS_CLOCK" in os.environ:
    _falsify(Path(os.environ["CHAOS_CLOCK"]))
