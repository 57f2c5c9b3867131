"""What is logged can be read by people and by programs, and steers neither."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from loguru import logger
from pydantic import TypeAdapter, ValidationError

from delayq.log import Recurring, configure, log

MARKER = "planted-marker"
EVIL = "\x1b[31m\r\nFAKE 2026 line\x00\x7f\x9b\u202e\u2028\ud800"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    libraries = [logging.getLogger(name) for name in ("apscheduler", "asyncio", "asyncpg")]
    before = [(one.handlers, one.level, one.propagate) for one in libraries]
    yield
    for one, (handlers, level, propagate) in zip(libraries, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)
    logger.remove()
    logger.add(sys.stderr)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def _event(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert isinstance(event, dict)
    return event


def test_an_event_is_one_json_object_with_its_fields(stream: io.StringIO) -> None:
    configure("INFO", "json", stream)
    log.bind(task_id=7, kind="mail", attempt=2, lateness_ms=1.5, cancelled=False).info("task.retry")
    event = _event(stream)
    assert event.pop("at").endswith("+00:00")
    assert event == {
        "level": "info",
        "event": "task.retry",
        "task_id": "7",
        "kind": "mail",
        "attempt": 2,
        "lateness_ms": 1.5,
        "cancelled": False,
    }


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, None),
        (2**53, 2**53),
        (2**53 + 1, "9007199254740993"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ({"a": 1}, "{'a': 1}"),
        ("x" * 5000, "x" * 4096 + "…"),
    ],
)
def test_every_value_becomes_valid_json(
    stream: io.StringIO, value: object, written: object
) -> None:
    configure("INFO", "json", stream)
    log.bind(value=value).info("event")
    assert _event(stream)["value"] == written


def test_a_field_cannot_take_the_place_of_the_event_or_the_level(stream: io.StringIO) -> None:
    configure("INFO", "json", stream)
    log.bind(event="fake", level="debug", at="never").warning("true")
    event = _event(stream)
    assert (event["event"], event["level"]) == ("true", "warning")
    assert event["at"] != "never"


@pytest.mark.parametrize("format", ["json", "human"])
def test_no_value_starts_a_line_or_steers_a_terminal(stream: io.StringIO, format: str) -> None:
    """C110."""
    configure("INFO", format, stream)
    log.bind(**{"kind": EVIL, "nam\x1be": 1}).info(EVIL)
    (line,) = stream.getvalue().split("\n")[:-1]
    assert line.isprintable() if format == "human" else line.isascii()
    assert not set(line) & set("\x00\x1b\r\n\u2028\u202e\ud800")


def test_people_see_the_event_and_its_fields_on_one_line(stream: io.StringIO) -> None:
    configure("DEBUG", "human", stream)
    log.bind(task_id=7, kind="send mail", empty="").debug("task.done")
    assert stream.getvalue().endswith(
        ' DEBUG    task.done  task_id=7  kind="send mail"  empty=""\n'
    )


def test_auto_is_human_on_a_terminal_and_json_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, pipe = Terminal(), io.StringIO()
    configure("INFO", "auto", terminal)
    log.warning("seen")
    configure("INFO", "auto", pipe)
    log.warning("seen")
    assert "\x1b[33mWARNING" in terminal.getvalue()
    assert _event(pipe)["event"] == "seen"


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    configure("INFO", "auto", terminal)
    log.warning("seen")
    assert "\x1b" not in terminal.getvalue()


def test_events_below_the_level_are_not_written(stream: io.StringIO) -> None:
    configure("WARNING", "json", stream)
    log.info("unseen")
    assert stream.getvalue() == ""


def _fails(error: Exception) -> None:
    # The name is what a traceback shows of this line, not the value.
    raise error from ValueError(MARKER)


def _refused() -> ValidationError:
    with pytest.raises(ValidationError) as refusal:
        TypeAdapter(int).validate_python(MARKER)
    return refusal.value


@pytest.mark.parametrize("format", ["json", "human"])
def test_an_error_is_told_with_its_place_and_without_the_values_of_variables(
    stream: io.StringIO, format: str
) -> None:
    configure("INFO", format, stream)
    try:
        _fails(RuntimeError("it broke"))
    except RuntimeError:
        log.exception("node.failed")
    text = stream.getvalue()
    assert "RuntimeError: it broke" in text
    assert "_fails" in text
    assert MARKER not in text


@pytest.mark.parametrize("format", ["json", "human"])
@pytest.mark.parametrize("error", [asyncpg.DataError(f"argument $1: {MARKER!r}"), _refused()])
def test_what_drivers_and_validators_quote_is_left_out(
    stream: io.StringIO, format: str, error: Exception
) -> None:
    configure("INFO", format, stream)
    try:
        _fails(error)
    except (asyncpg.DataError, ValidationError):
        log.exception("task.failed")
    assert type(error).__name__ in stream.getvalue()
    assert MARKER not in stream.getvalue()


@pytest.mark.parametrize("library", ["apscheduler.scheduler", "asyncpg.pool"])
def test_a_warning_of_a_library_comes_as_an_event_without_its_traceback(
    stream: io.StringIO, library: str
) -> None:
    configure("INFO", "json", stream)
    logging.getLogger(library).info("unseen")
    try:
        _fails(KeyError(MARKER))
    except KeyError:
        logging.getLogger(library).warning("it failed: %s\nand more", "job", exc_info=True)
    event = _event(stream)
    assert event["event"] == "library.warning"
    assert event["said"] == "it failed: job"
    assert event["error"] == "KeyError"
    assert event["where"].startswith("test_log.py:")
    assert MARKER not in stream.getvalue()


def test_asyncio_does_not_tell_what_the_failed_task_was_given(stream: io.StringIO) -> None:
    configure("INFO", "json", stream)
    logging.getLogger("asyncio").error(
        f"Task exception was never retrieved\nfuture: <Task exception=ValueError({MARKER!r})>"
    )
    event = _event(stream)
    assert event["said"] == "Task exception was never retrieved"
    assert MARKER not in stream.getvalue()


def test_asyncio_does_not_tell_what_the_failed_callback_was_given(stream: io.StringIO) -> None:
    def fails(secret: str) -> None:
        raise ValueError(secret)

    async def main() -> None:
        asyncio.get_running_loop().call_soon(fails, MARKER)
        await asyncio.sleep(0)

    configure("INFO", "json", stream)
    asyncio.run(main())
    event = _event(stream)
    assert (event["said"], event["error"]) == ("Exception in callback", "ValueError")
    assert MARKER not in stream.getvalue()


def test_what_recurs_is_told_at_once_and_then_how_often_in_ten_seconds(stream: io.StringIO) -> None:
    configure("INFO", "json", stream)
    refusals = Recurring("lease.refused")
    for second in (5, 6, 7, 15, 16, 40):
        refusals.tell(second * 1_000_000, error=str(second))
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(one["error"], one["times"]) for one in told] == [("5", 1), ("15", 3), ("40", 2)]
    assert {one["event"] for one in told} == {"lease.refused"}


def test_importing_delayq_leaves_the_sinks_of_the_application_alone() -> None:
    script = """
import sys
from loguru import logger
logger.remove()
lines = []
logger.add(lines.append, format="{message}")
import delayq.log
import logging
delayq.log.log.info("event")
logger.info("mine")
assert [str(line).strip() for line in lines] == ["event", "mine"], lines
assert not logging.getLogger("asyncpg").handlers
logger.disable("delayq")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
