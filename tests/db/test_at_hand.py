"""Connections that stay at hand between two statements of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from delayq.at_hand import AtHand
from tests.helpers import wait_for

if TYPE_CHECKING:
    from delayq.database import Connection, Database, Pool


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[Pool]:
    pool = await database.create_pool(0, 2, "tests", shared=False)
    async with asyncio.timeout(10), pool:
        yield pool


def at_hand(pool: Pool, *, most: int = 2, may_keep: bool = True) -> AtHand:
    return AtHand(pool, limit_s=5, most=most, may_keep=lambda: may_keep)


async def test_the_next_statement_finds_the_connection_of_the_last(pool: Pool) -> None:
    hand = at_hand(pool)
    first = await hand.take()
    await hand.give_back(first, sound=True)
    assert await hand.take() is first
    await hand.give_back(first, sound=True)
    await hand.let_go()


async def test_a_connection_that_the_server_ended_is_not_handed_out_again(
    pool: Pool, conn: Connection
) -> None:
    hand = at_hand(pool)
    first = await hand.take()
    pid = await first.fetchval("select pg_backend_pid()")
    await hand.give_back(first, sound=True)
    await conn.execute("select pg_terminate_backend($1, 5000)", pid)
    await wait_for(lambda: not pool.get_size(), "the driver has noticed")
    second = await hand.take()
    assert await second.fetchval("select pg_backend_pid()") != pid
    await hand.give_back(second, sound=True)
    await hand.let_go()


async def test_whoever_waits_for_the_pool_gets_what_comes_back(pool: Pool) -> None:
    hand = at_hand(pool)
    one, other = await hand.take(), await hand.take()
    waits = asyncio.create_task(hand.take())
    await asyncio.sleep(0)
    await hand.give_back(one, sound=True)
    third = await waits
    for taken in (other, third):
        await hand.give_back(taken, sound=True)
    await hand.let_go()


@pytest.mark.parametrize(
    ("most", "may_keep", "sound"), [(0, True, True), (2, False, True), (2, True, False)]
)
async def test_the_pool_gets_back_what_may_not_stay(
    pool: Pool, most: int, may_keep: bool, sound: bool
) -> None:
    """Among others what had an error: the pool knows how to clean up after that."""
    hand = at_hand(pool, most=most, may_keep=may_keep)
    await hand.give_back(await hand.take(), sound=sound)
    assert pool.get_idle_size() == 1


async def test_what_is_in_use_when_all_are_let_go_of_does_not_stay(pool: Pool) -> None:
    """Else the pool, which waits for it when it is closed, would wait in vain."""
    hand = at_hand(pool)
    conn = await hand.take()
    await hand.let_go()
    await hand.give_back(conn, sound=True)
    assert pool.get_idle_size() == pool.get_size() == 1


async def test_what_nobody_wanted_for_a_while_goes_back_to_the_pool(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.at_hand._KEPT_S", 0.05)
    hand = at_hand(pool)
    one, other = await hand.take(), await hand.take()
    await hand.give_back(one, sound=True)
    await hand.give_back(other, sound=True)
    await wait_for(lambda: pool.get_idle_size() == 2, "both are back")
    await hand.let_go()
