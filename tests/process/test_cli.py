"""The program as people and scripts meet it: its words, its exit codes, its silence."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delayq.cli.main import _COMMANDS
from tests.helpers import absent

PASSWORD = "S3cr%2Ft!"
DECODED = "S3cr/t!"
Delayq = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, Any]:
    """How a process is started that inherits nothing from this one's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DELAYQ_", "PG"))}
    source = str(Path(__file__).parents[2])
    return {"cwd": tmp_path, "env": kept | {"PYTHONPATH": source, "DELAYQ_EMBEDDED": "0"}}


@pytest.fixture
def delayq(outside: dict[str, Any]) -> Delayq:
    """Runs `delayq` without a database."""

    def run(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "delayq", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=40,
            cwd=outside["cwd"],
            env=outside["env"] | env,
            check=False,
        )

    return run


@pytest.fixture
def on_database(delayq: Delayq, dsn: str) -> Delayq:
    """Runs `delayq` on this test's database."""

    def run(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
        return delayq(*arguments, **({"DELAYQ_DSN": dsn} | options))

    return run


def is_one_error(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Nothing on standard output, one line on standard error, and that exit code."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("delayq: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    return done.stderr


# --- words ----------------------------------------------------------------------------------


def test_help_names_every_command_and_exit_code(delayq: Delayq) -> None:
    done = delayq("--help")
    assert done.returncode == 0
    for name in _COMMANDS:
        assert f"\n  {name} " in done.stdout
    for code in ("0", "1", "2", "3", "4", "5", "70", "130", "143"):
        assert f" {code} " in done.stdout
    assert "process list" in done.stdout


def test_version(delayq: Delayq) -> None:
    done = delayq("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("delayq ")


# --- errors ---------------------------------------------------------------------------------


def test_a_wrong_setting_is_named(delayq: Delayq) -> None:
    said = is_one_error(delayq("stats", DELAYQ_MAX_WORKERS="many"), 2)
    assert "DELAYQ_MAX_WORKERS" in said


@pytest.mark.parametrize("command", ["stats", "migrate", "cancel 7"])
def test_an_unreachable_database_is_3_and_never_shows_the_password(
    delayq: Delayq, command: str
) -> None:
    dsn = f"postgresql://app:{PASSWORD}@127.0.0.1:1/shop"
    said = is_one_error(delayq(*command.split(), DELAYQ_DSN=dsn, DELAYQ_LOG_LEVEL="DEBUG"), 3)
    assert "127.0.0.1:1" in said
    assert PASSWORD not in said
    assert DECODED not in said


@pytest.mark.parametrize("command", ["stats", "cancel 7", "migrate --check"])
def test_a_missing_schema_is_4(delayq: Delayq, empty_dsn: str, command: str) -> None:
    assert "delayq migrate" in is_one_error(delayq(*command.split(), DELAYQ_DSN=empty_dsn), 4)


@pytest.mark.parametrize(
    ("source", "reference", "words"),
    [
        (None, "nowhere:dq", "no module 'nowhere'"),
        ("raise ValueError('TOPSECRET')", "app:dq", "ValueError"),
    ],
)
def test_an_application_that_cannot_be_loaded_is_5(
    delayq: Delayq, tmp_path: Path, source: str | None, reference: str, words: str
) -> None:
    if source is not None:
        (tmp_path / "app.py").write_text(source)
    said = is_one_error(delayq("run", reference, DELAYQ_DSN="postgresql://127.0.0.1:1/x"), 5)
    assert words in said
    assert "TOPSECRET" not in said


# --- the schema -----------------------------------------------------------------------------


def test_migrate_makes_the_schema_once(delayq: Delayq, empty_dsn: str) -> None:
    first = json.loads(delayq("migrate", "--json", DELAYQ_DSN=empty_dsn).stdout)
    again = json.loads(delayq("--json", "migrate", "--dsn", empty_dsn).stdout)
    assert first["applied"]
    assert again == {"version": first["version"], "applied": []}
    assert delayq("migrate", "--check", DELAYQ_DSN=empty_dsn).returncode == 0


# --- reports --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["doctor", "dead list"])
def test_json_is_one_document_on_standard_output(on_database: Delayq, command: str) -> None:
    for arguments in (["--json", *command.split()], [*command.split(), "--json"]):
        done = on_database(*arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        assert isinstance(json.loads(done.stdout), dict)


def test_doctor_exits_with_what_it_found(delayq: Delayq, empty_dsn: str) -> None:
    missing = delayq("doctor", DELAYQ_DSN=empty_dsn)
    assert missing.returncode == 4
    assert "fail  schema" in missing.stdout
    gone = delayq("doctor", DELAYQ_DSN=f"postgresql://app:{PASSWORD}@127.0.0.1:1/x")
    assert gone.returncode == 3
    assert "fail  connection" in gone.stdout
    assert PASSWORD not in gone.stdout + gone.stderr


def test_a_reader_that_leaves_early_is_no_error(outside: dict[str, Any], dsn: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "delayq", "doctor"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=outside["cwd"],
        env=outside["env"] | {"DELAYQ_DSN": dsn, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_narrow_locale_is_no_error(on_database: Delayq) -> None:
    done = on_database("pause", "日本", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert r"\u65e5" in done.stdout


# --- a terminal -----------------------------------------------------------------------------


@pytest.fixture
def on_terminal(outside: dict[str, Any], dsn: str) -> Iterator[Callable[..., str]]:
    """Runs `delayq` on a pseudo-terminal and returns what it drew."""
    opened: list[int] = []

    def run(*arguments: str) -> str:
        master, slave = pty.openpty()
        opened.append(master)
        process = subprocess.Popen(
            [sys.executable, "-m", "delayq", *arguments],
            stdout=slave, stderr=slave, cwd=outside["cwd"],
            env=outside["env"] | {"DELAYQ_DSN": dsn, "TERM": "xterm", "COLUMNS": "150"},
        )  # fmt: skip
        os.close(slave)
        drawn = _read_all(master)
        assert process.wait(30) == 0, drawn
        return drawn

    yield run
    for descriptor in opened:
        os.close(descriptor)


def _read_all(descriptor: int) -> str:
    drawn = b""
    while select.select([descriptor], [], [], 30)[0]:
        try:
            chunk = os.read(descriptor, 65_536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not chunk:
            break
        drawn += chunk
    return drawn.decode()


def test_a_terminal_gets_tables_without_the_kinds_own_escapes(
    on_terminal: Callable[..., str], on_database: Delayq
) -> None:
    """C110."""
    hostile = "\x1b]0;owned\x07\x1b[31m[bold]x[/bold]\r\n"
    assert on_database("pause", hostile).returncode == 0
    drawn = on_terminal("stats")
    assert "\x1b]0;" not in drawn
    assert "\x07" not in drawn
    assert r"\x1b]0;owned\x07\x1b[31m[bold]x[/bold]\r\n" in drawn


# --- signals --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_at_once_and_quietly(
    outside: dict[str, Any], dsn: str, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "delayq", "schedule", "a", "-", "--in", "5m"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=outside["cwd"], env=outside["env"] | {"DELAYQ_DSN": dsn},
    )  # fmt: skip
    assert process.stdin is not None
    _wait_until_it_reads(process)
    started = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert time.monotonic() - started < 2
    assert (out, err) == (b"", b"")


def _wait_until_it_reads(process: subprocess.Popen[bytes]) -> None:
    """Until it sleeps in a read of its standard input."""
    assert process.stdin is not None
    process.stdin.write(b"{")
    process.stdin.flush()
    deadline = time.monotonic() + 20
    while _unread(process.stdin.fileno()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _unread(descriptor: int) -> bool:
    waiting = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, waiting)
    return bool(waiting[0])


@pytest.mark.parametrize("delay_ms", [0, 80, 250, 500])
def test_an_early_sigterm_ends_the_process_cleanly(
    outside: dict[str, Any], dsn: str, delay_ms: int
) -> None:
    """C049."""
    process = subprocess.Popen(
        [sys.executable, "-m", "delayq", "stats"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=outside["cwd"],
        env=outside["env"] | {"DELAYQ_DSN": dsn},
    )  # fmt: skip
    time.sleep(delay_ms / 1_000)
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode in (0, 143, -signal.SIGTERM)
    assert b"Traceback" not in err


# --- run ------------------------------------------------------------------------------------

APP = """
from delayq import DelayQ

dq = DelayQ()

@dq.task
async def greet(name: str) -> None:
    print("hello", name, flush=True)
"""


@pytest.fixture
def running(
    outside: dict[str, Any], dsn: str, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `delayq run app:dq` on this test's database, as PID 1 of its own if asked to."""
    (tmp_path / "app.py").write_text(APP)
    started: list[subprocess.Popen[str]] = []

    def start(*options: str, as_pid_1: bool = False) -> subprocess.Popen[str]:
        alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if as_pid_1 else []
        process = subprocess.Popen(
            [*alone, sys.executable, "-m", "delayq", "run", "app:dq", *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=outside["cwd"],
            env=outside["env"] | {"DELAYQ_DSN": dsn, "DELAYQ_LOG_FORMAT": "json"},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _until_active(on_database: Delayq) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        nodes = json.loads(on_database("nodes", "--json").stdout)["nodes"]
        active: list[dict[str, Any]] = [node for node in nodes if node["state"] == "active"]
        if active:
            return active[0]
    raise AssertionError("no node became active")


def test_a_node_runs_what_is_scheduled_and_drains_at_sigterm(
    running: Callable[..., subprocess.Popen[str]], on_database: Delayq
) -> None:
    process = running("-w", "1", "-i", "500ms", "--name", "the one", "--kinds", "greet")
    node = _until_active(on_database)
    assert (node["name"], node["kinds"]) == ("the one", ["greet"])
    assert on_database("schedule", "greet", '{"name": "you"}', "--in", "0s").returncode == 0
    assert process.stdout is not None
    assert process.stdout.readline() == "hello you\n"
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert out == ""
    assert "you" not in err
    assert json.loads(on_database("nodes", "--json").stdout) == {"nodes": []}


def test_a_node_drains_from_afar(
    running: Callable[..., subprocess.Popen[str]], on_database: Delayq
) -> None:
    process = running("--name", "the one")
    _until_active(on_database)
    assert on_database("drain", "the one").returncode == 0
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kinds", "nothing"], "nothing"),
        (["-i", "1m"], "sweep"),
        (["-w", "0"], "max-workers"),
        (["-i", "soon"], "seconds"),
        (["--dsn", "postgresql://app:S3cr%2Ft!@elsewhere/x", "--name", "\x1b"], "DELAYQ_NODE_NAME"),
    ],
)
def test_options_that_cannot_be_are_refused(
    running: Callable[..., subprocess.Popen[str]], options: list[str], words: str
) -> None:
    process = running(*options)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert out == ""
    assert words.lower() in err.splitlines()[-1].lower()
    assert DECODED not in err


@pytest.mark.more
@pytest.mark.parametrize("delay_ms", [100, 300, 500, 800, 1_500, 3_000])
def test_sigterm_as_pid_1_ends_the_node_whenever_it_comes(
    running: Callable[..., subprocess.Popen[str]], delay_ms: int
) -> None:
    """C049."""
    process = running(as_pid_1=True)
    child = _child_of(process.pid)
    if child is None:
        absent("the right to be PID 1 (unshare --pid)")
    time.sleep(delay_ms / 1_000)
    os.kill(child, signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode in (0, 143), err
    assert "Traceback" not in err


def _child_of(pid: int) -> int | None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        if children.exists() and (found := children.read_text().split()):
            return int(found[0])
    return None


# --- without a database ---------------------------------------------------------------------


def test_without_a_dsn_the_embedded_server_serves_and_is_stopped(
    delayq: Delayq, tmp_path: Path
) -> None:
    here = {"DELAYQ_EMBEDDED": "1", "DELAYQ_EMBEDDED_DIR": str(tmp_path / "kept")}
    first = delayq("schedule", "a", "--in", "5m", "--json", **here)
    assert first.returncode == 0, first.stderr
    assert str(tmp_path / "kept") in first.stderr
    listed = delayq("list", "--json", **here)
    assert [task["id"] for task in json.loads(listed.stdout)["tasks"]] == [
        json.loads(first.stdout)["id"]
    ]
    assert not _processes_of(tmp_path / "kept")


def _processes_of(folder: Path) -> list[bytes]:
    commands = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(process.read_bytes())
    return [command for command in commands if str(folder).encode() in command]
