"""The command line without a database: help, wrong usage, and applications that do not load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from delayq import errors
from delayq.cli.exits import Exit, exit_for
from delayq.cli.main import _COMMANDS, run

PASSWORD = "S3cr%2Ft!"


class Said(NamedTuple):
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str


Delayq = Callable[..., Said]


@pytest.fixture
def delayq(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Delayq]:
    """Runs a command in an empty folder, without a database."""
    monkeypatch.setenv("DELAYQ_EMBEDDED", "0")
    monkeypatch.setattr("delayq.log.configure", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*arguments: str) -> Said:
        code = run(arguments)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    yield call
    sys.modules.pop("app", None)


def is_one_error(said: Said, code: int) -> str:
    """Nothing on standard output, one line on standard error, and that exit code."""
    assert said.code == code, said.err
    assert said.out == ""
    assert said.err.startswith("delayq: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("command", [*_COMMANDS, "dead list", "dead revive", "dead discard"])
def test_every_command_has_help(delayq: Delayq, command: str) -> None:
    done = delayq(*command.split(), "--help")
    assert done.code == 0
    assert f"Usage: delayq {command}" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "No such command"),
        (["cancel"], "by its ID"),
        (["cancel", "0"], "whole number"),
        (["cancel", "1", "--key", "x"], "by its ID"),
        (["cancel", "--kind", "x"], "by its ID"),
        (["schedule", "a"], "--in"),
        (["schedule", "a", "--in", "5"], "units"),
        (["schedule", "a", "--in", "5m", "--at", "2026-05-01T09:00:00Z"], "--in"),
        (["schedule", "a", "--at", "2026-05-01T09:00:00"], "aware"),
        (["schedule", "a", "TOPSECRET", "--in", "5m"], "payload"),
        (["schedule", "a", '{"t":', "TOPSECRET}", "--in", "5m"], "quote JSON"),
        (["schedule", "a", "--in", "5m", "--header", "x"], "name=value"),
        (["list", "--limit", "0"], "--limit"),
        (["dead", "revive"], "ids"),
        (["dead", "discard", "1", "--kind", "x", "--all"], "ids"),
        (["stats", "--dsn", f"postgres:/app:{PASSWORD}@h/d"], "postgresql://"),
        (["stats", f"postgresql://app:{PASSWORD}@h/d"], "too many arguments"),
        ([f"postgresql://app:{PASSWORD}@h/d"], "No such command"),
        (["stats"], "DELAYQ_DSN"),
    ],
)
def test_wrong_usage_is_one_line_and_2(delayq: Delayq, arguments: list[str], words: str) -> None:
    said = is_one_error(delayq(*arguments), 2)
    assert words in said
    assert "TOPSECRET" not in said
    assert PASSWORD not in said


@pytest.mark.parametrize(
    ("source", "reference", "words"),
    [
        (None, "nowhere", "MODULE:APP"),
        (None, "no where:dq", "MODULE:APP"),
        (None, "nowhere:dq", "no module 'nowhere'"),
        (None, "nowhere.deep:dq", "no module 'nowhere'"),
        ("import nothing_like_this", "app:dq", "No module named 'nothing_like_this'"),
        ("def f(:", "app:dq", "SyntaxError"),
        ("raise ValueError('TOPSECRET')", "app:dq", "ValueError ("),
        ("raise SystemExit('TOPSECRET')", "app:dq", "SystemExit"),
        ("x = 1", "app:x", "must be a DelayQ"),
        ("x = 1", "app:y", "write `dq = DelayQ()`"),
        ("from delayq import DelayQ\nother = DelayQ()", "app:dq", "it has other"),
    ],
)
def test_an_application_that_cannot_be_loaded_is_5(
    delayq: Delayq, tmp_path: Path, source: str | None, reference: str, words: str
) -> None:
    if source is not None:
        (tmp_path / "app.py").write_text(source)
    said = is_one_error(delayq("run", reference), 5)
    assert words in said
    assert "TOPSECRET" not in said


def test_a_wrong_setting_of_the_application_is_2(delayq: Delayq, tmp_path: Path) -> None:
    source = (
        "from delayq import DelayQ, load_settings\ndq = DelayQ(settings=load_settings(threads=0))"
    )
    (tmp_path / "app.py").write_text(source)
    assert "DELAYQ_THREADS" in is_one_error(delayq("run", "app:dq"), 2)


def test_a_mistake_of_ours_is_70_without_a_traceback(
    delayq: Delayq, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("TOPSECRET")

    monkeypatch.setattr("delayq.cli.options.load_settings", fail)
    said = is_one_error(delayq("stats"), 70)
    assert "RuntimeError at" in said
    assert "TOPSECRET" not in said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.KeyTaken("a", 1), Exit.NO),
        (errors.InvalidArgument("at", "x"), Exit.USAGE),
        (errors.InvalidSettings("x"), Exit.USAGE),
        (errors.DatabaseUnavailable("x"), Exit.DATABASE),
        (errors.DatabaseTimeout("x"), Exit.DATABASE),
        (errors.AuthenticationFailed("x"), Exit.DATABASE),
        (errors.PrivilegeMissing("x"), Exit.DATABASE),
        (errors.EmbeddedError("x"), Exit.DATABASE),
        (errors.SchemaMissing("x"), Exit.SCHEMA),
        (errors.SchemaTooOld("x"), Exit.SCHEMA),
        (errors.SchemaTooNew("x"), Exit.SCHEMA),
        (errors.MigrationError("x"), Exit.SCHEMA),
        (errors.ApplicationNotFound("x"), Exit.APPLICATION),
        (errors.RegistrationError("x"), Exit.APPLICATION),
        (ZeroDivisionError(), Exit.INTERNAL),
    ],
)
def test_every_error_has_its_exit_code(error: Exception, code: Exit) -> None:
    assert exit_for(error) is code


def test_a_bulk_verb_that_stopped_half_way_exits_like_what_stopped_it() -> None:
    stopped = errors.BulkStopped(7, cause := errors.DatabaseUnavailable("gone"))
    stopped.__cause__ = cause
    assert exit_for(stopped) is Exit.DATABASE
