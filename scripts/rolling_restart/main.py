"""What is said in the end, and with which status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .interruption import Interruption
from .nodes import Watch
from .options import find, read
from .places import Place, named, units
from .roll import Roll
from .words import Failed, Interrupted, several, shown


def main(arguments: Sequence[str], usage: str) -> int:
    """Do it; the exit status."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a narrow locale must not end it half-way
            reconfigure(errors="backslashreplace")
    try:
        options = read(arguments)
        if options.help:
            print(usage.strip())
            return 0
        return _roll(options)
    except Failed as refusal:
        _complain(f"nothing was done: {refusal}")
        return 2


def _roll(options: argparse.Namespace) -> int:
    interruption = Interruption(_complain)
    roll: Roll | None = None
    try:
        watch = Watch(options.delayq)
        roll = Roll(watch, _places(options, watch), options.timeout, interruption, _say)
        roll.run()
    except Failed as failure:
        if roll is None or not (roll.done or roll.at_hand):
            raise
        _complain(f"{_where(roll)}: {failure}. {_how_far(roll)}")
        return 1
    except Interrupted as signalled:
        _complain(f"{_where(roll)}: interrupted. {_how_far(roll)}" if roll else "interrupted")
        return 128 + signalled.number
    return 0


def _places(options: argparse.Namespace, watch: Watch) -> list[Place]:
    find(options.delayq, "--delayq")
    watch.look()
    if options.restart is not None:
        return named(options.wanted, options.restart, watch.nodes.values())
    find(options.systemctl, "--systemctl")
    return units(options.wanted, options.systemctl)


def _where(roll: Roll) -> str:
    if roll.at_hand is not None:
        return f"stopped at {shown(roll.at_hand.name)}"
    return f"stopped after {shown(roll.done[-1].name)}" if roll.done else "stopped"


def _how_far(roll: Roll) -> str:
    """What has become of each."""
    told = [f"restarted: {_names(roll.done)}", f"not touched: {_names(roll.left)}"]
    if roll.at_hand is not None:
        told.insert(0, roll.at_hand.advice)
    text = "; ".join(told)
    return text[0].upper() + text[1:]


def _names(places: Sequence[Place]) -> str:
    return several([place.name for place in places], most=1_000) or "none"


def _say(text: str) -> None:
    print(text, flush=True)


def _complain(text: str) -> None:
    print(f"rolling-restart: {text}", file=sys.stderr, flush=True)
