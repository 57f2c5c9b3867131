"""Runs a command in an event loop that a signal ends (see `early`)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

from delayq.cli.early import Signalled, first_signal

T = TypeVar("T")


def run_until_signal(command: Coroutine[object, object, T]) -> T:
    """Run a command in an event loop of its own; a signal cancels it and raises SystemExit."""
    with leaving_at_signals():
        return asyncio.run(command)


@contextmanager
def leaving_at_signals() -> Iterator[None]:
    """Turn the cancellation that a signal caused into its exit code."""
    try:
        yield
    except asyncio.CancelledError:
        number = first_signal()
        if number is None:
            raise
        raise Signalled(number) from None
