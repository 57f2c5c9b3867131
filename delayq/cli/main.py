"""The group of all commands, and how the process ends: with an exit code and at most one line."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import click

from delayq.cli.exits import EXIT_CODES, Exit, exit_for
from delayq.cli.options import Invocation, shared_options
from delayq.cli.text import one_line
from delayq.errors import DelayQError
from delayq.version import VERSION

_COMMANDS: Final = {
    "run": "run:run",
    "schedule": "tasks:schedule",
    "cancel": "tasks:cancel",
    "reschedule": "tasks:reschedule",
    "run-now": "tasks:run_now",
    "show": "lists:show",
    "list": "lists:list_tasks",
    "dead": "dead:dead",
    "nodes": "nodes:nodes",
    "drain": "nodes:drain",
    "pause": "nodes:pause",
    "resume": "nodes:resume",
    "stats": "stats:stats",
    "migrate": "migrate:migrate",
    "doctor": "doctor:doctor",
}
_PIPE_CLOSED: Final = 128 + 13
_EXTRA: Final = "Got unexpected extra argument"


class _Commands(click.Group):
    """The commands, each imported when it is called: a short one starts fast."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        place = _COMMANDS.get(name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        command = getattr(importlib.import_module(f"delayq.cli.{module}"), attribute)
        return cast("click.Command", command)


@click.group(
    cls=_Commands,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, "--version", message="delayq %(version)s")
@shared_options
def cli() -> None:
    """Do X in 5 minutes: delayed tasks that need nothing but PostgreSQL.

    The database is named by DELAYQ_DSN (or .env, or --dsn). Without one, delayq starts the
    embedded PostgreSQL of the project, if that is installed. --json and --dsn may stand before
    or after the command.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command; return its exit status. Errors are one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a narrow locale must not turn an answer into an error
            reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    except BrokenPipeError:
        # Whoever read has seen enough; the interpreter must not complain about it at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _run(arguments: Sequence[str]) -> int:
    try:
        # Not cli.main(): that turns a closed pipe into exit code 1, which means "no" here.
        with cli.make_context("delayq", list(arguments), obj=Invocation()) as ctx:
            status = cli.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as left:
        return int(left.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - a traceback may quote what must not be shown
        return _fail(error)
    return int(status or 0)


def _fail(error: Exception) -> int:
    """Say what is wrong on standard error; the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return Exit.USAGE
    code, message = exit_for(error), str(error)
    if isinstance(error, click.ClickException):
        code, message = Exit.USAGE, _usage(error)
    elif not isinstance(error, DelayQError):
        message = _mistake(error)
    click.echo(f"delayq: {one_line(message)}", err=True)
    return code


def _usage(error: click.ClickException) -> str:
    message = error.format_message()
    if message.startswith(_EXTRA):  # click would quote it, and it may be a piece of a payload
        message = "too many arguments; quote JSON for the shell"
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx else "delayq"
    return f"{message.rstrip('.')} (see `{path} --help`)"


def _mistake(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"a mistake in delayq, please report it: {type(error).__name__}{where}"
