"""The demo from end to end: right, interrupted, from a fresh copy, and as an ordinary user."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import absent

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv*", ".delayq", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
MINUTE_S = 60
NAMED = "delayq-demo-"  # how its temporary folder begins, which all of its processes name

linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")


def left_running() -> list[str]:
    """Processes that work in a demo's folder or name it."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                place = str((process / "cwd").readlink())
                if NAMED in f"{place} {command}":
                    found.append(f"{process.name} {place} {command}")
    return found


def demo_here(folder: Path) -> subprocess.Popen[str]:
    """The demo without its making of .venv, with temporary files in `folder`."""
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-m", "demo_app"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check_table(status: int, shown: str) -> None:
    assert status == 0, shown
    row = dict(re.findall(r"^([a-z, ]+?) {2,}(\d+)(?= |$)", shown, re.MULTILINE))
    assert int(row["scheduled"]) == int(row["fired"]) + int(row["cancelled"])
    assert int(row["moved"]) > 0
    assert [row[name] for name in ("lost", "twice", "early")] == ["0", "0", "0"]
    last = r"^lost 0, twice 0; (\d+) s, nothing is left running$"
    (seconds,) = re.findall(last, shown, re.MULTILINE)
    assert int(seconds) < MINUTE_S


@linux
@pytest.mark.slow
def test_the_demo_ends_with_a_right_table_and_leaves_nothing(tmp_path: Path) -> None:
    with demo_here(tmp_path) as process:
        shown, _ = process.communicate(timeout=MINUTE_S)
    check_table(process.returncode, shown)
    fires = re.findall(
        r"^[\d:.]{12}  order \d+ +[\d:.]{12} +[\d.]+ ms  node-(\d) +(\d)$", shown, re.MULTILINE
    )
    assert {node for node, _ in fires} == {"1", "2", "3"}
    assert {attempt for _, attempt in fires} == {"1", "2"}
    assert re.search(r"SIGTERM to node-[12], which runs \d+ tasks and holds \d+ pending", shown)
    assert [each for each in left_running() if str(tmp_path) in each] == []
    assert list(tmp_path.iterdir()) == []


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["== embedded", "node-2 is active", "order "])
def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, number: signal.Signals, when: str
) -> None:
    with demo_here(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if when in line:
                break
        process.send_signal(number)
        began = time.monotonic()
        shown, _ = process.communicate(timeout=MINUTE_S)
    assert process.returncode != 0, shown
    assert time.monotonic() - began < 20
    assert [each for each in left_running() if str(tmp_path) in each] == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def copy() -> Iterator[Path]:
    """A fresh copy of everything, in a folder that everybody can reach."""
    with tempfile.TemporaryDirectory(prefix="fresh-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        place = Path(folder) / "delayq"
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield place


def run_copy(place: Path, user: str | None, path: str) -> tuple[int, str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        [place / "scripts" / "demo"],
        cwd="/",
        env={**kept, "PATH": path, "HOME": str(place.parent)},
        user=user,
        group=None if user is None else pwd.getpwnam(user).pw_gid,
        extra_groups=None if user is None else [],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.more
@pytest.mark.timeout(300)
def test_a_fresh_copy_runs_the_demo(copy: Path) -> None:
    check_table(*run_copy(copy, None, os.environ["PATH"]))


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_an_ordinary_user_runs_the_demo_in_a_copy(copy: Path) -> None:
    user = pwd.getpwnam("nobody")
    for each in (copy.parent, copy, *copy.rglob("*")):
        os.chown(each, user.pw_uid, user.pw_gid)
    status, shown = run_copy(copy, "nobody", "/usr/local/bin:/usr/bin:/bin")
    if status == 2 and "needs Python" in shown:
        absent("a Python of the system's, with venv")
    check_table(status, shown)
