"""Nonsense by the thousand against a database: what is taken is stored as it was meant.

What is refused leaves no row, names its field, and repeats nothing of what was sent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from delayq.client import Client
from delayq.errors import InvalidArgument
from delayq.instants import instant_to_us
from tests.leases import lease, settle
from tests.nonsense import SECRET, Fuzz

if TYPE_CHECKING:
    from delayq.database import Connection, Database
    from delayq.settings import Settings

ROUNDS = 5_000
"""Few calls are right in every part, three in a hundred: with 400 too few were, now and then."""


@pytest.fixture
async def client(database: Database, settings: Settings) -> AsyncIterator[Client]:
    async with Client(database, settings) as client:
        yield client


async def refused(call: Callable[[], Awaitable[object]]) -> InvalidArgument | None:
    """The refusal; None if it was taken. Anything else that is raised fails the test."""
    try:
        await call()
    except InvalidArgument as refusal:
        error = refusal
    else:
        return None
    assert SECRET not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    return error


async def rows(conn: Connection) -> int:
    return int(await conn.fetchval("select count(*) from delayq.tasks"))


def call_of(fuzz: Fuzz) -> dict[str, Any]:
    """A call that is right in most of its parts, so that each part is met by the database."""
    dice = fuzz.dice

    def mostly(good: object) -> object:
        return fuzz.anything() if dice.random() < 0.1 else good

    delay: dict[str, Any] = (
        {"delay": mostly(dice.uniform(0, 1e9))}
        if dice.random() < 0.5
        else {"at": mostly(fuzz.instant())}
    )
    options = {
        "key": dice.choice([None, fuzz.text()]),
        "idempotency_key": dice.choice([None, fuzz.text()]),
        "on_conflict": mostly(dice.choice(["keep", "replace", "error"])),
        "priority": mostly(dice.randrange(-100, 101)),
        "max_attempts": mostly(dice.choice([None, 1, 10_000])),
        "timeout": mostly(dice.choice([None, 0.001, 365 * 86_400])),
        "misfire_grace": mostly(dice.choice([None, 0.001, 365 * 86_400])),
        "headers": mostly({fuzz.text(): fuzz.number() for _ in range(dice.randrange(3))}),
    }
    payload = mostly({fuzz.text(): fuzz.anything() for _ in range(dice.randrange(3))})
    return {"kind": mostly(fuzz.text()), "payload": payload, **delay, **options}


@pytest.mark.timeout(300)
async def test_what_is_taken_is_stored_as_it_was_meant_and_what_is_not_leaves_no_row(
    client: Client, conn: Connection
) -> None:
    fuzz = Fuzz()
    stored = 0
    for _ in range(ROUNDS):
        call = call_of(fuzz)
        before = await rows(conn)
        try:
            error = await refused(lambda call=call: client.send(**call))  # type: ignore[misc]  # a default is no argument
            if error is None:
                stored += 1
                await conn.execute("delete from delayq.idempotency")
                await _check_row(client, conn, call)
            else:
                assert await rows(conn) == before
        except Exception as failure:
            failure.add_note(f"seed {fuzz.seed}")
            raise
        await conn.execute("delete from delayq.tasks")
    assert stored > ROUNDS / 50


async def _check_row(client: Client, conn: Connection, call: dict[str, Any]) -> None:
    row = await conn.fetchrow("select id, delayq.micros(execute_at) as at_us from delayq.tasks")
    assert row is not None
    task = await client.get(row["id"])
    assert task is not None
    assert (task.kind, task.key) == (call["kind"], call["key"])
    assert task.payload.keys() == call["payload"].keys()
    if "at" in call:
        assert row["at_us"] == instant_to_us(call["at"])
    if call["key"] is not None:
        assert await client.cancel(kind=call["kind"], key=call["key"])


async def test_a_payload_with_every_kind_of_json_comes_back_equal(
    client: Client, conn: Connection
) -> None:
    values: list[Any] = [
        0, -1, 2**53 + 1, 2**70, -(2**70), 10**400, 0.1, 5e-324, 1.7e308, 1e22, -1e-7, "", "\ufffe",
        "\\u0000", "é", "\x7f", "\U0010ffff", None, True, [], {}, [[]], {"": {"": []}},
    ]  # fmt: skip
    payload = {f"v{n}": value for n, value in enumerate(values)}
    task = await client.send("k", payload, delay=3_600)
    found = await client.get(task.id)
    assert found is not None
    assert found.payload == payload
    text = await conn.fetchval("select payload::text from delayq.tasks")
    assert [type(value) for value in json.loads(text).values()] == [type(v) for v in values]


async def test_a_payload_that_grows_in_the_database_is_stored_or_refused_by_its_name(
    client: Client, conn: Connection
) -> None:
    error = await refused(lambda: client.send("k", {"many": [1] * 500_000}, delay=3_600))
    assert error is None or error.field == "payload"
    assert await rows(conn) == (error is None)


# --- the verbs --------------------------------------------------------------------------------

VERBS: dict[str, Callable[[Client, Any], Awaitable[object]]] = {
    "cancel by id": lambda c, value: c.cancel(value),
    "cancel by key": lambda c, value: c.cancel(kind="k", key=value),
    "cancel by kind": lambda c, value: c.cancel(kind=value, key="k"),
    "cancel many": lambda c, value: c.cancel_many([1, value]),
    "reschedule by id": lambda c, value: c.reschedule(value, delay=5),
    "reschedule by key": lambda c, value: c.reschedule(kind=value, key=value, delay=5),
    "reschedule after": lambda c, value: c.reschedule(1, delay=value),
    "reschedule at": lambda c, value: c.reschedule(1, at=value),
    "run now": lambda c, value: c.run_now(value),
    "revive": lambda c, value: c.revive(value),
    "revive spread": lambda c, value: c.revive_many([1], spread=value),
    "discard": lambda c, value: c.discard(value),
    "get by id": lambda c, value: c.get(value),
    "get by key": lambda c, value: c.get(kind=value, key=value),
    "list after": lambda c, value: c.list(after_id=value),
    "list state": lambda c, value: c.list(state=value),
    "pause": lambda c, value: c.pause(value),
    "resume": lambda c, value: c.resume(value),
    "list kind": lambda c, value: c.list(kind=value),
    "list key": lambda c, value: c.list(key=value),
    "list dead kind": lambda c, value: c.list(kind=value, state="dead"),
    "list finished key": lambda c, value: c.list(key=value, state="succeeded"),
    "list limit": lambda c, value: c.list(limit=value),
    "drain node": lambda c, value: c.drain_node(value),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_given_nonsense_answers_or_names_the_field(
    client: Client, conn: Connection, verb: str
) -> None:
    await conn.execute(
        "insert into delayq.tasks (id, kind, key, execute_at) overriding system value"
        " values (1, 'k', 'k', '2900-01-01 00:00+00')"
    )
    fuzz = Fuzz()
    for value in [5.0, *(fuzz.anything() for _ in range(150))]:
        if value is None and not verb.startswith(("reschedule", "revive spread")):
            continue  # means that it was not given
        try:
            await refused(lambda value=value: VERBS[verb](client, value))  # type: ignore[misc]  # a default is no argument
        except Exception as failure:
            failure.add_note(f"seed {fuzz.seed}, a {type(value).__name__}")
            raise


@pytest.mark.parametrize("verb", ["reschedule after", "reschedule at"])
async def test_a_refused_move_leaves_the_task_where_it_is(
    client: Client, conn: Connection, verb: str
) -> None:
    at = "2900-01-01 00:00+00"
    task = await client.send("k", {}, delay=5)
    await conn.execute("update delayq.tasks set execute_at = $1::text::timestamptz", at)
    fuzz = Fuzz()
    moved = "delay" if verb.endswith("after") else "at"
    for _ in range(300):
        call = partial(client.reschedule, task.id, **{moved: fuzz.anything()})  # type: ignore[arg-type]  # nonsense on purpose
        if await refused(call) is None:
            await conn.execute("update delayq.tasks set execute_at = $1::text::timestamptz", at)
        left = await conn.fetchval(
            "select execute_at = $1::text::timestamptz from delayq.tasks", at
        )
        assert left, f"seed {fuzz.seed}"


# --- successors ---------------------------------------------------------------------------------

YEAR_S = 365 * 86_400
EXTREMES: dict[str, list[Any]] = {
    "priority": [-100, -99, -1, 0, 9, 10, 100],
    "max_attempts": [None, 1, 9_999, 10_000],
    "timeout": [None, 0.001, 9_999_999, 10_000_000, YEAR_S],
    "misfire_grace": [None, 0.001, 9_999_999, 10_000_000, YEAR_S],
    "idempotency_key": [None, "x", "é" * 250, "\n", "null"],
    "headers": [None, {"a": 1}, {"": None}],
}
INSTANTS = [datetime(2000, 1, 1, tzinfo=UTC), datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC),
            datetime(2286, 11, 20, tzinfo=UTC),
            datetime(8999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)]  # fmt: skip
ORDERS = [{name: value} for name, values in EXTREMES.items() for value in values]
ORDERS += [{"at": instant} for instant in INSTANTS]
ORDERS += [{"payload": {"x": "y" * 1_000_000}}, {"payload": {"n": 10**400}}]


@pytest.mark.parametrize("first", [1, 10**15, 10**18, 2**62])
async def test_whatever_may_be_scheduled_may_also_wait_behind_a_running_task(
    client: Client, conn: Connection, first: int
) -> None:
    """And becomes the very task that it would have been by itself."""
    await conn.execute(
        "select setval(pg_get_serial_sequence('delayq.tasks', 'id'), $1, false)", first
    )
    for order in ORDERS:
        given: dict[str, Any] = {
            "kind": "k",
            "payload": {},
            "key": "held",
            "on_conflict": "replace",
        }
        given |= order if "at" in order else {"delay": 3_600, **order}
        running = await client.send("k", {}, delay=0, key="held")
        token = await lease(conn, running.id)
        task = await client.send(**given)
        assert task.follow_up is not None, order
        assert await settle(conn, running.id, token) == "succeeded", order
        found = await client.get(task.follow_up)
        assert found is not None
        assert found.payload == given["payload"]
        for name in ("priority", "max_attempts", "idempotency_key"):
            assert getattr(found, name) == order.get(name, 0 if name == "priority" else None)
        for name, told in (
            ("timeout", found.timeout_ms),
            ("misfire_grace", found.misfire_grace_ms),
        ):
            wanted = order.get(name)
            assert told == (None if wanted is None else round(wanted * 1_000))
        if "at" in order:
            assert found.execute_at == order["at"]
        assert await client.cancel(task.follow_up)
