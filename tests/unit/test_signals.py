"""To whom SIGTERM and SIGINT go while a node runs, and afterwards."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from delayq.process import _signals_to


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_after_the_node_has_left_goes_to_whom_it_went_before(
    number: signal.Signals,
) -> None:
    """Not to the default, which kills: five presses of Ctrl-C come within 50 ms."""
    before: list[int] = []
    meanwhile = asyncio.Queue[signal.Signals]()
    kept = signal.signal(number, lambda came, _frame: before.append(came))
    try:
        with _signals_to(meanwhile.put_nowait, lambda: 0):
            os.kill(os.getpid(), number)
            async with asyncio.timeout(5):
                assert await meanwhile.get() is number
            assert before == []
        os.kill(os.getpid(), number)
        assert before == [number]
        assert meanwhile.empty()
    finally:
        signal.signal(number, kept)


async def test_one_more_signal_after_impatience_leaves_with_the_status_that_was_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with _signals_to(lambda _number: None, lambda: 130):
            pass
        for number in kept:
            os.kill(os.getpid(), number)
        assert left == [130, 130]
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
