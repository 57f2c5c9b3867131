"""DelayQ: one face for handlers, client and node."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

import delayq
from delayq import (
    Cancel,
    Context,
    DelayQ,
    DelayQError,
    InvalidArgument,
    InvalidSettings,
    RegistrationError,
    Reschedule,
    SchemaMissing,
    Settings,
    TaskState,
)
from delayq.client import Client
from delayq.settings import load_settings

if TYPE_CHECKING:
    from delayq.database import Connection
    from tests.conftest import Logged

REPOSITORY = Path(__file__).resolve().parents[2]
HOUR = timedelta(hours=1)
PROGRAM = """
import asyncio
from delayq import DelayQ

dq = DelayQ()

@dq.task
async def greet(name: str) -> None:
    print(f"hello {name}", flush=True)

async def main() -> None:
    async with dq:
        await greet.after(0, "Ada")

asyncio.run(main())
raise SystemExit(dq.run())
"""


@pytest.fixture
def dq(settings: Settings) -> DelayQ:
    return DelayQ(settings=settings)


# --- client ------------------------------------------------------------------------------------


async def test_a_handler_schedules_moves_and_cancels_through_its_application(dq: DelayQ) -> None:
    @dq.task
    async def expire(ctx: Context, order_id: int) -> None: ...

    async with dq:
        task = await expire.options(key="order:42").after(HOUR, order_id=42)
        assert (task.kind, task.created, task.state) == ("expire", True, TaskState.PENDING)
        found = await dq.get(task.id)
        assert found is not None
        assert found.payload == {"order_id": 42}
        assert await expire.reschedule(key="order:42", delay=2 * HOUR) is Reschedule.MOVED
        assert await dq.run_now(kind="expire", key="order:42") is Reschedule.MOVED
        assert await expire.cancel(key="order:42") is Cancel.CANCELLED
        assert await dq.cancel(task.id) is Cancel.ALREADY_FINISHED


async def test_requests_of_handlers_can_be_scheduled_together(dq: DelayQ) -> None:
    @dq.task
    async def expire(order_id: int) -> None: ...

    async with dq:
        wanted = [expire.options().request_after(HOUR, order_id=n) for n in range(10)]
        tasks = await dq.schedule_many(wanted)
        listed = await dq.list(kind="expire")
        assert [task.id for task in listed] == [task.id for task in tasks]


async def test_the_scheduling_of_a_handler_joins_the_callers_transaction(
    dq: DelayQ, conn: Connection
) -> None:
    @dq.task
    async def expire(order_id: int) -> None: ...

    async with dq:
        transaction = conn.transaction()
        await transaction.start()
        task = await expire.options(conn=conn).after(HOUR, order_id=42)
        await transaction.rollback()
        assert await dq.get(task.id) is None


def test_every_verb_of_the_client_is_one_of_the_application() -> None:
    verbs = {
        name
        for name, member in inspect.getmembers(Client, inspect.iscoroutinefunction)
        if not name.startswith("_")
    } - {"open", "close"}
    assert verbs >= {"schedule", "cancel_many", "list", "nodes"}
    for verb in verbs:
        assert getattr(DelayQ, verb, None) is getattr(Client, verb), verb


async def test_a_verb_of_the_application_goes_through_its_client(dq: DelayQ) -> None:
    async with dq:
        assert dq.transport is dq.client.transport
        task = await dq.send("k", {}, delay=HOUR)
        assert await dq.client.cancel(task.id) is Cancel.CANCELLED


async def test_a_verb_outside_of_the_block_says_what_is_missing(dq: DelayQ) -> None:
    with pytest.raises(DelayQError, match="async with"):
        await dq.cancel(1)


async def test_blocks_may_be_nested_and_the_last_one_closes(dq: DelayQ) -> None:
    async with dq:
        async with dq, dq:
            await dq.nodes()
        await dq.nodes()
    with pytest.raises(DelayQError, match="not open"):
        await dq.nodes()


def test_an_application_may_be_used_by_one_loop_after_another(dq: DelayQ) -> None:
    async def main() -> int:
        async with dq:
            return (await dq.send("k", {}, delay=HOUR)).id

    assert asyncio.run(main()) != asyncio.run(main())


async def test_an_opening_that_failed_can_be_tried_again(empty_dsn: str) -> None:
    dq = DelayQ(empty_dsn, settings=load_settings(embedded=False))
    for _ in range(2):
        with pytest.raises(SchemaMissing):
            await dq.__aenter__()


async def test_a_database_that_was_named_is_never_migrated(empty_dsn: str) -> None:
    with pytest.raises(SchemaMissing, match="delayq migrate"):
        async with DelayQ(empty_dsn):
            pass
    conn = await asyncpg.connect(empty_dsn)
    assert await conn.fetchval("select to_regnamespace('delayq')") is None
    await conn.close()


async def test_a_pool_of_the_applications_is_enough_for_a_client_but_not_for_a_node(
    dsn: str,
) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
        dq = DelayQ(pool=pool, settings=load_settings(embedded=False))

        @dq.task
        async def expire(order_id: int) -> None: ...

        async with dq:
            assert (await expire.after(HOUR, order_id=1)).created
            with pytest.raises(InvalidArgument, match="dsn"):
                async with dq.node():
                    pass
        assert await pool.fetchval("select count(*) from delayq.tasks") == 1


def test_what_is_wrong_is_told_when_the_application_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidArgument) as error:
        DelayQ("mysql://user:pa55word@host/db")
    assert "pa55word" not in str(error.value)
    monkeypatch.setenv("DELAYQ_MAX_WORKERS", "none")
    with pytest.raises(InvalidSettings, match="DELAYQ_MAX_WORKERS"):
        DelayQ("postgresql://host/db")


def test_the_argument_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELAYQ_DSN", "postgresql://elsewhere/db")
    dq = DelayQ("postgresql://here/db")
    assert dq.settings.dsn is not None
    assert dq.settings.dsn.get_secret_value() == "postgresql://here/db"


def test_a_kind_is_registered_once(dq: DelayQ) -> None:
    @dq.task
    async def expire() -> None: ...

    with pytest.raises(RegistrationError):

        @dq.task(kind="expire")
        async def other() -> None: ...


def test_the_policy_of_the_settings_is_that_of_a_handler_that_says_nothing(
    settings: Settings,
) -> None:
    changed = settings.model_copy(
        update={"max_attempts": 9, "backoff_base_s": 2.5, "backoff_max_s": 50.0}
    )
    dq = DelayQ(settings=changed)

    @dq.task
    async def expire() -> None: ...

    policy = expire.policy
    assert policy.max_attempts == 9
    assert (policy.backoff_base_us, policy.backoff_max_us) == (2_500_000, 50_000_000)


def test_everything_that_is_exported_is_there() -> None:
    assert sorted(delayq.__all__) == delayq.__all__
    assert all(hasattr(delayq, name) for name in delayq.__all__)


# --- node --------------------------------------------------------------------------------------


async def test_client_and_node_in_one_process(dq: DelayQ) -> None:
    ran: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    @dq.task
    async def in_the_loop(ctx: Context, n: int) -> None:
        assert ctx.attempt == 1
        ran.put_nowait(("loop", n))

    loop = asyncio.get_running_loop()

    @dq.task
    def in_a_thread(n: int) -> None:
        loop.call_soon_threadsafe(ran.put_nowait, ("thread", n))

    async with dq.node() as node:
        assert [info.id for info in await dq.nodes()] == [node.id]
        await in_the_loop.after(0, 1)
        await in_a_thread.after(timedelta(milliseconds=50), n=2)
        got = {await asyncio.wait_for(ran.get(), 10) for _ in range(2)}
    assert got == {("loop", 1), ("thread", 2)}
    async with dq:
        assert await dq.nodes() == []


async def test_a_node_may_serve_some_of_the_kinds(dq: DelayQ) -> None:
    @dq.task
    async def mine() -> None: ...

    @dq.task
    async def yours() -> None: ...

    async with dq.node(kinds=["mine"]):
        (info,) = await dq.nodes()
    assert info.kinds == ["mine"]
    with pytest.raises(InvalidArgument, match="kinds"):
        async with dq.node(kinds=["nobodys"]):
            pass


def test_run_lives_until_the_signal_and_returns_0(dsn: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"DELAYQ_DSN": dsn, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, program], env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hello Ada\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


# --- embedded ----------------------------------------------------------------------------------


async def test_without_a_database_one_is_started_in_a_folder_and_migrated(
    tmp_path: Path, logged: list[Logged]
) -> None:
    folder = tmp_path / "queue"
    dq = DelayQ(settings=load_settings(embedded=True, embedded_dir=folder))

    @dq.task
    async def expire(order_id: int) -> None: ...

    async with dq:
        task = await expire.after(HOUR, order_id=42)
    warnings = [event.text for event in logged if event.level == "WARNING"]
    assert any(str(folder) in text for text in warnings)
    async with dq:  # the same folder, the same tasks
        assert await dq.get(task.id) is not None


async def test_a_server_of_its_own_can_be_forbidden() -> None:
    with pytest.raises(InvalidSettings, match="DELAYQ_DSN"):
        async with DelayQ(settings=load_settings(embedded=False)):
            pass
