from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq.policy import (
    SHORTEST_BACKOFF_US,
    backoff_us,
    is_misfire,
    may_fire,
    truncate_error,
    trusted_until_us,
)

SECOND = 1_000_000
HOUR = 3_600 * SECOND
ANY_TEXT = st.text(st.characters(exclude_categories=()))


@pytest.mark.parametrize(
    ("attempt", "random", "expected"),
    [
        (1, 0.0, SECOND // 2),
        (1, 0.5, SECOND * 3 // 4),
        (2, 0.0, SECOND),
        (3, 0.0, 2 * SECOND),
        (12, 0.0, 1024 * SECOND),
        (13, 0.0, HOUR // 2),
        (10**9, 0.0, HOUR // 2),
        (10**18, 0.0, HOUR // 2),
        (0, 0.0, SECOND // 2),
        (-5, 0.0, SECOND // 2),
    ],
)
def test_the_backoff_doubles_from_the_base_to_the_cap(
    attempt: int, random: float, expected: int
) -> None:
    assert backoff_us(attempt, SECOND, HOUR, random) == expected


@given(
    attempt=st.integers(1, 10**9),
    base_us=st.integers(0, HOUR),
    cap_us=st.integers(0, 24 * HOUR),
    random=st.floats(0, 1, exclude_max=True),
)
def test_the_backoff_is_between_half_the_wait_and_the_wait_and_never_below_its_floor(
    attempt: int, base_us: int, cap_us: int, random: float
) -> None:
    whole = min(base_us * 2 ** min(attempt - 1, 62), cap_us)
    wait = backoff_us(attempt, base_us, cap_us, random)
    assert max(SHORTEST_BACKOFF_US, whole // 2) <= wait <= max(SHORTEST_BACKOFF_US, whole)


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True))
def test_a_later_attempt_never_waits_less_for_the_same_jitter(attempt: int, random: float) -> None:
    assert backoff_us(attempt, SECOND, HOUR, random) <= backoff_us(
        attempt + 1, SECOND, HOUR, random
    )


def test_a_backoff_of_nothing_still_waits_so_that_a_failing_task_does_not_spin() -> None:
    assert backoff_us(1, 0, 0, 0.0) == SHORTEST_BACKOFF_US
    assert backoff_us(5, SECOND, 1, 0.0) == SHORTEST_BACKOFF_US


@pytest.mark.parametrize(
    ("late_us", "grace_ms", "ever_leased", "missed"),
    [
        (0, 0, False, False),
        (1, 0, False, True),
        (5_000, 5, False, False),
        (5_001, 5, False, True),
        (10**12, None, False, False),
        (10**12, 5, True, False),
        (-1, 0, False, False),
    ],
)
def test_a_misfire_is_later_than_its_grace_and_was_never_leased(
    late_us: int, grace_ms: int | None, ever_leased: bool, missed: bool
) -> None:
    assert is_misfire(10**15 + late_us, 10**15, grace_ms, ever_leased) is missed


def test_trust_in_a_beat_counts_from_when_it_was_sent_and_ends_a_margin_early() -> None:
    assert trusted_until_us(100, 15, 2) == 113
    assert may_fire(112, 100, 15, 2)
    assert not may_fire(113, 100, 15, 2)


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("boom", 4, "boom"),
        ("booms", 4, "b…"),
        ("", 10, ""),
        ("boom", 0, ""),
        ("boom", -1, ""),
        ("boom", 2, "bo"),
        ("ééé", 6, "ééé"),
        ("éééé", 6, "é…"),
        ("a\x00b", 100, "a\ufffdb"),
        ("a\ud800b", 100, "a\ufffdb"),
        ("\x00\x00", 3, "…"),
    ],
)
def test_an_error_text_is_cut_at_a_character_and_says_so(
    text: str, limit: int, expected: str
) -> None:
    assert truncate_error(text, limit) == expected


@given(ANY_TEXT, st.integers(-5, 60))
def test_an_error_text_can_always_be_stored_within_its_limit(text: str, limit: int) -> None:
    kept = truncate_error(text, limit)
    assert len(kept.encode()) <= max(limit, 0)
    assert "\x00" not in kept
    assert r"\u0000" not in json.dumps(kept)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00")))
def test_an_error_text_that_fits_is_left_alone(text: str) -> None:
    assert truncate_error(text, len(text.encode())) == text
