"""What is shown: each fire as it happens, what people do between, and the table at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from . import ledger

_LOOK_S = 0.02
_WIDTH = 66


class Screen:
    """Writes lines to standard output, at once."""

    def heading(self, text: str) -> None:
        print(f"\n== {text}", flush=True)

    def event(self, text: str) -> None:
        print(f"{clock(ledger.now_us())}  {text}", flush=True)

    def fires_heading(self) -> None:
        print(
            f"{'started':12}  {'fire':9} {'due':12}  {'lateness':>11}  {'node':7} attempt",
            flush=True,
        )

    def fire(self, entry: ledger.Entry) -> None:
        late_ms = (entry.at_us - entry.due_us) / 1000
        print(
            f"{clock(entry.at_us)}  order {entry.order:<3} {clock(entry.due_us)}  "
            f"{late_ms:8.1f} ms  {entry.node:7} {entry.attempt}",
            flush=True,
        )

    def table(self, rows: Iterable[tuple[str, str, str]]) -> None:
        print("-" * _WIDTH)
        for name, value, remark in rows:
            print(f"{name:22}{value:>12}    {remark}".rstrip())
        print("-" * _WIDTH, flush=True)


def clock(at_us: int) -> str:
    """The time of day in UTC, to the millisecond."""
    instant = datetime.fromtimestamp(at_us / 1_000_000, UTC)
    return instant.strftime("%H:%M:%S.%f")[:-3]


async def show_fires(screen: Screen, path: Path) -> None:
    """Show what is written to the ledger, until cancelled."""
    seen = 0
    while True:
        entries = ledger.read(path, seen)
        seen += len(entries)
        for entry in entries:
            if entry.what == ledger.STARTED:
                screen.fire(entry)
        await asyncio.sleep(_LOOK_S)
