"""What is told of a loop that stands still, and that it turns again."""

from __future__ import annotations

from delayq.clock import Clock
from delayq.stalls import Stalls
from tests.conftest import Logged
from tests.helpers import wait_for


class Hand(Clock):
    """A clock that is moved by hand."""

    us = 1

    def boottime_us(self) -> int:
        return self.us


async def test_the_end_of_a_stall_is_told_although_the_loop_was_asked_again_meanwhile(
    logged: list[Logged],
) -> None:
    """The asking thread asks and looks in one go: the answer to that asking is not there yet."""
    clock = Hand()
    stalls = Stalls(clock, 1, 60_000_000, lambda _task: {})
    stalls.asks()
    clock.us += 2_000_000
    assert not stalls.look(0)
    await wait_for(lambda: _told(logged) == ["loop.blocked"], "the stall is told")
    clock.us += 1_000_000
    stalls.turned()
    stalls.asks()
    assert not stalls.look(0)
    await wait_for(lambda: _told(logged) == ["loop.blocked", "loop.turns_again"], "so is its end")
    assert logged[-1].fields["blocked_s"] == 3.0
    clock.us += 500_000
    assert not stalls.look(0)
    stalls.turned()
    assert not stalls.look(0)
    assert len(_told(logged)) == 2


def _told(logged: list[Logged]) -> list[str]:
    return [event.event for event in logged]
