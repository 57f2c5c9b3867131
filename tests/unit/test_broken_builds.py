"""The list of broken builds fits the tree as it stands, so that it cannot rot unnoticed.

That each of them is caught takes minutes: scripts/broken-builds shows it.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.broken.build import Build, Edit, StaleEditError, edited
from tests.broken.builds import FIRST, read_builds
from tests.broken.report import listing, table
from tests.broken.trial import Note, Run, Verdict, verdict_of
from tests.broken.witness import is_assertion

ROOT = Path(__file__).parents[2]
BUILDS = read_builds()
Every = pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)


@cache
def _tests_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, functions)}


def test_those_that_must_be_there_come_first() -> None:
    assert [build.name for build in BUILDS[: len(FIRST)]] == list(FIRST)


@Every
def test_every_edit_of_it_is_still_possible_and_what_it_leaves_is_no_nonsense(build: Build) -> None:
    texts = edited(build, ROOT)
    assert texts
    for name, text in texts.items():
        assert text != (ROOT / name).read_text(encoding="utf-8")
        if name.endswith(".py"):
            compile(text, name, "exec")


@Every
def test_the_tests_that_must_catch_it_exist(build: Build) -> None:
    assert build.caught_by
    for test in build.caught_by:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in _tests_in(file)


@Every
def test_it_says_what_it_breaks(build: Build) -> None:
    assert re.fullmatch("[a-z]+(-[a-z]+)+", build.name)  # a folder is called so
    assert build.breaks.endswith(".")
    assert build.name in listing(BUILDS)


# --- how it is judged -----------------------------------------------------------------------------

BUILD = Build("b", "All.", (Edit("f", "a", "b"),), ("x.py::test_x", "x.py::test_y[1]"))


@pytest.mark.parametrize("text", ["", "a a", "b"])
def test_an_edit_whose_text_is_not_there_as_often_as_it_says_is_refused(text: str) -> None:
    with pytest.raises(StaleEditError, match=f"found {text.count('a')} times, not 1"):
        Edit("f", "a", "c").applied_to(text)


def test_edits_of_one_file_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a x x")
    build = Build("b", "All.", (Edit("f", "a", "b"), Edit("f", "x", "b", 2)), ())
    assert edited(build, tmp_path) == {"f": "b b b"}
    assert (tmp_path / "f").read_text() == "a x x"


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (AssertionError("no"), True),
        (pytest.fail.Exception("DID NOT RAISE"), True),
        (ExceptionGroup("two", [AssertionError(), AssertionError()]), True),
        (ExceptionGroup("two", [AssertionError(), ImportError()]), False),
        (pytest.fail.Exception("Timeout (>60.0s) from pytest-timeout."), False),
        (ImportError("delayq"), False),
        (TimeoutError(), False),
        (None, False),
    ],
)
def test_only_an_assertion_is_a_catch(error: BaseException | None, counts: bool) -> None:
    assert is_assertion(error) is counts


CAUGHT_X = Note("x.py::test_x[a]", "failed in call", "AssertionError", asserted=True)
PASSED_X = Note("x.py::test_x[b]", "passed in call", "", asserted=False)
CAUGHT_Y = Note("x.py::test_y[1]", "failed in call", "AssertionError", asserted=True)


@pytest.mark.parametrize(
    ("status", "notes", "said"),
    [
        (1, [CAUGHT_X, PASSED_X, CAUGHT_Y], ""),
        (1, [CAUGHT_X, PASSED_X], "test_y[1]: not run"),
        (1, [PASSED_X, CAUGHT_Y], "test_x: passed in call"),
        (1, [CAUGHT_X, Note("x.py::test_y[2]", "failed in call", "", asserted=True)], "not run"),
        (1, [CAUGHT_X, Note("x.py::test_y[1]", "failed in setup", "KeyError", asserted=False)],
         "test_y[1]: failed in setup KeyError"),
        (0, [PASSED_X], "all passed"),
        (2, [CAUGHT_X, CAUGHT_Y], "pytest ended with 2"),
        (None, [CAUGHT_X, CAUGHT_Y], "not over after 5 s"),
    ],
)  # fmt: skip
def test_a_build_is_caught_if_each_of_its_tests_failed_by_an_assertion(
    status: int | None, notes: list[Note], said: str
) -> None:
    verdict = verdict_of(BUILD, Run(status, notes, "output", 5.0))
    assert said in verdict.why_not
    assert bool(verdict.why_not) == bool(said)


def test_the_table_names_who_caught_what_and_what_nobody_did() -> None:
    lines = table(
        [Verdict(BUILD, ["test_x", "test_y[1]"], "", 1.0), Verdict(BUILD, [], "why", 2.0)]
    )
    assert [line.rpartition("| ")[2] for line in lines[2:]] == ["test_x", "test_y[1]", "NOT CAUGHT"]
