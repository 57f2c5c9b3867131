"""A context tells its attempt's facts, and its effect works on the loop and from a thread alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from loguru import logger

from delayq.bridge import AnyConnection, BlockingConnection
from delayq.context import Context
from delayq.errors import EffectAlreadyApplied, EffectInterrupted, EffectMisused, LeaseLost


class FakeConnection:
    """Stands in for asyncpg's; remembers the calls, and may wait, fail or stop the loop."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.started = asyncio.Event()
        self.cancelled = False

    async def execute(self, query: str, *args: object, **options: object) -> str:
        self.calls.append((query, args, options, threading.get_ident()))
        if query == "fail":
            raise OSError("the server went away")
        if query == "wait":
            await self._wait()
        if query == "stop":
            asyncio.get_running_loop().stop()
            await asyncio.Event().wait()
        return "OK"

    async def executemany(self, query: str, args: Any, **options: object) -> None:
        self.calls.append((query, list(args), options))

    async def fetch(self, query: str, *args: object, **options: object) -> Any:
        return [query, args, options]

    async def fetchrow(self, query: str, *args: object, **options: object) -> Any:
        return (query, args, options)

    async def fetchval(self, query: str, *args: object, **options: object) -> Any:
        return (query, args, options)

    async def _wait(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class FakeAttempt:
    """What the executor would give: one attempt, whose effect records how it ended."""

    id = 7
    token = -(2**63)
    kind = "expire"
    attempt = 2
    due_us = 1_777_626_000_000_000
    execute_us = 1_777_626_000_000_001
    deadline_us: int | None = None
    headers_json: str | None = None
    idempotency_key: str | None = None
    node = 99
    cancel_requested = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.conn = FakeConnection()
        self.ended: list[str] = []
        self.over = asyncio.Event()
        self.on_enter: BaseException | None = None
        self.on_commit: BaseException | None = None

    @asynccontextmanager
    async def effect(self) -> AsyncIterator[AnyConnection]:
        if self.on_enter is not None:
            raise self.on_enter
        conn: Any = self.conn
        try:
            # A real effect may use a time limit, which must be left by the task that entered it.
            async with asyncio.timeout(30):
                yield conn
            self._commit()
        except BaseException as error:
            self.ended.append(f"rolled back for {type(error).__name__}")
            self.over.set()
            raise

    def _commit(self) -> None:
        if self.on_commit is not None:
            raise self.on_commit
        self.ended.append("committed")


@pytest.fixture
async def attempt() -> FakeAttempt:
    return FakeAttempt(asyncio.get_running_loop())


async def in_thread(attempt: FakeAttempt, body: Callable[[BlockingConnection], object]) -> Any:
    """The result of a plain handler that has `body` in its effect."""

    def handler() -> object:
        with Context(attempt).effect() as conn:
            return body(conn)

    return await asyncio.to_thread(handler)


def raising(error: BaseException) -> Callable[[BlockingConnection], None]:
    def body(_: BlockingConnection) -> None:
        raise error

    return body


# --- facts ----------------------------------------------------------------------------------


async def test_a_context_tells_the_facts_of_its_attempt(attempt: FakeAttempt) -> None:
    ctx = Context(attempt)
    assert (ctx.id, ctx.kind, ctx.attempt) == (7, "expire", 2)
    assert ctx.due_at == datetime(2026, 5, 1, 9, tzinfo=UTC)
    assert ctx.execute_at == datetime(2026, 5, 1, 9, 0, 0, 1, tzinfo=UTC)
    assert ctx.deadline is None
    assert ctx.headers == {}
    assert ctx.lease_token == "-9223372036854775808"
    assert ctx.idempotency_key == "delayq:7"
    assert repr(ctx) == "<Context task=7 kind='expire' attempt=2>"


async def test_a_context_tells_what_was_given_with_the_task(attempt: FakeAttempt) -> None:
    attempt.deadline_us = attempt.due_us
    attempt.headers_json = '{"trace": "x"}'
    attempt.idempotency_key = "once"
    ctx = Context(attempt)
    assert ctx.deadline == ctx.due_at
    assert ctx.headers == {"trace": "x"}
    assert ctx.headers is ctx.headers
    assert ctx.idempotency_key == "once"


async def test_headers_cannot_be_changed(attempt: FakeAttempt) -> None:
    headers: Any = Context(attempt).headers
    with pytest.raises(TypeError):
        headers["a"] = 1


async def test_a_cancel_request_is_seen_while_the_handler_runs(attempt: FakeAttempt) -> None:
    ctx = Context(attempt)
    assert not ctx.cancel_requested
    attempt.cancel_requested = True
    assert ctx.cancel_requested


async def test_a_context_holds_nothing_but_its_slots(attempt: FakeAttempt) -> None:
    with pytest.raises(AttributeError):
        Context(attempt).anything = 1  # type: ignore[attr-defined]  # refused on purpose


async def test_the_logger_carries_the_task(attempt: FakeAttempt) -> None:
    records: list[Any] = []
    sink = logger.add(lambda message: records.append(message.record["extra"]), level="INFO")
    try:
        Context(attempt).logger.info("x")
    finally:
        logger.remove(sink)
    expected = {"task_id": 7, "kind": "expire", "attempt": 2, "node": 99}
    assert expected.items() <= records[0].items()


# --- the effect on the loop -----------------------------------------------------------------


async def test_an_effect_on_the_loop_is_the_executors_own(attempt: FakeAttempt) -> None:
    async with Context(attempt).effect() as conn:
        await conn.execute("select 1")
    assert attempt.ended == ["committed"]


async def test_an_effect_on_the_loop_rolls_back_when_its_body_raises(attempt: FakeAttempt) -> None:
    with pytest.raises(KeyError):
        async with Context(attempt).effect():
            raise KeyError
    assert attempt.ended == ["rolled back for KeyError"]


async def test_a_blocking_effect_on_the_loop_is_refused_instead_of_a_deadlock(
    attempt: FakeAttempt,
) -> None:
    with pytest.raises(EffectMisused, match="async with"), Context(attempt).effect():
        pass


async def test_an_async_effect_on_another_loop_is_refused(attempt: FakeAttempt) -> None:
    async def elsewhere() -> None:
        async with Context(attempt).effect():
            pass

    with pytest.raises(EffectMisused, match="another event loop"):
        await asyncio.to_thread(asyncio.run, elsewhere())


# --- the effect in a thread -----------------------------------------------------------------


async def test_a_thread_works_in_the_effect_and_commits(attempt: FakeAttempt) -> None:
    def body(conn: BlockingConnection) -> list[Any]:
        conn.executemany("many", [(1,), (2,)])
        return [
            conn.execute("one", 5, timeout=3),
            conn.fetch("all", 1),
            conn.fetchrow("row", 1),
            conn.fetchval("val", 1, column=2),
        ]

    nothing = {"timeout": None}
    assert await in_thread(attempt, body) == [
        "OK",
        ["all", (1,), nothing],
        ("row", (1,), nothing),
        ("val", (1,), {"column": 2, "timeout": None}),
    ]
    assert attempt.conn.calls == [
        ("many", [(1,), (2,)], nothing),
        ("one", (5,), {"timeout": 3}, threading.get_ident()),
    ]
    assert attempt.ended == ["committed"]


async def test_a_thread_may_run_anything_async_on_the_connection(attempt: FakeAttempt) -> None:
    async def follow_up(conn: AnyConnection) -> str:
        return await conn.execute("insert")

    assert await in_thread(attempt, lambda conn: conn.run(follow_up)) == "OK"


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), LeaseLost("lost"), StopIteration(), SystemExit(3), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_the_body_raises_rolls_back_and_comes_out_as_it_was(
    attempt: FakeAttempt, error: BaseException
) -> None:
    caught: list[BaseException] = []

    def handler() -> None:
        try:
            with Context(attempt).effect() as conn:
                raising(error)(conn)
        except BaseException as raised:  # noqa: BLE001 - SystemExit is among them
            caught.append(raised)

    await asyncio.to_thread(handler)
    assert caught == [error]
    assert len(attempt.ended) == 1
    assert attempt.ended[0].startswith("rolled back")


