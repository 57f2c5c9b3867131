"""The only source of time in Python, and the database's clock as seen from here.

Local wall clocks are never read. `DatabaseClock` bounds the database's clock from below by what
beats and other statements bring back, so that a timer that compares with it is never early,
whatever the latency of the network.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final

from delayq.errors import DatabaseUnavailable

STEP_US: Final = 50_000
"""A move of the offset by more than this, either way, is a step that others must hear of."""

_SAMPLES: Final = 15
_UNTOLD: Final = "the database has not told its time yet"
_BOOTTIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)
# A bound ages by a microsecond for every 20 ms (50 ppm). Without it the largest bound ever seen
# would win for ever, and a node whose clock runs a hair faster than the database's would come
# to be early by the latency of a request.
_AGING_US: Final = 20_000


class Clock:
    """The clocks of this machine, in integer microseconds. Tests replace it, and nothing else."""

    def monotonic_us(self) -> int:
        """A clock that never goes back; it may stand still while the machine is suspended."""
        return time.monotonic_ns() // 1_000

    def boottime_us(self) -> int:
        """A clock that never goes back and counts suspend, where the system has one."""
        if _BOOTTIME is None:
            return self.monotonic_us()
        return time.clock_gettime_ns(_BOOTTIME) // 1_000


class DatabaseClock:
    """A lower bound of the database's clock: never ahead of it, behind by about half a trip.

    `observe` may be called from any thread, and the callbacks of `on_step` run in the thread
    that observed. They get the change in microseconds and must not raise.

    True while the two clocks drift apart by less than 50 ppm. After the database's clock was set
    back the bound is ahead of it until the next sample; the guard in the lease holds meanwhile.
    """

    def __init__(self, clock: Clock) -> None:
        self.on_step: list[Callable[[int], None]] = []
        self.latest_us = 0
        """the latest reading that there was, also after the clock was set back"""
        self._clock = clock
        self._observing = Lock()
        # (offset, monotonic instant at which it was true): one tuple, so that a reader in
        # another thread never sees half of a change.
        self._bound: tuple[int, int] | None = None
        self._round_trips: deque[int] = deque(maxlen=_SAMPLES)

    @property
    def ready(self) -> bool:
        """True once there was a sample."""
        return self._bound is not None

    @property
    def offset_us(self) -> int:
        """What to add to the monotonic clock at this moment."""
        offset_us, at_us = self._known()
        return offset_us + _aged(at_us, self._clock.monotonic_us())

    @property
    def round_trip_us(self) -> int:
        """The median round trip of the last 15 samples; 0 before the first."""
        trips = sorted(self._round_trips.copy())
        return trips[len(trips) // 2] if trips else 0

    def now_us(self) -> int:
        """The instant by the database's clock, or a little before it.

        Raises `DatabaseUnavailable` before the first sample.
        """
        return self.at_us(self._clock.monotonic_us())

    def at_us(self, monotonic_us: int) -> int:
        """The same at a reading of the monotonic clock that was just taken."""
        bound = self._bound
        if bound is None:
            raise DatabaseUnavailable(_UNTOLD)
        return monotonic_us + bound[0] + (bound[1] - monotonic_us) // _AGING_US

    def observe(self, database_us: int, sent_us: int, received_us: int) -> None:
        """Take a sample: the database read `database_us` between two monotonic instants.

        The offset is at least `database_us - received_us` and at most `database_us - sent_us`.
        The largest lower bound counts, until it exceeds a new upper bound: then the database's
        clock was set back, and the sample starts afresh.
        """
        lower_us = database_us - received_us
        with self._observing:
            self._round_trips.append(received_us - sent_us)
            self.latest_us = max(self.latest_us, database_us)
            change_us = self._move(lower_us, database_us - sent_us, received_us)
        if abs(change_us) > STEP_US:
            for changed in self.on_step:
                changed(change_us)

    def _move(self, lower_us: int, upper_us: int, received_us: int) -> int:
        if self._bound is None:
            self._bound = (lower_us, received_us)
            return 0
        offset_us, at_us = self._bound
        present_us = offset_us + _aged(at_us, received_us)
        if lower_us >= present_us or present_us > upper_us:
            self._bound = (lower_us, received_us)
            return lower_us - present_us
        return 0

    def _known(self) -> tuple[int, int]:
        if self._bound is None:
            raise DatabaseUnavailable(_UNTOLD)
        return self._bound


def _aged(at_us: int, now_us: int) -> int:
    """By how much (zero or negative) a bound of `at_us` has aged; rounds away from early."""
    return (at_us - now_us) // _AGING_US
