"""The command line."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Sequence
from typing import Never

from .words import Failed

TIMEOUT_S = 120.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        raise Failed(f"{message} (see --help)")


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for. Raises Failed for nonsense."""
    parser = _Parser(prog="rolling-restart", add_help=False, allow_abbrev=False)
    parser.add_argument("wanted", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--restart")
    parser.add_argument("--timeout", type=_seconds, default=TIMEOUT_S)
    parser.add_argument("--delayq", type=_program, default="delayq")
    parser.add_argument("--systemctl", type=_program, default="systemctl")
    options = parser.parse_intermixed_args(arguments)
    if not options.help and not options.wanted:
        parser.error("name the nodes")
    return options


def find(program: Sequence[str], option: str) -> None:
    """Raises Failed if there is no such program."""
    if shutil.which(program[0]) is None:
        raise Failed(f"there is no program {program[0]} on PATH; {option} names another")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError("no number of seconds up to a day")
    return seconds


def _program(text: str) -> list[str]:
    words = shlex.split(text)
    if not words:
        raise argparse.ArgumentTypeError("it is empty")
    return words
