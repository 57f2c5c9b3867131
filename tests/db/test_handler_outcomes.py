"""Whatever a handler does, its attempt ends as it should, and the node goes on."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from delayq import leaving
from delayq.context import Context
from delayq.errors import Dead, EffectMisused, LeaseLost, Retry, Snooze
from tests.helpers import connected, events, wait_for, wait_until_blocked
from tests.nodes import (
    Application,
    all_ended,
    ended,
    eventually,
    life,
    row_of,
    schedule,
    stopped_at_once,
)

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings
    from tests.conftest import Logged

MARKER = "Marker-5f0c2f7e"


@pytest.fixture
def app(settings: Settings) -> Application:
    return Application(settings)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Odd(BaseException):
    """An exception that `except Exception` does not see."""


def _raise(error: BaseException) -> NoReturn:
    raise error


# --- exceptions ---------------------------------------------------------------------------------

RAISED: dict[str, Callable[[], BaseException]] = {
    "Exception": lambda: ValueError("boom"),
    "BaseException": lambda: Odd("boom"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": lambda: StopIteration(1),
    "StopAsyncIteration": StopAsyncIteration,
    "unprintable": Unprintable,
    "huge": lambda: ValueError("x" * 10_000_000),
    "NUL": lambda: ValueError("a\x00b"),
    "lone surrogate": lambda: ValueError("a\ud800b"),
    "group": lambda: BaseExceptionGroup("both", [ValueError("a"), Odd("b")]),
    "recursion": lambda: RecursionError("deep"),
}


@pytest.mark.parametrize("asynchronous", [True, False], ids=["coroutine", "thread"])
async def test_whatever_is_raised_is_retried_then_dead_and_the_next_task_runs(
    app: Application, conn: Connection, asynchronous: bool
) -> None:
    """C068. C094."""
    if asynchronous:

        @app.task(kind="raises", max_attempts=2)
        async def coroutine(name: str) -> None:
            _raise(RAISED[name]())
    else:

        @app.task(kind="raises", max_attempts=2)
        def plain(name: str) -> None:
            _raise(RAISED[name]())

    @app.task
    async def healthy() -> None:
        await asyncio.sleep(0)

    async with app.node(max_workers=2) as node:
        ids = {name: await schedule(conn, "raises", {"name": name}) for name in RAISED}
        ends = await all_ended(conn, ids.values())
        after = [await schedule(conn, "healthy") for _ in range(6)]
        assert {end.state for end in (await all_ended(conn, after)).values()} == {"succeeded"}
        assert node.counters is not None
        assert node.counters.dead == len(RAISED)
    for name, task_id in ids.items():
        end = ends[task_id]
        assert (end.state, end.attempt, len(end.errors)) == ("dead", 2, 2), name
        for error in end.errors:
            assert len(json.dumps(error, ensure_ascii=False).encode()) < 16_384, name
    assert ends[ids["Exception"]].errors[0]["error"] == "ValueError"
    assert "boom" in ends[ids["Exception"]].errors[0]["message"]
    assert ends[ids["NUL"]].errors[0]["message"] == "a\ufffdb"


async def test_a_handler_that_cancels_its_own_task_fails_its_attempt_and_no_other(
    app: Application, conn: Connection
) -> None:
    """C094."""

    @app.task(max_attempts=1)
    async def suicidal(how: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if how == "waits":
            await asyncio.sleep(0)
        if how == "raises":
            raise ValueError(how)

    @app.task(max_attempts=1)
    async def innocent() -> None:
        await asyncio.sleep(0.001)

    async with app.node(min_workers=1, max_workers=1) as node:
        pool = life(node)._pool
        states: dict[str, str] = {}
        innocents: list[int] = []
        for how in ("waits", "returns", "raises"):
            # both are leased before the first of them runs, so that one worker runs them in a row
            pool._max, pool_max = 2, pool._max
            first = await schedule(conn, "suicidal", {"how": how})
            innocents += [await schedule(conn, "innocent") for _ in range(3)]
            states[how] = (await ended(conn, first)).state
            pool._max = pool_max
        ends = (await all_ended(conn, innocents)).values()
    assert states == {"waits": "dead", "returns": "succeeded", "raises": "dead"}
    assert [end.state for end in ends] == ["succeeded"] * 9


@pytest.mark.parametrize(
    "garbage", [object(), b"\x00", float("nan"), "\ud800", NotImplemented, ValueError("returned")]
)
async def test_what_a_handler_returns_is_discarded(
    app: Application, conn: Connection, garbage: object
) -> None:
    """C068."""

    @app.task
    async def returns() -> object:
        return garbage

    async with app.node():
        assert (await ended(conn, await schedule(conn, "returns"))).state == "succeeded"


async def test_a_handler_that_blocks_the_loop_keeps_its_lease_and_runs_once_and_is_named(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    """C038."""
    starts: list[int] = []

    @app.task
    async def blocks(ctx: Context) -> None:
        starts.append(ctx.attempt)
        # longer than the TTL: the beat must come from elsewhere
        time.sleep(4)  # noqa: ASYNC251 - this is what the test is about

    @app.task
    async def bystander() -> None:
        pass

    async with app.node() as first, app.node() as second:
        blocked = await schedule(conn, "blocks")
        end = await ended(conn, blocked)
        assert end.state == "succeeded"
        assert end.node in (first.id, second.id)
        assert await conn.fetchval("select count(*) from delayq.nodes where state = 'active'") == 2
        assert (await ended(conn, await schedule(conn, "bystander"))).state == "succeeded"
        # each node has a thread that looks, and here both look at one loop
        await wait_for(lambda: len(events(logged, "loop.turns_again")) == 2, "both have told")
    assert starts == [1]
    for event, at_least_s in (("loop.blocked", 1.0), ("loop.turns_again", 3.0)):
        told = events(logged, event)
        assert len(told) == 2
        assert {entry.fields["node"] for entry in told} == {first.id, second.id}
        assert all(entry.fields["blocked_s"] >= at_least_s for entry in told)
        assert all(entry.fields["where"].startswith("test_handler_outcomes.py:") for entry in told)
        (by_its_own,) = [entry for entry in told if entry.fields["node"] == end.node]
        assert (by_its_own.fields["task_id"], by_its_own.fields["kind"]) == (blocked, "blocks")


# --- outcomes on purpose --------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [True, False], ids=["raised", "returned"])
async def test_a_handler_chooses_retry_snooze_or_dead(
    app: Application, conn: Connection, raised: bool
) -> None:
    seen: list[tuple[str, int]] = []

    @app.task(max_attempts=2)
    async def chooses(ctx: Context, what: str) -> object:
        first = (what, ctx.attempt) not in seen
        seen.append((what, ctx.attempt))
        outcomes = {"retry": Retry(after=0.01), "snooze": Snooze(timedelta(milliseconds=10))}
        outcome = Dead("enough") if what == "dead" else outcomes.get(what)
        if outcome is None or (what == "snooze" and not first) or ctx.attempt > 1:
            return None
        if raised:
            raise outcome
        return outcome

    async with app.node():
        ids = {what: await schedule(conn, "chooses", {"what": what}) for what in
               ("retry", "snooze", "dead")}  # fmt: skip
        ends = await all_ended(conn, ids.values())
    retried, snoozed, dead = (ends[ids[what]] for what in ("retry", "snooze", "dead"))
    assert (retried.state, retried.attempt) == ("succeeded", 2)
    assert [what for what, _ in seen].count("snooze") == 2
    assert (snoozed.state, snoozed.attempt, snoozed.errors) == ("succeeded", 1, [])
    assert (dead.state, dead.attempt) == ("dead", 1)
    assert dead.errors[0]["message"] == "enough"


async def test_retry_after_counts_and_ends_at_max_attempts(
    app: Application, conn: Connection
) -> None:
    @app.task(max_attempts=3)
    async def again() -> None:
        raise Retry(after=0.01)

    async with app.node():
        end = await ended(conn, await schedule(conn, "again"))
    assert (end.state, end.attempt, len(end.errors)) == ("dead", 3, 3)


@pytest.mark.parametrize("after", [float("nan"), -1, "soon", 10**30, True])
async def test_nonsense_in_retry_after_fails_the_attempt_with_a_reason(
    app: Application, conn: Connection, after: Any
) -> None:
    @app.task(max_attempts=2)
    async def confused(snooze: bool) -> None:
        raise Snooze(after) if snooze else Retry(after)

    async with app.node():
        retry = await ended(conn, await schedule(conn, "confused", {"snooze": False}))
        snooze = await ended(conn, await schedule(conn, "confused", {"snooze": True}))
    assert (retry.state, snooze.state) == ("dead", "dead")
    assert retry.errors[0]["message"].startswith("after:")


async def test_classes_of_errors_decide_whether_to_give_up(
    app: Application, conn: Connection
) -> None:
    @app.task(retry_on=OSError, give_up_on=FileNotFoundError, max_attempts=2)
    async def picky(name: str) -> None:
        raise {"other": ValueError, "retry": OSError, "give_up": FileNotFoundError}[name]

    async with app.node():
        ids = [await schedule(conn, "picky", {"name": n}) for n in ("other", "retry", "give_up")]
        ends = await all_ended(conn, ids)
    assert [ends[task_id].attempt for task_id in ids] == [1, 2, 1]
    assert {end.state for end in ends.values()} == {"dead"}


# --- time-outs and cancels ------------------------------------------------------------------------


async def test_a_coroutine_that_takes_too_long_is_cancelled_and_retried(
    app: Application, conn: Connection
) -> None:
    cleaned: list[int] = []

    @app.task(timeout=0.1, max_attempts=2)
    async def slow(ctx: Context) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(ctx.attempt)

    async with app.node():
        end = await ended(conn, await schedule(conn, "slow"))
    assert (end.state, cleaned) == ("dead", [1, 2])
    assert [error["error"] for error in end.errors] == ["TimeoutError"] * 2
    assert "100 ms" in end.errors[0]["message"]


async def test_a_timeout_given_with_the_task_goes_before_the_handlers(
    app: Application, conn: Connection
) -> None:
    @app.task(timeout=3600, max_attempts=1)
    async def slow() -> None:
        await asyncio.sleep(3600)

    async with app.node():
        end = await ended(conn, await schedule(conn, "slow", timeout=timedelta(milliseconds=50)))
    assert end.errors[0]["error"] == "TimeoutError"


async def test_a_timeout_inside_the_handler_is_its_own_affair(
    app: Application, conn: Connection
) -> None:
    @app.task(timeout=20, max_attempts=1)
    async def careful() -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await asyncio.sleep(3600)

    async with app.node(max_workers=1):
        ids = [await schedule(conn, "careful") for _ in range(3)]
        ends = await all_ended(conn, ids)
    assert {end.state for end in ends.values()} == {"succeeded"}


async def test_a_thread_keeps_its_lease_past_its_timeout_and_starts_once(
    app: Application, conn: Connection
) -> None:
    """C118."""
    starts: list[int] = []
    go_on = threading.Event()

    @app.task(timeout=0.05, max_attempts=3)
    def stubborn(ctx: Context) -> None:
        starts.append(ctx.attempt)
        go_on.wait(20)

    async with app.node() as node:
        task_id = await schedule(conn, "stubborn")
        running = life(node)._executor.running
        await wait_for(
            lambda: task_id in running and running[task_id].cancel_requested, "its time is up"
        )
        # longer than the TTL and than two beats past the deadline
        until = time.monotonic() + 4.5
        await wait_for(lambda: time.monotonic() > until, "peers had every chance to take it")
        row = await row_of(conn, task_id)
        assert row is not None
        assert (row["state"], row["lease_owner"], row["attempt"]) == ("running", node.id, 1)
        go_on.set()
        end = await ended(conn, task_id)
    assert (end.state, end.attempt, starts) == ("succeeded", 1, [1])


async def test_a_cancelled_handler_that_raises_is_cancelled_and_never_retried(
    app: Application, conn: Connection
) -> None:
    started = asyncio.Event()

    @app.task
    async def obedient() -> None:
        started.set()
        await asyncio.sleep(3600)

    async with app.node():
        task_id = await schedule(conn, "obedient")
        await started.wait()
        assert await conn.fetchval("select delayq.cancel($1)", task_id) == "cancel_requested"
        end = await ended(conn, task_id)
    assert (end.state, end.attempt) == ("cancelled", 1)


async def test_a_cancelled_handler_that_returns_has_succeeded(
    app: Application, conn: Connection
) -> None:
    started = asyncio.Event()
    flags: list[bool] = []

    @app.task
    async def finishes(ctx: Context) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            flags.append(ctx.cancel_requested)

    async with app.node():
        task_id = await schedule(conn, "finishes")
        await started.wait()
        await conn.fetchval("select delayq.cancel($1)", task_id)
        end = await ended(conn, task_id)
    assert (end.state, flags) == ("succeeded", [True])


async def test_a_swallowed_cancel_does_not_reach_the_next_task_of_the_worker(
    app: Application, conn: Connection
) -> None:
    """A task group takes a cancel count that was left behind for a cancel of its own."""
    started = asyncio.Event()
    raised: list[str] = []

    @app.task
    async def swallows() -> None:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

    @app.task
    async def groups() -> None:
        async def fails() -> None:
            raise ValueError("inside")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
                await asyncio.sleep(3600)
        except BaseException as error:  # noqa: BLE001 - which one is the question
            raised.append(type(error).__name__)

    async with app.node(min_workers=1, max_workers=1):
        first = await schedule(conn, "swallows")
        await started.wait()
        await conn.fetchval("select delayq.cancel($1)", first)
        assert (await ended(conn, first)).state == "succeeded"
        await ended(conn, await schedule(conn, "groups"))
    assert raised == ["ExceptionGroup"]


async def test_a_thread_is_told_of_a_cancel_by_its_flag(app: Application, conn: Connection) -> None:
    started = threading.Event()

    @app.task
    def watches(ctx: Context) -> None:
        started.set()
        deadline = time.monotonic() + 10
        while not ctx.cancel_requested and time.monotonic() < deadline:
            time.sleep(0.005)
        raise RuntimeError("asked to end")

    async with app.node():
        task_id = await schedule(conn, "watches")
        await wait_for(started.is_set, "the thread runs")
        await conn.fetchval("select delayq.cancel($1)", task_id)
        end = await ended(conn, task_id)
    assert (end.state, end.attempt) == ("cancelled", 1)


async def test_a_cancel_is_found_without_listen(app: Application, conn: Connection) -> None:
    started = asyncio.Event()

    @app.task
    async def obedient() -> None:
        started.set()
        await asyncio.sleep(3600)

    async with app.node():
        task_id = await schedule(conn, "obedient")
        await started.wait()
        await conn.execute("set delayq.hints = off")
        await conn.fetchval("select delayq.cancel($1)", task_id)
        assert (await ended(conn, task_id)).state == "cancelled"


async def test_a_drain_ends_although_a_handler_ignores_every_cancel(
    app: Application, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "_CANCEL_GRACE_S", 0.3)
    started = asyncio.Event()
    release = asyncio.Event()

    @app.task
    async def deaf() -> None:
        started.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    node = app.node(drain_timeout_s=0.1)
    await node.start()
    try:
        await schedule(conn, "deaf")
        await started.wait()
        node.request_drain()
        async with asyncio.timeout(10):
            await node.wait()
        row = await conn.fetchrow("select state, lease_owner, attempt from delayq.tasks")
        assert row is not None
        assert tuple(row) == ("pending", 0, 0)
    finally:
        release.set()
        await asyncio.sleep(0)


async def test_shutdown_gives_an_interrupted_attempt_back(
    app: Application, conn: Connection
) -> None:
    started = asyncio.Event()

    @app.task
    async def long() -> None:
        started.set()
        await asyncio.sleep(3600)

    async with stopped_at_once(app.node()):
        task_id = await schedule(conn, "long")
        await started.wait()
    row = await row_of(conn, task_id)
    assert row is not None
    assert (row["state"], row["attempt"], row["interruptions"]) == ("pending", 0, 1)
    assert row["errors"] == "[]" or "Cancelled" not in row["errors"]
    assert await conn.fetchval("select count(*) from delayq.nodes") == 0


# --- misfire, arguments, payloads -----------------------------------------------------------------


async def test_a_task_that_is_too_late_is_missed_and_not_run(
    app: Application, conn: Connection
) -> None:
    ran: list[int] = []

    @app.task
    async def punctual(n: int) -> None:
        ran.append(n)

    @app.task(misfire_grace=1)
    async def graceful(n: int) -> None:
        ran.append(n)

    late = await schedule(conn, "punctual", {"n": 1}, misfire_grace=timedelta(seconds=1))
    handlers = await schedule(conn, "graceful", {"n": 2})
    forever = await schedule(conn, "punctual", {"n": 3})
    await conn.execute("update delayq.tasks set execute_at = execute_at - interval '10 s'")
    fresh = await schedule(conn, "graceful", {"n": 4})
    async with app.node():
        ends = await all_ended(conn, [late, handlers, forever, fresh])
    assert [ends[i].state for i in (late, handlers)] == ["missed", "missed"]
    assert [ends[i].state for i in (forever, fresh)] == ["succeeded", "succeeded"]
    assert sorted(ran) == [3, 4]


async def test_a_snoozed_task_is_no_misfire(app: Application, conn: Connection) -> None:
    attempts: list[int] = []

    @app.task(misfire_grace=0.3)
    async def sleepy(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            raise Snooze(0.6)

    async with app.node():
        end = await ended(conn, await schedule(conn, "sleepy"))
    assert (end.state, attempts) == ("succeeded", [1, 1])


@pytest.mark.parametrize("outcome", [Retry(after=0.05), Snooze(0.05)])
async def test_a_task_that_goes_back_keeps_the_instant_that_was_asked_for(
    app: Application, conn: Connection, outcome: Exception
) -> None:
    """A plain task has no `due_at` of its own: it is its first `execute_at`."""
    seen: list[Context] = []

    @app.task
    async def again(ctx: Context) -> None:
        seen.append(ctx)
        if len(seen) == 1:
            raise outcome

    async with app.node():
        await ended(conn, await schedule(conn, "again"))
    first, second = seen
    assert first.due_at == first.execute_at == second.due_at
    assert second.execute_at > second.due_at
    assert await conn.fetchval("select due_at from delayq.task_history") == first.due_at


async def test_arguments_that_do_not_fit_are_retried_and_then_dead(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    ran: list[int] = []

    @app.task(max_attempts=2)
    async def strict(n: int) -> None:
        ran.append(n)

    async with app.node():
        wrong = await schedule(conn, "strict", {"n": MARKER})
        missing = await schedule(conn, "strict", {"other": 1})
        fine = await schedule(conn, "strict", {"n": 1})
        ends = await all_ended(conn, [wrong, missing, fine])
    assert (ends[wrong].state, ends[wrong].attempt) == ("dead", 2)
    assert ends[wrong].errors[-1]["error"] == "ArgumentsRefused"
    assert "n" in ends[wrong].errors[-1]["message"]
    assert ends[missing].state == "dead"
    assert (ends[fine].state, ran) == ("succeeded", [1])
    assert MARKER not in json.dumps(ends[wrong].errors)
    assert not [event for event in logged if MARKER in event.text]


@pytest.mark.parametrize("size", [100, 16_300, 16_500, 300_000])
async def test_payloads_of_any_size_arrive_whole(
    app: Application, conn: Connection, size: int
) -> None:
    got: list[str] = []

    @app.task
    async def reads(text: str) -> None:
        got.append(text)

    text = "é" + "x" * size
    async with app.node():
        end = await ended(conn, await schedule(conn, "reads", {"text": text}))
    assert end.state == "succeeded"
    assert got == [text]


async def test_many_large_payloads_at_once_arrive_whole(app: Application, conn: Connection) -> None:
    sizes: list[int] = []

    @app.task
    async def reads(text: str) -> None:
        sizes.append(len(text))

    await conn.execute(
        "insert into delayq.tasks (kind, payload)"
        " select 'reads', jsonb_build_object('text', repeat('x', 15000 + g))"
        " from generate_series(1, 150) g"
    )
    async with app.node():
        ids = [row["id"] for row in await conn.fetch("select id from delayq.tasks")]
        await all_ended(conn, ids)
    assert sorted(sizes) == [15000 + n for n in range(1, 151)]


# --- admission ------------------------------------------------------------------------------------


class Crowd:
    """Counts how many are inside at once. For threads too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self.most = 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_no_kind_takes_more_than_its_share(
    app: Application, conn: Connection, kind: str
) -> None:
    crowd = Crowd()

    @app.task(max_concurrency=2)
    async def coroutine() -> None:
        with crowd:
            await asyncio.sleep(0.01)

    @app.task(max_concurrency=2)
    def thread() -> None:
        with crowd:
            time.sleep(0.01)

    @app.task
    async def other() -> None:
        pass

    async with app.node():
        ids = [await schedule(conn, kind) for _ in range(30)]
        ids += [await schedule(conn, "other") for _ in range(5)]
        ends = await all_ended(conn, ids)
    assert {end.state for end in ends.values()} == {"succeeded"}
    assert crowd.most == 2


