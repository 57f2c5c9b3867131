"""The findings of doctor, from what it may find."""

from __future__ import annotations

from typing import Any

import pytest

from delayq.cli import checks
from delayq.cli.checks import Check, Limits, Route, worst
from delayq.cli.figures import Due, due_of
from delayq.settings import load_settings
from tests.unit.test_cli_figures import due, node

SERVER = {
    "version": 150_004, "standby": False, "encoding": "UTF8", "clock_us": 0, "role": "app",
    "sees_all": True, "notify_usage": 0.0, "autovacuum": True,
}  # fmt: skip
ROOMY = {
    "server_limit": 100, "server_used": 10, "database_limit": -1, "database_used": 5,
    "role_limit": -1, "role_used": 5,
}  # fmt: skip
LIMITS = Limits()
S = 1_000_000


def test_the_worst_finding_decides() -> None:
    ok, warn, fail = (Check("x", status, "") for status in ("ok", "warn", "fail"))
    assert worst([ok, warn, fail]) == "fail"
    assert worst([ok, warn]) == "warn"
    assert worst([]) == "ok"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "ok"),
        ({"version": 180_006}, "ok"),
        ({"version": 130_022}, "fail"),
        ({"version": 190_000}, "warn"),
        ({"standby": True}, "fail"),
        ({"encoding": "SQL_ASCII"}, "fail"),
    ],
)
def test_server(changes: dict[str, Any], status: str) -> None:
    found = checks.server_version(SERVER | changes)
    assert found.status == status
    assert bool(found.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("offset_us", "round_trip_us", "status", "words"),
    [
        (300, 500, "ok", "ahead of"),
        (-300, 500, "ok", "behind"),
        (3_600 * S, 500, "warn", "1h ahead of"),
        (-5 * S, 500, "warn", "5s behind"),
        (5 * S, 20 * S, "ok", "give or take 10s"),
    ],
)
def test_clock(offset_us: int, round_trip_us: int, status: str, words: str) -> None:
    found = checks.clock_offset(offset_us, round_trip_us, LIMITS)
    assert found.status == status
    assert words in found.finding


def test_time_zone() -> None:
    assert checks.time_zone({"zone": "Etc/UTC", "naive": 0}).status == "ok"
    abroad = checks.time_zone({"zone": "Europe/Berlin", "naive": 0})
    assert abroad.status == "warn"
    assert "Europe/Berlin" in abroad.finding
    assert checks.time_zone({"zone": "UTC", "naive": 1}).status == "fail"


@pytest.mark.parametrize("scope", ["server", "database", "role"])
def test_connections_of_every_scope(scope: str) -> None:
    settings = load_settings()
    assert checks.connections(ROOMY, settings).status == "ok"
    tight = checks.connections(ROOMY | {f"{scope}_limit": 30, f"{scope}_used": 28}, settings)
    assert tight.status == "warn"
    assert f"2 of 30 connections of the {scope}" in tight.finding


@pytest.mark.parametrize(("usage", "status"), [(0.0, "ok"), (0.2, "warn"), (0.9, "fail")])
def test_notify_queue(usage: float, status: str) -> None:
    assert checks.notify_queue(SERVER | {"notify_usage": usage}, LIMITS).status == status


@pytest.mark.parametrize(
    ("route", "status", "words"),
    [
        (Route(False, False, None, None), "ok", "no pooler"),
        (Route(True, False, False, True), "ok", "session mode"),
        (Route(True, True, True, False), "warn", "transaction mode"),
        (Route(True, True, False, True), "warn", "settings are dropped"),
        (Route(True, False, None, False), "warn", "prepared statements fail"),
    ],
)
def test_pooler(route: Route, status: str, words: str) -> None:
    found = checks.pooler(route)
    assert found.status == status
    assert words in found.finding


def test_listen() -> None:
    assert checks.listening(800, 2).status == "ok"
    deaf = checks.listening(None, 2)
    assert deaf.status == "warn"
    assert "within 2 s" in deaf.finding


def test_privileges_name_what_is_missing_and_how_to_grant_it() -> None:
    assert checks.privileges({"app": [], "node": []}, "app").status == "ok"
    reader = checks.privileges({"app": ["execute on delayq.cancel"], "node": []}, "app")
    assert reader.status == "fail"
    assert "delayq.grant_app('app')" in reader.advice
    client = checks.privileges({"app": [], "node": ["a", "b", "c", "d"]}, "app")
    assert client.status == "warn"
    assert "a, b, c and 1 more" in client.finding


