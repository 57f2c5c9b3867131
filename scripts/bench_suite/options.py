"""What may be chosen on the command line; every size has an option of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .scenarios import SCENARIOS
from .sizes import Size, Sizes, all_sizes


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, read."""

    reps: int
    only: tuple[str, ...]
    json: bool
    check: bool
    dsn: str | None
    pg_bin: Path | None
    keep: bool
    settings: dict[str, str]
    """DELAYQ_ variables for the workers and producers, beside the DSN"""
    sizes: Sizes


def read_options(arguments: Sequence[str]) -> Options:
    """Options from the command line; argparse ends the program on nonsense."""
    given = _parser().parse_args(arguments)
    chosen: dict[str, Any] = {
        size.name: size.chosen(getattr(given, size.name), full=given.full) for size in all_sizes()
    }
    names = tuple(name for name, scenario in SCENARIOS.items() if given.full or scenario.brief)
    return Options(
        reps=given.reps,
        only=given.only or names,
        json=given.json,
        check=given.check,
        dsn=given.dsn,
        pg_bin=given.pg_bin,
        keep=given.keep,
        settings=dict(given.set),
        sizes=Sizes(**chosen),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures delayq, each figure beside plain asyncpg or asyncio in the same run.",
    )
    add = parser.add_argument
    add("--reps", type=_at_least_one, default=3, help="runs of each scenario, interleaved (3)")
    later = [name for name, scenario in SCENARIOS.items() if not scenario.brief]
    add("--only", type=_names, metavar="NAME[,NAME]",
        help=f"of {', '.join(SCENARIOS)} (all but {', '.join(later)})")  # fmt: skip
    add("--full", action="store_true",
        help="all, at the sizes of the stated targets: 40 minutes, and 12 GB of disk")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--check", action="store_true", help="exit 1 if a target is missed or a task is lost")
    add("--dsn", help="a server of yours, where databases are made (default: one is started)")
    add("--pg-bin", type=Path, help="PostgreSQL binaries to start instead of those found")
    add("--keep", action="store_true", help="keep the folder with the server's data and the logs")
    add("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of delayq that is not to be the default, say max_workers=10")  # fmt: skip
    sizes = parser.add_argument_group("sizes (in brackets the default; with --full)")
    for size in all_sizes():
        sizes.add_argument(
            f"--{size.name.replace('_', '-')}", type=_reader(size), help=size.told, metavar="N"
        )
    return parser


def _reader(size: Size) -> Callable[[str], object]:
    """What reads the option of a size."""
    return _counts if isinstance(size.default, tuple) else type(size.default)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(number) for number in text.split(","))
    if list(counts) != sorted(set(counts)) or counts[0] < 0:
        raise argparse.ArgumentTypeError("must be numbers, the smallest first, say 0,1000")
    return counts


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no scenario {unknown[0]!r}; of {', '.join(SCENARIOS)}")
    return names


def _setting(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not name.isidentifier():
        raise argparse.ArgumentTypeError("must be NAME=VALUE, say max_workers=10")
    return f"DELAYQ_{name.upper()}", value
