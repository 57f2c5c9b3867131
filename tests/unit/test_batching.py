from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayq.batching import Batcher, Weight
from delayq.errors import DatabaseTimeout, DatabaseUnavailable, DelayQError


class Server:
    """Answers batches with ten times each item. Holds its answers while `open` is not set."""

    def __init__(self, refuses: Callable[[int], bool] = lambda _: False) -> None:
        self.batches: list[list[int]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.called = asyncio.Event()
        self.refuses = refuses
        self.busy = self.most_busy = 0

    async def run(self, items: list[int]) -> list[int | Exception]:
        self.batches.append(items)
        self.called.set()
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            await self.open.wait()
        finally:
            self.busy -= 1
        bad = [item for item in items if self.refuses(item)]
        if bad:
            raise ValueError(bad)
        return [item * 10 for item in items]


def start(work: Coroutine[Any, Any, int]) -> asyncio.Task[int]:
    return asyncio.get_running_loop().create_task(work)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def nothing_lost() -> AsyncIterator[None]:
    """Fails if asyncio reports an exception that nobody retrieved."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    yield
    await turns()
    gc.collect()  # asyncio reports when the future goes
    assert reports == []


async def test_one_item_alone_is_sent_at_once() -> None:
    server = Server()
    batcher = Batcher(server.run, max_size=500, max_waiting=1_000)
    assert await batcher.submit(4) == 40
    assert server.batches == [[4]]


async def test_while_one_call_is_in_flight_the_next_batch_gathers() -> None:
    server = Server()
    server.open.clear()
    batcher = Batcher(server.run, max_size=3, max_waiting=1_000)
    first = start(batcher.submit(0))
    await server.called.wait()
    rest = [start(batcher.submit(n)) for n in range(1, 6)]
    await turns()
    assert batcher.waiting == 5
    assert server.batches == [[0]]
    server.open.set()
    assert await asyncio.gather(first, *rest) == [0, 10, 20, 30, 40, 50]
    assert server.batches == [[0], [1, 2, 3], [4, 5]]
    assert batcher.waiting == 0


async def test_items_of_one_turn_of_the_loop_share_a_call() -> None:
    server = Server()
    batcher = Batcher(server.run, max_size=500, max_waiting=1_000)
    await asyncio.gather(*(batcher.submit(n) for n in range(100)))
    assert server.batches == [list(range(100))]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
async def test_no_more_calls_than_allowed_are_in_flight(in_flight: int) -> None:
    server = Server()
    server.open.clear()
    batcher = Batcher(server.run, max_size=2, max_waiting=100, in_flight=in_flight)
    tasks = [start(batcher.submit(n)) for n in range(20)]
    await turns(20)
    assert len(server.batches) == server.busy == in_flight
    server.open.set()
    assert await asyncio.gather(*tasks) == [n * 10 for n in range(20)]
    assert server.most_busy == in_flight


@pytest.mark.parametrize(
    ("items", "sizes"), [(1, [1]), (7, [7]), (8, [4, 4]), (9, [5, 4]), (30, [10, 10, 10])]
)
async def test_calls_that_may_run_at_a_time_share_what_waits_if_it_is_worth_it(
    items: int, sizes: list[int]
) -> None:
    server = Server()
    batcher = Batcher(server.run, max_size=10, max_waiting=100, in_flight=2, share_above=8)
    answers = [start(batcher.submit(item)) for item in range(items)]
    assert await asyncio.gather(*answers) == [item * 10 for item in range(items)]
    assert [len(batch) for batch in server.batches] == sizes
    assert [item for batch in server.batches for item in batch] == list(range(items))


async def test_an_item_that_comes_just_as_a_worker_ends_is_not_stranded() -> None:
    server = Server()
    batcher = Batcher(server.run, max_size=10, max_waiting=100)

    async def chain(n: int) -> int:
        for _ in range(50):
            await batcher.submit(n)
            await turns(n % 4)
        return n

    async with asyncio.timeout(5):
        await asyncio.gather(*(chain(n) for n in range(1, 9)))


async def test_a_result_that_is_an_exception_is_raised_to_its_submitter_alone() -> None:
    async def run(items: list[int]) -> list[int | Exception]:
        return [LookupError(n) if n == 2 else n for n in items]

    batcher = Batcher(run, max_size=10, max_waiting=10)
    results = await asyncio.gather(*(batcher.submit(n) for n in range(4)), return_exceptions=True)
    assert isinstance(results[2], LookupError)
    assert [results[n] for n in (0, 1, 3)] == [0, 1, 3]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 39)), st.integers(1, 40), st.integers(1, 3))
def test_only_the_bad_items_fail_and_each_with_its_own_error(
    bad: set[int], max_size: int, in_flight: int
) -> None:
    async def scenario() -> None:
        server = Server(refuses=bad.__contains__)
        batcher = Batcher(server.run, max_size=max_size, max_waiting=7, in_flight=in_flight)
        results = await asyncio.gather(
            *(batcher.submit(n) for n in range(40)), return_exceptions=True
        )
        for n, result in enumerate(results):
            if n in bad:
                assert isinstance(result, ValueError)
                assert result.args == ([n],)
            else:
                assert result == n * 10
        assert max(len(batch) for batch in server.batches) <= max_size

    asyncio.run(scenario())


async def test_one_bad_item_among_many_costs_twice_the_depth_of_the_splits_in_calls() -> None:
    server = Server(refuses=lambda n: n == 77)
    batcher = Batcher(server.run, max_size=512, max_waiting=1_000)
    results = await asyncio.gather(*(batcher.submit(n) for n in range(512)), return_exceptions=True)
    assert sum(isinstance(result, ValueError) for result in results) == 1
    assert len(server.batches) == 1 + 2 * 9


async def test_an_error_that_is_not_the_items_fault_fails_the_batch_without_splitting() -> None:
    calls = 0

    async def run(items: list[int]) -> list[int | Exception]:
        nonlocal calls
        calls += 1
        raise DatabaseUnavailable

    batcher = Batcher(
        run,
        max_size=10,
        max_waiting=10,
        unsplittable=lambda error: isinstance(error, DatabaseUnavailable),
    )
    results = await asyncio.gather(*(batcher.submit(n) for n in range(8)), return_exceptions=True)
    assert all(isinstance(result, DatabaseUnavailable) for result in results)
    assert calls == 1


async def test_a_wrong_number_of_results_fails_all_and_runs_nothing_twice() -> None:
    calls: list[list[int]] = []

    async def run(items: list[int]) -> list[int | Exception]:
        calls.append(items)
        return []

    batcher = Batcher(run, max_size=10, max_waiting=10)
    results = await asyncio.gather(*(batcher.submit(n) for n in range(3)), return_exceptions=True)
    assert all(isinstance(result, RuntimeError) for result in results)
    assert calls == [[0, 1, 2]]


async def test_submit_waits_while_too_many_are_waiting_and_goes_on_in_order() -> None:
    server = Server()
    server.open.clear()
    batcher = Batcher(server.run, max_size=2, max_waiting=2)
    tasks = [start(batcher.submit(n)) for n in range(7)]
    await turns()
    assert server.batches == [[0, 1]]
    assert batcher.waiting == 2
    server.open.set()
    await asyncio.gather(*tasks)
    assert server.batches == [[0, 1], [2, 3], [4, 5], [6]]


async def test_a_submitter_cancelled_before_its_item_was_sent_withdraws_it() -> None:
    server = Server()
    server.open.clear()
    batcher = Batcher(server.run, max_size=10, max_waiting=2)
    first = start(batcher.submit(0))
    await server.called.wait()
    second, third, blocked = (start(batcher.submit(n)) for n in (1, 2, 3))
    await turns()
    second.cancel()
    await turns()
    assert second.cancelled()
    assert batcher.waiting == 2, "the place of the withdrawn item goes to the one that waited"
    server.open.set()
    assert [await first, await third, await blocked] == [0, 20, 30]
    assert server.batches == [[0], [2, 3]]


async def test_a_cancelled_item_is_not_sent_even_if_its_submitter_had_no_turn_yet() -> None:
    server = Server()
    batcher = Batcher(server.run, max_size=10, max_waiting=10)
    task, other = start(batcher.submit(1)), start(batcher.submit(2))
    await asyncio.sleep(0)  # both are waiting, the worker has not begun
    task.cancel()
    assert await other == 20
    assert server.batches == [[2]]
    assert task.cancelled()


async def test_a_submitter_cancelled_after_its_item_was_sent_harms_nobody() -> None:
    async with nothing_lost():
        server = Server(refuses=lambda n: n == 1)
        server.open.clear()
        batcher = Batcher(server.run, max_size=10, max_waiting=10)
        tasks = [start(batcher.submit(n)) for n in range(3)]
        await server.called.wait()
        tasks[1].cancel()
        server.open.set()
        assert await tasks[0] == 0
        assert await tasks[2] == 20
        assert tasks[1].cancelled()
        assert server.batches[-2:] == [[0], [2]], "nor is it sent again when the batch is split"


async def fail_into_a_cancellation() -> None:
    async def run(items: list[int]) -> list[int | Exception]:
        # Comes after the failure was set, and before its submitter wakes up to see it.
        asyncio.get_running_loop().call_soon(task.cancel)
        raise ValueError(items)

    task = start(Batcher(run, max_size=10, max_waiting=10).submit(1))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failure_that_meets_a_cancelled_submitter_is_not_reported_as_lost() -> None:
    async with nothing_lost():
        await fail_into_a_cancellation()


@pytest.mark.parametrize("when", ["waiting", "just granted"])
async def test_a_cancelled_waiter_for_room_passes_its_place_on(when: str) -> None:
    server = Server()
    server.open.clear()

    async def run(items: list[int]) -> list[int | Exception]:
        if items == [1] and when == "just granted":
            tasks[2].cancel()  # taking [1] gave it the place, and it has not woken up yet
        return await server.run(items)

    batcher = Batcher(run, max_size=1, max_waiting=1)
    tasks = [start(batcher.submit(n)) for n in range(5)]
    await turns()
    if when == "waiting":
        tasks[2].cancel()
        await turns()
    server.open.set()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[2].cancelled()
    assert [results[n] for n in (0, 1, 3, 4)] == [0, 10, 30, 40]
    assert batcher._free == 1


async def test_a_waiter_that_was_granted_a_place_as_the_batcher_closed_is_refused() -> None:
    server = Server()
    server.open.clear()
    batcher = Batcher(server.run, max_size=1, max_waiting=1)
    tasks = [start(batcher.submit(n)) for n in range(3)]
    await turns()
    # In the next turn of the loop the worker goes first: it takes 1, which makes room for 2.
    server.open.set()
    await asyncio.ensure_future(batcher.close())
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[:2] == [0, 10]
    assert isinstance(results[2], DelayQError)
    assert server.batches == [[0], [1]]
    assert batcher._free == 1


async def test_a_second_call_is_not_prepared_while_the_first_has_yet_to_take_its_batch() -> None:
    server = Server()
    batcher = Batcher(server.run, max_size=10, max_waiting=10, in_flight=3)
    tasks = [start(batcher.submit(n)) for n in range(3)]
    await asyncio.sleep(0)
    assert len(batcher._workers) == 1
    await asyncio.gather(*tasks)
    assert server.batches == [[0, 1, 2]]


async def test_close_answers_what_was_taken_and_refuses_the_rest() -> None:
    server = Server()
    server.open.clear()
    batcher = Batcher(server.run, max_size=2, max_waiting=3)
    tasks = [start(batcher.submit(n)) for n in range(9)]
    await turns()
    closing = asyncio.ensure_future(batcher.close())
    await turns()
    with pytest.raises(DelayQError, match="closed"):
        await batcher.submit(99)
    assert not closing.done()
    server.open.set()
    await closing
    results = await asyncio.gather(*tasks, return_exceptions=True)
    taken = [n for batch in server.batches for n in batch]
    assert [r for r in results if isinstance(r, int)] == [n * 10 for n in taken]
    assert taken == list(range(5))
    assert all(isinstance(result, DelayQError) for result in results[5:])


async def test_closing_an_idle_batcher_returns_at_once_and_twice_is_fine() -> None:
    batcher = Batcher(Server().run, max_size=2, max_waiting=3)
    await batcher.close()
    await batcher.close()
    with pytest.raises(DelayQError, match="closed"):
        await batcher.submit(1)


async def test_a_close_that_runs_out_of_time_leaves_no_submitter_waiting() -> None:
    async with nothing_lost():
        server = Server()
        server.open.clear()
        batcher = Batcher(server.run, max_size=2, max_waiting=10)
        tasks = [start(batcher.submit(n)) for n in range(5)]
        await server.called.wait()
        closing = asyncio.ensure_future(batcher.close())
        await turns()
        closing.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, DatabaseTimeout) for result in results)
        assert closing.cancelled()
        assert batcher._workers == set()


async def test_a_worker_that_is_cancelled_before_it_began_strands_nobody() -> None:
    server = Server()
    batcher = Batcher(server.run, max_size=2, max_waiting=10)
    task = start(batcher.submit(1))
    await asyncio.sleep(0)
    (worker,) = batcher._workers
    worker.cancel()
    with pytest.raises(DatabaseTimeout):
        await task
    assert server.batches == []
    assert await batcher.submit(2) == 20
    assert batcher._free == 10


async def test_a_batch_stays_within_its_bytes_and_a_huge_item_goes_alone() -> None:
    server = Server()
    batcher = Batcher(
        server.run, max_size=10, max_waiting=100, weight=Weight(lambda item: item, 10)
    )
    await asyncio.gather(*(batcher.submit(n) for n in (4, 6, 1, 99, 5, 5, 5)))
    assert server.batches == [[4, 6], [1], [99], [5, 5], [5]]


async def test_a_worker_does_not_inherit_the_context_of_the_submitter_that_launched_it() -> None:
    tenant = contextvars.ContextVar("tenant", default="none")
    seen: list[str] = []

    async def run(items: list[int]) -> list[int | Exception]:
        seen.append(tenant.get())
        return list(items)

    batcher = Batcher(run, max_size=10, max_waiting=10)
    tenant.set("acme")
    await batcher.submit(1)
    assert seen == ["none"]
