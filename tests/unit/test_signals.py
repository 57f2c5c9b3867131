"""To whom SIGTERM and SIGINT go while a node runs, and afterwards."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from delayq.node import _signals_to


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_after_the_node_has_left_goes_to_whom_it_went_before(
    number: signal.Signals,
) -> None:
    """Not to the default, which kills: five presses of Ctrl-C come within 50 ms."""
    before: list[int] = []
    meanwhile = asyncio.Queue[signal.Signals]()
    kept = signal.signal(number, lambda came, _frame: before.append(came))
    try:
        with _signals_to(asyncio.get_running_loop(), meanwhile.put_nowait):
            os.kill(os.getpid(), number)
            async with asyncio.timeout(5):
                assert await meanwhile.get() is number
            assert before == []
        os.kill(os.getpid(), number)
        assert before == [number]
        assert meanwhile.empty()
    finally:
        signal.signal(number, kept)
