"""Values that no caller means, and that some caller will send."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cache
from pathlib import Path
from uuid import UUID
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

from delayq.model import OnConflict

SECRET = "Secret-9d41"
"""Stands in every text and every key; no error may repeat it."""


class Colour(Enum):
    RED = 1


class Sly(str):
    """Text that lies about itself."""

    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Rude:
    """Does not even say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def ring() -> list[object]:
    """A list that contains itself."""
    found: list[object] = []
    found.append(found)
    return found


@cache
def deep(levels: int) -> object:
    """Lists in lists."""
    found: object = 0
    for _ in range(levels):
        found = [found]
    return found


ODD_TEXTS = ["", " ", "\0", "a\0b", "\ud800", "\udcff", "x" * 501, "é" * 251, "\n", "\x1b[31m",
             "\u202e", "null", "NaN", "\\u0000", "5", "-1", "{}", "\ufffe", "١٢"]  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(ODD_TEXTS),
    st.text(max_size=40),
    st.text(st.characters(categories=["Cs", "Cc", "Co", "Cn"]), max_size=5),
)
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**400, -(10**400)]),
    st.floats(),
    st.sampled_from([-0.0, math.inf, -math.inf, math.nan, 5e-324, 1.8e308, 1e22]),
    st.booleans(),
    st.complex_numbers(),
    st.decimals(),
    st.fractions(),
)
INSTANTS = st.one_of(
    st.datetimes(),
    st.datetimes(timezones=st.timezones()),
    st.datetimes(timezones=st.sampled_from([UTC, ZoneInfo("America/New_York"),
                                            timezone(timedelta(hours=23, minutes=59))])),
    st.sampled_from([datetime.max, datetime.min, datetime.max.replace(tzinfo=UTC)]),  # noqa: DTZ901 - nonsense on purpose
    st.dates(),
    st.times(),
)  # fmt: skip
DURATIONS = st.one_of(st.timedeltas(), st.sampled_from([timedelta.max, timedelta.min]))
# Made anew each time, and by name: some cannot even be printed.
_MAKERS: dict[str, Callable[[], object]] = {
    "none": lambda: None, "object": object, "class": lambda: object, "function": lambda: len,
    "ellipsis": lambda: ..., "not implemented": lambda: NotImplemented,
    "bytes": lambda: b"x", "no text": lambda: b"\xff", "bytearray": lambda: bytearray(b"x"),
    "enum": lambda: Colour.RED, "words": lambda: OnConflict.KEEP, "sly": lambda: Sly("x"),
    "rude": Rude, "uuid": lambda: UUID(int=7), "path": lambda: Path("x"),
    "fraction": lambda: Fraction(1, 3), "no decimal": lambda: Decimal("NaN"),
    "huge decimal": lambda: Decimal("1e9999"), "huge": lambda: 10**5_000,
    "range": lambda: range(3), "ring": ring, "deep": lambda: deep(99), "deeper": lambda: deep(101),
    "deepest": lambda: deep(20_000), "set": lambda: {1, 2}, "frozenset": frozenset,
    "generator": lambda: (n for n in range(3)), "error": lambda: ValueError("x"),
    "date": lambda: date.max, "zone": lambda: tzinfo,
}  # fmt: skip
OTHERS = st.sampled_from(sorted(_MAKERS)).map(lambda name: _MAKERS[name]())
LEAVES = st.one_of(TEXTS, NUMBERS, INSTANTS, DURATIONS, OTHERS)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(TEXTS, st.integers(), st.none(), st.booleans()), inner,
                        max_size=4),
    ),
    max_leaves=8,
)  # fmt: skip
STORABLE = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([2**53 + 1, 2**63, 2**70, -(2**70), 10**400]),
        st.floats(allow_nan=False, allow_infinity=False),
        STORABLE,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(STORABLE, inner, max_size=3)
    ),
    max_leaves=8,
)
"""What JSON can say, and PostgreSQL can store."""


class Fuzz:
    """The same without a search behind it, thousands of them. A failure is to name the seed."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = random.randrange(2**32) if seed is None else seed
        self.dice = random.Random(self.seed)

    def anything(self, depth: int = 3) -> object:
        """Any value, now and then with others in it."""
        dice = self.dice
        if depth and dice.random() < 0.25:
            parts = [self.anything(depth - 1) for _ in range(dice.randrange(4))]
            names = [dice.choice([self.text(), dice.getrandbits(70), None, True]) for _ in parts]
            return dice.choice([parts, tuple(parts), dict(zip(names, parts, strict=True))])
        make = dice.choice([self.text, self.number, self.instant, self.duration, self.other])
        return make()

    def text(self) -> str:
        """Text of any kind, storable or not."""
        dice = self.dice
        if dice.random() < 0.4:
            return dice.choice(ODD_TEXTS)
        most = dice.choice([127, 255, 0x2FFF, 0xFFFF, 0x10FFFF])
        return "".join(chr(dice.randint(0, most)) for _ in range(dice.choice([1, 3, 20, 300])))

    def number(self) -> object:
        """Numbers that do not fit where numbers are wanted."""
        dice = self.dice
        whole = dice.choice(
            [dice.getrandbits(8), dice.getrandbits(64), 2**31, 2**53, 2**63, 10**400]
        )
        signed = dice.choice([whole, -whole, whole + 1, whole - 1])
        odd = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.8e308, True, 5j, Decimal("NaN")]
        share = dice.uniform(-1e3, 1e3)
        return dice.choice([signed, signed, share, share, Decimal(str(share)), dice.choice(odd)])

    def instant(self) -> object:
        """Instants near and beyond both ends of the calendar, with and without a zone."""
        dice = self.dice
        year = dice.choice([1, 1969, 1999, 2000, 2026, 8999, 9000, 9999])
        zones = [
            None,
            UTC,
            ZoneInfo("America/New_York"),
            timezone(timedelta(hours=-23, minutes=-59)),
        ]
        hour, minute, micro = dice.randrange(24), dice.randrange(60), dice.randrange(10**6)
        month, day, fold = dice.choice([1, 3, 11, 12]), dice.randrange(1, 31), dice.randrange(2)
        there = datetime(year, month, day, hour, minute, 59, micro, dice.choice(zones), fold=fold)
        return dice.choice([there, there, there, there.date(), there.time(), there.isoformat()])

    def duration(self) -> timedelta:
        """From below nothing to beyond everything."""
        days = self.dice.choice([0, 0, 0, 400, 7_000 * 365, 999_999_999, -1, -999_999_999])
        return timedelta(days=days, microseconds=self.dice.randrange(10**6) if days >= 0 else 0)

    def other(self) -> object:
        """What is neither text nor number nor time."""
        return _MAKERS[self.dice.choice(sorted(_MAKERS))]()
