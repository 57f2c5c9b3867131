"""What a node has in hand, and what it had a moment ago."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq.holdings import Holdings
from delayq.timer_heap import Timer

NOW = 1_790_000_000_000_000


def timer(task_id: int) -> Timer:
    return Timer(task_id, NOW, "mail", 0)


def holding(*task_ids: int) -> Holdings:
    holdings = Holdings()
    holdings.take([timer(task_id) for task_id in task_ids])
    return holdings


def test_what_is_in_hand_is_not_taken_a_second_time() -> None:
    holdings = holding(1, 2)
    assert holdings.take([timer(2), timer(3)]) == [timer(3)]
    assert sorted(holdings.ids()) == [1, 2, 3]


def test_what_was_let_go_may_be_taken_again_and_has_not_ended() -> None:
    holdings = holding(1, 2)
    holdings.let_go([1, 9])
    assert not holdings.has_ended(1)
    assert holdings.take([timer(1), timer(2)]) == [timer(1)]


def test_what_ended_is_remembered_until_the_next_page_begins() -> None:
    holdings = holding(1, 2)
    holdings.end([1])
    assert (holdings.holds(1), holdings.has_ended(1)) == (False, True)
    assert (holdings.holds(2), holdings.has_ended(2)) == (True, False)
    holdings.page_begins()
    assert not holdings.has_ended(1)
    assert holdings.holds(2)


def test_what_ended_may_be_taken_again_at_once() -> None:
    """A retry: it was armed by its settlement, not by the page."""
    holdings = holding(1)
    holdings.end([1])
    assert holdings.take([timer(1)]) == [timer(1)]
    assert holdings.holds(1)


def test_what_ended_is_bounded_also_if_nobody_reads_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayq.holdings._MOST_ENDED", 10)
    holdings = Holdings()
    for task_id in range(100):
        holdings.end([task_id])
        assert holdings.has_ended(task_id)
        assert sum(map(holdings.has_ended, range(100))) <= 11


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "let_go", "end", "page_begins"]),
        st.frozensets(st.integers(0, 7), max_size=4),
    ),
    max_size=30,
)


@given(STEPS)
def test_its_tests_agree_with_its_history(steps: list[tuple[str, frozenset[int]]]) -> None:
    holdings, held, ended = Holdings(), set[int](), set[int]()
    for step, ids in steps:
        match step:
            case "take":
                assert {one.id for one in holdings.take(map(timer, ids))} == ids - held
                held |= ids
            case "let_go":
                holdings.let_go(ids)
                held -= ids
            case "end":
                holdings.end(ids)
                held -= ids
                ended |= ids
            case _:
                holdings.page_begins()
                ended.clear()
        assert set(holdings.ids()) == held
        assert [holdings.holds(i) for i in range(8)] == [i in held for i in range(8)]
        assert [holdings.has_ended(i) for i in range(8)] == [i in ended for i in range(8)]
