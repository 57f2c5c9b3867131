"""Which peers are dead, told without trusting any clock but the judge's own.

A peer is condemned only if its row did not change for a whole TTL during which the judge's own
beats got through. What `expires_at` says is never compared with a clock, only with what it said
before: so an outage of the database, a failover or a step of its clock buries nobody, and a row
dated in the future hides no corpse.

The verdict is an opinion. It is carried out by a statement that re-judges the row it updates
(`expires_at` unchanged), which waits for a beat in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Seen:
    expires_at_us: int
    since_us: int
    ttl_us: int


class Judge:
    """The record of one node about its peers. All instants by its own boottime clock.

    `ttl_us` is the lease TTL. A gap of more than half of it between two own good beats (three
    fit into one TTL) counts as an outage even if no beat failed: the judge itself slept.
    """

    def __init__(self, ttl_us: int) -> None:
        self._ttl_us = ttl_us
        self._longest_gap_us = ttl_us // 2
        self._last_good_us: int | None = None
        self._peers: dict[int, _Seen] = {}

    def observe(
        self,
        now_us: int,
        beat_ok: bool,
        peers: Mapping[int, int],
        ttls_us: Mapping[int, int] | None = None,
    ) -> None:
        """Note how an own beat ended, and what it read of the other nodes.

        `peers` maps incarnations to `expires_at` as read (ignored if the beat failed); those
        that are gone from it are forgotten. `ttls_us` are their own TTLs: one that beats more
        slowly than this node (a rolling change of the setting) is given its own time. A failed
        beat restarts every count.
        """
        if not beat_ok:
            self._peers.clear()
            return
        known = self._peers if self._fresh(now_us) else {}
        self._peers = {
            peer: _unchanged(known.get(peer), expires_at_us)
            or _Seen(expires_at_us, now_us, max(self._ttl_us, (ttls_us or {}).get(peer, 0)))
            for peer, expires_at_us in peers.items()
        }
        self._last_good_us = now_us

    def to_bury(self, now_us: int) -> list[int]:
        """The peers to bury: at the last good beat their rows had not changed for a TTL.

        Empty if that beat is itself too old to act on. A peer stays on the list until a beat
        finds it changed or gone, so a burial that failed is tried again.
        """
        if not self._fresh(now_us):
            return []
        return [peer for peer, seen in self._peers.items() if self._silent(seen)]

    def next_look_us(self) -> int | None:
        """When the next peer's time is up, or None: beat then, observe, and ask `to_bury`.

        Peers that are condemned already are left out: they wait for the next ordinary beat.
        """
        return min(
            (
                seen.since_us + seen.ttl_us
                for seen in self._peers.values()
                if not self._silent(seen)
            ),
            default=None,
        )

    def _fresh(self, now_us: int) -> bool:
        last = self._last_good_us
        return last is not None and now_us - last <= self._longest_gap_us

    def _silent(self, seen: _Seen) -> bool:
        last = self._last_good_us
        return last is not None and last - seen.since_us >= seen.ttl_us


def _unchanged(seen: _Seen | None, expires_at_us: int) -> _Seen | None:
    if seen is not None and seen.expires_at_us == expires_at_us:
        return seen
    return None
