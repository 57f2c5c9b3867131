"""`delayq doctor`: looks for what goes wrong in practice, and says what to do about it."""

from __future__ import annotations

import sys

import click

from delayq.cli.checks import Check, Limits, Status, worst
from delayq.cli.examine import examine
from delayq.cli.exits import Exit
from delayq.cli.options import Invocation, pass_invocation, shared_options
from delayq.cli.output import answer, write_line
from delayq.cli.signals import run_until_signal
from delayq.cli.text import neutral
from delayq.place import open_database

_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@shared_options
@pass_invocation
def doctor(invocation: Invocation) -> int:
    """Examine the database, the way to it, the schema, the nodes and the tasks.

    Each check is ok, warn or fail, with an advice. The exit code is 1 if one fails (3 if the
    database cannot be reached, 4 if it is the schema); warnings alone exit with 0.
    """
    found = run_until_signal(_examine(invocation))
    document = {"status": worst(found), "checks": [check.document() for check in found]}
    answer(invocation.json, document, lambda: _show(found))
    return _exit(found)


async def _examine(invocation: Invocation) -> list[Check]:
    settings = invocation.settings()
    async with open_database(settings) as place:
        return await examine(place, settings, Limits())


def _show(found: list[Check]) -> None:
    widest = max(len(check.name) for check in found)
    for check in found:
        status = click.style(f"{check.status:<4}", fg=_COLOURS[check.status])
        shown = status if sys.stdout.isatty() else f"{check.status:<4}"
        write_line(f"{shown}  {check.name:<{widest}}  {neutral(check.finding)}")
        if check.advice:
            write_line(f"{'':<4}  {'':<{widest}}  -> {neutral(check.advice)}")


def _exit(found: list[Check]) -> Exit:
    failed = {check.name for check in found if check.status == "fail"}
    if "connection" in failed:
        return Exit.DATABASE
    if failed == {"schema"}:
        return Exit.SCHEMA
    return Exit.NO if failed else Exit.OK
