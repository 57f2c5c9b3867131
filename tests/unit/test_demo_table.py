"""The table of scripts/demo is computed from evidence, and says so if the evidence is bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scripts.demo_app import ledger
from scripts.demo_app.nodes import Held
from scripts.demo_app.reckoning import Ended, Evidence, Order, Restart, reckon, table_of

LEAVER, OTHER = 11, 22


def entry(what: str, order: int, attempt: int = 1, at_us: int = 1_500) -> ledger.Entry:
    return ledger.Entry(what, order, 100 + order, attempt, "node", 1_000, at_us)


def fired(order: int, node: int = OTHER) -> Ended:
    return Ended(100 + order, "succeeded", 1_000, 1_400, 400, 1, node)


@pytest.fixture
def good() -> Evidence:
    """Order 1 was paid; 2 was moved and expired; 3 ran on the node that left, 4 was its own."""
    return Evidence(
        orders=[
            Order(1, "paid", 1_000, 101, 0, 0),
            Order(2, "expired", 1_000, 102, 1, 1),
            Order(3, "expired", 1_000, 103, 0, 1),
            Order(4, "expired", 1_000, 104, 0, 1),
        ],
        history=[
            Ended(101, "cancelled", 1_000, None, None, 0, None),
            fired(2),
            fired(3, LEAVER),
            fired(4),
        ],
        unfinished=[],
        entries=[
            entry(what, order) for order in (2, 3, 4) for what in (ledger.STARTED, ledger.EXPIRED)
        ],
        restart=Restart("node-1", Held(LEAVER, frozenset({103}), frozenset({104})), 0),
    )


Spoil = Callable[[Evidence], Evidence]


def order_becomes(number: int, **changes: object) -> Spoil:
    def spoil(it: Evidence) -> Evidence:
        orders = [replace(o, **changes) if o.id == number else o for o in it.orders]  # type: ignore[arg-type]  # fields by name
        return replace(it, orders=orders)

    return spoil


def history_becomes(number: int, **changes: object) -> Spoil:
    def spoil(it: Evidence) -> Evidence:
        history = [
            replace(e, **changes) if e.task == 100 + number else e  # type: ignore[arg-type]  # fields by name
            for e in it.history
        ]
        return replace(it, history=history)

    return spoil


def without(what: str, number: int) -> Spoil:
    def spoil(it: Evidence) -> Evidence:
        kept = [e for e in it.entries if (e.what, e.order) != (what, number)]
        return replace(it, entries=kept)

    return spoil


def also(*entries: ledger.Entry) -> Spoil:
    return lambda it: replace(it, entries=[*it.entries, *entries])


SPOILED: dict[str, tuple[Spoil, str]] = {
    "a task that nobody knows any more": (
        lambda it: replace(it, history=it.history[:-1]),
        "lost: orders [4]",
    ),
    "a task that waits for ever": (
        lambda it: replace(it, history=it.history[:-1], unfinished=[104]),
        "lost: orders [4]",
    ),
    "an order that never expired": (order_becomes(4, state="unpaid"), "lost: orders [4]"),
    "an effect that was rolled back": (order_becomes(4, expirations=0), "lost: orders [4]"),
    "a success of which the handler knows nothing": (
        without(ledger.EXPIRED, 4),
        "lost: orders [4]",
    ),
    "a cancelled task of an expired order": (
        history_becomes(4, state="cancelled"),
        "lost: orders [4]",
    ),
    "an effect that came twice": (order_becomes(4, expirations=2), "fired twice: orders [4]"),
    "a task that ended twice": (
        lambda it: replace(it, history=[*it.history, fired(4)]),
        "fired twice: orders [4]",
    ),
    "a task that ended and still waits": (
        lambda it: replace(it, unfinished=[104]),
        "fired twice: orders [4]",
    ),
    "an attempt that began twice": (also(entry(ledger.STARTED, 4)), "fired twice: orders [4]"),
    "a handler that finished twice": (also(entry(ledger.EXPIRED, 4)), "fired twice: orders [4]"),
    "a start before its time, by history": (
        history_becomes(4, started_us=999),
        "fired early: orders [4]",
    ),
    "a start before its time, by the ledger": (
        also(entry(ledger.STARTED, 4, attempt=2, at_us=999)),
        "fired early: orders [4]",
    ),
    "a handler that ran although its order was paid": (
        also(entry(ledger.STARTED, 1)),
        "fired though cancelled: orders [1]",
    ),
    "a move that was forgotten": (
        order_becomes(2, expires_us=2_000),
        "moved, and fired at another instant: orders [2]",
    ),
    "a node that crashed": (
        lambda it: replace(it, restart=replace(it.restart, status=1)),
        "the node that was replaced left with status 1",
    ),
    "a running task that was not finished by its node": (
        history_becomes(3, node=OTHER),
        "1 running tasks were interrupted",
    ),
    "no pending task that was handed over": (
        history_becomes(4, node=LEAVER),
        "nothing that it held was fired by another node",
    ),
    "nothing at all": (
        lambda it: replace(it, orders=[], history=[], entries=[]),
        "nothing was scheduled, fired, cancelled or moved",
    ),
}


def test_good_evidence_makes_a_right_table(good: Evidence) -> None:
    told = reckon(good)
    assert told.faults() == []
    rows = {name: value for name, value, _ in table_of(told, good.restart)}
    assert [rows[name] for name in ("scheduled", "fired", "cancelled", "moved")] == list("4311")
    assert [rows[name] for name in ("lost", "twice", "early")] == ["0", "0", "0"]
    assert rows["lateness, median"] == rows["lateness, maximum"] == "0.4 ms"


@pytest.mark.parametrize("what", SPOILED)
def test_the_table_is_wrong_after(good: Evidence, what: str) -> None:
    spoil, fault = SPOILED[what]
    assert fault in reckon(spoil(good)).faults()
