from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delayq.durations import format_duration, parse_duration
from delayq.errors import InvalidArgument

MS = 1_000
S = 1_000_000
M = 60 * S
H = 60 * M
D = 24 * H


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1h30m", H + 30 * M),
        ("90s", 90 * S),
        ("5m", 5 * M),
        ("250ms", 250 * MS),
        ("5ms", 5 * MS),
        ("5m5ms", 5 * M + 5 * MS),
        ("2d", 2 * D),
        ("1.5h", H + 30 * M),
        ("0.1s", 100 * MS),
        ("7us", 7),
        ("0s", 0),
        (" 1d 2h 3m 4s 5ms 6us ", D + 2 * H + 3 * M + 4 * S + 5 * MS + 6),
        ("1 h 30 m", H + 30 * M),
        ("0.0000014s", 1),
        ("90m", 90 * M),
        ("3653000d", 3_653_000 * D),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, expected: int) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "5",
        "0",
        "m",
        "-5m",
        "+5m",
        "5 minutes",
        "5M",
        "30m1h",
        "1h1h",
        "1e3s",
        "nan",
        "nans",
        "infs",
        ".5h",
        "5.h",
        "1,5h",
        "1h-30m",
        "\N{ARABIC-INDIC DIGIT FIVE}m",
        "5m\x00",
        "4000000d",
        "9" * 16 + "s",
        "1" * 200,
        "1h" * 100,
    ],
)
def test_nonsense_is_refused_by_the_name_of_its_field(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^delay: ") as refused:
        parse_duration(text, "delay")
    assert refused.value.field == "delay"
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize(
    ("duration_us", "expected"),
    [
        (0, "0s"),
        (1, "1us"),
        (1_500, "1.5ms"),
        (250 * MS, "250ms"),
        (1_500 * MS, "1.5s"),
        (90 * S, "1m30s"),
        (5 * M, "5m"),
        (H + 30 * M, "1h30m"),
        (2 * D, "2d"),
        (10 * D + 10 * S, "10d10s"),
        (M + 1, "1m1us"),
        (100 * S, "1m40s"),
        (-5 * M, "-5m"),
    ],
)
def test_a_duration_is_written_in_its_shortest_usual_form(duration_us: int, expected: str) -> None:
    assert format_duration(duration_us) == expected


@given(st.integers(0, 3_650_000 * D))
@example(3_660_000 * D)
def test_what_is_written_is_read_back_exactly(duration_us: int) -> None:
    assert parse_duration(format_duration(duration_us)) == duration_us


@given(st.text(max_size=30))
def test_any_text_is_either_a_duration_or_an_invalid_argument(text: str) -> None:
    with suppress(InvalidArgument):
        assert parse_duration(text) >= 0
