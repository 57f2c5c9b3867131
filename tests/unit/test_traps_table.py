"""The table of traps names tests that exist, and leaves no trap out."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "TRAPS.md").read_text(encoding="utf-8")
LINES = [line for line in TABLE.splitlines() if re.match(r"\| \d", line)]
REFERENCE = re.compile(r"`([a-z]+/test_\w+\.py)::(test_\w+)`")
REFERENCES = sorted({match.groups() for line in LINES for match in REFERENCE.finditer(line)})


@cache
def _tests_in(file: str) -> frozenset[str]:
    text = (TESTS / file).read_text(encoding="utf-8")
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE))


def test_every_trap_has_its_line() -> None:
    numbers = [int(match[1]) for line in LINES if (match := re.match(r"\| (\d+)", line))]
    assert sorted(set(numbers)) == list(range(1, 29))
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[2:6].strip(" ."))
def test_every_line_names_a_test(line: str) -> None:
    assert REFERENCE.search(line)
    assert line.count("`") == 2 * len(REFERENCE.findall(line))  # and nothing that looks like one


@pytest.mark.parametrize(("file", "name"), REFERENCES)
def test_every_test_in_the_table_exists(file: str, name: str) -> None:
    assert name in _tests_in(file)


def test_the_readme_names_what_the_beat_cannot_survive() -> None:
    readme = " ".join((TESTS.parent / "README.md").read_text(encoding="utf-8").split())
    assert "A call into C that holds the interpreter lock" in readme
    assert "stops the beat" in readme
