"""What all actors of one incarnation share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayq.clock import Clock, DatabaseClock
    from delayq.metrics import Counters
    from delayq.settings import Settings
    from delayq.store import Store


@dataclass(frozen=True, slots=True)
class Commons:
    """The store (which knows the incarnation's number), the clocks, the counters, the settings."""

    store: Store
    clock: Clock
    database_clock: DatabaseClock
    counters: Counters
    settings: Settings

    @property
    def node(self) -> int:
        """The incarnation."""
        return self.store.incarnation

    @property
    def sweep_us(self) -> int:
        """The sweep interval."""
        return round(self.settings.sweep_interval_s * 1e6)
