"""What every command understands, and what it is told: `--json`, `--dsn`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from delayq import log
from delayq.settings import Settings, load_settings

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class Invocation:
    """How this command was called."""

    json: bool = False
    dsn: str | None = None

    def settings(self, **overrides: object) -> Settings:
        """The settings of the environment and `.env`, with what the command line says on top.

        From here on the process logs as they say, to standard error.
        """
        settings = load_settings(dsn=self.dsn, **overrides)
        log.configure(settings.log_level, settings.log_format)
        return settings


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)


def _remember(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def remember(ctx: click.Context, _param: click.Parameter, value: Any) -> None:
        if value:
            setattr(ctx.ensure_object(Invocation), name, value)

    return remember


def json_option(command: F) -> F:
    """`--json`, before or after the name of the command."""
    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_remember("json"),
        help="Answer with one JSON document on standard output.",
    )(command)


def dsn_option(command: F) -> F:
    """`--dsn`, before or after the name of the command."""
    return click.option(
        "--dsn",
        metavar="URL",
        expose_value=False,
        callback=_remember("dsn"),
        help="The database. Everybody on this computer can read it in the process list: "
        "prefer DELAYQ_DSN or .env.",
    )(command)


def shared_options(command: F) -> F:
    """The options of every command."""
    return json_option(dsn_option(command))


def limit_option(default: int) -> Callable[[F], F]:
    """`--limit`, for lists."""
    return click.option(
        "--limit",
        type=click.IntRange(1, 1_000),
        default=default,
        show_default=True,
        help="Rows at the most.",
    )