async def test_a_paused_kind_waits_and_runs_once_it_is_resumed(
    app: Application, conn: Connection
) -> None:
    ran: list[str] = []

    @app.task
    async def halted() -> None:
        ran.append("halted")

    @app.task
    async def free() -> None:
        ran.append("free")

    async def pause(paused: bool) -> None:
        await conn.execute(
            "insert into delayq.kinds (kind, paused) values ('halted', $1)"
            " on conflict (kind) do update set paused = excluded.paused",
            paused,
        )
        await conn.execute("select delayq.notify('kind halted')")

    async with app.node() as node:
        before = await schedule(conn, "halted", delay=timedelta(seconds=0.4))
        await pause(True)
        await wait_for(lambda: "halted" in life(node)._dispatcher.paused, "the node heard of it")
        after = await schedule(conn, "halted")
        await ended(conn, await schedule(conn, "free", delay=timedelta(seconds=0.6)))
        assert ran == ["free"]
        await pause(False)
        ends = await all_ended(conn, [before, after])
    assert {end.attempt for end in ends.values()} == {1}
    assert ran == ["free", "halted", "halted"]


# --- what is said ---------------------------------------------------------------------------------


class Rude(Exception):
    """Says what it was given."""


def _chain(secret: str) -> BaseException:
    error = Rude("chained")
    error.__cause__ = ValueError(secret)
    return error


