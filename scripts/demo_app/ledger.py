"""What handlers say about themselves, outside every transaction: an append-only file.

One line is one write to a file opened for appending, so lines of several processes never mix and
no roll-back takes one away.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LEDGER = "DEMO_LEDGER"
"""The environment variable that names the file."""

STARTED, EXPIRED = "started", "expired"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. Instants in microseconds since 1970; `due_us` is when this attempt was to fire."""

    what: str
    order: int
    task: int
    attempt: int
    node: str
    due_us: int
    at_us: int


def write(entry: Entry) -> None:
    file = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, f"{json.dumps(asdict(entry))}\n".encode())
    finally:
        os.close(file)


def now_us() -> int:
    return time.time_ns() // 1000


def read(path: Path, skip: int = 0) -> list[Entry]:
    """The entries after the first `skip` ones."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[skip:-1]
    return [Entry(**json.loads(line)) for line in lines]
