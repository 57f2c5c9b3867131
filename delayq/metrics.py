"""What a node counts about itself: plain integers, carried to the node table by each beat.

Percentiles are not kept here; they are computed from the history, which has every fire.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Since this incarnation began."""

    fired: int = 0
    """handlers started"""
    succeeded: int = 0
    retried: int = 0
    dead: int = 0
    missed: int = 0
    cancelled: int = 0
    snoozed: int = 0
    released: int = 0
    """leases given back: interrupted by shutdown, or never started"""
    leases_lost: int = 0
    adopted: int = 0
    """tasks taken over from dead nodes"""
    foreign: int = 0
    """overdue tasks found outside own buckets; near zero in a healthy cluster"""
    understudied: int = 0
    """tasks fired in place of their owner"""
    leased: int = 0
    missed_leases: int = 0
    """ids in lease batches that came back empty"""
    loop_lag_p50_us: int = 0
    """how late the event loop was in the last minute"""
    loop_lag_p99_us: int = 0
    loop_lag_max_us: int = 0

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        return asdict(self)
