from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayq.errors import InvalidArgument
from delayq.timer_heap import Timer, TimerHeap

T0 = 1_790_000_000_000_000
YEAR_9000 = 221_845_392_000_000_000


def sorted_timers(model: dict[int, Timer]) -> list[Timer]:
    return sorted(model.values(), key=lambda t: (t.at_us, -t.priority, t.id))


TIMERS = st.builds(
    Timer,
    id=st.integers(1, 30),
    at_us=st.integers(T0, T0 + 20),
    kind=st.sampled_from(["mail", "order", "ü"]),
    priority=st.integers(-2, 2),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), TIMERS),
        st.tuples(st.just("discard"), st.integers(1, 30)),
        st.tuples(st.just("pop"), st.tuples(st.integers(T0 - 1, T0 + 21), st.integers(0, 5))),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(1, 30))
def test_the_heap_behaves_like_a_sorted_list(steps: list[tuple[str, object]], limit: int) -> None:
    heap, model = TimerHeap(limit), dict[int, Timer]()
    for _, argument in steps:
        if isinstance(argument, Timer):
            fits = argument.id in model or len(model) < limit
            assert heap.push(*argument) is fits
            if fits:
                model[argument.id] = argument
        elif isinstance(argument, int):
            assert heap.discard(argument) is (model.pop(argument, None) is not None)
        elif isinstance(argument, tuple):
            now_us, count = argument
            due = [t for t in sorted_timers(model) if t.at_us <= now_us][:count]
            assert heap.pop_due(now_us, count) == due
            for timer in due:
                del model[timer.id]
        ordered = sorted_timers(model)
        assert len(heap) == len(model)
        assert heap.ids() == model.keys()
        assert heap.next_at_us() == (ordered[0].at_us if ordered else None)
        assert heap.latest_at_us() == (ordered[-1].at_us if ordered else None)
        assert all(heap.at_of(i) == (model[i].at_us if i in model else None) for i in range(31))
    assert heap.pop_due(T0 + 21, 100) == sorted_timers(model)


@settings(max_examples=200, deadline=None)
@given(st.lists(TIMERS, min_size=1, max_size=60), st.integers(1, 20))
def test_with_make_room_nothing_before_the_cut_is_ever_lost(
    timers: list[Timer], limit: int
) -> None:
    heap, wanted, cut_us = TimerHeap(limit), dict[int, Timer](), YEAR_9000
    for timer in timers:
        wanted[timer.id] = timer
        heap.push(*timer, make_room=True)
        taken = heap.take_cut_us()
        cut_us = cut_us if taken is None else min(cut_us, taken)
        assert heap.take_cut_us() is None
        assert len(heap) <= limit
    held = {t.id: t for t in heap.pop_due(T0 + 21, 100)}
    assert list(held.values()) == sorted_timers(held)
    for timer in sorted_timers(wanted):
        assert timer.at_us >= cut_us or held[timer.id] == timer


EXTREMES = [
    Timer(1, T0, "a", 0),
    Timer(2**63 - 1, T0, "b", 32_767),
    Timer(2**62, YEAR_9000, "a", -32_768),
    Timer(7, 946_684_800_000_000, "", 100),
]


def test_the_extremes_of_every_field_come_back_unchanged() -> None:
    heap = TimerHeap(10)
    for timer in EXTREMES:
        assert heap.push(*timer)
    assert heap.pop_due(YEAR_9000, 10) == sorted_timers({t.id: t for t in EXTREMES})


@pytest.mark.parametrize(("task_id", "priority"), [(-1, 0), (2**63, 0), (1, 32_768), (1, -32_769)])
def test_what_no_row_can_have_is_refused_instead_of_spilling_into_the_next_field(
    task_id: int, priority: int
) -> None:
    heap = TimerHeap(10)
    with pytest.raises(InvalidArgument):
        heap.push(task_id, T0, "mail", priority)
    assert len(heap) == 0


def test_at_one_instant_the_higher_priority_goes_first_and_then_the_older_task() -> None:
    heap = TimerHeap(10)
    for task_id, priority, kind in ((3, 0, "b"), (1, 0, "c"), (2, 5, "a"), (4, -5, "a")):
        heap.push(task_id, T0, kind, priority)
    assert [t.id for t in heap.pop_due(T0, 10)] == [2, 1, 3, 4]


def test_nothing_is_due_a_microsecond_early() -> None:
    heap = TimerHeap(10)
    heap.push(1, T0, "mail", 0)
    assert heap.pop_due(T0 - 1, 10) == []
    assert heap.pop_due(T0, 10) == [Timer(1, T0, "mail", 0)]


def test_a_timer_moved_away_and_back_fires_once() -> None:
    heap = TimerHeap(10)
    for at_us in (T0, T0 + 5, T0, T0):
        assert heap.push(1, at_us, "mail", 0)
    assert heap.pop_due(T0 + 9, 10) == [Timer(1, T0, "mail", 0)]
    assert heap.next_at_us() is None


def test_a_full_heap_refuses_strangers_and_still_moves_its_own() -> None:
    heap = TimerHeap(2)
    heap.push(1, T0 + 5, "mail", 0)
    heap.push(2, T0 + 9, "mail", 0)
    assert not heap.push(3, T0 + 7, "mail", 0)
    assert not heap.push(4, T0 + 8, "mail", 0)
    assert heap.take_cut_us() == T0 + 7
    assert heap.push(1, T0 + 99, "mail", 0)
    assert heap.take_cut_us() is None
    assert [t.id for t in heap.pop_due(T0 + 99, 9)] == [2, 1]