def test_kinds_that_nobody_serves() -> None:
    waiting = due_of([due(tasks=3), due(kind="b\x1b", tasks=2)])
    found = checks.served_kinds(waiting, [node()])
    assert found.status == "fail"
    assert found.finding == r"2 due tasks of kinds that nobody serves: b\x1b"
    assert checks.served_kinds(waiting, [node(kinds=["a", "b\x1b"])]).status == "ok"


@pytest.mark.parametrize(("late_s", "status"), [(0, "ok"), (4, "ok"), (6, "warn"), (61, "fail")])
def test_overdue_tasks(late_s: int, status: str) -> None:
    waiting = due_of([due(oldest_us=1_000 * S)])
    now_us = (1_000 + late_s) * S
    assert checks.overdue(waiting, [node()], [], now_us, LIMITS).status == status


def test_overdue_tasks_of_paused_or_unserved_kinds_are_excused() -> None:
    waiting = due_of([due(oldest_us=0)])
    assert checks.overdue(waiting, [node()], ["a"], 900 * S, LIMITS).status == "ok"
    assert checks.overdue(waiting, [], [], 900 * S, LIMITS).status == "ok"


@pytest.mark.parametrize(
    ("nodes", "status"),
    [
        ([node()], "ok"),
        ([], "warn"),
        ([node(live=False)], "fail"),
        ([node(), node(id=2, live=False)], "warn"),
        ([node(), node(id=2, live=False, state="dead")], "warn"),
    ],
)
def test_nodes(nodes: list[Any], status: str) -> None:
    assert checks.node_states(nodes).status == status


def test_running_tasks_of_nodes_that_are_gone() -> None:
    running = due_of([due(state="running", node=7, tasks=2)])
    assert checks.orphans(running, [node(id=7)]).status == "ok"
    assert "2 running tasks" in checks.orphans(running, []).finding
    assert checks.orphans(running, [node(id=7, state="dead")]).status == "warn"


def test_running_tasks_past_their_deadline() -> None:
    running = due_of([due(state="running", node=7, past_deadline=1)])
    assert checks.orphans(running, [node(id=7)]).status == "warn"
    assert checks.orphans(Due(), []).status == "ok"


@pytest.mark.parametrize(
    ("days", "strays", "status"),
    [(8, 0, "ok"), (3, 0, "ok"), (2, 0, "warn"), (8, 1, "warn"), (0, 9, "fail")],
)
def test_partitions(days: int, strays: int, status: str) -> None:
    found = checks.partitions({"days": days, "in_default": strays}, LIMITS)
    assert found.status == status
    assert ("make_partitions" in found.advice) == (status != "ok")


def holder(what: str, age_s: float | None = None, wal: int | None = None) -> dict[str, Any]:
    return {
        "what": what, "name": "it", "detail": "psql", "age_s": age_s, "active": False,
        "wal_bytes": wal,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "status", "words"),
    [
        (holder("transaction", 20), "ok", "nothing holds"),
        (holder("transaction", 600), "warn", "pid it (psql) is 10m old"),
        (holder("prepared", 7_200), "fail", "prepared transaction it is 2h old"),
        (holder("slot", None, 2**20), "warn", "slot it has no reader"),
        (holder("slot", None, 2**40), "fail", "slot it has no reader"),
    ],
)
def test_what_holds_back_vacuum(row: dict[str, Any], status: str, words: str) -> None:
    found = checks.vacuum_holders([row], True, LIMITS)
    assert found.status == status
    assert words in found.finding


def test_a_role_that_sees_little_is_told_so() -> None:
    assert "not visible" in checks.vacuum_holders([], False, LIMITS).finding


def table(**changes: Any) -> dict[str, Any]:
    return {"name": "tasks", "live_rows": 10, "dead_rows": 5, "autovacuum": True} | changes


def test_vacuum() -> None:
    assert checks.vacuum([table()], SERVER, LIMITS).status == "ok"
    off = checks.vacuum([table(autovacuum=False)], SERVER, LIMITS)
    assert off.status == "fail"
    assert "alter table delayq.tasks reset" in off.advice
    assert checks.vacuum([table()], SERVER | {"autovacuum": False}, LIMITS).status == "fail"
    assert checks.vacuum([table(dead_rows=10**6)], SERVER, LIMITS).status == "warn"
