"""What may be chosen on the command line; every size has an option of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, cast

from .systems import SYSTEMS

NAMES: Final = (
    "throughput", "lateness", "burst", "backlog", "deep", "transaction", "crash", "schedule",
)  # fmt: skip
UNASKED: Final = ("deep",)
"""only measured when named: they take long"""
_ENDLESS: Final = float("inf")
ENVIRONMENTS: Final = Path(__file__).resolve().parents[3] / ".venv-peers"


def _size(default: float, about: str) -> float:
    size: float = field(default=default, metadata={"about": about})
    return size


def _count(default: int, about: str) -> int:
    count: int = field(default=default, metadata={"about": about})
    return count


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    throughput_tasks: int = _count(50_000, "no-op tasks that are due before the worker starts")
    limit_seconds: float = _size(30.0, "a worker that has not run them all by then is cut off")
    lateness_rate: int = _count(200, "tasks a second, due evenly")
    lateness_seconds: float = _size(10.0, "for how long")
    burst_tasks: int = _count(5_000, "tasks due at one instant")
    lead_seconds: float = _size(4.0, "from when timed tasks are all scheduled to the first")
    grace_seconds: float = _size(30.0, "a timed task that has not started by then is lost")
    backlog_tasks: int = _count(100_000, "tasks that are pending a day ahead")
    deep_tasks: int = _count(1_000_000, "the same, for `deep`")
    transaction_tasks: int = _count(50_000, "tasks that are run while a transaction is open")
    held_tasks: int = _count(5, "tasks that run when their worker is killed")
    crash_seconds: float = _size(420.0, "how long to wait until they run again")
    schedule_seconds: float = _size(3.0, "for how long single calls are counted")
    bulk_tasks: int = _count(20_000, "tasks to schedule by the bulk call")


@dataclass(frozen=True, slots=True)
class Server:
    """Where it is measured, in the words of `server.prepared`."""

    dsn: str | None
    pg_bin: Path | None
    keep: bool
    settings: dict[str, str]
    """of delayq: none but the defaults, here"""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, read."""

    reps: int
    only: tuple[str, ...]
    systems: tuple[str, ...]
    json: bool
    python: Path | None
    environments: Path
    server: Server
    sizes: Sizes


def read_options(arguments: Sequence[str]) -> Options:
    """Options from the command line; argparse ends the program on nonsense."""
    given = _parser().parse_args(arguments)
    return Options(
        reps=given.reps,
        only=given.only,
        systems=given.systems,
        json=given.json,
        python=given.python,
        environments=given.environments.absolute(),
        server=Server(given.dsn, given.pg_bin, given.keep, {}),
        sizes=Sizes(**{size.name: getattr(given, size.name) for size in fields(Sizes)}),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench peers",
        description="The same work on delayq and its rivals, each in an environment of its own.",
    )
    add = parser.add_argument
    usual = tuple(name for name in NAMES if name not in UNASKED)
    add("--reps", type=_at_least_one, default=3, help="runs of everything, interleaved (3)")
    add("--only", type=_names(NAMES), default=usual, metavar="NAME[,NAME]",
        help=f"of {', '.join(NAMES)} (all but {', '.join(UNASKED)})")  # fmt: skip
    add("--systems", type=_names(SYSTEMS), default=tuple(SYSTEMS), metavar="NAME[,NAME]",
        help=f"of {', '.join(SYSTEMS)}")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--python", type=Path, help="tried first as the Python of the rivals' environments")
    add("--environments", type=Path, default=ENVIRONMENTS, help="where those are kept")
    add("--dsn", help="a server of yours, where databases are made (default: one is started)")
    add("--pg-bin", type=Path, help="PostgreSQL binaries to start instead of those found")
    add("--keep", action="store_true", help="keep the folder with the server's data and the logs")
    _add_sizes(parser.add_argument_group("sizes"))
    return parser


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    for size in fields(Sizes):
        default = cast("float", size.default)
        group.add_argument(
            f"--{size.name.replace('_', '-')}",
            type=_above_zero(type(default)),
            default=default,
            help=f"{size.metadata['about']} ({default:g})",
            metavar="N",
        )


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _above_zero(read: Callable[[str], float]) -> Callable[[str], float]:
    def above_zero(text: str) -> float:
        number = read(text)
        if not 0 < number < _ENDLESS:
            raise argparse.ArgumentTypeError("must be above zero, and a number with an end")
        return number

    return above_zero


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(name.strip() for name in text.split(","))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; of {', '.join(known)}")
        return given

    return names
