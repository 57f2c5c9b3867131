"""How late the event loop is: what a handler that blocks it costs all the others."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from delayq.clock import Clock
from delayq.metrics import Counters

_KEPT_S: Final = 60.0
_REPORT_EVERY_S: Final = 1.0
_MOST: Final = 1_200


class LoopLag:
    """Sleeps for those who look around now and then, and notes how much longer it took.

    It wakes nobody by itself: an idle node is to be idle. The counters carry the median, the
    99th percentile and the maximum of the last minute, in microseconds. asyncio waits in whole
    milliseconds, so about one is nothing.
    """

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._late: deque[tuple[int, int]] = deque(maxlen=_MOST)  # when, how late
        self._reported_us = 0

    async def sleep(self, seconds: float) -> None:
        """Sleep so long, and note what came on top."""
        due_us = self._clock.monotonic_us() + round(seconds * 1e6)
        await asyncio.sleep(seconds)
        now_us = self._clock.monotonic_us()
        self.note(now_us, now_us - due_us)
        if now_us - self._reported_us >= _REPORT_EVERY_S * 1e6:
            self._reported_us = now_us
            self.report()

    def note(self, now_us: int, late_us: int) -> None:
        """It was so late once. (uvloop may be a little early: that is on time.)"""
        self._late.append((now_us, max(0, late_us)))
        while self._late[0][0] < now_us - _KEPT_S * 1e6:
            self._late.popleft()

    def report(self) -> None:
        """Put what was noted into the counters."""
        late_us = sorted(late_us for _, late_us in self._late)
        if late_us:
            self._counters.loop_lag_p50_us = late_us[len(late_us) // 2]
            self._counters.loop_lag_p99_us = late_us[len(late_us) * 99 // 100]
            self._counters.loop_lag_max_us = late_us[-1]
