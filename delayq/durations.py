"""Durations as people write them: "1h30m", "90s", "250ms", "1.5h"."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from delayq.errors import InvalidArgument

_UNITS_US: Final = {
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
    "us": 1,
}
_NUMBER: Final = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
_SHAPE: Final = re.compile(
    r"\s*".join(rf"(?:(?P<{unit}>{_NUMBER})\s*{unit})?" for unit in _UNITS_US)
)
_LONGEST_US: Final = 10_000 * 366 * _UNITS_US["d"]
_LONGEST_TEXT: Final = 100


def parse_duration(text: str, field: str = "duration") -> int:
    """The microseconds that `text` says, rounded to the nearest one.

    Numbers with units from the largest down: d, h, m, s, ms, us ("1h30m", "1.5h", "250ms").
    Anything else (no unit, a sign, NaN, more than 10,000 years) raises `InvalidArgument` that
    names `field`.
    """
    stripped = text.strip()
    found = _SHAPE.fullmatch(stripped) if 0 < len(stripped) <= _LONGEST_TEXT else None
    if found is None:
        problem = f"{stripped[:40]!r} is no duration; write it like 1h30m or 90s"
        raise InvalidArgument(field, problem)
    parts = found.groupdict()
    exact = sum(
        Fraction(number) * _UNITS_US[unit] for unit, number in parts.items() if number is not None
    )
    if exact > _LONGEST_US:
        raise InvalidArgument(field, "must not be longer than 10,000 years")
    return round(exact)


def format_duration(duration_us: int) -> str:
    """The duration in the shortest usual form, exact to the microsecond: "1h30m", "1.5s".

    `parse_duration` reads it back, except for the minus of a negative one.
    """
    if duration_us < 0:
        return "-" + format_duration(-duration_us)
    text = ""
    rest_us = duration_us
    for unit in ("d", "h", "m"):
        count, rest_us = divmod(rest_us, _UNITS_US[unit])
        text += f"{count}{unit}" if count else ""
    if rest_us or not text:
        text += _seconds(rest_us)
    return text


def _seconds(rest_us: int) -> str:
    if rest_us >= _UNITS_US["s"] or rest_us == 0:
        return _decimal(rest_us, 6) + "s"
    if rest_us >= _UNITS_US["ms"]:
        return _decimal(rest_us, 3) + "ms"
    return f"{rest_us}us"


def _decimal(value: int, places: int) -> str:
    whole, fraction = divmod(value, 10**places)
    return f"{whole}.{fraction:0{places}d}".rstrip("0").rstrip(".")
