"""What every process says it did, in files that no roll-back and no dead server can reach.

One file a process, opened for appending; one line is one write, before and after each call and at
the start and end of each handler. A process that is killed keeps what it wrote. Instants are
microseconds since 1970 of this machine's true clock, which the database server reads as well;
they stay true where a process's own idea of the time is falsified.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

LEDGER = "CHAOS_LEDGER"
"""The environment variable that names the folder."""

Line = dict[str, Any]


def now_us() -> int:
    """This machine's true clock. Not by `time.time`, which some nodes have falsified."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME) // 1000


def note(what: str, **fields: object) -> int:
    """Append one line, and return its instant."""
    at_us = now_us()
    text = json.dumps({"what": what, "at": at_us, **fields}, separators=(",", ":"))
    os.write(_file(os.getpid()), f"{text}\n".encode())
    return at_us


def open_in(folder: Path) -> None:
    """From now on this process, and those that it starts, write there."""
    os.environ[LEDGER] = str(folder)
    _file.cache_clear()


@functools.cache
def _file(pid: int) -> int:
    path = Path(os.environ[LEDGER]) / f"{pid}-{now_us()}.jsonl"
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def read(folder: Path) -> list[Line]:
    """Every line of every process, by instant."""
    lines: list[Line] = []
    for path in sorted(folder.glob("*.jsonl")):
        pid = path.name.partition("-")[0]
        with path.open(encoding="utf-8") as file:
            lines += [{**json.loads(text), "pid": pid} for text in file]
    lines.sort(key=lambda line: int(line["at"]))
    return lines
