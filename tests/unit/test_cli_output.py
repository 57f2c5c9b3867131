"""One JSON document for programs; columns that stand straight for people."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from delayq.cli.output import aligned, sound, write_fields, write_json, write_table


def test_json_is_one_valid_document_of_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"text": "\x9b31m\u202eä", "at": datetime(2026, 5, 1, tzinfo=UTC), "big": 10**400})
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.count("\n") == 1
    assert json.loads(out) == {
        "text": "\x9b31m\u202eä",
        "at": "2026-05-01T00:00:00.000000Z",
        "big": 10**400,
    }


def test_json_says_in_words_what_it_has_no_numbers_for() -> None:
    assert sound([math.inf, -math.inf, math.nan]) == ["Infinity", "-Infinity", "NaN"]
    assert sound({1: Decimal("1.10"), "b": (True, None)}) == {"1": "1.10", "b": [True, None]}


def test_a_piped_table_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(("ID", "KIND", "ATTEMPT"), [(7, "a", 1), (1234, "日本", None)], "nothing")
    assert capsys.readouterr().out.splitlines() == [
        "  ID  KIND  ATTEMPT",
        "   7  a           1",
        "1234  日本",
    ]


def test_a_table_shows_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(("KEY",), [("\x1b[31m\nx\r",), ("[bold]markup[/bold]",)], "nothing")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]markup[/bold]" in out
    assert len(out.splitlines()) == 3


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(("ID",), [], "no such tasks")
    assert capsys.readouterr().out == "no such tasks\n"


def test_numbers_stand_right_and_words_left() -> None:
    lines = aligned(("N", "WORD"), [["5", "a"], ["12345", "b"]], ["right", "left"])
    assert lines == ["    N  WORD", "    5  a", "12345  b"]


def test_fields_without_a_value_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    write_fields([("state", "pending"), ("key", None), ("attempt", 0), ("node", "")])
    assert capsys.readouterr().out == "state    pending\nattempt  0\n"
