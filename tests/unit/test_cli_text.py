"""What others wrote is shown without what it could do to a terminal."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq.cli.text import clipped, instant, iso, neutral, one_line, short, span

HOSTILE = "\x1b[2J\x1b]0;owned\x07 a\r\nb\t\x9b31m \u202eevil\u2069 \u2028 \ud800 \x00 \x7f"


@given(st.text(alphabet=st.characters(codec=None)))
def test_neutral_text_always_prints(text: str) -> None:
    assert neutral(text).isprintable()


@given(st.text(alphabet=st.characters(categories=["L", "N", "P"])))
def test_text_that_prints_is_left_alone(text: str) -> None:
    assert neutral(text) == text


def test_control_characters_are_spelled_out() -> None:
    shown = neutral(HOSTILE)
    assert shown.isprintable()
    for spelled in (
        r"\x1b[2J",
        r"\x07",
        r"\r\n",
        r"\x9b",
        r"\u202e",
        r"\u2028",
        r"\ud800",
        r"\x00",
    ):
        assert spelled in shown


def test_markup_is_text() -> None:
    assert neutral("<script>[red]=cmd()") == "<script>[red]=cmd()"


def test_long_text_is_cut() -> None:
    assert clipped("x" * 100, 10) == "xxxxxxxxx…"
    assert clipped("x" * 10, 10) == "x" * 10
    assert len(clipped("\x1b" * 1_000_000, 10)) == 10


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach postgresql://app:S3cr%2Ft!@db/shop now",
        "No such command 'postgres://app:S3cr%2Ft!@db/shop'.",
        "cannot reach postgresql:app:S3cr%2Ft!@db",
        "POSTGRESQL+ASYNCPG://app:S3cr%2Ft!@db",
    ],
)
def test_a_dsn_never_survives_in_an_error(text: str) -> None:
    assert "S3cr" not in one_line(text)


def test_an_error_is_one_line() -> None:
    assert one_line("a\nb\r\n  c") == "a b c"
    assert len(one_line("x" * 10_000)) <= 600


def test_instants_are_iso_8601_in_utc() -> None:
    at = datetime.fromisoformat("2026-05-01T11:00:00.000001+02:00")
    assert iso(at) == "2026-05-01T09:00:00.000001Z"
    assert short(at) == "2026-05-01 09:00:00.000Z"
    assert iso(None) is None
    assert short(None) == ""


def test_an_instant_that_no_calendar_has_is_none() -> None:
    assert instant(0) == datetime(1970, 1, 1, tzinfo=UTC)
    assert instant(2**63 - 1) is None
    assert instant(None) is None


@pytest.mark.parametrize(
    ("us", "shown"),
    [
        (0, "0s"),
        (7, "7us"),
        (4_234, "4.2ms"),
        (12_345_678, "12.3s"),
        (61_400_000, "1m1s"),
        (5_400_000_000, "1h30m"),
        (100_000_000_000, "1d4h"),
        (-4_234, "-4.2ms"),
        (None, ""),
    ],
)
def test_durations_are_shown_in_a_few_figures(us: int | None, shown: str) -> None:
    assert span(us) == shown
