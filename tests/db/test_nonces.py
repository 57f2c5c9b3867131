"""The nonces of leases: nobody can know them, and no two nodes choose the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.nodes import Application, ended, life, schedule
from tests.rooms import swap

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings


async def test_the_nonces_of_an_application_that_seeds_its_random_numbers_are_not_to_be_known(
    conn: Connection, settings: Settings
) -> None:
    """With one seed on all nodes, whoever lost a lease could hold the token of the next one."""
    application, nonces = Application(settings), list[int]()

    @application.task
    async def mail() -> None:
        pass

    async with application.node() as node:

        async def seen(ids: list[int], nonce: int, *rest: Any) -> Any:
            nonces.append(nonce)
            return await real(ids, nonce, *rest)

        real = swap(life(node)._store, "lease", seen)
        state = random.getstate()
        random.seed(7)
        foreseen = [random.getrandbits(63) - (1 << 62) for _ in range(100)]
        random.seed(7)
        try:
            await ended(conn, await schedule(conn, "mail"))
        finally:
            random.setstate(state)
    assert nonces
    assert not set(nonces) & set(foreseen)
