"""`delayq run`: a node in this process, until it is told to leave."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from delayq.cli.application import load_application
from delayq.cli.options import Invocation, dsn_option, pass_invocation
from delayq.cli.signals import leaving_at_signals
from delayq.cli.values import Kinds, Seconds
from delayq.errors import InvalidArgument
from delayq.settings import Settings, load_settings

if TYPE_CHECKING:
    from delayq.app import DelayQ


class RunOptions(TypedDict):
    """The options of `run` that change settings of the node, by the names of those."""

    max_workers: int | None
    sweep_interval_s: float | None
    drain_timeout_s: float | None
    node_name: str | None


@click.command("run")
@click.argument("application", metavar="MODULE:APP")
@click.option(
    "-w", "--max-workers", type=click.IntRange(1, 10_000), help="Tasks run at once (default 100)."
)
@click.option(
    "-i",
    "--sweep-interval",
    "sweep_interval_s",
    type=Seconds(),
    help="How often timers are loaded: seconds, or 500ms (default 5).",
)
@click.option("--kinds", type=Kinds(), help="Serve only these kinds, separated by commas.")
@click.option("--name", "node_name", help="What people call this node (default: the host name).")
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=Seconds(),
    help="How long a shutdown lets tasks run: seconds, or 2m (default 30).",
)
@dsn_option
@pass_invocation
def run(
    invocation: Invocation,
    application: str,
    kinds: tuple[str, ...] | None,
    **options: Unpack[RunOptions],
) -> int:
    """Run a node for the application MODULE:APP, such as shop.tasks:dq, until it is told to leave.

    The first SIGTERM or SIGINT drains: no new task fires here, other nodes take over at once,
    what runs may finish for --drain-timeout; exit code 0. A second one stops at once; exit code
    143 or 130. In a container let `exec delayq run …` be the process that gets the signal.

    Options go before what the application says in its settings; those go before DELAYQ_….
    """
    invocation.settings()  # so that the import below already logs as it should
    if invocation.dsn is not None:
        os.environ["DELAYQ_DSN"] = invocation.dsn
    app = load_application(application)
    _check_database(app, invocation.dsn)
    settings = _settings(app.settings, options)
    with leaving_at_signals():
        return app.run(kinds=kinds, settings=settings)


def _check_database(app: DelayQ, dsn: str | None) -> None:
    chosen = app.settings.dsn
    if dsn is not None and (chosen is None or chosen.get_secret_value() != dsn):
        raise InvalidArgument("dsn", "the application names its own database; leave --dsn out")


def _settings(settings: Settings, options: RunOptions) -> Settings:
    """The application's settings with the options on top, checked again as a whole."""
    given = {name: value for name, value in options.items() if value is not None}
    most = options["max_workers"]
    if most is not None:
        given["min_workers"] = min(settings.min_workers, most)
    return load_settings(**(settings.model_dump() | given))
