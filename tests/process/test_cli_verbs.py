"""The verbs of the command line on a real database: answers, exit codes, documents.

They run in this process, since the program around them is tested beside this file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest

from delayq.cli.main import run
from tests.helpers import connected

BIG = 2**53 + 1
HOSTILE = "\x1b]0;owned\x07<script>\r\n=cmd()\u202e"


class Said(NamedTuple):
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Its one JSON document."""
        assert self.out.count("\n") == 1, self
        assert self.out.isascii()
        document: dict[str, Any] = json.loads(self.out)
        return document


Delayq = Callable[..., Said]
Sql = Callable[..., list[Any]]


@pytest.fixture
def delayq(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Delayq:
    """Runs a command on this test's database."""
    monkeypatch.setenv("DELAYQ_DSN", dsn)
    monkeypatch.setattr("delayq.log.configure", lambda *_: None)

    def call(*arguments: object) -> Said:
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


@pytest.fixture
def sql(dsn: str) -> Sql:
    """Runs a statement on this test's database."""

    async def execute(statement: str, *arguments: object) -> list[Any]:
        async with connected(dsn) as conn:
            return await conn.fetch(statement, *arguments)

    return lambda statement, *arguments: asyncio.run(execute(statement, *arguments))


def schedule(delayq: Delayq, *arguments: object) -> dict[str, Any]:
    said = delayq("schedule", *arguments, "--json")
    assert said.code == 0, said.err
    return said.document


DEAD = """
    insert into delayq.dead_tasks (
        id, kind, payload, headers, key, priority, due_at, execute_at, created_at, attempt,
        interruptions, errors, lease_token, finished_at)
    select $1::bigint + i, $2, '{}', '{}', $4, 0, now(), now(), now(), 5, 0,
           '[{"attempt": 5, "error": "ValueError", "message": "no"}]', 1, now()
      from generate_series(0, $3::int - 1) as i
"""


# --- schedule -------------------------------------------------------------------------------


def test_schedule_after_a_delay(delayq: Delayq, sql: Sql) -> None:
    before = datetime.now(UTC)
    task = schedule(delayq, "mail", '{"to": 1}', "--in", "1h30m")
    fires = datetime.fromisoformat(task["execute_at"])
    assert timedelta(minutes=89) < fires - before < timedelta(minutes=91)
    assert task["execute_at"].endswith("Z")
    assert (task["created"], task["state"], task["kind"]) == (True, "pending", "mail")
    assert sql("select id, payload from delayq.tasks")[0]["payload"] == '{"to": 1}'


def test_schedule_with_every_option(delayq: Delayq, sql: Sql) -> None:
    schedule(
        delayq, "mail", "--at", "2030-05-01T11:00:00+02:00", "--key", "k", "--on-conflict", "error",
        "--idempotency-key", "i", "--priority", "-5", "--max-attempts", "3", "--timeout", "20s",
        "--misfire-grace", "1m", "--header", "a=1", "--header", "b=x=y",
    )  # fmt: skip
    row = sql("select *, delayq.micros(execute_at) as us from delayq.tasks")[0]
    assert row["us"] == 1_903_856_400_000_000
    assert (row["key"], row["idempotency_key"], row["priority"]) == ("k", "i", -5)
    assert (row["max_attempts"], row["timeout_ms"], row["misfire_grace_ms"]) == (3, 20_000, 60_000)
    assert json.loads(row["headers"]) == {"a": "1", "b": "x=y"}


def test_ids_above_2_to_the_53_are_exact(delayq: Delayq, sql: Sql) -> None:
    """C074."""
    sql("select setval(pg_get_serial_sequence('delayq.tasks', 'id'), $1, false)", BIG)
    assert schedule(delayq, "mail", "--in", "5m")["id"] == str(BIG)
    assert delayq("list", "--json").document["tasks"][0]["id"] == str(BIG)
    assert delayq("show", BIG, "--json").document["task"]["id"] == str(BIG)
    assert delayq("cancel", BIG, "--json").document == {"answer": "cancelled", "id": str(BIG)}


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**70, -(2**70), 10**400])
def test_big_integers_of_a_payload_are_exact(delayq: Delayq, number: int) -> None:
    """C074."""
    task = schedule(delayq, "mail", json.dumps({"n": number}), "--in", "5m")
    assert delayq("show", task["id"], "--json").document["task"]["payload"] == {"n": number}


