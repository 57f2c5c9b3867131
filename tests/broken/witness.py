"""A plugin of pytest: notes how each test ended, and by what, a line of JSON each.

It imports all of delayq first, from the tree whose tests are run and from no other.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections.abc import Generator
from pathlib import Path

import pytest

NOTES = "TESTS_OF_DELAYQ_NOTES"
"""the variable that names the file"""


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test what does not import, or is another delayq."""
    package = importlib.import_module("delayq")
    folder = Path(str(package.__file__)).resolve().parent
    if folder != config.rootpath.resolve() / "delayq":
        raise pytest.UsageError(f"this would test another delayq: {folder}")
    for module in pkgutil.walk_packages([str(folder)], "delayq."):
        if not module.name.endswith(".__main__"):
            try:
                importlib.import_module(module.name)
            except Exception as error:
                raise pytest.UsageError(f"{module.name} cannot be imported: {error!r}") from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what becomes of a test: it passed, or what ended it in which phase."""
    report = yield
    if report.when == "call" or not report.passed:
        error = None if call.excinfo is None else call.excinfo.value
        note = {
            "test": item.nodeid,
            "outcome": f"{report.outcome} in {report.when}",
            "by": "" if error is None else type(error).__name__,
            "asserted": report.failed and report.when == "call" and is_assertion(error),
        }
        with Path(os.environ[NOTES]).open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(note) + "\n")
    return report


def is_assertion(error: BaseException | None) -> bool:
    """True if a test says that something is not as it should be, not that it came to grief."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_assertion(one) for one in error.exceptions)
    if isinstance(error, pytest.fail.Exception):
        return "pytest-timeout" not in str(error)
    return isinstance(error, AssertionError)
