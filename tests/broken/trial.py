"""Puts a build up in a folder of its own, runs tests on it, and says what they found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests import conftest
from tests.broken.build import Build, edited
from tests.broken.witness import NOTES

ROOT: Final = Path(__file__).parents[2]
LIMIT_S: Final = 300.0
_END_S: Final = 20.0
_SAID: Final = 1_500
_ALL_PASSED, _SOME_FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Note:
    """How one test ended; `asserted`: an assertion of its own failed."""

    test: str
    outcome: str
    by: str
    asserted: bool


@dataclass(frozen=True, slots=True)
class Run:
    """What became of some tests on one build. `status` None: they did not end in time."""

    status: int | None
    notes: list[Note]
    said: str
    seconds: float

    def of(self, test: str) -> list[Note]:
        """The notes about a test, or about all of its parameters."""
        return [note for note in self.notes if note.test == test or _plain(note.test) == test]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`caught`: the tests that caught the build. `why_not`: what is wrong, if anything."""

    build: Build
    caught: list[str]
    why_not: str
    seconds: float


def copy_tree(folder: Path) -> None:
    """All files of this repository as they stand, those that are not committed yet too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        raise SystemExit(f"{ROOT} must be a clone, read by git: {listed.stderr.strip()}")
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():  # not one that was removed and not committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def try_sound(folder: Path, builds: Iterable[Build]) -> tuple[Run, dict[str, str]]:
    """Run the tests of all these builds on what is not broken; what is wrong, by test."""
    tests = sorted({test for build in builds for test in build.caught_by})
    run = _run(folder, tests, LIMIT_S * 4)
    wrong = {test: reason for test in tests if (reason := _unsound(run, test))}
    return run, wrong


def try_broken(sound: Path, folder: Path, build: Build) -> Verdict:
    """Break a copy of `sound` in `folder`, and see whether each of its tests notices."""
    shutil.copytree(sound, folder, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    for name, text in edited(build, folder).items():
        (folder / name).write_text(text, encoding="utf-8")
    return verdict_of(build, _run(folder, build.caught_by, LIMIT_S))


def verdict_of(build: Build, run: Run) -> Verdict:
    """Caught, if each of its tests ran and some assertion of each failed."""
    caught = [test for test in build.caught_by if any(note.asserted for note in run.of(test))]
    why = [
        f"{_name(test)}: {_ends(run.of(test))}" for test in build.caught_by if test not in caught
    ]
    if run.status != _SOME_FAILED or why:
        why.append(f"{_status(run)}\n{run.said}")
    return Verdict(build, [_name(test) for test in caught], "\n".join(why), run.seconds)


def _unsound(run: Run, test: str) -> str:
    notes = run.of(test)
    if not any(note.outcome == "passed in call" for note in notes):
        return f"{_ends(notes)} ({_status(run)})"
    bad = [note for note in notes if note.outcome.startswith("failed")]
    return _ends(bad) if bad else ""


def _run(folder: Path, tests: Sequence[str], limit_s: float) -> Run:
    # beside the copy, which may be copied in its turn
    notes, output = folder.with_suffix(".jsonl"), folder.with_suffix(".txt")
    notes.touch()
    began = time.monotonic()
    # in the order in which they are named, in one process: a run is like the one before
    command = [
        sys.executable, "-m", "pytest", "-p", "tests.broken.witness", "-p", "no:randomly", "-n",
        "0", "-q", "--tb=short", *(f"tests/{test}" for test in tests),
    ]  # fmt: skip
    own = {"PYTHONPATH": str(folder), NOTES: str(notes)}
    status = _in_time(command, folder, own, output, limit_s)
    found = [Note(**json.loads(line)) for line in notes.read_text("utf-8").splitlines()]
    said = output.read_text("utf-8", errors="replace")[-_SAID:]
    below = [Note(n.test.removeprefix("tests/"), n.outcome, n.by, n.asserted) for n in found]
    return Run(status, below, said, time.monotonic() - began)


def _in_time(
    command: Sequence[str], folder: Path, own: dict[str, str], output: Path, limit_s: float
) -> int | None:
    outside = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=outside | own, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupted pytest takes down what it put up; if it does not, everything is killed."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
        return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    conftest._remove_what_killed_runs_left(conftest._fast_disk())


def _plain(test: str) -> str:
    return test.partition("[")[0]


def _name(test: str) -> str:
    return test.rpartition("::")[2]


def _ends(notes: Iterable[Note]) -> str:
    return ", ".join(sorted({f"{note.outcome} {note.by}".strip() for note in notes})) or "not run"


def _status(run: Run) -> str:
    if run.status is None:
        return f"not over after {run.seconds:.0f} s"
    return "all passed" if run.status == _ALL_PASSED else f"pytest ended with {run.status}"
