"""What is kept of a failed attempt: bounded, storable, and without the payload.

The text of an exception is the application's own and may quote what it was given; whatever also
stands in the payload is blanked out. Errors of the database driver quote argument values and
rows, so they are told in our own words.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from delayq.failures import DRIVER_ERRORS, translate
from delayq.policy import truncate_error

_FRAMES: Final = 8
_NAME_BYTES: Final = 200
_BLANK: Final = "[…]"
_SHORTEST_SECRET: Final = 4
_MOST_SECRETS: Final = 200
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def describe(
    error: BaseException, *, attempt: int, at_us: int, payload: str | None, limit_bytes: int
) -> str:
    """The error as a JSON object: attempt, instant (database's clock), class, message, frames."""
    return json.dumps(
        {
            "attempt": attempt,
            "at": (_EPOCH + timedelta(microseconds=at_us)).isoformat(),
            "error": truncate_error(type(error).__qualname__, _NAME_BYTES),
            "message": message_of(error, payload, limit_bytes),
            "where": _frames(error, limit_bytes // 2),
        }
    )


def message_of(error: BaseException, payload: str | None, limit_bytes: int) -> str:
    """What the exception says, bounded and blanked; never raises."""
    try:
        text = str(translate(error)) if isinstance(error, DRIVER_ERRORS) else str(error)
    except BaseException:  # noqa: BLE001 - an exception that cannot be printed is still a failure
        return "(the exception cannot be printed)"
    # a huge text is cut first: what is blanked is looked for in what is kept
    return _blanked(truncate_error(text, limit_bytes), payload)


def _blanked(text: str, payload: str | None) -> str:
    if not text or not payload or payload == "{}":
        return text
    try:
        secrets = sorted(set(_leaves(json.loads(payload))), key=len, reverse=True)
    except (ValueError, RecursionError):
        return "(withheld: it might quote the payload)"
    for secret in secrets[:_MOST_SECRETS]:
        text = text.replace(secret, _BLANK)
    return text


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    elif not isinstance(value, bool) and value is not None:
        text = str(value)
        if len(text) >= _SHORTEST_SECRET:
            yield text


def _frames(error: BaseException, limit_bytes: int) -> str:
    """The innermost frames as file:line function; no source text, no values."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return truncate_error(
        "\n".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames), limit_bytes
    )
