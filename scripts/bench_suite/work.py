"""What handlers and bare timers do beside saying that they started."""

from __future__ import annotations

from time import thread_time


def spin(ms: float) -> None:
    """Use the processor for so long."""
    until = thread_time() + ms / 1000
    while thread_time() < until:
        pass
