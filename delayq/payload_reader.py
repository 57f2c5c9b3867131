"""Reads the payloads that were too long to come with their leases, for many attempts at a time.

While one page is on its way the next readers gather, so that a burst of medium payloads costs a
few round trips; pages are bounded in bytes. Trouble of the database is waited out for a while:
the handler has not begun, and must not be judged for it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from delayq.batching import Batcher
from delayq.errors import DelayQError, LeaseLost
from delayq.failures import is_worth_splitting
from delayq.log import log

if TYPE_CHECKING:
    from delayq.clock import Clock
    from delayq.lease import Lease
    from delayq.store import Store

_PAGE: Final = 500
_PAGE_BYTES: Final = 1024 * 1024
_WAITING_MOST: Final = 10_000
_PATIENCE_S: Final = 10.0
_RETRY_FIRST_S: Final = 0.05
_RETRY_LONGEST_S: Final = 1.0


class PayloadReader:
    """The payloads of the leases of one incarnation."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._pages: Batcher[Lease, str | None] = Batcher(
            self._page,
            max_size=_PAGE,
            max_waiting=_WAITING_MOST,
            unsplittable=lambda error: not is_worth_splitting(error),
        )

    async def read(self, lease: Lease) -> str:
        """The payload of a lease.

        Raises LeaseLost, or DatabaseError if it cannot be read, which takes up to ten seconds
        unless the server refuses this very row.
        """
        while True:
            payload = await self._pages.submit(lease)
            if payload is not None:
                return payload
            # the page was full before its turn came

    async def aclose(self) -> None:
        """Read nothing any more; whoever still waits gets DatabaseTimeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await self._pages.close()

    async def _page(self, leases: list[Lease]) -> list[str | Exception | None]:
        found = await self._insist(leases)
        return [
            found[lease.id]
            if lease.id in found
            else LeaseLost(f"task {lease.id} is no longer leased to this node")
            for lease in leases
        ]

    async def _insist(self, leases: list[Lease]) -> dict[int, str | None]:
        ids, tokens = [lease.id for lease in leases], [lease.token for lease in leases]
        give_up_us = self._clock.monotonic_us() + round(_PATIENCE_S * 1e6)
        wait_s = _RETRY_FIRST_S
        while True:
            try:
                return await self._store.payloads(ids, tokens, _PAGE_BYTES)
            except DelayQError as error:
                if is_worth_splitting(error) or self._clock.monotonic_us() >= give_up_us:
                    raise
                log.bind(error=str(error), count=len(ids)).warning("payload.retry")
            await asyncio.sleep(wait_s)
            wait_s = min(_RETRY_LONGEST_S, 2 * wait_s)
