"""Runs other programs. Ctrl-C at the terminal reaches us alone: we decide what becomes of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from .words import Failed

ANSWER_LIMIT_S = 60.0
_SPARED = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")


def answer(command: Sequence[str]) -> str:
    """What it prints. Raises Failed with the last thing it complained of if it fails."""
    try:
        done = subprocess.run(
            [*_SPARED, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=ANSWER_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"`{command[0]}` gives no answer: {type(error).__name__}") from None
    if done.returncode != 0:
        complaints = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise Failed(complaints[-1])
    return done.stdout


def start(command: str) -> subprocess.Popen[bytes]:
    """Let the shell begin with it. What it prints is no answer of ours, so it goes beside."""
    return subprocess.Popen([*_SPARED, "sh", "-c", command], stdout=sys.stderr)
