"""Which event loop a node's process runs on, and how its lag is told."""

from __future__ import annotations

import asyncio
import sys

import pytest

from delayq.clock import Clock
from delayq.errors import InvalidSettings
from delayq.loop_lag import LoopLag
from delayq.loops import new_event_loop
from delayq.metrics import Counters
from delayq.process import run_process


def _kind(loop: asyncio.AbstractEventLoop) -> str:
    loop.close()
    return type(loop).__module__.partition(".")[0]


def test_without_uvloop_the_loop_is_asyncios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert _kind(new_event_loop()) == "asyncio"


def test_uvloop_that_is_asked_for_and_not_installed_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)

    async def never() -> int:
        raise AssertionError

    with pytest.raises(InvalidSettings, match=r"DELAYQ_EVENT_LOOP .* delayq\[fast\]"):
        run_process(never(), "uvloop")


def test_uvloop_is_taken_where_it_is_installed_unless_asyncio_is_asked_for() -> None:
    pytest.importorskip("uvloop", reason="an extra: delayq[fast]")
    assert _kind(new_event_loop()) == "uvloop"
    assert _kind(new_event_loop("uvloop")) == "uvloop"
    assert _kind(new_event_loop("asyncio")) == "asyncio"


def test_the_lag_of_the_loop_is_told_as_median_tail_and_maximum_of_the_last_minute() -> None:
    counters = Counters()
    lag = LoopLag(Clock(), counters)
    lag.report()
    assert counters.loop_lag_max_us == 0
    lag.note(1_000_000, 77_000)
    for late_us in range(1_000):  # the old one is forgotten; early is on time
        lag.note(62_000_000 + late_us, late_us - 100)
    lag.report()
    assert counters.loop_lag_p50_us == 400
    assert counters.loop_lag_p99_us == 890
    assert counters.loop_lag_max_us == 899


async def test_a_handler_that_blocks_the_loop_is_seen_in_its_lag() -> None:
    counters = Counters()
    clock = Clock()
    lag = LoopLag(clock, counters)
    watching = asyncio.create_task(lag.sleep(0.05))
    await asyncio.sleep(0)  # it has begun to wait
    until_us = clock.monotonic_us() + 120_000
    while clock.monotonic_us() < until_us:
        pass
    await watching
    assert counters.loop_lag_max_us >= 60_000
