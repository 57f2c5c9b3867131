"""The log: events with fields, on loguru.

`log.bind(task_id=1, kind="x").info("task.retry")` is an event. As a library delayq adds no sink
and takes none away: the application's loguru set-up decides (`logger.disable("delayq")` silences
it). `configure` is for the command line, which owns its process.

Never in a log: payloads, DSNs, passwords. What exceptions of a database or of a validation say
is left out too, since it quotes values; their class and their place are told.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import traceback
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from loguru import logger

if TYPE_CHECKING:
    from loguru import Message, Record

__all__ = ["Recurring", "configure", "hears_debug", "log"]

log: Final = logger.bind(name="delayq")

# Their messages quote the values that they refuse.
_QUOTING: Final = ("asyncpg", "pydantic", "pydantic_core", "pydantic_settings")
_LIBRARIES: Final = ("apscheduler", "asyncio", "asyncpg")
_CALLBACK: Final = re.compile(r"\b(callback) .*")
_LONGEST_VALUE: Final = 4_096
_RECURS_US: Final = 10_000_000
_EXACT_INT: Final = 2**53  # beyond it readers of JSON lose digits
_COLOURS: Final = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31;1", "INFO": "32"}


def configure(level: str, format: str, stream: TextIO | None = None) -> None:
    """Make `stream` (default: stderr) the one place where this process logs.

    `format` is "human", "json" (one object a line) or "auto": human on a terminal. Warnings of
    the libraries that delayq runs on come the same way.
    """
    out = sys.stderr if stream is None else stream
    human = format == "human" or (format == "auto" and out.isatty())
    colour = human and out.isatty() and not os.environ.get("NO_COLOR")

    def write(message: Message) -> None:
        record = message.record
        out.write((_human_line(record, colour) if human else _json_line(record)) + "\n")
        out.flush()

    logger.remove()
    logger.add(write, level=level, format="", diagnose=False, backtrace=False)
    _take_over_libraries()


def hears_debug() -> bool:
    """True if some sink wants DEBUG: asked once a batch, where each event would cost a task 5 %."""
    # loguru has no public question for it; a record below this level is dropped first thing
    return bool(logger._core.min_level <= logger.level("DEBUG").no)  # type: ignore[attr-defined]  # noqa: SLF001 - loguru has no public way to ask


class Recurring:
    """An error that comes by the hundred while its cause lasts: told at once, then every 10 s."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._times = 0
        self._quiet_until_us: int | None = None

    def tell(self, now_us: int, **fields: object) -> None:
        """It happened, at this instant of a monotonic clock; `times` since it was told last."""
        self._times += 1
        if self._quiet_until_us is not None and now_us < self._quiet_until_us:
            return
        log.bind(**fields, times=self._times).error(self._event)
        self._times, self._quiet_until_us = 0, now_us + _RECURS_US


# --- as JSON ----------------------------------------------------------------------------------


def _json_line(record: Record) -> str:
    event: dict[str, object] = {
        "at": record["time"].astimezone(UTC).isoformat(timespec="microseconds"),
        "level": record["level"].name.lower(),
        "event": record["message"],
    }
    for name, value in _fields(record).items():
        event.setdefault(name, str(value) if _is_id(name) else _plain(value))
    # Pure ASCII: every control character and lone surrogate leaves as an escape.
    return json.dumps(event, ensure_ascii=True, allow_nan=False)


def _is_id(name: str) -> bool:
    # Text always, as everywhere in JSON: 63 bits do not fit a reader's double.
    return name == "node" or name.endswith("id")


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= _EXACT_INT:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _text(value)


# --- for people ---------------------------------------------------------------------------------


def _human_line(record: Record, colour: bool) -> str:
    level = f"{record['level'].name:<8}"
    if colour:
        level = f"\x1b[{_COLOURS.get(record['level'].name, '2')}m{level}\x1b[0m"
    fields = _fields(record)
    trace = str(fields.pop("traceback", ""))
    time = record["time"].astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    line = "  ".join((f"{time} {level} {_neutral(record['message'])}", *_pairs(fields)))
    return "\n    ".join((line, *(_neutral(part) for part in trace.splitlines())))


def _pairs(fields: dict[str, Any]) -> list[str]:
    return [f"{_neutral(name)}={_quoted(_text(value))}" for name, value in fields.items()]


def _quoted(text: str) -> str:
    neutral = _neutral(text)
    return json.dumps(neutral, ensure_ascii=False) if " " in text or not text else neutral


def _neutral(text: str) -> str:
    """The text without anything that could steer a terminal or fake a line."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


# --- both -----------------------------------------------------------------------------------


def _fields(record: Record) -> dict[str, Any]:
    fields = {name: value for name, value in record["extra"].items() if name != "name"}
    raised = record["exception"]
    if raised is not None and raised.value is not None:
        fields["error"] = _error(raised.value)
        fields["traceback"] = "".join(traceback.format_tb(raised.value.__traceback__))
    return fields


def _error(error: BaseException) -> str:
    kind = type(error)
    if kind.__module__.partition(".")[0] in _QUOTING:
        return kind.__name__
    return _text(f"{kind.__name__}: {error}")


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"


# --- the libraries below ------------------------------------------------------------------------


class _ToLoguru(logging.Handler):
    """Passes on the first line of a library's warning, with the class and place of its error.

    Not the traceback, nor asyncio's description of the task that failed: both quote values.
    """

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, object] = {"library": record.name.partition(".")[0]}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields |= {"error": type(error).__name__, "where": _place(error)}
        # asyncio puts whole reprs into the arguments, and a callback's arguments into the message.
        asyncio = fields["library"] == "asyncio"
        said = (str(record.msg) if asyncio else record.getMessage()).partition("\n")[0]
        fields["said"] = _CALLBACK.sub(r"\1", said) if asyncio else said
        logger.bind(name="delayq", **fields).log(_level(record), "library.warning")


def _level(record: logging.LogRecord) -> str:
    return "ERROR" if record.levelno >= logging.ERROR else "WARNING"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown"


def _take_over_libraries() -> None:
    for name in _LIBRARIES:
        library = logging.getLogger(name)
        library.handlers = [_ToLoguru(logging.WARNING)]
        library.setLevel(logging.WARNING)
        # Else the root logger prints the same once more, with its traceback.
        library.propagate = False
