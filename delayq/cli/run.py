"""`delayq run`: a node in this process, until it is told to leave."""

from __future__ import annotations

from typing import TypedDict, Unpack

import click

from delayq.cli.application import load_application
from delayq.cli.options import Invocation, dsn_option, pass_invocation
from delayq.cli.values import Kinds, Seconds


class RunOptions(TypedDict):
    """The options of `run`."""

    max_workers: int | None
    sweep_interval: float | None
    drain_timeout: float | None
    kinds: tuple[str, ...] | None
    name: str | None
