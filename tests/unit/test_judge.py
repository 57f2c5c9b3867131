"""The judge against simulated peers, on a clock that the tests own. Instants in seconds here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayq.judge import Judge

S = 1_000_000
TTL = 15
BEAT = 4


def judge() -> Judge:
    return Judge(TTL * S)


def test_a_silent_peer_is_buried_after_one_ttl_of_own_good_beats() -> None:
    subject = judge()
    for now in (0, 4, 8, 12):
        subject.observe(now * S, True, {1: 99, 2: now})
        assert subject.to_bury(now * S) == []
    assert subject.next_look_us() == 15 * S
    subject.observe(15 * S, True, {1: 99, 2: 15})
    assert subject.to_bury(15 * S) == [1]


def test_a_silent_peer_is_not_buried_a_microsecond_before_its_time() -> None:
    subject = judge()
    for now_us in (0, 5 * S, 10 * S, 15 * S - 1):
        subject.observe(now_us, True, {1: 99})
    assert subject.to_bury(15 * S - 1) == []


def test_time_alone_buries_nobody_without_an_own_beat_at_the_end_of_it() -> None:
    subject = judge()
    for now in (0, 4, 8, 12):
        subject.observe(now * S, True, {1: 99})
    assert subject.to_bury(16 * S) == []


@pytest.mark.parametrize("dated", [-(10**15), 0, 4 * 10**15])
def test_what_the_row_is_dated_does_not_matter_only_that_it_does_not_change(dated: int) -> None:
    subject = judge()
    for now in (0, 5, 10, 15):
        subject.observe(now * S, True, {1: dated})
    assert subject.to_bury(15 * S) == [1]


def test_a_row_that_goes_back_after_a_clock_step_has_changed() -> None:
    subject = judge()
    for now, row in ((0, 5_000), (5, 5_000), (10, 1_400), (15, 1_400)):
        subject.observe(now * S, True, {1: row})
    assert subject.to_bury(15 * S) == []


def test_a_failed_beat_restarts_the_count() -> None:
    subject = judge()
    for now in (0, 4, 8):
        subject.observe(now * S, True, {1: 99})
    subject.observe(12 * S, False, {1: 99})
    assert subject.next_look_us() is None
    assert subject.to_bury(12 * S) == []
    for now in (16, 20, 24, 28):
        subject.observe(now * S, True, {1: 99})
        assert subject.to_bury(now * S) == []
    subject.observe(31 * S, True, {1: 99})
    assert subject.to_bury(31 * S) == [1]


def test_a_judge_that_slept_starts_over_even_if_no_beat_failed() -> None:
    subject = judge()
    subject.observe(0, True, {1: 99})
    subject.observe(20 * S, True, {1: 99})
    assert subject.to_bury(20 * S) == []
    assert subject.next_look_us() == 35 * S


def test_an_old_verdict_is_not_acted_on() -> None:
    subject = judge()
    for now in (0, 5, 10, 15):
        subject.observe(now * S, True, {1: 99})
    assert subject.to_bury(22 * S) == [1]
    assert subject.to_bury(23 * S) == []


def test_a_burial_that_failed_is_asked_for_again_without_a_look_of_its_own() -> None:
    subject = judge()
    for now in (0, 5, 10, 15):
        subject.observe(now * S, True, {1: 99})
    assert subject.next_look_us() is None
    subject.observe(19 * S, True, {1: 99})
    assert subject.to_bury(19 * S) == [1]


def test_a_peer_that_is_gone_is_forgotten_and_counts_anew_if_it_returns() -> None:
    subject = judge()
    for now in (0, 5):
        subject.observe(now * S, True, {1: 99})
    subject.observe(10 * S, True, {})
    subject.observe(15 * S, True, {1: 99})
    assert subject.to_bury(15 * S) == []
    assert subject.next_look_us() == 30 * S


def test_a_judge_without_peers_has_nothing_to_look_at() -> None:
    assert judge().next_look_us() is None
    assert judge().to_bury(0) == []


@dataclass
class World:
    """A database that may be away, may pause everybody, and may step its clock."""

    troubles: list[tuple[int, int, bool]]  # start, length, whether the judge notices
    steps: dict[int, int]  # at which second the database's clock moves by how much
    step: int = 0

    def trouble(self, second: int) -> bool | None:
        for start, length, noticed in self.troubles:
            if start <= second < start + length:
                return noticed
        return None


def burials(world: World, phases: list[int], silent_from: dict[int, int], end: int) -> list[int]:
    """Run the judge for `end` seconds; returns when each peer of `silent_from` was buried."""
    subject = judge()
    rows = dict.fromkeys(range(len(phases)), 0)
    buried: dict[int, int] = {}
    for second in range(end):
        world.step += world.steps.get(second, 0)
        away = world.trouble(second)
        for peer, phase in enumerate(phases):
            alive = second < silent_from.get(peer, end)
            if alive and away is None and second % BEAT == phase:
                rows[peer] = (second + TTL) * S + world.step
        look = subject.next_look_us()
        if second % BEAT == 0 or (look is not None and second * S >= look):
            if away is None:
                subject.observe(second * S, True, rows)
            elif away:
                subject.observe(second * S, False, {})
        for peer in subject.to_bury(second * S):
            buried.setdefault(peer, second)
    assert set(buried) <= set(silent_from)
    return [buried[peer] for peer in silent_from]


TROUBLES = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60), st.booleans()), max_size=4)
STEPS = st.dictionaries(st.integers(0, 200), st.integers(-3_600 * S, 3_600 * S), max_size=4)
PHASES = st.lists(st.integers(0, BEAT - 1), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(TROUBLES, STEPS, PHASES)
def test_nobody_is_buried_across_outages_pauses_and_clock_steps(
    troubles: list[tuple[int, int, bool]], steps: dict[int, int], phases: list[int]
) -> None:
    assert burials(World(troubles, steps), phases, {}, 300) == []


@settings(max_examples=200, deadline=None)
@given(STEPS, PHASES, st.integers(0, 100))
def test_a_dead_peer_is_buried_within_a_ttl_and_a_beat_whatever_the_clock_does(
    steps: dict[int, int], phases: list[int], dies: int
) -> None:
    quiet_steps = {at: by for at, by in steps.items() if by}
    (buried,) = burials(World([], quiet_steps), phases, {0: dies}, 300)
    assert dies + TTL - BEAT <= buried <= dies + TTL + BEAT


@settings(max_examples=100, deadline=None)
@given(TROUBLES, PHASES, st.integers(0, 100))
def test_a_dead_peer_is_buried_in_the_end_whatever_happened(
    troubles: list[tuple[int, int, bool]], phases: list[int], dies: int
) -> None:
    calm = max([dies, *(start + length for start, length, _ in troubles)])
    (buried,) = burials(World(troubles, {}), phases, {0: dies}, 400)
    assert buried <= calm + TTL + 2 * BEAT
