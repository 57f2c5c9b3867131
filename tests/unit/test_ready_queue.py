"""What is taken first, and what waits aside."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayq.ready_queue import Admission, ReadyQueue
from delayq.timer_heap import Timer

NOW = 1_790_000_000_000_000
LATE = NOW - 60_000_000
_ids = count(1)


def timer(at_us: int = NOW, priority: int = 0, kind: str = "mail") -> Timer:
    return Timer(next(_ids), at_us, kind, priority)


def queue_of(*timers: Timer, limits: dict[str, int] | None = None) -> ReadyQueue:
    admission = Admission({kind: ((kind, limit),) for kind, limit in (limits or {}).items()})
    queue = ReadyQueue(admission)
    queue.push(timers, NOW)
    return queue


def waiting_in(queue: ReadyQueue) -> int:
    """How many are in it, those that wait aside too."""
    return queue.takeable + sum(map(len, queue._aside.values()))


# --- order ------------------------------------------------------------------------------------


def test_higher_priorities_go_first_and_within_them_earlier_ones() -> None:
    low, early, late, high = timer(priority=-5), timer(), timer(NOW + 1), timer(priority=7)
    queue = queue_of(low, early, late, high)
    assert queue.take(10) == [high, early, late, low]
    assert waiting_in(queue) == 0


def test_what_has_just_come_due_goes_ahead_of_backlog() -> None:
    old, fresh = [timer(LATE) for _ in range(4)], [timer() for _ in range(4)]
    queue = queue_of(*old, *fresh)
    assert queue.take(4) == [*fresh[:3], old[0]]


def test_backlog_keeps_a_quarter_however_much_is_fresh_and_however_urgent() -> None:
    fresh, old = [timer(priority=100) for _ in range(100)], [timer(LATE) for _ in range(100)]
    queue = queue_of(*fresh, *old)
    taken = queue.take(40)
    assert taken[:30] == fresh[:30]
    assert taken[30:] == old[:10]


@pytest.mark.parametrize("taken", [1, 2, 3, 5, 8])
def test_a_quarter_is_the_backlogs_over_many_takes(taken: int) -> None:
    queue = queue_of(*(timer() for _ in range(200)), *(timer(LATE) for _ in range(200)))
    takes = [one for _ in range(80 // taken) for one in queue.take(taken)]
    late = sum(one.at_us == LATE for one in takes)
    assert late == pytest.approx(len(takes) / 4, abs=1)


def test_of_a_kind_at_its_limit_only_so_many_wait_in_memory() -> None:
    queue = ReadyQueue(Admission({"slow": (("slow", 1),)}))
    queue.push([Timer(n, NOW, "slow", 0) for n in range(1, 1_002)], NOW)
    assert len(queue.take(2_000)) == 1
    assert queue.full_kinds == {"slow"}
    assert waiting_in(queue) + len(queue.dropped) == 1_000
    assert waiting_in(queue) < 500


def test_what_was_let_go_is_read_again_when_the_line_has_grown_short() -> None:
    queue = ReadyQueue(Admission({"slow": (("slow", 1),)}))
    queue.push([Timer(n, NOW, "slow", 0) for n in range(1, 1_002)], NOW)
    queue.take(2_000)
    while queue.full_kinds:
        assert not queue.reopened
        queue.release("slow", NOW)
        assert len(queue.take(1)) == 1
    assert queue.reopened
    assert waiting_in(queue) > 0  # before the line is empty: the reading takes a while


def test_what_one_lane_cannot_fill_goes_to_the_other() -> None:
    old, fresh = [timer(LATE) for _ in range(3)], [timer() for _ in range(3)]
    assert queue_of(*old).take(3) == old
    assert queue_of(*fresh).take(3) == fresh
    assert len(queue_of(*old, *fresh).take(6)) == 6
    assert queue_of().take(5) == []


# --- limits -----------------------------------------------------------------------------------


def test_a_kind_at_its_limit_waits_aside_and_holds_up_nobody() -> None:
    reports = [timer(kind="report", priority=50) for _ in range(5)]
    mails = [timer() for _ in range(3)]
    queue = queue_of(*reports, *mails, limits={"report": 2})
    assert queue.take(10) == [*reports[:2], *mails]
    assert waiting_in(queue) == 3
    assert queue.takeable == 0
    assert queue.take(10) == []


def test_the_next_of_a_limited_kind_is_taken_when_one_is_over() -> None:
    reports = [timer(kind="report") for _ in range(4)]
    queue = queue_of(*reports, limits={"report": 1})
    for report in reports:
        assert queue.take(10) == [report]
        assert queue.take(10) == []
        queue.release("report", NOW)
    assert waiting_in(queue) == 0
    assert queue.take(10) == []


def test_those_that_wait_aside_are_taken_by_priority_too() -> None:
    first, *others = [timer(kind="report") for _ in range(3)]
    queue = queue_of(first, *others, limits={"report": 1})
    assert queue.take(10) == [first]
    queue.take(10)
    urgent = timer(kind="report", priority=9)
    queue.push([urgent], NOW)
    assert queue.take(10) == []
    queue.release("report", NOW)
    assert queue.take(10) == [urgent]


def test_one_that_waits_aside_does_not_lose_its_place_to_one_that_came_later() -> None:
    first, second, third = (timer(kind="report") for _ in range(3))
    queue = queue_of(first, second, limits={"report": 1})
    assert queue.take(10) == [first]
    queue.push([third], NOW)
    queue.release("report", NOW)
    assert queue.take(10) == [second]
    queue.release("report", NOW)
    assert queue.take(10) == [third]


def test_a_kind_without_a_limit_is_never_set_aside() -> None:
    queue = queue_of(*(timer() for _ in range(50)), limits={"report": 1})
    assert len(queue.take(50)) == 50
    queue.release("mail", NOW)
    assert queue.takeable == 0


def test_kinds_of_one_group_share_its_limit() -> None:
    admission = Admission({"a": (("threads", 2),), "b": (("threads", 2), ("kind b", 1))})
    assert [admission.admit(kind) for kind in "abab"] == [True, True, False, False]
    assert admission.done("a")
    assert not admission.admit("b")  # the threads have room, its own limit has not
    assert admission.admit("a")
    assert not admission.done("c")


def test_a_place_in_a_shared_group_goes_to_any_kind_that_waits_for_it() -> None:
    first, waiting = timer(kind="a"), timer(kind="b")
    queue = ReadyQueue(Admission({"a": (("threads", 1),), "b": (("threads", 1),)}))
    queue.push([first, waiting], NOW)
    assert queue.take(5) == [first]
    queue.release("a", NOW)
    assert queue.take(5) == [waiting]


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.lists(
                st.tuples(
                    st.sampled_from([LATE, NOW]), st.integers(-2, 2), st.sampled_from("abcd")
                ),
                max_size=6,
            ),
        ),
        st.tuples(st.just("take"), st.integers(0, 8)),
        st.tuples(st.just("end"), st.integers(0, 20)),
    ),
    max_size=60,
)
LIMITS = {"a": (("a", 1),), "b": (("b", 2), ("threads", 3)), "c": (("threads", 3),)}


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_nothing_is_lost_or_taken_twice_and_no_limit_is_broken(
    steps: list[tuple[str, object]],
) -> None:
    queue = ReadyQueue(Admission(LIMITS))
    waiting: set[Timer] = set()
    running: list[Timer] = []
    for step, argument in steps:
        if isinstance(argument, list):
            fresh = [timer(at, priority, kind) for at, priority, kind in argument]
            waiting.update(fresh)
            queue.push(fresh, NOW)
        elif isinstance(argument, int) and step == "take":
            taken = queue.take(argument)
            assert len(taken) <= argument
            assert waiting.issuperset(taken)
            waiting.difference_update(taken)
            running += taken
        elif isinstance(argument, int) and running:
            over = running.pop(argument % len(running))
            queue.release(over.kind, NOW)
        assert waiting_in(queue) == len(waiting)
        kinds = Counter(one.kind for one in running)
        assert kinds["a"] <= 1
        assert kinds["b"] <= 2
        assert kinds["b"] + kinds["c"] <= 3
    while waiting:  # and nobody waits for ever
        taken = queue.take(100)
        assert taken or running
        waiting.difference_update(taken)
        running += taken
        for over in running:
            queue.release(over.kind, NOW)
        running.clear()
