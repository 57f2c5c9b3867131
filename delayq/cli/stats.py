"""`delayq stats`: how the tasks fare, in figures that are bounded to read."""

from __future__ import annotations

import click

from delayq.cli.collect import Stats, collect
from delayq.cli.options import Invocation, pass_invocation, shared_options
from delayq.cli.output import answer
from delayq.cli.place import reports
from delayq.cli.signals import run_until_signal
from delayq.cli.stats_json import document
from delayq.cli.stats_text import show


@click.command("stats")
@shared_options
@pass_invocation
def stats(invocation: Invocation) -> None:
    """Show how the tasks fare: pending, due, running, dead, lateness, by kind and by node.

    Counting stops at 10,000 ("10000+") and big tables are estimated ("~1003000"). Lateness and
    run times are of the last hour, or of its newest tasks if it had very many; the answer says
    which.
    """
    found = run_until_signal(_collect(invocation))
    answer(invocation.json, document(found), lambda: show(found))


async def _collect(invocation: Invocation) -> Stats:
    async with reports(invocation) as store:
        return await collect(store)