TELLTALES: dict[str, Callable[[str], BaseException]] = {
    "message": lambda secret: Rude(f"refused {secret}"),
    "repr": lambda secret: Rude({"secret": secret}),
    "key": KeyError,
    "dead": lambda secret: Dead(f"because of {secret}"),
    "chain": _chain,
    "group": lambda secret: ExceptionGroup(secret, [ValueError(secret)]),
}


async def test_payloads_reach_neither_logs_nor_errors(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    """C107."""

    @app.task(max_attempts=2)
    async def leaks(secret: str, how: str) -> None:
        raise TELLTALES[how](secret)

    @app.task(max_attempts=2, timeout=0.1)
    async def sleeps(secret: str) -> None:
        local = secret
        await asyncio.sleep(3600 + len(local))

    @app.task(max_attempts=2)
    async def inserts(ctx: Context, secret: str) -> None:
        async with ctx.effect() as effect:
            await effect.execute("insert into unique_things values ($1), ($1)", secret)

    await conn.execute("create table unique_things (thing text primary key)")
    async with app.node():
        ids = [await schedule(conn, "leaks", {"secret": MARKER, "how": how}) for how in TELLTALES]
        ids += [await schedule(conn, kind, {"secret": MARKER}) for kind in ("inserts", "sleeps")]
        ends = await all_ended(conn, ids)
    for task_id, how in zip(ids, [*TELLTALES, "driver", "timeout"], strict=True):
        assert ends[task_id].state == "dead", how
        assert MARKER not in json.dumps(ends[task_id].errors), how
    assert not [event for event in logged if MARKER in event.text]


async def test_a_marker_that_is_quoted_or_cut_does_not_leak(
    app: Application, conn: Connection
) -> None:
    secret = "line one 'quoted'\nline two \\ é " + MARKER * 40

    @app.task(max_attempts=1)
    async def quotes(secret: str, nested: dict[str, int], before: int) -> None:
        raise ValueError("x" * before + repr(secret) + json.dumps([secret]) + str(nested))

    async with app.node(error_max_bytes=4096):
        payload = {"secret": secret, "nested": {f"{MARKER}-key": 1}}
        ids = [await schedule(conn, "quotes", payload | {"before": n}) for n in (0, 4000, 4085)]
        ends = await all_ended(conn, ids)
    for end in ends.values():
        assert MARKER not in end.errors[0]["message"]
        assert "line one" not in end.errors[0]["message"]


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


@pytest.mark.parametrize("workers", [1, 3])
async def test_context_variables_of_one_handler_never_reach_the_next(
    app: Application, conn: Connection, workers: int
) -> None:
    seen: list[str] = []

    @app.task
    async def sets(n: int) -> None:
        seen.append(VARIABLE.get())
        VARIABLE.set(f"of {n}")
        await asyncio.sleep(0.001)
        assert VARIABLE.get() == f"of {n}"

    @app.task
    def sets_in_thread(n: int) -> None:
        seen.append(VARIABLE.get())
        VARIABLE.set(f"of thread {n}")

    async with app.node(min_workers=1, max_workers=workers):
        ids = [await schedule(conn, "sets", {"n": n}) for n in range(10)]
        ids += [await schedule(conn, "sets_in_thread", {"n": n}) for n in range(10)]
        ids += [await schedule(conn, "sets", {"n": n}) for n in range(10)]
        ends = await all_ended(conn, ids)
    assert {end.state for end in ends.values()} == {"succeeded"}
    assert seen == ["unset"] * 30


# --- effects --------------------------------------------------------------------------------------


@pytest.fixture
async def effects(conn: Connection) -> None:
    await conn.execute("create table effects (task_id bigint, attempt int, note text)")


async def _effects(conn: Connection) -> list[tuple[int, int, str | None]]:
    rows = await conn.fetch("select task_id, attempt, note from effects order by 1, 2")
    return [tuple(row) for row in rows]


INSERT = "insert into effects values ($1, $2, $3)"


async def test_an_effect_commits_with_the_completion(
    app: Application, conn: Connection, effects: None
) -> None:
    @app.task
    async def coroutine(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, None)

    @app.task
    def plain(ctx: Context) -> None:
        with ctx.effect() as effect:
            effect.execute(INSERT, ctx.id, ctx.attempt, None)

    async with app.node():
        ids = [await schedule(conn, kind) for kind in ("coroutine", "plain")]
        ends = await all_ended(conn, ids)
    assert [end.state for end in ends.values()] == ["succeeded"] * 2
    assert await _effects(conn) == [(task_id, 1, None) for task_id in ids]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["coroutine", "thread"])
