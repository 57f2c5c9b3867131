"""What may be chosen on the command line; every size has an option of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from .scenarios import SCENARIOS


def _size(default: float, about: str) -> float:
    size: float = field(default=default, metadata={"about": about})
    return size


def _count(default: int, about: str) -> int:
    count: int = field(default=default, metadata={"about": about})
    return count


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; the defaults are those of the stated targets."""

    throughput_tasks: int = _count(50_000, "no-op tasks that are due before the worker starts")
    lateness_rate: int = _count(200, "tasks a second, due evenly")
    lateness_seconds: float = _size(10.0, "for how long")
    burst_tasks: int = _count(5_000, "tasks due at one instant")
    lone_tasks: int = _count(100, "lone tasks, one after another")
    lone_spacing_seconds: float = _size(0.1, "between two of them")
    lead_seconds: float = _size(4.0, "how far ahead timed tasks are scheduled")
    schedule_seconds: float = _size(2.0, "for how long calls are counted")
    cancel_tasks: int = _count(2_000, "tasks to cancel in each of the two ways")
    callers: int = _count(50, "concurrent callers that schedule and cancel")
    idle_nodes: int = _count(3, "nodes that idle")
    idle_pending: int = _count(100_000, "tasks that are pending an hour ahead")
    idle_seconds: float = _size(30.0, "for how long statements are counted")


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
    sizes = Sizes(**{size.name: getattr(given, size.name) for size in fields(Sizes)})
    return Options(
        reps=given.reps,
        only=tuple(given.only),
        json=given.json,
        check=given.check,
        dsn=given.dsn,
        pg_bin=given.pg_bin,
        keep=given.keep,
        settings=dict(given.set),
        sizes=sizes,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures delayq, each figure beside plain asyncpg or asyncio in the same run.",
    )
    add = parser.add_argument
    add("--reps", type=_at_least_one, default=3, help="runs of each scenario, interleaved (3)")
    add("--only", type=_names, default=tuple(SCENARIOS), metavar="NAME[,NAME]",
        help=f"of {', '.join(SCENARIOS)}")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--check", action="store_true", help="exit 1 if a target is missed or a task is lost")
    add("--dsn", help="a server of yours, where databases are made (default: one is started)")
    add("--pg-bin", type=Path, help="PostgreSQL binaries to start instead of those found")
    add("--keep", action="store_true", help="keep the folder with the server's data and the logs")
    add("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of delayq that is not to be the default, say max_workers=10")  # fmt: skip
    sizes = parser.add_argument_group("sizes")
    for size in fields(Sizes):
        kind = type(size.default)
        about = f"{size.metadata['about']} ({size.default:g})"
        sizes.add_argument(
            f"--{size.name.replace('_', '-')}", type=kind, default=size.default, help=about,
            metavar="N",
        )  # fmt: skip
    return parser


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
