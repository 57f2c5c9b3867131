"""What is measured: the module that `delayq run` is given, with one handler.

The handler writes down its number and the time and returns. Starts are kept in memory; a thread
writes them to the file BENCH_EVENTS four times a second and at the end.
"""

from __future__ import annotations

import atexit
import os
import threading
from array import array
from datetime import timedelta
from pathlib import Path
from time import time_ns

from delayq import DelayQ

dq = DelayQ()
_starts = array("q")
_FLUSH_S = 0.25


@dq.task(timeout=timedelta(seconds=30))
async def noop(n: int) -> None:
    """Says when it started."""
    # one call: the thread that flushes never sees half a pair
    _starts.extend((n, time_ns()))


def _record(path: Path) -> None:
    written = 0
    over = threading.Event()
    turn = threading.Lock()

    def flush() -> None:
        nonlocal written
        with turn:
            # never shortened, so that no start can fall between a copy and a clear
            upto = len(_starts)
            if upto > written:
                with path.open("ab") as file:
                    file.write(_starts[written:upto].tobytes())
                written = upto

    def loop() -> None:
        while not over.wait(_FLUSH_S):
            flush()

    threading.Thread(target=loop, daemon=True, name="bench-events").start()
    atexit.register(flush)


if _path := os.environ.get("BENCH_EVENTS"):
    _record(Path(_path))