async def test_a_body_that_raises_is_rolled_back_and_retried(
    app: Application, conn: Connection, effects: None, asynchronous: bool
) -> None:
    if asynchronous:

        @app.task(kind="fails_once")
        async def coroutine(ctx: Context) -> None:
            async with ctx.effect() as effect:
                await effect.execute(INSERT, ctx.id, ctx.attempt, None)
                if ctx.attempt == 1:
                    raise ValueError("once")
    else:

        @app.task(kind="fails_once")
        def plain(ctx: Context) -> None:
            with ctx.effect() as effect:
                effect.execute(INSERT, ctx.id, ctx.attempt, None)
                if ctx.attempt == 1:
                    raise ValueError("once")

    async with app.node():
        end = await ended(conn, await schedule(conn, "fails_once"))
    assert (end.state, end.attempt) == ("succeeded", 2)
    assert await _effects(conn) == [(end.id, 2, None)]


async def test_an_exception_after_the_commit_is_told_and_never_retried(
    app: Application, conn: Connection, effects: None, logged: list[Logged]
) -> None:
    @app.task
    async def trips(ctx: Context, how: str) -> object:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, None)
        if how == "retry":
            return Retry(0.01)
        raise Odd("after") if how == "base" else ValueError("after")

    async with app.node() as node:
        ids = [await schedule(conn, "trips", {"how": how}) for how in ("error", "base", "retry")]
        ends = await all_ended(conn, ids)
        await wait_for(lambda: not life(node)._holdings.ids(), "all three are let go of")
    assert {end.state for end in ends.values()} == {"succeeded"}
    assert len(await _effects(conn)) == 3
    told = [event for event in logged if event.event == "task.failed_after_its_effect"]
    assert len(told) == 3
    assert {event.level for event in told} == {"WARNING"}