def test_a_key_that_is_taken(delayq: Delayq) -> None:
    first = schedule(delayq, "mail", "--in", "5m", "--key", "k")
    kept = schedule(delayq, "mail", "--in", "9m", "--key", "k")
    assert (kept["id"], kept["created"]) == (first["id"], False)
    assert kept["execute_at"] == first["execute_at"]
    refused = delayq("schedule", "mail", "--in", "5m", "--key", "k", "--on-conflict", "error")
    assert refused.code == 1
    assert refused.err.startswith("delayq: key: a live task")


@pytest.mark.parametrize(
    "arguments",
    [
        ("mail", '{"token": "TOPSECRET",}'),
        ("mail", '["TOPSECRET"]'),
        ("mail", '{"a": "TOPSECRET\\u0000"}'),
        ("x" * 501, '{"a": "TOPSECRET"}'),
    ],
)
def test_a_refused_task_is_no_row_and_its_payload_is_not_shown(
    delayq: Delayq, sql: Sql, arguments: tuple[str, str]
) -> None:
    said = delayq("schedule", *arguments, "--in", "5m")
    assert said.code == 2
    assert "TOPSECRET" not in said.err + said.out
    assert sql("select from delayq.tasks") == []


# --- the verbs with an answer ---------------------------------------------------------------


def test_cancel_says_what_really_happened(delayq: Delayq, sql: Sql) -> None:
    id = schedule(delayq, "mail", "--in", "5m")["id"]
    assert delayq("cancel", id)[:2] == (0, "cancelled\n")
    assert delayq("cancel", id)[:2] == (1, "already finished\n")
    assert delayq("cancel", 999_999)[:2] == (1, "not found\n")
    sql(
        """insert into delayq.tasks (kind, key, state, lease_owner, lease_token, attempt)
           values ('mail', 'busy', 'running', 1, 1, 1)"""
    )
    asked = delayq("cancel", "--kind", "mail", "--key", "busy", "--json")
    assert asked.code == 0
    assert asked.document == {
        "answer": "cancel_requested", "id": None, "kind": "mail", "key": "busy",
    }  # fmt: skip


def test_reschedule_and_run_now_move_a_task(delayq: Delayq, sql: Sql) -> None:
    id = schedule(delayq, "mail", "--in", "5m", "--key", "k")["id"]
    assert delayq("reschedule", id, "--at", "2030-01-01T00:00:00Z")[:2] == (0, "moved\n")
    assert sql("select from delayq.tasks where execute_at = '2030-01-01 00:00+00'")
    assert delayq("reschedule", "--kind", "mail", "--key", "k", "--in", "1d").code == 0
    assert delayq("run-now", id).code == 0
    assert sql("select from delayq.tasks where execute_at <= delayq.clock()")
    assert delayq("reschedule", 999_999, "--in", "5m")[:2] == (1, "not found\n")
    assert delayq("run-now", "--kind", "mail", "--key", "nobody").code == 1


# --- many by a prefix of their keys -----------------------------------------------------------


@pytest.fixture
def orders(delayq: Delayq, sql: Sql) -> list[str]:
    """Tasks whose keys begin alike, one of which runs; their ids as text."""
    ids = [schedule(delayq, "mail", "--in", "5m", "--key", f"o:4{n}")["id"] for n in "%_2"]
    schedule(delayq, "mail", "--in", "5m", "--key", "o:5")
    schedule(delayq, "post", "--in", "5m", "--key", "o:42")
    sql(
        """update delayq.tasks set state = 'running', lease_owner = 1, lease_token = 1, attempt = 1
           where key = 'o:42' and kind = 'mail'"""
    )
    return ids


def test_many_are_cancelled_by_a_prefix_of_their_keys(
    delayq: Delayq, sql: Sql, orders: list[str]
) -> None:
    some = ("cancel", "--kind", "mail", "--key-prefix")
    assert delayq(*some, "o:4%")[:2] == (0, "1 cancelled\n")
    said = delayq(*some, "o:4", "--json")
    assert said.code == 0
    assert said.document == {
        "answers": {"cancelled": 1, "cancel_requested": 1}, "others": [], "refused": [],
    }  # fmt: skip
    assert delayq(*some, "o:7")[:2] == (1, "no live task has such a key\n")
    nothing = delayq(*some, "o:7", "--json")
    assert (nothing.code, nothing.document["answers"]) == (1, {})
    assert [row["key"] for row in sql("select key from delayq.tasks order by id")] == [
        "o:42", "o:5", "o:42",
    ]  # fmt: skip


