"""How a life begins: connected and registered first, then listening and loaded, then active."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from delayq.database import is_transient
from delayq.errors import DatabaseError, DelayQError, InvalidSettings
from delayq.log import log
from delayq.version import VERSION

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.lease import Lease
    from delayq.membership import Membership
    from delayq.news import Newsroom
    from delayq.upkeep import Upkeep
    from delayq.worker_pool import WorkerPool

T = TypeVar("T")

_JOIN_S: Final = 5.0
"""Steps of joining that fail in passing are tried again for so long."""
_LISTEN_S: Final = 10.0
"""So long a node that could take its share waits until it is heard by LISTEN."""
_HINT_SHARE: Final = 3


class Joining:
    """The beginning of one incarnation. `draining` tells whether it was asked to leave already."""

    def __init__(
        self,
        commons: Commons,
        kinds: Sequence[str],
        membership: Membership,
        pool: WorkerPool[Lease],
        upkeep: Upkeep,
        news: Newsroom,
        draining: Callable[[], bool],
    ) -> None:
        self._store = commons.store
        self._clock = commons.clock
        self._database_clock = commons.database_clock
        self._settings = commons.settings
        self._kinds = list(kinds)
        self._membership = membership
        self._pool = pool
        self._upkeep = upkeep
        self._news = news
        self._draining = draining

    async def join(self) -> None:
        """Connect, write this node's row and beat for it. Raises `DelayQError` if it cannot."""
        await self._retried("connect", self._store.open)
        self._check_sweeps(await self._retried("horizon", self._store.hint_horizon_us))
        # many nodes may start at once: they get in each other's way here, and only here
        await self._retried("partitions", self._upkeep.make_partitions)
        await self._retried("clock", self._see_time)
        sent_boot_us = self._clock.boottime_us()
        await self._retried("register", self._register)
        self._membership.registered(sent_boot_us)
        self._membership.start()
        self._pool.open()

    async def take_share(self) -> None:
        """Listen first, load the window, then become active."""
        await self._news.first()
        await self._news.listens(_LISTEN_S)
        await self._insist("rank", self._news.take_up)
        if await self._insist("activate", self._store.activate):
            log.bind(node=self._store.incarnation, kinds=len(self._kinds)).info("node.active")
        self._membership.beat_soon()

    def _check_sweeps(self, horizon_us: int) -> None:
        if self._settings.sweep_interval_s * 1e6 * _HINT_SHARE > horizon_us:
            raise InvalidSettings(
                f"DELAYQ_SWEEP_INTERVAL_S must be at most {horizon_us / 1e6 / _HINT_SHARE:g}: a "
                "third of the database's hint horizon (delayq.hint_horizon()), or tasks would "
                "be found too late"
            )

    async def _see_time(self) -> None:
        sent_us = self._clock.monotonic_us()
        database_us = await self._store.clock_us()
        self._database_clock.observe(database_us, sent_us, self._clock.monotonic_us())

    async def _register(self) -> None:
        settings = self._settings
        await self._store.register(
            settings.node_name, socket.gethostname(), os.getpid(), VERSION, self._kinds,
            round(settings.lease_ttl_s * 1000),
        )  # fmt: skip

    async def _retried(self, step: str, call: Callable[[], Awaitable[T]]) -> T:
        """Again for a few seconds, as long as what is in the way may pass."""
        until_us = self._clock.monotonic_us() + round(_JOIN_S * 1e6)
        wait_s = 0.1
        while True:
            try:
                return await call()
            except DelayQError as error:
                late = self._clock.monotonic_us() >= until_us
                if late or self._draining() or not is_transient(error):
                    raise
                log.bind(step=step, error=str(error)).warning("node.step_retry")
            await asyncio.sleep(wait_s * (0.5 + random.random()))
            wait_s = min(1.0, 2 * wait_s)

    async def _insist(self, step: str, call: Callable[[], Awaitable[T]]) -> T:
        """Again for as long as it is the database that is in the way: this node has a row."""
        while True:
            try:
                return await call()
            except DelayQError as error:
                if not (isinstance(error, DatabaseError) or is_transient(error)):
                    raise
                log.bind(step=step, error=str(error)).warning("node.step_retry")
                await asyncio.sleep(0.5)
