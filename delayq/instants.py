"""Turns the callers' datetimes and timedeltas into the integers that delayq keeps.

No clock is read here: a delay stays a delay until the database adds it to its own clock.
Every refusal is an `InvalidArgument` that names the field and the remedy and holds no value.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from delayq.errors import InvalidArgument

Delay: TypeAlias = timedelta | int | float
"""A timedelta, or seconds."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

EARLIEST_US = (datetime(2000, 1, 1, tzinfo=UTC) - EPOCH) // MICROSECOND
LATEST_US = (datetime(9000, 1, 1, tzinfo=UTC) - EPOCH) // MICROSECOND

# Keeps `now + delay` below the year 9000 until 2100 without reading a clock here.
MAX_DELAY_US = timedelta(days=6_900 * 365) // MICROSECOND
MAX_DURATION_MS = 365 * 24 * 3600 * 1000


def delay_to_us(delay: Delay, field: str = "delay") -> int:
    """The delay in microseconds, at least 0; InvalidArgument if it is not a sensible one."""
    microseconds = _to_us(delay, field)
    if microseconds < 0:
        raise InvalidArgument(field, "must not be negative; use 0 for now")
    if microseconds > MAX_DELAY_US:
        raise InvalidArgument(field, "must be at most 6900 years, in seconds or as a timedelta")
    return microseconds


def instant_to_us(instant: datetime, field: str = "at") -> int:
    """Microseconds since 1970 UTC of an aware datetime, exact also in the hour that repeats.

    InvalidArgument for naive datetimes, other types, and years outside 2000 to 8999.
    """
    if not isinstance(instant, datetime):
        raise InvalidArgument(field, "must be an aware datetime, such as datetime.now(UTC)")
    if instant.tzinfo is None:
        raise InvalidArgument(field, _NAIVE)
    microseconds = _instant_us(instant, field) if 1999 <= instant.year <= 9000 else LATEST_US
    if not EARLIEST_US <= microseconds < LATEST_US:
        raise InvalidArgument(field, "must lie in the years 2000 to 8999, in UTC")
    return microseconds


def instant_from_text(text: str, field: str = "at") -> int:
    """Microseconds since 1970 UTC of ISO 8601 text with an offset, such as 2026-05-01T09:00:00Z."""
    try:
        instant = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        instant = None
    if instant is None:
        raise InvalidArgument(field, "must be ISO 8601 with an offset: 2026-05-01T09:00:00Z")
    return instant_to_us(instant, field)


def instant_from_us(microseconds: int) -> datetime:
    """The aware UTC datetime of an instant in microseconds since 1970."""
    return EPOCH + timedelta(microseconds=microseconds)


def duration_to_ms(duration: Delay, field: str) -> int:
    """A limit such as a timeout in whole milliseconds, from 1 ms to one year."""
    milliseconds = round(_to_us(duration, field) / 1000)
    if not 1 <= milliseconds <= MAX_DURATION_MS:
        raise InvalidArgument(field, "must be between 1 millisecond and 365 days")
    return milliseconds


def _to_us(value: Delay, field: str) -> int:
    """Microseconds, clamped just outside every limit so that huge numbers cannot overflow."""
    if isinstance(value, timedelta):
        return value // MICROSECOND
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(field, "must be a timedelta, or seconds as int or float")
    if not isinstance(value, int) and not math.isfinite(value):
        raise InvalidArgument(field, "must be finite; NaN and infinity are no durations")
    bound = MAX_DELAY_US // 1_000_000 + 1
    return round(max(-bound, min(value, bound)) * 1_000_000)


def _instant_us(instant: datetime, field: str) -> int:
    if instant.tzinfo is UTC:
        return (instant - EPOCH) // MICROSECOND  # as is usual; in a third of the time
    # Not astimezone(): it overflows at the ends of the calendar. utcoffset() honours fold.
    try:
        offset = instant.utcoffset()
    except Exception:  # noqa: BLE001 - a time zone may be anybody's code
        raise InvalidArgument(field, "has a time zone that cannot say its offset") from None
    if offset is None:
        raise InvalidArgument(field, _NAIVE)
    wall = instant.replace(tzinfo=UTC, fold=0)
    return (wall - EPOCH - offset) // MICROSECOND


_NAIVE = "must be aware (with a time zone), such as datetime.now(UTC); a naive one is ambiguous"
