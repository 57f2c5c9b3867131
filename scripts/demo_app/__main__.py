"""The demo itself: a database, two nodes, sixty orders, one rolling restart, one table.

Exit status: 0 if the table is right, 1 if it is not or something failed on the way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from delayq.embedded import PrivateServer

from . import ledger
from .screen import Screen

ENDING = (signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    started = time.monotonic()
    for number in ENDING:
        signal.signal(number, leave)
    screen = Screen()
    with tempfile.TemporaryDirectory(prefix="delayq-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with database(folder, screen):
            # Not before: the application reads DELAYQ_DSN as it is imported.
            from .scenario import play  # noqa: PLC0415 - it needs a DSN first

            faults = asyncio.run(until_told(play(folder, screen)))
    for fault in faults:
        print(f"WRONG: {fault}")
    verdict = "the table is wrong" if faults else "lost 0, twice 0"
    print(f"{verdict}; {time.monotonic() - started:.0f} s, nothing is left running")
    return 1 if faults else 0


def leave(number: int, _frame: FrameType | None) -> None:
    """Unwind the stack, so that everything that was started is ended."""
    raise SystemExit(128 + number)


async def until_told(work: Coroutine[None, None, list[str]]) -> list[str]:
    """Do it, unless a signal comes; in the event loop, where no driver's callback swallows it."""
    loop, told = asyncio.get_running_loop(), list[int]()
    task = asyncio.ensure_future(work)

    def end(number: int) -> None:
        told.append(number)
        task.cancel()

    for number in ENDING:
        loop.add_signal_handler(number, end, number)
    try:
        return await task
    finally:
        for number in ENDING:
            loop.remove_signal_handler(number)
            signal.signal(number, leave)
        if told:
            raise SystemExit(128 + told[0])


@contextmanager
def database(folder: Path, screen: Screen) -> Iterator[None]:
    """A migrated database of the demo's own, named to everything that runs inside."""
    forget_the_surroundings()
    # Beside the folder of the logs: a server wants a folder for itself.
    with PrivateServer(folder / "database", allow_system=True) as server:
        os.environ["DELAYQ_DSN"] = server.dsn
        os.environ[ledger.LEDGER] = str(folder / "ledger")
        os.environ["PYTHONPATH"] = path_for_nodes()
        os.chdir(folder)  # where no .env says otherwise
        screen.heading(f"embedded PostgreSQL in {server.folder}; delayq migrate")
        migrate = [sys.executable, "-m", "delayq", "migrate"]
        subprocess.run(migrate, check=True, timeout=30)
        yield


def path_for_nodes() -> str:
    """Where `delayq run` finds the application."""
    scripts = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [scripts, os.environ.get("PYTHONPATH")]))


def forget_the_surroundings() -> None:
    for name in list(os.environ):
        if name.startswith(("DELAYQ_", "PG")):
            del os.environ[name]


if __name__ == "__main__":
    sys.exit(main())
