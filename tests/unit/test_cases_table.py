"""The table of cases leaves none out, and names tests that exist and say which case they play."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "CASES.md").read_text(encoding="utf-8")
CASES = """
    C001 C003 C007 C008 C009 C010 C012 C014 C019 C020 C023 C025 C026 C027 C028 C035 C036 C038 C039
    C041 C042 C045 C046 C048 C049 C052 C053 C056 C058 C060 C065 C066 C067 C068 C070 C074 C078 C079
    C081 C082 C083 C084 C085 C090 C093 C094 C097 C098 C099 C100 C104 C105 C106 C107 C110 C111 C112
    C114 C118 C120 C122 C123 C126
""".split()
LINES = [line for line in TABLE.splitlines() if re.match(r"\| C\d{3} ", line)]
REFERENCE = re.compile(r"`([a-z]+/test_\w+\.py)::(test_\w+)`")
REFERENCES = [(line[2:6], *match.groups()) for line in LINES for match in REFERENCE.finditer(line)]


@cache
def _docstrings(file: str) -> dict[str, str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, functions)
    }


def test_every_case_has_its_line_and_has_it_once() -> None:
    assert len(CASES) == 63
    assert [line[2:6] for line in LINES] == CASES


@pytest.mark.parametrize("case", CASES)
def test_every_line_names_a_test(case: str) -> None:
    (line,) = [line for line in LINES if line[2:6] == case]
    named = line.split(" | ")[2]
    assert REFERENCE.search(named)
    assert named.count("`") == 2 * len(REFERENCE.findall(named))  # and nothing that looks like one


@pytest.mark.parametrize(("case", "file", "name"), REFERENCES)
def test_every_test_in_the_table_exists_and_names_its_case(case: str, file: str, name: str) -> None:
    assert re.search(rf"\b{case}\b", _docstrings(file)[name])
