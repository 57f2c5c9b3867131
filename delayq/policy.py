"""Small decisions without a clock: back-off, misfire, trust in the own beat, bounds of errors.

Values in, value out. Who ranks where is decided in `ranks`, who is buried in `judge`, and
what "1h30m" means in `durations`.
"""

from __future__ import annotations

import re
from typing import Final

SHORTEST_BACKOFF_US: Final = 10_000
"""No retry comes sooner: a failing task with an unlucky jitter must not spin."""

_MOST_DOUBLINGS: Final = 62
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
_REPLACEMENT: Final = "\ufffd"
_ELLIPSIS: Final = "…"


def backoff_us(attempt: int, base_us: int, cap_us: int, random: float) -> int:
    """Microseconds to wait after the failure of `attempt` (1 is the first).

    Doubles from `base_us` up to `cap_us`; the second half of the wait is jitter, chosen by
    `random` from [0, 1). Never less than `SHORTEST_BACKOFF_US`, whatever the arguments.
    """
    doublings = min(max(attempt - 1, 0), _MOST_DOUBLINGS)
    whole = min(base_us << doublings, cap_us)
    fixed = whole - whole // 2
    return max(SHORTEST_BACKOFF_US, fixed + int((whole - fixed) * random))


def is_misfire(now_us: int, due_us: int, grace_ms: int | None, ever_leased: bool) -> bool:
    """True if a task would fire later than its grace allows.

    Judged against the instant that was asked for, and only for a task that was never leased:
    one that ran and was interrupted, snoozed or is retried has not missed its time.
    """
    if grace_ms is None or ever_leased:
        return False
    return now_us - due_us > grace_ms * 1_000


def trusted_until_us(sent_us: int, ttl_us: int, margin_us: int) -> int:
    """The instant until which a beat that got through lets its node fire.

    Counts from when the beat was *sent*, by a clock that also counts suspend: the database
    may have written it at once and answered late.
    """
    return sent_us + ttl_us - margin_us


def may_fire(now_boot_us: int, last_beat_sent_us: int, ttl_us: int, margin_us: int) -> bool:
    """False once a node must take itself for dead: it stops firing and cancels its handlers."""
    return now_boot_us < trusted_until_us(last_beat_sent_us, ttl_us, margin_us)


def truncate_error(text: str, limit_bytes: int) -> str:
    """`text` as PostgreSQL can store it, in at most `limit_bytes` bytes of UTF-8.

    NUL and lone surrogates become U+FFFD, a text that was cut ends in "…" if that fits.
    Never raises, and never looks at more of a huge text than could be kept.
    """
    if limit_bytes <= 0:
        return ""
    # A character is at least a byte, so this slice is too long whenever the text is.
    clean = _UNSTORABLE.sub(_REPLACEMENT, text[: limit_bytes + 1])
    encoded = clean.encode()
    if len(encoded) <= limit_bytes:
        return clean
    mark = _ELLIPSIS if limit_bytes >= len(_ELLIPSIS.encode()) else ""
    kept = encoded[: limit_bytes - len(mark.encode())]
    return kept.decode(errors="ignore") + mark
