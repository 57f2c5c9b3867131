"""How much a node leases beyond its free workers."""

from __future__ import annotations

import pytest

from delayq.clock import Clock
from delayq.pace import Pace

MS = 1_000


class Hands(Clock):
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_us = 1_000_000

    def monotonic_us(self) -> int:
        return self.now_us

    def boottime_us(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> Hands:
    return Hands()


def test_after_five_milliseconds_of_a_burst_as_many_may_wait_as_end_in_twenty(clock: Hands) -> None:
    pace = Pace(clock)
    pace.allowance(0)
    clock.now_us += 5 * MS
    assert pace.allowance(100) == 400


def test_handlers_that_end_in_waves_are_not_taken_for_fast_ones_again_and_again(
    clock: Hands,
) -> None:
    """A hundred workers whose handlers take half a second: a wave looks like a burst."""
    pace = Pace(clock)
    finished, given_back = 0, 0
    for _wave in range(4):
        pace.allowance(finished)
        clock.now_us += 5 * MS
        finished += 100
        waits = pace.allowance(finished)
        pace.progress(finished)
        clock.now_us += 120 * MS
        assert pace.stands_still(finished)
        given_back += waits
        clock.now_us += 375 * MS
    assert given_back < 500