def test_many_are_moved_by_a_prefix_of_their_keys(
    delayq: Delayq, sql: Sql, orders: list[str]
) -> None:
    some = ("reschedule", "--kind", "mail", "--key-prefix")
    assert delayq(*some, "o:4_", "--in", "0s")[:2] == (0, "1 moved\n")
    said = delayq(*some, "o:4", "--at", "2030-01-01T00:00:00Z", "--json")
    assert said.code == 1  # one of them runs just now
    assert said.document == {
        "answers": {"moved": 2, "running": 1},
        "others": [{"id": orders[2], "answer": "running"}],
        "refused": [],
    }
    assert delayq(*some, "o:4", "--in", "1d")[:2] == (1, f"2 moved\n1 running: {orders[2]}\n")
    assert delayq(*some, "o:7", "--in", "1d").code == 1
    assert len(sql("select from delayq.tasks where execute_at > delayq.clock() + '1 hour'")) == 2


@pytest.mark.parametrize("verb", [["cancel"], ["reschedule", "--in", "5m"]])
@pytest.mark.parametrize(
    ("which", "words"),
    [
        (["--key-prefix", "o:"], "goes with --kind"),
        (["7", "--kind", "mail", "--key-prefix", "o:"], "goes with --kind"),
        (["--kind", "mail", "--key", "o:4", "--key-prefix", "o:"], "goes with --kind"),
        (["--kind", "mail", "--key-prefix", ""], "must not be empty"),
    ],
)
def test_a_prefix_names_tasks_of_one_kind_and_not_all_of_them(
    delayq: Delayq, verb: list[str], which: list[str], words: str
) -> None:
    said = delayq(*verb, *which)
    assert (said.code, said.out) == (2, "")
    assert words in said.err


# --- looking --------------------------------------------------------------------------------


def test_show_tells_all_of_a_task(delayq: Delayq) -> None:
    id = schedule(delayq, "mail", '{"to": 1}', "--in", "5m", "--timeout", "90s")["id"]
    said = delayq("show", id)
    assert said.code == 0
    assert '{"to": 1}' in said.out
    assert "1m30s" in said.out
    assert delayq("show", 999_999)[:2] == (1, "not found\n")
    assert delayq("show", 999_999, "--json").document == {"task": None}


def test_list_goes_a_page_at_a_time_and_filters(delayq: Delayq) -> None:
    ids = [schedule(delayq, kind, "--in", "5m")["id"] for kind in ("a", "a", "b", "a")]
    first = delayq("list", "--kind", "a", "--limit", 2, "--json").document
    assert [task["id"] for task in first["tasks"]] == ids[:2]
    second = delayq(
        "list", "--kind", "a", "--limit", 2, "--after", first["next"], "--json"
    ).document
    assert [task["id"] for task in second["tasks"]] == ids[3:]
    assert second["next"] is None
    assert "payload" not in first["tasks"][0]
    delayq("cancel", ids[0])
    assert ids[0] in delayq("list", "--state", "cancelled").out
    assert delayq("list", "--state", "dead").out == "no such tasks\n"


ODD_PAYLOADS = (
    "null",
    "7",
    "[[1e400]]",
    json.dumps("x" * 1_000_000),
    "[" * 3_000 + "]" * 3_000,
    "9" * 5_000,
)


def test_odd_rows_are_listed_like_others(delayq: Delayq, sql: Sql) -> None:
    """C126."""
    for payload in ODD_PAYLOADS:
        sql(
            """insert into delayq.tasks (kind, payload, headers, key, errors, execute_at)
               values ($1::text, $2::text::jsonb, '"odd"', $1 || md5($2::text),
                       '[null, 7, {"message": 5}]', now() + interval '1 day')""",
            HOSTILE,
            payload,
        )
    listed = delayq("list")
    assert listed.code == 0, listed.err
    assert len(listed.out.splitlines()) == 7
    assert all(line.isprintable() for line in listed.out.splitlines())
    tasks = delayq("list", "--json").document["tasks"]
    assert len(tasks) == 6
    for task in tasks:
        assert delayq("show", task["id"], "--json").document["task"]["kind"] == HOSTILE
        shown = delayq("show", task["id"])
        assert shown.code == 0, shown.err
        assert all(line.isprintable() for line in shown.out.splitlines())


# --- dead tasks -----------------------------------------------------------------------------


def test_dead_tasks_are_listed_with_their_last_error(delayq: Delayq, sql: Sql) -> None:
    sql(DEAD, 1, "mail", 2, None)
    said = delayq("dead", "list")
    assert said.code == 0
    assert said.out.count("ValueError: no") == 2


def test_dead_tasks_are_revived_by_id(delayq: Delayq, sql: Sql) -> None:
    sql(DEAD, 1, "mail", 2, None)
    assert delayq("dead", "revive", 1)[:2] == (0, "1 revived\n")
    both = delayq("dead", "revive", 1, 2, 77, "--json")
    assert both.code == 1
    assert both.document["answers"] == {"live": 1, "revived": 1, "not_found": 1}
    assert sorted(other["id"] for other in both.document["others"]) == ["1", "77"]


