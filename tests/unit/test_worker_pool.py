"""The worker pool alone: no database, and every moment chosen by the test."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from delayq.worker_pool import WorkerPool
from tests.helpers import wait_for

Run = Callable[[int, "asyncio.Task[None]"], Awaitable[None]]


class Desk:
    """Runs items until they are let go, and remembers who ran what."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.done: list[int] = []
        self.workers: dict[int, asyncio.Task[None]] = {}
        self.open = asyncio.Event()
        self.most_at_once = 0
        self._at_once = 0

    async def run(self, item: int, task: asyncio.Task[None]) -> None:
        self.started.append(item)
        self.workers[item] = task
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await self.open.wait()
        finally:
            self._at_once -= 1
        self.done.append(item)


@asynccontextmanager
async def pool_of(
    run: Run, *, low: int = 1, high: int = 4, idle_s: float = 60.0, **told: Any
) -> AsyncIterator[WorkerPool[int]]:
    pool: WorkerPool[int] = WorkerPool(
        run, min_workers=low, max_workers=high, idle_s=idle_s, **told
    )
    pool.open()
    yield pool
    await pool.aclose()


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# --- growing and shrinking --------------------------------------------------------------------


async def test_the_pool_grows_on_demand_and_no_wider_than_its_limit() -> None:
    desk = Desk()
    async with pool_of(desk.run, low=1, high=4) as pool:
        await turns()
        assert (len(pool), pool.busy, pool.free) == (1, 0, 4)
        for item in range(3):
            pool.submit(item)
        await turns()
        assert (len(pool), pool.busy, pool.free) == (3, 3, 1)
        for item in range(3, 9):
            pool.submit(item)
        await turns()
        assert (len(pool), pool.busy, pool.queued, pool.free) == (4, 4, 5, -5)
        desk.open.set()
        await pool.drained()
        assert sorted(desk.done) == list(range(9))
        assert desk.most_at_once == 4
        assert pool.finished == 9


async def test_one_worker_does_all_items_that_never_suspend() -> None:
    workers: list[asyncio.Task[None]] = []

    async def run(_item: int, task: asyncio.Task[None]) -> None:
        workers.append(task)

    async with pool_of(run, low=1, high=50) as pool:
        await turns()
        for item in range(40):
            pool.submit(item)
        await pool.drained()
        assert len(workers) == 40
        assert len(set(workers)) == 1
        assert len(pool) <= 2  # the one that was woken in case, and found nothing


async def test_items_that_never_suspend_let_the_loop_turn_now_and_then() -> None:
    done: list[int] = []
    done_at_turn: list[int] = []

    async def run(item: int, _task: asyncio.Task[None]) -> None:
        ends = time.monotonic() + 0.0005
        while time.monotonic() < ends:
            pass
        done.append(item)

    async with pool_of(run, low=1, high=1) as pool:
        await turns()
        for item in range(200):
            pool.submit(item)
        asyncio.get_running_loop().call_later(0.001, lambda: done_at_turn.append(len(done)))
        await pool.drained()
        assert len(done) == 200
        assert done_at_turn
        assert done_at_turn[0] < 150


async def test_many_workers_share_one_turn_of_the_loop() -> None:
    """However many of them go on in the same turn, the loop is not held up for longer."""
    gate = asyncio.Event()
    done = 0
    done_in_turn: list[int] = []

    async def run(item: int, _task: asyncio.Task[None]) -> None:
        nonlocal done
        if item < 20:
            await gate.wait()
            return
        ends = time.monotonic() + 0.0005
        while time.monotonic() < ends:
            pass
        done += 1

    async with pool_of(run, low=1, high=20) as pool:
        for item in range(20):
            pool.submit(item)
        await turns(30)
        assert pool.busy == 20
        for item in range(20, 320):
            pool.submit(item)
        gate.set()
        while done < 300:
            before = done
            await asyncio.sleep(0)
            done_in_turn.append(done - before)
        # 2 ms of items that take at least 0.5 ms, and the one that was begun in time
        assert max(done_in_turn) <= 5
        await pool.drained()
        assert pool.finished == 320


