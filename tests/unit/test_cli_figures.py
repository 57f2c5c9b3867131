"""Figures say how far they can be trusted, and no odd row spoils them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from delayq.cli.figures import (
    COUNTERS,
    Count,
    Percentiles,
    begin_of,
    capped,
    counters_of,
    due_of,
    is_cut,
    live_estimate,
    live_of,
    node_of,
    paces_of,
    since_start,
    unserved,
)

MIDNIGHT = datetime(2026, 5, 2, tzinfo=UTC)


def node(**changes: Any) -> Any:
    row = {
        "id": 1, "name": "n", "host": "h", "pid": 1, "version": "1", "kinds": ["a"],
        "state": "active", "counters": "{}", "started_us": 0, "expires_us": 0, "live": True,
    }  # fmt: skip
    return node_of(row | changes)


def due(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "a", "state": "pending", "node": None, "tasks": 1, "oldest_us": 10,
        "leased_us": None, "past_deadline": 0, "capped": False,
    } | changes  # fmt: skip


def test_a_count_says_what_it_is() -> None:
    assert str(Count(12)) == "12"
    assert str(Count(10_000, "at_least")) == "10000+"
    assert str(Count(1_234_567, "estimate")) == "~1230000"
    assert str(Count(12, "estimate")) == "~12"
    assert capped(12_000, True) == Count(10_000, "at_least")
    assert capped(700, True) == Count(700, "at_least")
    assert capped(700, False) == Count(700)


def test_live_tasks_are_exact_when_all_were_read() -> None:
    rows = [
        {"kind": "a", "state": "pending", "tasks": 3},
        {"kind": "a", "state": "running", "tasks": 2},
        {"kind": "b", "state": "pending", "tasks": 4},
    ]
    live = live_of(rows)
    assert live.pending == Count(7)
    assert live.by_kind == {"b": Count(4), "a": Count(3)}


def test_live_tasks_are_estimated_from_a_sample() -> None:
    live = live_estimate([{"kind": "a", "state": "pending", "tasks": 500, "share": 0.01}])
    assert live.pending == Count(50_000, "estimate")


def test_an_estimate_is_never_below_what_was_counted() -> None:
    assert live_estimate([]).pending == Count(10_000, "at_least")


def test_due_tasks_by_kind_and_node() -> None:
    found = due_of(
        [
            due(tasks=3),
            due(kind="b", tasks=1, oldest_us=5),
            due(state="running", node=7, tasks=2, leased_us=50),
            due(state="running", node=8, tasks=1, leased_us=40, past_deadline=1, capped=True),
        ]
    )
    assert found.count_waiting() == Count(4, "at_least")
    assert found.running_on == {7: 2, 8: 1}
    assert found.oldest() == 5
    assert found.longest == (40, "a", 8)
    assert found.past_deadline == 1


def test_a_state_of_a_newer_version_counts_as_waiting() -> None:
    assert due_of([due(state="parked")]).count_waiting() == Count(1)


def test_paces_are_sorted_into_their_groups() -> None:
    row = {
        "tasks": 5, "succeeded": 4, "cancelled": 0, "missed": 1, "retried": 0, "first_us": 1,
        "lateness_us": [1, 2, 3, 4], "run_us": [None, None, None, None],
    }  # fmt: skip
    paces = paces_of(
        [
            row | {"kind": None, "node": None, "grouping": 3},
            row | {"kind": "a", "node": None, "grouping": 1},
            row | {"kind": None, "node": 7, "grouping": 2},
            row | {"kind": None, "node": None, "grouping": 2},
        ]
    )
    assert paces.all.lateness == Percentiles(1, 2, 3, 4)
    assert paces.all.run is None
    assert set(paces.by_kind) == {"a"}
    assert set(paces.by_node) == {7}


@pytest.mark.parametrize(
    "text",
    ["null", "[]", "7", '"x"', "{", None, '{"fired": "many"}', '{"fired": -1}', '{"fired": true}',
     '{"fired": 1e999}', '{"fired": [1]}', "[" * 100_000, '{"fired": ' + "9" * 5_000 + "}"],
)  # fmt: skip
def test_odd_counters_count_as_nothing(text: str | None) -> None:
    assert counters_of(text) == dict.fromkeys(COUNTERS, 0)


def test_counters_are_summed_over_the_nodes() -> None:
    nodes = [node(counters='{"fired": 2, "adopted": 1}'), node(counters='{"fired": 3}')]
    total = since_start(nodes)
    assert (total["fired"], total["adopted"], total["missed"]) == (5, 1, 0)


def test_only_a_live_node_that_stays_serves_its_kinds() -> None:
    assert unserved(["b", "a"], [node()]) == ["b"]
    for gone in ({"state": "dead"}, {"state": "draining"}, {"live": False}):
        assert unserved(["a"], [node(**gone)]) == ["a"]


def test_only_the_end_of_a_long_history_is_read() -> None:
    assert begin_of(10, 100) == "(0,0)"
    assert begin_of(1_000, 100) == "(900,0)"


@pytest.mark.parametrize(
    ("hour", "today", "yesterday", "older", "cut"),
    [
        (3, 50, 9_999, False, False),
        (3, 500, 0, True, False),
        (3, 500, 0, False, True),
        (0, 50, 50, False, False),
        (0, 50, 500, True, False),
        (0, 50, 500, False, True),
        (0, 500, 50, True, True),
    ],
)
def test_figures_are_cut_if_the_read_end_does_not_reach_back(
    hour: int, today: int, yesterday: int, older: bool, cut: bool
) -> None:
    since = MIDNIGHT.replace(hour=hour) if hour else MIDNIGHT.replace(day=1, hour=23)
    leaves = {"midnight": MIDNIGHT, "today": today, "yesterday": yesterday}
    assert is_cut(leaves, since, 100, older) is cut
