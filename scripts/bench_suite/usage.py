"""Memory and processor time of other processes.

On Linux from /proc, elsewhere memory from `ps` and processor time not at all (NaN): its whole
seconds say nothing about a process that idles.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .scenario import NAN

_PROC = Path("/proc")
_LOOK_S = 0.1
MB = 1_000_000


def rss_mb(pid: int) -> float:
    """Resident memory in megabytes; NaN if there is no such process."""
    try:
        pages = (_PROC / str(pid) / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / MB
    except OSError:
        return _rss_by_ps(pid)


def _rss_by_ps(pid: int) -> float:
    answer = subprocess.run(
        ("ps", "-o", "rss=", "-p", str(pid)),  # noqa: S607 - wherever it is
        capture_output=True,
        text=True,
        check=False,
    )
    return int(answer.stdout) * 1024 / MB if answer.stdout.strip() else NAN


def cpu_s(pids: Iterable[int]) -> float:
    """Processor seconds that the present threads of these processes have used so far."""
    try:
        threads = [thread for pid in pids for thread in (_PROC / str(pid) / "task").iterdir()]
        return sum(map(_on_cpu_ns, threads)) / 1e9
    except OSError:
        return NAN


def _on_cpu_ns(thread: Path) -> int:
    try:
        return int((thread / "schedstat").read_text().split()[0])
    except FileNotFoundError:  # it has just ended
        return 0


@dataclass(slots=True)
class Peak:
    """The most memory that was seen, in megabytes."""

    mb: float = 0.0


@asynccontextmanager
async def watched(pid: int) -> AsyncIterator[Peak]:
    """Looks at the memory of a process ten times a second to the end of the block."""
    peak = Peak()

    async def look() -> None:
        while True:
            now_mb = rss_mb(pid)
            peak.mb = max(peak.mb, now_mb)  # not NaN, which comes second
            await asyncio.sleep(_LOOK_S)

    looking = asyncio.create_task(look())
    try:
        yield peak
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