async def test_items_that_suspend_run_as_many_at_once_after_a_turn_that_was_too_short() -> None:
    """What ends together goes on together: one at a time would read one payload at a time."""
    first, second = asyncio.Event(), asyncio.Event()
    started = 0

    async def run(item: int, _task: asyncio.Task[None]) -> None:
        nonlocal started
        if item < 20:
            await first.wait()
            ends = time.monotonic() + 0.0005
            while time.monotonic() < ends:
                pass
        else:
            started += 1
            await second.wait()

    async with pool_of(run, low=1, high=20) as pool:
        for item in range(40):
            pool.submit(item)
        await turns(30)
        assert pool.busy == 20
        first.set()
        await turns(6)
        assert started == 20
        second.set()
        await pool.drained()


async def test_workers_beyond_the_fewest_retire_after_their_idle_time() -> None:
    desk = Desk()
    async with pool_of(desk.run, low=2, high=6, idle_s=0.02) as pool:
        for item in range(6):
            pool.submit(item)
        await turns()
        assert len(pool) == 6
        desk.open.set()
        await pool.drained()
        await wait_for(lambda: len(pool) == 2, "four of six retire")
        # those that stay still work
        pool.submit(6)
        await pool.drained()
        assert desk.done[-1] == 6
        assert len(pool) == 2


async def test_a_worker_that_is_needed_now_and_then_does_not_retire() -> None:
    desk = Desk()
    desk.open.set()
    async with pool_of(desk.run, low=1, high=2, idle_s=3600) as pool:
        pool.submit(1)
        pool.submit(2)
        await pool.drained()
        await turns()
        assert pool.busy == 0
        assert len(pool) >= 1


async def test_the_one_that_waited_least_is_woken_so_that_others_may_retire() -> None:
    desk = Desk()
    async with pool_of(desk.run, low=0, high=3) as pool:
        for item in range(3):
            pool.submit(item)
        await turns()
        last = desk.workers[2]
        desk.open.set()
        await pool.drained()
        await turns()
        waited_least = desk.workers[desk.done[-1]]
        assert waited_least is last
        pool.submit(3)
        await pool.drained()
        assert desk.workers[3] is waited_least


async def test_what_goes_ahead_starts_before_the_rest_and_in_its_own_order() -> None:
    desk = Desk()
    async with pool_of(desk.run, low=1, high=1) as pool:
        pool.submit(0)
        await turns()
        for item in (10, 11, 12):
            pool.submit(item, ahead=False)
        for item in (1, 2):
            pool.submit(item)
        desk.open.set()
        await pool.drained()
        for item in (13, 3):  # nothing is remembered of those that went ahead before
            pool.submit(item, ahead=item == 3)
        assert pool.withdraw() == [3, 13]
        for item in (14, 4):
            pool.submit(item, ahead=item == 4)
        await pool.drained()
        assert desk.started == [0, 1, 2, 10, 11, 12, 4, 14]


# --- items that go wrong ----------------------------------------------------------------------


class Odd(BaseException):
    """Something that is no Exception."""


@pytest.mark.parametrize("error", [ValueError("boom"), Odd("boom"), SystemExit(3)])
async def test_an_item_that_crashes_is_reported_and_its_worker_goes_on(
    error: BaseException,
) -> None:
    crashes: list[tuple[int, BaseException]] = []
    done: list[int] = []

    async def run(item: int, _task: asyncio.Task[None]) -> None:
        if item == 1:
            raise error
        done.append(item)

    told: dict[str, Any] = {"on_crash": lambda item, error: crashes.append((item, error))}
    async with pool_of(run, low=1, high=1, **told) as pool:
        for item in range(3):
            pool.submit(item)
        await pool.drained()
        assert done == [0, 2]
        assert crashes == [(1, error)]
        assert (pool.busy, pool.finished) == (0, 3)


async def test_cancelling_one_item_from_elsewhere_ends_that_item_only() -> None:
    desk = Desk()
    crashes: list[int] = []
    told: dict[str, Any] = {"on_crash": lambda item, _error: crashes.append(item)}
    async with pool_of(desk.run, low=1, high=2, **told) as pool:
        pool.submit(0)
        pool.submit(1)
        await turns()
        desk.workers[0].cancel()
        await turns()
        assert crashes == [0]
        assert pool.busy == 1
        pool.submit(2)
        await turns()
        assert desk.started == [0, 1, 2]
        desk.open.set()
        await pool.drained()
        assert sorted(desk.done) == [1, 2]


