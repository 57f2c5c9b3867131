"""Runs everything on every system, over and over, and prints the comparison.

scripts/bench peers            the table, three runs, about an hour
scripts/bench peers --help     what can be chosen
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import asyncpg

from delayq.errors import DelayQError

from ..processes import BenchError
from ..server import connected, prepared
from .environments import made
from .measures import Outcome, measures_of
from .options import Options, Sizes, read_options
from .stage import Ready, described, staged
from .systems import SYSTEMS
from .table import Failed, Report

if TYPE_CHECKING:
    from ..options import Options as SuiteOptions
    from ..server import Ground
    from .measures import Measure

_TROUBLE = (BenchError, DelayQError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0; 1 if delayq itself failed; 2 if nothing could be run."""
    options = read_options(arguments)
    # Asked to stop, it stops its processes and its server, and tells what it has found by then.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    comparison = Comparison(options)
    status = 0
    try:
        asyncio.run(comparison.run())
    except _TROUBLE as error:
        print(f"scripts/bench peers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # An hour's findings are not thrown away.
        status = 130
    if (report := comparison.report) is None:
        return status or 2
    print(report.as_json() if options.json else report.as_text())
    return status or int(not report.complete)


class Comparison:
    """What is measured, and what was found so far."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._absent: dict[str, str] = {}
        self._ready: dict[str, Ready] = {}
        self.report: Report | None = None

    async def run(self) -> None:
        """Everything, `reps` times."""
        pythons = await self._environments()
        # It reads four of the suite's options, and these are the same four.
        async with prepared(cast("SuiteOptions", self._options.server)) as ground:
            if self._options.server.keep:
                _say(f"data and logs in {ground.folder.parent}")
            await self._describe(ground, pythons)
            self.report = await self._empty(ground)
            # Interleaved: a minute in which the machine is busy with something else hits one run
            # of each, not all runs of one.
            for run in range(1, self._options.reps + 1):
                for measure in self.report.measures:
                    await self._all(ground, measure, run)

    async def _environments(self) -> dict[str, Path]:
        pythons: dict[str, Path] = {}
        for name in self._options.systems:
            _say(f"environment of {name}")
            try:
                pythons[name] = await made(
                    SYSTEMS[name], self._options.environments, self._options.python
                )
            except _TROUBLE as error:
                self._miss(name, error)
        return pythons

    async def _describe(self, ground: Ground, pythons: dict[str, Path]) -> None:
        for name, python in pythons.items():
            try:
                self._ready[name] = await described(ground, SYSTEMS[name], python)
            except _TROUBLE as error:
                self._miss(name, error)

    def _miss(self, name: str, error: BaseException) -> None:
        self._absent[name] = f"not run: {_reason(error)}"
        _say(f"{name}: {self._absent[name]}")

    async def _empty(self, ground: Ground) -> Report:
        measures = measures_of(self._options.sizes)
        return Report(
            facts=await _facts(ground, self._options),
            systems=[SYSTEMS[name] for name in self._options.systems],
            described={name: ready.facts for name, ready in self._ready.items()},
            absent=self._absent,
            measures=[measures[name] for name in measures if name in self._options.only],
        )

    async def _all(self, ground: Ground, measure: Measure, run: int) -> None:
        """One run of one measure on every system that can do it."""
        able = [
            ready for ready in self._ready.values() if measure.name not in ready.facts["cannot"]
        ]
        if measure.together:
            await asyncio.gather(*(self._one(ground, measure, ready, run) for ready in able))
            return
        for ready in able:
            await self._one(ground, measure, ready, run)

    async def _one(self, ground: Ground, measure: Measure, ready: Ready, run: int) -> None:
        began = time.monotonic()
        found: Outcome | Failed
        try:
            # A connection of its own: several systems may be at work at the same time.
            async with (
                connected(ground.dsn) as admin,
                staged(replace(ground, admin=admin), ready) as stage,
            ):
                found = await measure.run(stage)
        except _TROUBLE as error:
            found = Failed(f"failed: {_reason(error)}")
        if self.report is not None:
            self.report.add(measure.name, ready.system.name, found)
        _say(
            f"run {run} {measure.name} {ready.system.name}: {_told(found)};"
            f" {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}"
        )


def _told(found: Outcome | Failed) -> str:
    if isinstance(found, Failed):
        return found.reason
    figures = [f"{key} {value:.4g}" for key, value in found.figures.items()]
    notes = [note for notes in found.notes.values() for note in notes]
    return ", ".join([*figures, *dict.fromkeys(notes)])


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__


async def _facts(ground: Ground, options: Options) -> dict[str, str]:
    server = await ground.differing()
    return {
        "postgresql": str(await ground.admin.fetchval("show server_version")),
        "server settings": ", ".join(f"{k}={v}" for k, v in server.items()) or "defaults",
        "machine": f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}",
        "sizes": _sizes(options.sizes),
        "runs": f"{options.reps}, interleaved; medians",
    }


def _sizes(sizes: Sizes) -> str:
    normal = Sizes()
    changed = [
        f"{size.name}={getattr(sizes, size.name):g}"
        for size in fields(Sizes)
        if getattr(sizes, size.name) != getattr(normal, size.name)
    ]
    return f"default but for {', '.join(changed)}" if changed else "default"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
