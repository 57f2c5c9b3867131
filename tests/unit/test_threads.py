"""The threads of plain handlers: no database, and the test decides when a job ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from delayq.threads import Threads
from tests.helpers import wait_for

LIMIT_S = 10.0


class Job:
    """Runs in a thread until it is let go."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.let_go = threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> int:
        self.thread = threading.current_thread()
        self.started.set()
        assert self.let_go.wait(LIMIT_S)
        return threading.get_ident()


async def finished(*jobs: asyncio.Future[int]) -> list[int]:
    async with asyncio.timeout(LIMIT_S):
        return list(await asyncio.gather(*jobs))


async def test_a_function_runs_in_a_thread_and_its_value_comes_back() -> None:
    threads = Threads(2)
    here = threading.get_ident()
    (there,) = await finished(threads.submit(threading.get_ident))
    assert there != here
    threads.close()


async def test_threads_are_made_when_no_idle_one_is_there_and_reused_else() -> None:
    threads = Threads(8)
    assert threads.alive == 0
    jobs = [Job() for _ in range(3)]
    futures = [threads.submit(job) for job in jobs]
    assert threads.alive == 3
    for job in jobs:
        job.let_go.set()
    await finished(*futures)
    for _ in range(20):
        (ident,) = await finished(threads.submit(threading.get_ident))
        assert ident
    # a job may come back an instant before its thread says that it is idle
    assert threads.alive <= 4
    threads.close()


async def test_there_are_never_more_threads_than_the_limit_and_the_rest_waits() -> None:
    threads = Threads(2)
    jobs = [Job() for _ in range(5)]
    futures = [threads.submit(job) for job in jobs]
    await wait_for(lambda: sum(job.started.is_set() for job in jobs) == 2, "two have started")
    assert threads.alive == 2
    assert not jobs[4].started.is_set()
    for job in jobs:
        job.let_go.set()
    assert len(set(await finished(*futures))) == 2
    threads.close()


class Odd(BaseException):
    """Something that is no Exception."""


@pytest.mark.parametrize("error", [ValueError("boom"), Odd("boom"), SystemExit(3)])
async def test_whatever_ends_a_job_reaches_the_one_that_waits_and_the_thread_goes_on(
    error: BaseException,
) -> None:
    threads = Threads(1)

    def fail() -> None:
        raise error

    future = threads.submit(fail)
    await wait_for(future.done, "the job ended")
    assert future.exception() is error
    assert await finished(threads.submit(lambda: 7)) == [7]
    assert threads.alive == 1
    threads.close()


async def test_a_job_that_raises_stop_iteration_does_not_leave_its_waiter_waiting() -> None:
    threads = Threads(1)

    def fail() -> None:
        raise StopIteration(5)

    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(threads.submit(fail), LIMIT_S)
    threads.close()


async def test_cancelling_the_wait_ends_neither_the_thread_nor_the_next_job() -> None:
    threads = Threads(1)
    job = Job()
    waiting = threads.submit(job)
    await wait_for(job.started.is_set, "the job has started")
    waiting.cancel()
    after = threads.submit(lambda: 7)
    job.let_go.set()
    assert await finished(after) == [7]
    threads.close()


async def test_a_job_whose_wait_was_cancelled_before_it_began_is_not_run() -> None:
    threads = Threads(1)
    first, ran = Job(), threading.Event()
    futures = [threads.submit(first)]
    withdrawn = threads.submit(ran.set)
    await wait_for(first.started.is_set, "the first has started")
    withdrawn.cancel()
    first.let_go.set()
    await finished(*futures, threads.submit(lambda: 7))
    assert not ran.is_set()
    threads.close()


NAME: ContextVar[str] = ContextVar("NAME", default="nobody")


async def test_a_job_sees_the_callers_context_and_leaves_nothing_in_its_thread() -> None:
    threads = Threads(1)

    def swap() -> str:
        before = NAME.get()
        NAME.set("left behind")
        return before

    NAME.set("first")
    assert await asyncio.wait_for(threads.submit(swap), LIMIT_S) == "first"
    NAME.set("second")
    assert await asyncio.wait_for(threads.submit(swap), LIMIT_S) == "second"
    assert NAME.get() == "second"
    threads.close()


async def test_closing_lets_each_thread_go_when_its_job_ends() -> None:
    threads = Threads(2)
    jobs = [Job(), Job()]
    futures = [threads.submit(job) for job in jobs]
    await wait_for(lambda: all(job.started.is_set() for job in jobs), "both have started")
    threads.close()
    for job in jobs:
        job.let_go.set()
    await finished(*futures)
    for job in jobs:
        assert job.thread is not None
        assert job.thread.daemon  # a stuck one must not keep the process
        await asyncio.to_thread(job.thread.join, LIMIT_S)
        assert not job.thread.is_alive()


def test_a_job_that_outlives_its_loop_ends_quietly() -> None:
    threads = Threads(1)
    job = Job()

    async def leave() -> None:
        _left = threads.submit(job)
        await wait_for(job.started.is_set, "the job has started")

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    job.let_go.set()
    threads.close()
    assert job.thread is not None
    job.thread.join(LIMIT_S)
    assert not job.thread.is_alive()


async def test_many_jobs_from_few_threads_all_come_back() -> None:
    threads = Threads(3)

    def square(number: int) -> Callable[[], int]:
        return lambda: number * number

    futures = [threads.submit(square(number)) for number in range(2_000)]
    assert await finished(*futures) == [number * number for number in range(2_000)]
    assert threads.alive == 3
    threads.close()