async def test_a_cancel_that_an_item_swallowed_does_not_follow_the_next_one() -> None:
    """A task group in the next item would take the old request for one of its own."""
    caught: list[str] = []

    async def fail() -> None:
        raise ValueError("of the child")

    async def run(item: int, task: asyncio.Task[None]) -> None:
        if item == 0:
            task.cancel()
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await asyncio.sleep(3600)
        except* ValueError:
            caught.append("the child's error")

    async with pool_of(run, low=1, high=1) as pool:
        pool.submit(0)
        pool.submit(1)
        async with asyncio.timeout(5):
            await pool.drained()
        assert caught == ["the child's error"]


async def test_a_cancel_that_an_item_left_pending_does_not_hit_the_next_one() -> None:
    done: list[int] = []

    async def run(item: int, task: asyncio.Task[None]) -> None:
        if item == 0:
            task.cancel()  # and returns before it is delivered
            return
        await asyncio.sleep(0)
        done.append(item)

    async with pool_of(run, low=1, high=1) as pool:
        for item in range(3):
            pool.submit(item)
        async with asyncio.timeout(5):
            await pool.drained()
        assert done == [1, 2]


# --- context variables ------------------------------------------------------------------------

WHO: ContextVar[str] = ContextVar("WHO", default="nobody")


async def test_context_variables_of_one_item_are_not_seen_by_the_next() -> None:
    seen: list[str] = []

    async def run(item: int, _task: asyncio.Task[None]) -> None:
        seen.append(WHO.get())
        WHO.set(f"item {item}")
        await asyncio.sleep(0)

    async with pool_of(run, low=1, high=1) as pool:
        for item in range(3):
            pool.submit(item)
        await pool.drained()
        pool.submit(3)
        await pool.drained()
        assert seen == ["nobody"] * 4


async def test_context_variables_of_whoever_submits_are_not_seen_by_items() -> None:
    seen: list[str] = []

    async def run(_item: int, _task: asyncio.Task[None]) -> None:
        seen.append(WHO.get())

    async with pool_of(run, low=0, high=1) as pool:
        WHO.set("who submits")
        pool.submit(0)
        await pool.drained()
        assert seen == ["nobody"]


# --- taking back, draining, closing -----------------------------------------------------------


async def test_withdraw_takes_back_what_has_not_been_started() -> None:
    desk = Desk()
    async with pool_of(desk.run, low=1, high=2) as pool:
        for item in range(5):
            pool.submit(item)
        await turns()
        assert pool.withdraw() == [2, 3, 4]
        assert (pool.queued, pool.busy) == (0, 2)
        assert pool.withdraw() == []
        desk.open.set()
        await pool.drained()
        assert sorted(desk.done) == [0, 1]


async def test_a_pool_is_drained_once_nothing_waits_and_nothing_runs() -> None:
    desk = Desk()
    async with pool_of(desk.run, low=0, high=1) as pool:
        await asyncio.wait_for(pool.drained(), 1)  # nothing was submitted yet
        pool.submit(0)
        drained = asyncio.ensure_future(pool.drained())
        await turns()
        assert not drained.done()
        assert pool.withdraw() == []
        await turns()
        assert not drained.done()
        desk.open.set()
        await asyncio.wait_for(drained, 5)


async def test_withdrawing_everything_before_it_started_drains_the_pool() -> None:
    desk = Desk()
    async with pool_of(desk.run, low=0, high=1) as pool:
        pool.submit(0)
        assert pool.withdraw() == [0]
        await asyncio.wait_for(pool.drained(), 5)
        assert desk.started == []


async def test_on_free_is_told_after_each_item_whatever_became_of_it() -> None:
    free: list[int] = []

    async def run(item: int, _task: asyncio.Task[None]) -> None:
        if item == 1:
            raise ValueError

    pool: WorkerPool[int] = WorkerPool(
        run, min_workers=1, max_workers=1, idle_s=60, on_free=lambda: free.append(pool.free)
    )
    pool.open()
    for item in range(3):
        pool.submit(item)
    await pool.drained()
    await pool.aclose()
    assert free == [-1, 0, 1]