@pytest.mark.parametrize(
    "error", [EffectAlreadyApplied(), LeaseLost("lost"), EffectMisused("twice")]
)
async def test_an_effect_that_cannot_be_entered_says_so_in_the_thread(
    attempt: FakeAttempt, error: BaseException
) -> None:
    attempt.on_enter = error
    ran: list[str] = []
    with pytest.raises(type(error)) as caught:
        await in_thread(attempt, lambda _: ran.append("body"))
    assert caught.value is error
    assert not ran


async def test_a_lease_that_was_lost_at_the_commit_is_raised_in_the_thread(
    attempt: FakeAttempt,
) -> None:
    attempt.on_commit = LeaseLost("lost")
    with pytest.raises(LeaseLost):
        await in_thread(attempt, lambda conn: conn.execute("x"))
    assert attempt.ended == ["rolled back for LeaseLost"]


async def test_a_failed_statement_raises_in_the_thread_and_may_be_handled_there(
    attempt: FakeAttempt,
) -> None:
    def body(conn: BlockingConnection) -> str:
        with pytest.raises(OSError, match="went away"):
            conn.execute("fail")
        return conn.execute("next")

    assert await in_thread(attempt, body) == "OK"
    assert attempt.ended == ["committed"]


async def test_a_failed_statement_that_is_not_handled_rolls_back(attempt: FakeAttempt) -> None:
    with pytest.raises(OSError, match="went away"):
        await in_thread(attempt, lambda conn: conn.execute("fail"))
    assert attempt.ended == ["rolled back for OSError"]


