"""Text that is safe to show: what others wrote loses its control characters on the way."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from delayq.durations import format_duration
from delayq.instants import instant_from_us

_URL: Final = re.compile(r"postgres(?:ql)?(?:\+\w+)?:/?/?\S*", re.IGNORECASE)
_LONGEST: Final = 600


def neutral(text: object) -> str:
    """The text with every character that does not print (escapes, line ends, bidi) spelled out."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else _spelled(c) for c in plain)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def clipped(text: object, longest: int = 60) -> str:
    """Neutral text of at most so many characters."""
    shown = neutral(str(text)[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def one_line(text: object) -> str:
    """An error as one short line without anybody's DSN."""
    spaced = " ".join(str(text).split())
    return clipped(_URL.sub("postgresql://…", spaced), _LONGEST)


def iso(at: datetime | None) -> str | None:
    """ISO 8601 in UTC with microseconds, as everywhere in JSON."""
    if at is None:
        return None
    return iso_text(at, "microseconds")


def iso_text(at: datetime, precision: str) -> str:
    """ISO 8601 in UTC, to the precision that `datetime.isoformat` understands."""
    return at.astimezone(UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def instant(us: int | None) -> datetime | None:
    """The datetime of an instant in microseconds; None if there is none, or no calendar has it."""
    try:
        return None if us is None else instant_from_us(us)
    except OverflowError:
        return None


def short(at: datetime | None) -> str:
    """The instant for people, to the millisecond."""
    if at is None:
        return ""
    return iso_text(at, "milliseconds").replace("T", " ")


def span(duration_us: int | None) -> str:
    """A duration for people, in two or three figures: "1h30m", "12.3s", "4.2ms"."""
    if duration_us is None:
        return ""
    if duration_us < 0:
        return "-" + span(-duration_us)
    return format_duration(_rounded(duration_us))


def _rounded(duration_us: int) -> int:
    for above, step in (
        (86_400_000_000, 3_600_000_000),
        (3_600_000_000, 60_000_000),
        (60_000_000, 1_000_000),
        (1_000_000, 100_000),
        (1_000, 100),
    ):
        if duration_us >= above:
            return round(duration_us / step) * step
    return duration_us