def test_making_room_drops_the_latest_and_says_from_where() -> None:
    heap = TimerHeap(160)
    for n in range(160):
        heap.push(n + 1, T0 + n, "mail", 0)
    assert not heap.push(999, T0 + 159, "mail", 0, make_room=True)
    assert heap.push(999, T0 - 1, "mail", 0, make_room=True)
    assert heap.take_cut_us() == T0 + 149
    assert heap.latest_at_us() == T0 + 148
    assert heap.next_at_us() == T0 - 1


def test_a_full_heap_knows_its_latest_again_after_that_one_was_discarded() -> None:
    heap = TimerHeap(3)
    for task_id, at_us in ((1, T0), (2, T0 + 1), (3, T0 + 900)):
        heap.push(task_id, at_us, "mail", 0)
    heap.discard(3)
    heap.push(4, T0 + 2, "mail", 0)
    assert not heap.push(5, T0 + 500, "mail", 0, make_room=True)
    assert heap.ids() == {1, 2, 4}


def test_a_full_heap_knows_its_latest_again_after_that_one_was_moved() -> None:
    heap = TimerHeap(2)
    heap.push(1, T0, "mail", 0)
    heap.push(2, T0 + 1, "mail", 0)
    heap.push(2, T0 + 900, "mail", 0)
    assert heap.push(3, T0 + 500, "mail", 0, make_room=True)
    assert heap.ids() == {1, 3}
    assert heap.take_cut_us() == T0 + 900


@given(st.lists(st.integers(T0, T0 + 10**6), min_size=1, max_size=3_000))
@settings(max_examples=30, deadline=None)
def test_making_room_drops_the_latest_sixteenth_and_names_the_earliest_dropped(
    instants: list[int],
) -> None:
    heap = TimerHeap(len(instants))
    for task_id, at_us in enumerate(instants):
        heap.push(task_id, at_us, "mail", 0)
    assert heap.push(5_000, T0 - 1, "mail", 0, make_room=True)
    ordered = sorted(instants)
    kept = len(ordered) - len(ordered) // 16 - 1
    assert heap.take_cut_us() == ordered[kept]
    assert [t.at_us for t in heap.pop_due(YEAR_9000, 5_000)] == [T0 - 1, *ordered[:kept]]


def test_making_room_is_right_even_where_sampling_misleads() -> None:
    heap = TimerHeap(2_000)
    # Every second entry is late: a sample taken in even strides sees the late ones alone, and
    # takes the 126 latest for a smaller share than they are.
    for n in range(2_000):
        heap.push(n + 1, T0 + (n if n % 2 else 10**6 + n), "mail", 0)
    assert heap.push(9_999, T0 - 1, "mail", 0, make_room=True)
    assert heap.take_cut_us() == T0 + 10**6 + 1_998 - 2 * 125
    assert heap.latest_at_us() == T0 + 10**6 + 1_998 - 2 * 126
    assert len(heap) == 2_000 - 126 + 1


@pytest.mark.parametrize("by", ["moving", "discarding"])
def test_stale_entries_never_outnumber_half_of_the_live_ones(by: str) -> None:
    heap = TimerHeap(1_000)
    for round_ in range(20):
        for task_id in range(1, 1_001):
            if by == "discarding":
                heap.discard(task_id)
            heap.push(task_id, T0 + round_ * 7 + task_id, "mail", 0)
            assert len(heap._heap) <= len(heap) * 3 // 2 + 65
    assert [t.id for t in heap.pop_due(YEAR_9000, 2_000)] == list(range(1, 1_001))


def test_an_emptied_heap_holds_nothing_back() -> None:
    heap = TimerHeap(1_000)
    for task_id in range(1, 1_001):
        heap.push(task_id, T0, "mail", 0)
    for task_id in range(1, 1_001):
        assert heap.discard(task_id)
    assert heap.next_at_us() is None
    assert heap.latest_at_us() is None
    assert heap._heap == []


def moved_by_half(heap: TimerHeap, rows: Iterator[tuple[int, int]]) -> None:
    for index, (task_id, at_us) in enumerate(rows):
        heap.push(task_id, at_us, "mail", 0)
        if index % 2:
            heap.push(task_id, at_us + 1, "mail", 0)


def as_loaded(heap: TimerHeap, rows: Iterator[tuple[int, int]]) -> None:
    for task_id, at_us in rows:
        heap.push(task_id, at_us, "mail", 0)


@pytest.mark.parametrize("fill", [as_loaded, moved_by_half])
def test_a_timer_costs_at_most_200_bytes_at_100_000(
    fill: Callable[[TimerHeap, Iterator[tuple[int, int]]], None],
) -> None:
    count, rng = 100_000, random.Random(1)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        heap = TimerHeap(count)
        # Ids that no small-integer cache shares, as they come from the database.
        fill(heap, ((2**40 + n, T0 + rng.randrange(15_000_000)) for n in range(count)))
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(heap) == count
    assert (after - before) / count <= 200
    assert (peak - before) / count <= 250
