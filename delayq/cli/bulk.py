"""The verbs about every live task of a kind whose key begins with a prefix."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Any, Final, TypeVar

import click

from delayq.cli.exits import Exit
from delayq.cli.options import Invocation
from delayq.cli.tally import Tally, exit_of, report

F = TypeVar("F", bound=Callable[..., Any])

_NOTHING: Final = "no live task has such a key"


def prefix_option(command: F) -> F:
    """`--key-prefix`."""
    return click.option(
        "--key-prefix",
        metavar="TEXT",
        help="Name every live task of --kind whose key begins with this text.",
    )(command)


def check_prefix_given(id: int | None, kind: str | None, key: str | None) -> str:
    """The kind that goes with a prefix; a usage error if the tasks are named in other ways too."""
    if kind is None or id is not None or key is not None:
        raise click.UsageError("--key-prefix goes with --kind, and without an ID or --key")
    return kind


def say_all(invocation: Invocation, answers: Mapping[int, StrEnum], good: Collection[str]) -> Exit:
    """Give the answers for all of them. Exit code 1 if one was not good, or there was none."""
    tally = Tally()
    tally.add(answers)
    report(invocation, tally, good, _NOTHING)
    return exit_of(tally, good) if answers else Exit.NO
