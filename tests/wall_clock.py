"""The wall clock of a test's own process, to be set: nothing in delayq may mind it."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, tzinfo

import pytest


class WallClock:
    """The machine's wall clock, wherever this process reads it for its jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        wall, real_ns = self, time.time_ns

        class Datetime(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Datetime:
                there = datetime.now(tz) + timedelta(seconds=wall.ahead_s)
                return cls.fromtimestamp(there.timestamp(), tz)

        for module in ("schedulers.base", "executors.base", "triggers.interval"):
            monkeypatch.setattr(f"apscheduler.{module}.datetime", Datetime)
        monkeypatch.setattr("delayq.maintenance.datetime", Datetime)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(wall.ahead_s * 1e9))
