"""Runs the scenarios, one after another and over again, and prints what came out."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

import asyncpg

from delayq import __version__
from delayq.errors import DelayQError

from .options import Options, read_options
from .processes import BenchError, TooLate
from .report import Report, lines_of
from .scenario import Sample, Scenario
from .scenarios import SCENARIOS
from .server import Ground, prepared
from .sizes import Sizes, all_sizes, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

TROUBLE: Final = (BenchError, DelayQError, asyncpg.PostgresError, OSError)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0, or with --check 1 if a target was missed; 2 if not all could be run."""
    options = read_options(arguments)
    try:
        report = asyncio.run(_measure(options))
    except TROUBLE as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(report.as_json() if options.json else report.as_text())
    return 2 if report.failures else int(options.check and not report.passed)


async def _measure(options: Options) -> Report:
    chosen = {name: SCENARIOS[name] for name in SCENARIOS if name in options.only}
    samples: dict[str, list[Sample]] = {name: [] for name in chosen}
    failures: list[str] = []
    async with prepared(options) as ground:
        if options.keep:
            _say(f"data and logs in {ground.folder.parent}")
        facts = await _facts(ground, options)
        # Interleaved: a minute in which the machine is busy with something else hits one run of
        # each, not all runs of one.
        for run in range(1, options.reps + 1):
            for name, scenario in chosen.items():
                try:
                    samples[name].append(await _one(ground, scenario, options.sizes, run))
                except TROUBLE as error:
                    # what the others found in an hour is not to be lost for it
                    failures.append(f"{name}, run {run}: {error}")
                    _say(f"FAILED {failures[-1]}")
    figures = {name: scenario.figures_at(options.sizes) for name, scenario in chosen.items()}
    return Report(facts, chosen, figures, samples, failures)


async def _one(ground: Ground, scenario: Scenario, sizes: Sizes, run: int) -> Sample:
    began = time.monotonic()
    sample = await _patiently(ground, scenario, sizes)
    found = ", ".join(
        f"{line.figure.key} {line.ours[0]:.4g}"
        + ("" if line.figure.alone else f" (raw {line.raw[0]:.4g})")
        for line in lines_of(scenario.figures_at(sizes), [sample])
    )
    load = os.getloadavg()[0]
    _say(f"run {run} {scenario.name}: {found}; {time.monotonic() - began:.0f} s, load {load:.1f}")
    return sample


async def _patiently(ground: Ground, scenario: Scenario, sizes: Sizes) -> Sample:
    """On a busy machine scheduling may take longer than thought: once more, further ahead."""
    for further in (1, 2, 4):
        try:
            return await scenario.run(
                ground, replace(sizes, lead_seconds=further * sizes.lead_seconds)
            )
        except TooLate:
            _say(f"{scenario.name}: scheduling took longer than the lead")
    return await scenario.run(ground, replace(sizes, lead_seconds=8 * sizes.lead_seconds))


async def _facts(ground: Ground, options: Options) -> dict[str, str]:
    server = await ground.differing()
    return {
        "delayq": f"{__version__}, {_settings(options.settings)}",
        "python": f"{platform.python_version()}, asyncpg {asyncpg.__version__}, {_uvloop()}",
        "postgresql": str(await ground.admin.fetchval("show server_version")),
        "server settings": ", ".join(f"{k}={v}" for k, v in server.items()) or "defaults",
        "machine": f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}",
        "sizes": _sizes(options.sizes),
        "runs": str(options.reps),
    }


def _settings(settings: dict[str, str]) -> str:
    changed = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"default settings but for {changed}" if changed else "default settings and logging"


def _uvloop() -> str:
    try:
        return f"uvloop {version('uvloop')}"
    except PackageNotFoundError:
        return "no uvloop"


def _sizes(sizes: Sizes) -> str:
    changed = [
        f"{size.name}={text_of(getattr(sizes, size.name))}"
        for size in all_sizes()
        if getattr(sizes, size.name) != size.default
    ]
    return f"default but for {', '.join(changed)}" if changed else "default"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
