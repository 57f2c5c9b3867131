"""The waits of a node that leaves: each ends, a stop cuts them short, and none is left behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from delayq.errors import DatabaseUnavailable
from delayq.patience import Patience
from tests.helpers import PATIENCE_S, wait_for

if TYPE_CHECKING:
    from tests.conftest import Logged

NODE = 4_711
LONG_S = 3_600.0


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayq.patience._GRACE_S", 0.02)


class Wait:
    """Something to wait for, which remembers how each wait for it ended."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.ends: list[str] = []

    async def __call__(self) -> None:
        try:
            await self.came.wait()
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        self.ends.append("came")


async def test_what_has_come_is_not_waited_for() -> None:
    wait = Wait()
    wait.came.set()
    assert await Patience(NODE, asyncio.Event()).patiently(wait, LONG_S)
    assert wait.ends == ["came", "came"]


async def test_what_does_not_come_in_time_is_told_and_left_behind(logged: list[Logged]) -> None:
    wait = Wait()
    assert not await Patience(NODE, asyncio.Event()).patiently(wait, 0.02)
    assert wait.ends == ["cancelled", "cancelled"]
    (told,) = [event for event in logged if event.event == "node.left_behind"]
    assert told.fields["node"] == NODE


async def test_a_stop_ends_a_long_wait_but_for_its_grace() -> None:
    wait, stop_now = Wait(), asyncio.Event()
    waiting = asyncio.ensure_future(Patience(NODE, stop_now).patiently(wait, LONG_S))
    await asyncio.sleep(0)
    stop_now.set()
    assert not await waiting
    assert wait.ends == ["cancelled", "cancelled"]


async def test_what_comes_within_the_grace_of_a_stop_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayq.patience._GRACE_S", LONG_S)
    wait, stop_now = Wait(), asyncio.Event()
    stop_now.set()
    waiting = asyncio.ensure_future(Patience(NODE, stop_now).patiently(wait, LONG_S))
    await wait_for(lambda: wait.ends, "the first wait is cut short by the stop")
    wait.came.set()
    assert await waiting
    assert wait.ends == ["cancelled", "came"]


async def test_a_wait_that_is_itself_cancelled_leaves_nothing_behind() -> None:
    wait, stop_now = Wait(), asyncio.Event()
    before = asyncio.all_tasks()
    waiting = asyncio.ensure_future(Patience(NODE, stop_now).until_stopped(wait(), LONG_S))
    await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert wait.ends == ["cancelled"]
    assert asyncio.all_tasks() == before


async def _hang() -> None:
    await asyncio.Event().wait()


async def _fail() -> None:
    raise DatabaseUnavailable("gone")


async def test_a_step_that_fails_or_hangs_is_told_and_does_not_end_the_leaving(
    logged: list[Logged],
) -> None:
    patience = Patience(NODE, asyncio.Event())
    await patience.bounded("drain", _fail(), LONG_S)
    await patience.bounded("leave", _hang(), 0.01)
    told = [event.fields["step"] for event in logged if event.event == "node.step_failed"]
    assert told == ["drain", "leave"]


async def test_a_step_is_short_once_a_stop_was_asked_for() -> None:
    stop_now = asyncio.Event()
    stop_now.set()
    async with asyncio.timeout(PATIENCE_S):
        await Patience(NODE, stop_now).bounded("leave", _hang(), LONG_S)


async def test_a_bug_in_a_step_is_not_hidden() -> None:
    async def bug() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await Patience(NODE, asyncio.Event()).bounded("leave", bug(), LONG_S)