def test_all_dead_tasks_of_a_kind_are_revived_spread_over_time(delayq: Delayq, sql: Sql) -> None:
    """C098."""
    sql(DEAD, 1, "mail", 1_200, None)
    sql(DEAD, 5_000, "other", 1, None)
    said = delayq("dead", "revive", "--kind", "mail", "--all", "--spread", "1h", "--json")
    assert said.code == 0
    assert said.document == {"answers": {"revived": 1_200}, "others": [], "refused": []}
    spread = sql("select max(execute_at) - min(execute_at) as s, count(*) as n from delayq.tasks")[
        0
    ]
    assert spread["n"] == 1_200
    assert spread["s"] > timedelta(minutes=50)
    assert len(sql("select from delayq.dead_tasks")) == 1


def test_a_dead_row_that_is_refused_fails_alone(delayq: Delayq, sql: Sql) -> None:
    sql(DEAD, 101, "mail", 20, None)
    sql("update delayq.dead_tasks set priority = 32767 where id = 107")
    sql("insert into delayq.tasks (kind, key) values ('mail', 'taken')")
    sql("update delayq.dead_tasks set key = 'taken' where id = 109")
    said = delayq("dead", "revive", "--kind", "mail", "--all", "--json")
    assert said.code == 1
    assert said.document["answers"] == {"revived": 18, "key_taken": 1}
    assert [refused["id"] for refused in said.document["refused"]] == ["107"]
    assert "priority_is_sane" in said.document["refused"][0]["error"]
    shown = delayq("dead", "revive", "--kind", "mail", "--all")
    assert "task 107 was refused" in shown.out


def test_dead_tasks_are_discarded(delayq: Delayq, sql: Sql) -> None:
    sql(DEAD, 1, "mail", 3, None)
    assert delayq("dead", "discard", 1).code == 0
    assert delayq("dead", "discard", 1)[:2] == (1, "1 not found: 1\n")
    assert delayq("dead", "discard", "--kind", "mail", "--all")[:2] == (0, "2 discarded\n")
    assert delayq("dead", "discard", "--kind", "mail", "--all")[:2] == (0, "no dead tasks\n")


# --- nodes and kinds ------------------------------------------------------------------------

NODE = """
    insert into delayq.nodes (id, name, host, pid, version, kinds, state, expires_at)
    values ($1, $2, 'h', 1, '1', '{mail}', $3, delayq.clock() + $4::interval)
"""


def test_a_node_is_asked_to_drain_by_number_or_name(delayq: Delayq, sql: Sql) -> None:
    sql(NODE, -(2**62), "one", "active", timedelta(seconds=15))
    sql(NODE, 2, "two", "active", timedelta(seconds=15))
    assert delayq("drain", -(2**62)).code == 0
    assert delayq("drain", "two").code == 0
    assert delayq("drain", "two")[:2] == (1, "no such node that could drain\n")
    assert delayq("drain", "three").code == 1
    states = {node["name"]: node["state"] for node in delayq("nodes", "--json").document["nodes"]}
    assert states == {"one": "draining", "two": "draining"}


def test_a_name_that_several_nodes_have_is_refused(delayq: Delayq, sql: Sql) -> None:
    sql(NODE, 1, "same", "active", timedelta(seconds=15))
    sql(NODE, 2, "same", "active", timedelta(seconds=15))
    said = delayq("drain", "same")
    assert said.code == 2
    assert "by its number" in said.err
    assert {node["state"] for node in delayq("nodes", "--json").document["nodes"]} == {"active"}


def test_kinds_are_paused_and_resumed(delayq: Delayq, sql: Sql) -> None:
    assert delayq("pause", "mail", "--json").document == {"kind": "mail", "paused": True}
    assert delayq("stats", "--json").document["kinds"][0]["paused"] is True
    assert delayq("resume", "mail").code == 0
    assert sql("select paused from delayq.kinds")[0]["paused"] is False


def test_hostile_names_are_harmless_everywhere(delayq: Delayq, sql: Sql) -> None:
    """C110."""
    sql(NODE, 1, HOSTILE, "active", timedelta(seconds=15))
    schedule(delayq, HOSTILE, "--in", "5m", "--key", HOSTILE)
    sql(DEAD, 50, HOSTILE, 1, HOSTILE)
    for command in ("list", "dead list", "nodes", "stats", "doctor"):
        said = delayq(*command.split())
        assert all(line.isprintable() for line in said.out.splitlines()), command
        assert delayq(*command.split(), "--json").document
