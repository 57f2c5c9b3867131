"""What keeps the tables small: history by the day, ended idempotency keys, and the net under both.

Every statement is bounded, and a round is as many of them as it takes, for a bounded time; what is
left is for the next one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from delayq.log import log

if TYPE_CHECKING:
    from delayq.commons import Commons

_PARTITION_DAYS: Final = 7
_ROWS: Final = 2_000
_ROUND_US: Final = 10_000_000
"""Each half of a round, the net and the keys, gets so long."""
_WALK_EVERY_US: Final = 3_600_000_000
_BEGINNING: Final = ("", "")


class Upkeep:
    """The upkeep of one incarnation; every node does all of it, and none needs another's."""

    def __init__(self, commons: Commons) -> None:
        self._store = commons.store
        self._clock = commons.clock
        self._settings = commons.settings
        self._walked_to = _BEGINNING
        self._walk_from_us: int | None = None  # when the walk began; None: it may begin

    async def run(self) -> None:
        """One round."""
        await self.make_partitions()
        await self._store.drop_partitions(self._settings.history_days)
        await self._empty_net()
        await self._walk_keys()

    async def make_partitions(self) -> None:
        """A week ahead; one that cannot be made now is made later, the net holds meanwhile."""
        answers = await self._store.make_partitions(_PARTITION_DAYS)
        if "locked" in answers:
            log.bind(count=answers.count("locked")).warning("partitions.locked")

    async def _empty_net(self) -> None:
        until_us = self._clock.monotonic_us() + _ROUND_US
        while await self._store.prune_default(self._settings.history_days, _ROWS):
            if self._clock.monotonic_us() >= until_us:
                return
            await asyncio.sleep(0)

    async def _walk_keys(self) -> None:
        """On through the idempotency keys; round and round, once an hour at the most."""
        now_us = self._clock.monotonic_us()
        until_us = now_us + _ROUND_US
        if self._walked_to == _BEGINNING:
            if self._walk_from_us is not None and now_us < self._walk_from_us + _WALK_EVERY_US:
                return
            self._walk_from_us = now_us
        while self._clock.monotonic_us() < until_us:
            days = self._settings.idempotency_days
            walked_to = await self._store.prune_idempotency(days, self._walked_to, _ROWS)
            self._walked_to = walked_to or _BEGINNING
            if walked_to is None:
                return
            await asyncio.sleep(0)