async def test_closing_cancels_what_runs_and_refuses_what_comes() -> None:
    desk = Desk()
    async with pool_of(desk.run, low=1, high=2) as pool:
        pool.submit(0)
        await turns()
        await pool.aclose()
        assert desk.done == []
        assert all(worker.done() for worker in desk.workers.values())
        assert len(pool) == 0
        with pytest.raises(RuntimeError, match="closed"):
            pool.submit(1)


async def test_an_item_that_ignores_its_cancel_does_not_hold_up_the_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayq.worker_pool._CLOSE_S", 0.05)
    let_go = asyncio.Event()

    async def run(_item: int, _task: asyncio.Task[None]) -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    pool: WorkerPool[int] = WorkerPool(run, min_workers=1, max_workers=1, idle_s=60)
    pool.open()
    pool.submit(0)
    await turns()
    async with asyncio.timeout(5):
        await pool.aclose()
    let_go.set()
    await turns()


async def test_closing_can_itself_be_cancelled() -> None:
    let_go = asyncio.Event()

    async def run(_item: int, _task: asyncio.Task[None]) -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    pool: WorkerPool[int] = WorkerPool(run, min_workers=1, max_workers=1, idle_s=60)
    pool.open()
    pool.submit(0)
    await turns()
    closing = asyncio.ensure_future(pool.aclose())
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(closing, 5)
    let_go.set()
    await turns()


async def test_closing_twice_and_closing_what_was_never_opened_is_fine() -> None:
    pool: WorkerPool[int] = WorkerPool(Desk().run, min_workers=1, max_workers=1, idle_s=60)
    await pool.aclose()
    await pool.aclose()


# --- the stress that everything long-lived has to pass ----------------------------------------


class Chaos:
    """Items that do what may go wrong, and somebody who starts, stops and takes back at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.high = self.chance.randint(1, 5)
        self.started: list[int] = []
        self.withdrawn: list[int] = []
        self.submitted = 0
        self.at_once = self.most_at_once = 0

    async def run(self, item: int, task: asyncio.Task[None]) -> None:
        self.started.append(item)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.chance.choice(self._ends)(item, task)
        finally:
            self.at_once -= 1

    async def _crash(self, _item: int, _task: asyncio.Task[None]) -> None:
        raise ValueError

    async def _cancel(self, _item: int, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.sleep(0)

    async def _leave_a_variable(self, item: int, _task: asyncio.Task[None]) -> None:
        WHO.set(str(item))

    async def _wait(self, _item: int, _task: asyncio.Task[None]) -> None:
        await asyncio.sleep(self.chance.choice([0, 0.0005]))

    async def _return(self, _item: int, _task: asyncio.Task[None]) -> None:
        return None

    @property
    def _ends(self) -> list[Run]:
        return [self._crash, self._cancel, self._leave_a_variable, self._wait, self._return]

    async def step(self, pool: WorkerPool[int]) -> None:
        match self.chance.randrange(4):
            case 0 | 1:
                for _ in range(self.chance.randint(1, 8)):
                    pool.submit(self.submitted)
                    self.submitted += 1
            case 2:
                await asyncio.sleep(self.chance.choice([0, 0.0005, 0.002]))
            case 3:
                self.withdrawn += pool.withdraw()


@pytest.mark.parametrize("seed", range(12))
async def test_under_random_starts_stops_and_crashes_no_item_is_lost_or_run_twice(
    seed: int,
) -> None:
    chaos = Chaos(seed)
    low = chaos.chance.randint(0, chaos.high)
    async with pool_of(chaos.run, low=low, high=chaos.high, idle_s=0.001) as pool:
        for _ in range(150):
            await chaos.step(pool)
            assert len(pool) <= chaos.high
        if seed % 2:
            async with asyncio.timeout(10):
                await pool.drained()
            assert sorted(chaos.started + chaos.withdrawn) == list(range(chaos.submitted))
    left = pool.withdraw()
    assert sorted(chaos.started + chaos.withdrawn + left) == list(range(chaos.submitted))
    assert chaos.most_at_once <= chaos.high
    assert (pool.busy, len(pool)) == (0, 0)