async def test_a_second_effect_in_one_attempt_is_refused(
    app: Application, conn: Connection, effects: None
) -> None:
    refused: list[type[BaseException]] = []

    @app.task
    async def greedy(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, "first")
        try:
            async with ctx.effect() as effect:
                await effect.execute(INSERT, ctx.id, ctx.attempt, "second")
        except EffectMisused as error:
            refused.append(type(error))
            raise

    async with app.node():
        end = await ended(conn, await schedule(conn, "greedy"))
    assert (end.state, refused) == ("succeeded", [EffectMisused])
    assert await _effects(conn) == [(end.id, 1, "first")]


async def test_an_effect_whose_lease_was_lost_is_rolled_back(
    app: Application, conn: Connection, effects: None, logged: list[Logged]
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()
    errors: list[type[BaseException]] = []

    @app.task
    async def overtaken(ctx: Context) -> None:
        try:
            async with ctx.effect() as effect:
                await effect.execute(INSERT, ctx.id, ctx.attempt, ctx.lease_token)
                if ctx.attempt == 1:
                    entered.set()
                    await go_on.wait()
        except BaseException as error:
            errors.append(type(error))
            raise

    async with app.node():
        task_id = await schedule(conn, "overtaken")
        await entered.wait()
        # somebody took the task over, as an adopter would
        await conn.execute(
            "update delayq.tasks set state = 'pending', lease_owner = 0, lease_token = 0"
            " where id = $1",
            task_id,
        )
        go_on.set()
        end = await ended(conn, task_id)
    assert errors == [LeaseLost]
    assert (end.state, end.attempt) == ("succeeded", 2)
    assert await _effects(conn) == [(task_id, 2, str(end.lease_token))]
    assert "lease.lost" in {event.event for event in logged}


async def test_the_effect_of_an_idempotency_key_is_applied_once(
    app: Application, conn: Connection, effects: None
) -> None:
    passed: list[int] = []

    @app.task
    async def applies(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, ctx.idempotency_key)
        passed.append(ctx.id)

    async with app.node():
        first = await schedule(conn, "applies", idempotency_key="order 7")
        assert (await ended(conn, first)).state == "succeeded"
        assert await schedule(conn, "applies", idempotency_key="order 7") == first
        # a second task that claims the same key, as a restored backup might hold
        second = await conn.fetchval(
            "insert into delayq.tasks (kind, idempotency_key) values ('applies', 'order 7')"
            " returning id"
        )
        assert (await ended(conn, second)).state == "succeeded"
    assert await _effects(conn) == [(first, 1, "order 7")]
    assert passed == [first]


async def test_the_body_of_an_effect_that_was_applied_before_is_not_entered(
    app: Application, conn: Connection
) -> None:
    """It may do what no roll-back takes back."""
    begun: list[int] = []
    entered: list[int] = []

    @app.task
    async def coroutine(ctx: Context) -> None:
        begun.append(ctx.id)
        async with ctx.effect():
            entered.append(ctx.id)

    @app.task
    def plain(ctx: Context) -> None:
        begun.append(ctx.id)
        with ctx.effect():
            entered.append(ctx.id)

    async with app.node():
        for kind in ("coroutine", "plain"):
            task_id = await schedule(conn, kind, idempotency_key="k", delay=timedelta(hours=1))
            await conn.execute("update delayq.idempotency set applied_at = now()")
            await conn.execute("select delayq.run_now($1)", task_id)
            assert (await ended(conn, task_id)).state == "succeeded"
    assert (len(begun), entered) == (2, [])


async def test_a_stamp_that_comes_during_the_body_rolls_it_back(
    app: Application, conn: Connection, effects: None
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def races(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, None)
            entered.set()
            await go_on.wait()

    async with app.node():
        task_id = await schedule(conn, "races", idempotency_key="k")
        await entered.wait()
        await conn.execute("update delayq.idempotency set applied_at = now()")
        go_on.set()
        end = await ended(conn, task_id)
    assert end.state == "succeeded"
    assert await _effects(conn) == []


async def test_an_effect_that_is_cut_off_is_retried_and_applied_once(
    app: Application, conn: Connection, dsn: str, effects: None
) -> None:
    entered = asyncio.Event()

    @app.task
    async def cut(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, None)
            if ctx.attempt == 1:
                pid = await effect.fetchval("select pg_backend_pid()")
                await killer.execute("select pg_terminate_backend($1)", pid)
                entered.set()

    async with connected(dsn) as killer, app.node():
        end = await ended(conn, await schedule(conn, "cut"))
    assert (end.state, end.attempt, entered.is_set()) == ("succeeded", 2, True)
    assert await _effects(conn) == [(end.id, 2, None)]


async def test_a_timeout_inside_an_effect_rolls_it_back(
    app: Application, conn: Connection, effects: None
) -> None:
    @app.task(timeout=0.15, max_attempts=2)
    async def waits(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, None)
            if ctx.attempt == 1:
                await effect.execute("select pg_sleep(30)")

    async with app.node():
        end = await ended(conn, await schedule(conn, "waits"))
    assert (end.state, end.attempt) == ("succeeded", 2)
    assert await _effects(conn) == [(end.id, 2, None)]


async def test_slow_effects_do_not_starve_leases_and_settlements(
    app: Application, conn: Connection, effects: None
) -> None:
    release = asyncio.Event()

    @app.task
    async def slow(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, None)
            await release.wait()

    @app.task
    async def quick() -> None:
        pass

    async with app.node(effect_connections=2):
        slow_ones = [await schedule(conn, "slow") for _ in range(5)]
        quick_ones = [await schedule(conn, "quick") for _ in range(20)]
        assert len(await all_ended(conn, quick_ones)) == 20
        release.set()
        ends = await all_ended(conn, slow_ones)
    assert {end.state for end in ends.values()} == {"succeeded"}
    assert len(await _effects(conn)) == 5


async def test_the_settle_of_an_effect_waits_for_a_stranger_without_holding_up_others(
    app: Application, conn: Connection, dsn: str, effects: None
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def writes(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, None)
            entered.set()
            await go_on.wait()

    @app.task
    async def quick() -> None:
        pass

    async with app.node(), connected(dsn) as stranger:
        task_id = await schedule(conn, "writes")
        await entered.wait()
        async with stranger.transaction():
            await stranger.execute("select from delayq.tasks where id = $1 for update", task_id)
            go_on.set()
            await wait_until_blocked(conn)
            assert (await ended(conn, await schedule(conn, "quick"))).state == "succeeded"
            assert await row_of(conn, task_id) is not None
        assert (await ended(conn, task_id)).state == "succeeded"
    assert len(await _effects(conn)) == 1


async def test_two_handlers_that_cancel_each_other_in_their_effects_both_end(
    app: Application, conn: Connection, effects: None
) -> None:
    """Their settles deadlock; the database ends one of them, which is tried again."""
    partners: dict[int, int] = {}
    both = asyncio.Barrier(2)

    @app.task(max_attempts=5)
    async def hostile(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt, None)
            if ctx.attempt == 1:
                await both.wait()
                await effect.fetchval("select delayq.cancel($1)", partners[ctx.id])

    async with app.node():
        first = await schedule(conn, "hostile", delay=timedelta(seconds=0.3))
        second = await schedule(conn, "hostile", delay=timedelta(seconds=0.3))
        partners.update({first: second, second: first})
        ends = await all_ended(conn, [first, second])
    states = sorted(end.state for end in ends.values())
    assert states in (["cancelled", "succeeded"], ["succeeded", "succeeded"])
    done = [row[0] for row in await _effects(conn)]
    assert sorted(done) == sorted(i for i, end in ends.items() if end.state == "succeeded")


async def test_held_is_empty_once_everything_is_over(app: Application, conn: Connection) -> None:
    @app.task(max_attempts=2, max_concurrency=3)
    async def varied(n: int) -> None:
        await asyncio.sleep(0.001 * (n % 3))
        if n % 4 == 0:
            raise ValueError(n)
        if n % 4 == 1:
            raise Dead(str(n))

    async with app.node() as node:
        ids = [await schedule(conn, "varied", {"n": n}) for n in range(60)]
        await all_ended(conn, ids)
        holdings, dispatcher = life(node)._holdings, life(node)._dispatcher
        executor = life(node)._executor

        async def nothing_left() -> bool:
            ready = dispatcher.ready
            waits = ready.takeable or any(ready._aside.values())
            return not (holdings.ids() or executor.running or waits)

        await eventually(nothing_left, "the node holds nothing")
        assert all(used == 0 for used in dispatcher._admission._used.values())
