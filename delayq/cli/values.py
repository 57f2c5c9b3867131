"""What people type, as the values that delayq takes. Refusals never quote a payload."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

import click

from delayq.durations import parse_duration
from delayq.errors import InvalidArgument
from delayq.instants import instant_from_text, instant_from_us
from delayq.payload import payload_from_json
from delayq.request import MAX_ID, MISSING, HeaderValue, Maybe

if TYPE_CHECKING:
    _IdType = click.ParamType[int]
    _DurationType = click.ParamType[timedelta]
    _InstantType = click.ParamType[datetime]
    _KindsType = click.ParamType[tuple[str, ...]]
    _SecondsType = click.ParamType[float]
else:  # a class without parameters in older releases
    _IdType = _DurationType = _InstantType = _KindsType = _SecondsType = click.ParamType

E = TypeVar("E", bound=StrEnum)

_STDIN: Final = "-"
_SECONDS: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_ID: Final = re.compile(r"[0-9]{1,19}")


class TaskId(_IdType):
    """The id of a task: a whole number above 0."""

    name = "id"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """The id, or a usage error."""
        text = str(value)
        if not _ID.fullmatch(text) or not 1 <= int(text) <= MAX_ID:
            self.fail("a task id is a whole number above 0", param, ctx)
        return int(text)


class Duration(_DurationType):
    """A duration such as 5m, 1h30m or 250ms."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """The duration, or a usage error."""
        if isinstance(value, timedelta):
            return value
        try:
            return timedelta(microseconds=parse_duration(str(value), "duration"))
        except InvalidArgument:
            self.fail("write it with units, like 90s, 5m or 1h30m", param, ctx)


class Seconds(_SecondsType):
    """A number of seconds, or a duration with units: 10, 0.5, 250ms."""

    name = "seconds"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The seconds, or a usage error."""
        text = str(value)
        if _SECONDS.fullmatch(text):
            return float(text)
        try:
            return parse_duration(text) / 1_000_000
        except InvalidArgument:
            self.fail("write a number of seconds, or a duration like 250ms or 1m", param, ctx)


class Instant(_InstantType):
    """An instant with its offset, such as 2026-05-01T09:00:00Z."""

    name = "instant"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """The aware datetime, or a usage error."""
        if isinstance(value, datetime):
            return value
        try:
            return instant_from_us(instant_from_text(str(value), "at"))
        except InvalidArgument as error:
            self.fail(str(error).removeprefix("at: "), param, ctx)


class Kinds(_KindsType):
    """Kinds, separated by commas."""

    name = "kinds"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The kinds without blanks and repetitions, or a usage error."""
        if isinstance(value, tuple):
            return value
        kinds = tuple(dict.fromkeys(filter(None, (part.strip() for part in str(value).split(",")))))
        if not kinds:
            self.fail("name at least one kind", param, ctx)
        return kinds


def word_of(words: type[E]) -> Callable[[click.Context, click.Parameter, str | None], E | None]:
    """A callback that makes the chosen word a member of its enum."""

    def convert(_ctx: click.Context, _param: click.Parameter, value: str | None) -> E | None:
        return None if value is None else words(value)

    return convert


def when(
    delay: timedelta | None, at: datetime | None
) -> tuple[timedelta | Maybe, datetime | Maybe]:
    """`--in` and `--at` as the two arguments of a request; exactly one is to be given."""
    if (delay is None) == (at is None):
        raise click.UsageError("give either --in 5m or --at 2026-05-01T09:00:00Z, in that form")
    return (MISSING if delay is None else delay), (MISSING if at is None else at)


def payload_text(argument: str | None, limit: int) -> str:
    """The payload as it will be stored; `-` reads standard input, nothing means `{}`."""
    if argument is None:
        return "{}"
    if argument == _STDIN:
        return payload_from_json(sys.stdin.buffer.read(limit + 1), limit, "payload")
    try:
        return payload_from_json(argument.encode(), limit, "payload")
    except UnicodeEncodeError:
        pass
    raise InvalidArgument("payload", "must be UTF-8")


def headers_of(pairs: Sequence[str]) -> dict[str, HeaderValue]:
    """`name=value` pairs as headers; the values stay text."""
    headers: dict[str, HeaderValue] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidArgument("header", "write it as name=value")
        headers[name] = value
    return headers
