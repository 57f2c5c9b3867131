"""What is compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class System:
    """One column of the table."""

    name: str
    """of its adapter too"""
    title: str
    requirements: tuple[str, ...] = ()
    """of its own environment, pinned by constraints.txt; none: delayq's own"""
    python: tuple[int, int] = (3, 11)
    """the oldest that it runs on"""


SYSTEMS: Final = {
    system.name: system
    for system in (
        System("delayq", "delayq"),
        System("procrastinate", "procrastinate", ("procrastinate", "psycopg[binary]")),
        System("pgqueuer", "pgqueuer", ("pgqueuer", "asyncpg", "uvloop")),
        System("oban", "oban", ("oban", "psycopg[binary]"), python=(3, 12)),
        System("chancy", "chancy", ("chancy", "psycopg[binary]")),
        System("raw", "raw asyncpg"),
    )
}
