"""What a node hears about its peers and from the channel, and what it makes of it.

Whoever hears something only notes it. `follow` turns what was noted into ranks and scans, one at a
time; and nothing is followed before the node is active.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from delayq.errors import DelayQError
from delayq.log import log
from delayq.model import NodeState
from delayq.ranks import ranks

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.maintenance import Maintenance
    from delayq.membership import Membership, News
    from delayq.orphans import Orphanage
    from delayq.timer_manager import TimerManager


class Newsroom:
    """The news of one incarnation. `follow` is its loop, from when `active` is set."""

    def __init__(
        self,
        commons: Commons,
        manager: TimerManager,
        orphans: Orphanage,
        membership: Membership,
        maintenance: Maintenance,
        request_drain: Callable[[], object],
        active: asyncio.Event,
    ) -> None:
        self._node = commons.node
        self._sweep_us = commons.sweep_us
        self._clock = commons.clock
        self._database_clock = commons.database_clock
        self._manager = manager
        self._orphans = orphans
        self._membership = membership
        self._maintenance = maintenance
        self._request_drain = request_drain
        self._active = active
        self._last: News | None = None
        self._came = asyncio.Event()  # something to follow
        self._first = asyncio.Event()
        self._listening = asyncio.Event()
        self._listens_late = False
        self._doubted_us: int | None = None  # when a garbled hint last led to a scan
        self._scan_from_us: int | None = None

    # --- what a beat brings --------------------------------------------------------------------

    def hear(self, news: News) -> None:
        """A beat got through."""
        if self._last is None:
            # the clock may have been set back before this node came, and all who saw it be dead
            self._orphans.reach(news.latest_us)
        self._last = news
        self._came.set()
        self._first.set()
        gone = self._orphans.alive - news.nodes or set(news.dead) - set(self._orphans.dead)
        self._orphans.alive = news.nodes
        self._orphans.dead = news.dead
        if gone:
            self._maintenance.run_now("orphans")  # it may have left something
        self._maintenance.check_wall_clock()
        if news.state is NodeState.DRAINING:
            self._request_drain()

    def hear_burials(self, buried: list[int]) -> None:
        """This node just buried these peers."""
        # the news of that very beat still counted them among the living
        self._orphans.alive -= frozenset(buried)
        self._orphans.dead += tuple(buried)
        self._membership.beat_soon()
        self._maintenance.run_now("orphans")

    async def first(self) -> None:
        """Return once the first beat got through."""
        await self._first.wait()

    # --- what the channel says -----------------------------------------------------------------

    def hear_membership(self, verb: str, node: int) -> None:
        """A node joins, leaves or is asked to drain: the next beat tells whether that is true."""
        if node != self._node or verb == "drain":
            self._membership.beat_soon()

    def hear_listening(self) -> None:
        """From now on hints are heard (again)."""
        if self._listening.is_set() or self._listens_late:
            self.scan_soon(0)  # after a gap: read everything again
        self._listening.set()

    def hear_garbled(self) -> None:
        """Look at what is due about now; once a sweep at the most, which finds it all the same."""
        now_us = self._clock.monotonic_us()
        if self._doubted_us is None or now_us - self._doubted_us >= self._sweep_us:
            self._doubted_us = now_us
            self.scan_soon(self._database_clock.now_us() - 2 * self._sweep_us)

    def scan_soon(self, from_us: int) -> None:
        """There is something to read from this instant on."""
        known_us = self._scan_from_us
        self._scan_from_us = from_us if known_us is None else min(from_us, known_us)
        self._came.set()

    async def listens(self, within_s: float) -> None:
        """Return once hints are heard, or after so long without them."""
        try:
            async with asyncio.timeout(within_s):
                await self._listening.wait()
        except TimeoutError:
            self._listens_late = True
            log.warning("listen.late")  # hints only: the sweeps find everything

    # --- what follows from it ------------------------------------------------------------------

    async def follow(self) -> None:
        """Turn what was heard into ranks and scans, one at a time; loops until cancelled."""
        await self._active.wait()
        while True:
            await self._came.wait()
            self._came.clear()
            try:
                await self.take_up()
                from_us, self._scan_from_us = self._scan_from_us, None
                if from_us is not None:
                    await self._manager.rescan_from(from_us)
            except DelayQError as error:
                log.bind(error=str(error)).warning("news.retry")
                self._scan_from_us = 0
                await asyncio.sleep(0.5)
                self._came.set()

    async def take_up(self) -> None:
        """Act on the last news: what is paused before any load, or it would fire once more."""
        if self._last is not None:
            await self._manager.serve(self._last.paused)
            await self._rank(self._last)

    async def _rank(self, news: News) -> None:
        """Ranks among the active nodes, this one among them: it loads before it is active."""
        served = self._manager.served
        nodes = dict(news.active)
        nodes[self._node] = served
        roles = ranks(nodes, served, self._node)
        if roles != self._manager.roles:
            await self._manager.adjust(roles)