async def test_a_connection_is_refused_after_its_block(attempt: FakeAttempt) -> None:
    kept: list[BlockingConnection] = []
    await in_thread(attempt, kept.append)
    with pytest.raises(EffectInterrupted, match="inside the block only"):
        await asyncio.to_thread(kept[0].execute, "late")


async def test_a_wait_has_a_limit_and_stops_the_statement(attempt: FakeAttempt) -> None:
    async def for_ever(conn: AnyConnection) -> None:
        await conn.execute("wait")

    with pytest.raises(EffectInterrupted):
        await in_thread(attempt, lambda conn: conn.run(for_ever, limit_s=0.1))
    async with asyncio.timeout(5):
        await attempt.over.wait()
    assert attempt.conn.cancelled
    assert attempt.ended == ["rolled back for CancelledError"]


async def test_cancelling_everything_on_the_loop_rolls_back_and_frees_the_thread(
    attempt: FakeAttempt,
) -> None:
    handler = asyncio.create_task(in_thread(attempt, lambda conn: conn.execute("wait")))
    await attempt.conn.started.wait()
    others = asyncio.all_tasks() - {asyncio.current_task(), handler}
    for other in others:
        other.cancel()
    with pytest.raises(EffectInterrupted):
        await handler
    assert attempt.ended == ["rolled back for CancelledError"]


def test_a_loop_that_stops_does_not_hold_the_thread_for_ever() -> None:
    loop = asyncio.new_event_loop()
    attempt = FakeAttempt(loop)
    errors: list[BaseException] = []

    def handler() -> None:
        try:
            with Context(attempt).effect() as conn:
                conn.execute("stop")
        except EffectInterrupted as error:
            errors.append(error)

    thread = threading.Thread(target=handler)
    loop.call_soon(thread.start)
    loop.run_forever()
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 1
    owners = asyncio.all_tasks(loop)
    loop.run_until_complete(asyncio.gather(*owners, return_exceptions=True))
    loop.close()
    assert attempt.ended == ["rolled back for CancelledError"]


def test_a_loop_that_is_closed_refuses_the_effect_at_once() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(EffectInterrupted), Context(FakeAttempt(loop)).effect():
        pass
