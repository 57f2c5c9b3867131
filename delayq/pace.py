"""How fast a node is just now: how much to lease, and how early.

Handlers that take no time would leave the database idle while they run, if leases were taken
only for workers that are free. So some leased tasks may wait for a worker: as many as finish
within 20 ms at the present pace. If the pace was a mistake (the handlers turn out to be slow) they
are given back.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from delayq.clock import Clock

_WAIT_US: Final = 20_000
_LOOK_US: Final = 5_000
"""The pace is that of so long: a burst is taken in large batches a moment after it began."""
_CAREFUL_US: Final = 2_000_000
"""After a mistake the pace is that of 100 ms for so long: handlers that take as long as each other
end all at once, and then for a while none does."""
_STILL_US: Final = 100_000
_EARLIEST_US: Final = 5_000
_COARSE_US: Final = 1_000
"""Timers of the event loop go off up to this late: it waits in whole milliseconds."""
_SMALL_BATCH: Final = 8
_TRIPS: Final = 15


class Pace:
    """Measured from what finished and how long leases took. For one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._trips: deque[int] = deque(maxlen=_TRIPS)
        self.trip_us = 0
        """how long before T a small lease is sent: its median round trip, and what the timer that
        sends it may be late; bounded"""
        self._mark = (0, 0)
        self._rate = 0.0  # finished a microsecond
        self._still = (0, 0)
        self._careful_until_us = 0

    def allowance(self, finished: int) -> int:
        """How many leased tasks may wait for a worker, given how many have finished so far."""
        now_us = self._clock.monotonic_us()
        before, at_us = self._mark
        if now_us - at_us >= (_STILL_US if now_us < self._careful_until_us else _LOOK_US):
            self._rate = (finished - before) / (now_us - at_us)
            self._mark = (finished, now_us)
        return int(self._rate * _WAIT_US)

    def leased(self, count: int, trip_us: int) -> None:
        """A lease of so many took so long."""
        if count <= _SMALL_BATCH:
            self._trips.append(trip_us)
            median_us = sorted(self._trips)[len(self._trips) // 2]
            self.trip_us = min(_EARLIEST_US, median_us + _COARSE_US)

    def progress(self, finished: int) -> None:
        """Leased tasks begin to wait."""
        self._still = (finished, self._clock.monotonic_us())

    def stands_still(self, finished: int) -> bool:
        """True if nothing has finished for 100 ms while leased tasks wait."""
        before, at_us = self._still
        if finished != before:
            self.progress(finished)
            return False
        if self._clock.monotonic_us() - at_us < _STILL_US:
            return False
        self._rate = 0.0
        self._careful_until_us = self._clock.monotonic_us() + _CAREFUL_US
        return True
