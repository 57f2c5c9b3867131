from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayq.clock import STEP_US, Clock, DatabaseClock
from delayq.errors import DatabaseUnavailable

MS = 1_000
S = 1_000_000
EPOCH = 1_790_000_000 * S


class HandClock(Clock):
    """Stands still until a test moves it."""

    def __init__(self, us: int = 0) -> None:
        self.us = us

    def monotonic_us(self) -> int:
        return self.us


@dataclass
class Database:
    """A database whose clock drifts against the node's, and steps; latencies up to 300 ms."""

    drift_ppm: int
    clock: HandClock = field(default_factory=HandClock)
    stepped_us: int = 0
    changes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen = DatabaseClock(self.clock)
        self.seen.on_step.append(self.changes.append)

    def now_us(self) -> int:
        t = self.clock.us
        return EPOCH + self.stepped_us + t + t * self.drift_ppm // 1_000_000

    def sample(self, there_us: int, back_us: int) -> None:
        sent_us = self.clock.us
        self.clock.us += there_us
        database_us = self.now_us()
        self.clock.us += back_us
        self.seen.observe(database_us, sent_us, self.clock.us)


LATENCY = st.integers(0, 300 * MS)
PAUSE = st.integers(0, 60 * S)
MOVES = st.lists(st.tuples(PAUSE, LATENCY, LATENCY), min_size=1, max_size=30)


@settings(deadline=None)
@given(st.integers(-50, 1_000), MOVES, st.lists(st.integers(0, 29), max_size=3))
def test_the_clock_is_never_ahead_of_the_database_and_behind_by_one_answer_at_most(
    drift_ppm: int, moves: list[tuple[int, int, int]], steps: list[int]
) -> None:
    database = Database(drift_ppm)
    for index, (pause_us, there_us, back_us) in enumerate(moves):
        database.clock.us += pause_us
        if index in steps:
            database.stepped_us += 3_600 * S
        elif database.seen.ready:
            assert database.seen.now_us() <= database.now_us()
        drift_us = abs(back_us * drift_ppm) // 1_000_000 + 1
        database.sample(there_us, back_us)
        behind_us = database.now_us() - database.seen.now_us()
        assert 0 <= behind_us <= back_us + drift_us


@settings(deadline=None)
@given(MOVES, st.integers(301 * MS, 3_600 * S), MOVES)
def test_after_the_database_was_set_back_one_sample_is_enough_never_to_be_ahead_again(
    before: list[tuple[int, int, int]], back_us: int, after: list[tuple[int, int, int]]
) -> None:
    database = Database(0)
    for pause_us, there_us, answer_us in before:
        database.clock.us += pause_us
        database.sample(there_us, answer_us)
    database.stepped_us -= 300 * MS + back_us
    for pause_us, there_us, answer_us in after:
        database.clock.us += pause_us
        database.sample(there_us, answer_us)
        assert database.seen.now_us() <= database.now_us()


def test_a_node_that_runs_a_hair_fast_for_a_day_is_not_early_by_the_latency_of_a_request() -> None:
    # Without the ageing the best bound of the morning would win all day: 86 ms of drift, and
    # samples whose upper bound contradicts it only beyond the 20 ms that a request takes.
    database = Database(-1)
    for _ in range(24 * 60):
        database.clock.us += 60 * S
        database.sample(20 * MS, 200)
        assert 0 <= database.now_us() - database.seen.now_us() <= 201


def test_the_best_of_many_samples_counts_even_if_later_ones_are_slow() -> None:
    database = Database(0)
    database.sample(1 * MS, 100)
    for _ in range(50):
        database.clock.us += 10 * MS
        database.sample(30 * MS, 90 * MS)
    # 100 us of the best answer, and 6.5 s of ageing.
    assert database.now_us() - database.seen.now_us() <= 100 + 6_500 * MS // 20_000 + 1


@pytest.mark.parametrize(
    ("step_us", "told"),
    [(STEP_US, False), (STEP_US + 1, True), (3_600 * S, True), (-STEP_US - 1, True), (-300, False)],
)
def test_a_step_of_more_than_50_ms_either_way_is_told_once(step_us: int, told: bool) -> None:
    database = Database(0)
    database.sample(0, 0)
    assert database.changes == []
    database.stepped_us += step_us
    database.sample(0, 0)
    database.sample(0, 0)
    assert database.changes == ([step_us] if told else [])


def test_the_first_sample_is_no_step() -> None:
    database = Database(0)
    ready = [database.seen.ready]
    database.sample(0, 0)
    ready.append(database.seen.ready)
    assert ready == [False, True]
    assert database.changes == []
    assert database.seen.offset_us == EPOCH


def test_time_spent_in_suspend_comes_back_as_a_step_forward() -> None:
    database = Database(0)
    database.sample(0, 0)
    database.stepped_us += 600 * S  # the monotonic clock stood still meanwhile
    assert database.seen.now_us() <= database.now_us()
    database.sample(0, 0)
    assert database.changes == [600 * S]
    assert database.seen.now_us() == database.now_us()


def test_asking_before_the_first_sample_is_an_error_that_says_so() -> None:
    seen = DatabaseClock(HandClock())
    for ask in (seen.now_us, lambda: seen.offset_us):
        with pytest.raises(DatabaseUnavailable):
            ask()


def test_the_round_trip_is_the_median_of_the_last_fifteen() -> None:
    seen = DatabaseClock(HandClock())
    assert seen.round_trip_us == 0
    trips = [10**6] * 40 + [100, 200, 300, 400, 500, 600, 700, 800] + [10**6] * 7
    for trip in trips:
        seen.observe(0, 0, trip)
    assert seen.round_trip_us == 800


def test_the_offset_says_what_the_clock_adds() -> None:
    rng = random.Random(1)
    database = Database(-20)
    for _ in range(20):
        database.clock.us += rng.randrange(10 * S)
        database.sample(rng.randrange(MS), rng.randrange(MS))
        database.clock.us += rng.randrange(10 * S)
        assert database.clock.us + database.seen.offset_us == database.seen.now_us()


def test_the_real_clocks_are_in_microseconds_and_never_go_back() -> None:
    clock = Clock()
    first = (clock.monotonic_us(), clock.boottime_us())
    second = (clock.monotonic_us(), clock.boottime_us())
    assert first <= second
    assert second[1] - first[1] < 10 * S
    assert clock.boottime_us() >= first[0]


def test_the_real_clocks_do_not_mind_a_wall_clock_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    before = (clock.monotonic_us(), clock.boottime_us())
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: 0.0)
        patched.setattr(time, "time_ns", lambda: 0)
        after = (clock.monotonic_us(), clock.boottime_us())
    assert before[0] <= after[0] < before[0] + 10 * S
    assert before[1] <= after[1] < before[1] + 10 * S


def test_without_a_boottime_clock_the_monotonic_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayq.clock._BOOTTIME", None)
    assert HandClock(7).boottime_us() == 7
