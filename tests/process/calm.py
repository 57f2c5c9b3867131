"""Judges a promise in milliseconds as strictly as it was made, on a machine that others use too.

A bare timer beside the run tells how late the machine itself was in the same seconds. A run that
fails its promise on a calm machine fails the test. If the machine was late, the run says nothing,
and is done again; the bound is never widened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import FIGURES, Databases
from tests.helpers import connected
from tests.process.crew import Crew, crew

RUNS = 3


@dataclass(frozen=True, slots=True)
class Run:
    """What one run showed, in microseconds: how late, and how late a bare timer was meanwhile."""

    late_us: int
    machine_us: int
    told: str


async def keeps(
    run: Callable[[], Awaitable[Run]],
    *,
    within_us: int,
    calm_us: int,
    tell: Callable[[str, object], None],
) -> None:
    """Run until it is less than `within_us` late. Once more, up to three times in all, only if
    the machine itself was more than `calm_us` late. `tell` (`record_property`) is given the
    figures, for the summary of all tests."""
    for _ in range(RUNS):
        one = await run()
        tell(FIGURES, one.told)
        if one.late_us < within_us:
            return
        assert one.machine_us > calm_us, f"on a calm machine: {one.told}"
    raise AssertionError(f"not once in {RUNS} runs, none of them on a calm machine")


@asynccontextmanager
async def fresh_crew(databases: Databases, folder: Path) -> AsyncIterator[Crew]:
    """What each run needs anew: nodes with default settings, on a database of their own."""
    async with (
        databases() as dsn,
        connected(dsn) as conn,
        crew(conn, dsn, folder, short=False) as them,
    ):
        yield them
