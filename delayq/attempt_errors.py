"""What is kept of a failed attempt: bounded, storable, and without the payload.

The text of an exception is the application's own and may quote what it was given; whatever also
stands in the payload is blanked out, whole or cut short. Errors of the database driver quote
argument values and rows, so they are told in our own words; those of a validation are told without
the input that they quote.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pydantic_core import ValidationError

from delayq.failures import DRIVER_ERRORS, translate
from delayq.policy import truncate_error

_FRAMES: Final = 8
_NAME_BYTES: Final = 200
_BLANK: Final = "[…]"
_WITHHELD: Final = "(withheld: it might quote the payload)"
_SHORTEST_SECRET: Final = 4
_SHORTEST_PART: Final = 8
_SLACK: Final = 4_096
_MOST_SECRETS: Final = 10_000
_MOST_WORK: Final = 20_000_000
"""characters of the text times secrets: some tens of milliseconds of the event loop"""
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
        text = _text(error)
    except BaseException:  # noqa: BLE001 - an exception that cannot be printed is still a failure
        return "(the exception cannot be printed)"
    return truncate_error(_blanked(text, payload, limit_bytes), limit_bytes)


def _text(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        return _refused(error)
    return str(translate(error)) if _of_the_driver(error) else str(error)


def _refused(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    told = (f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in found)
    return f"{error.error_count()} validation errors for {error.title}: {'; '.join(told)}"


def _of_the_driver(error: BaseException) -> bool:
    """The network's errors quote nothing, and may be about another service than the database."""
    return isinstance(error, DRIVER_ERRORS) and not isinstance(error, OSError)


def _blanked(text: str, payload: str | None, limit: int) -> str:
    """The text without what stands in the payload too, as it is or escaped; cut not much above
    `limit`, since whoever raised it may have put megabytes in."""
    if not text or not payload or payload == "{}":
        return text
    try:
        secrets = sorted(_secrets(json.loads(payload)), key=len, reverse=True)
    except (ValueError, RecursionError):
        return _WITHHELD
    longest = len(secrets[0]) if secrets else 0
    cut = text[: limit + 2 * longest]
    if len(secrets) > _MOST_SECRETS or len(cut) * len(secrets) > _MOST_WORK:
        return _WITHHELD
    blanked = cut
    for secret in secrets:
        blanked = blanked.replace(secret, _BLANK)
    # what was cut may end with the first part of a secret
    whole = blanked[: len(blanked) - longest] if len(cut) < len(text) else blanked
    told = _without_parts(whole[: limit + _SLACK], secrets)
    was_cut = len(cut) < len(text) or len(whole) > limit + _SLACK
    return told[:-_SHORTEST_PART] if was_cut else told


def _without_parts(text: str, secrets: Iterable[str]) -> str:
    """Python and its libraries quote long values cut short: by their first part, or by that and
    the last one."""
    long = [secret for secret in secrets if len(secret) > _SHORTEST_PART]
    text = _without_first_parts(text, long, _BLANK)
    turned = (secret[::-1] for secret in long)
    return _without_first_parts(text[::-1], turned, _BLANK[::-1])[::-1]


def _without_first_parts(text: str, secrets: Iterable[str], blank: str) -> str:
    for secret in secrets:
        start = secret[:_SHORTEST_PART]
        if start not in text:
            continue
        before, *quoted = text.split(start)
        rest = secret[_SHORTEST_PART:]
        text = before + "".join(blank + _after_common_start(part, rest) for part in quoted)
    return text


def _after_common_start(text: str, secret: str) -> str:
    pairs = enumerate(zip(text, secret, strict=False))
    return text[next((at for at, (a, b) in pairs if a != b), min(len(text), len(secret))) :]


def _secrets(payload: Any) -> set[str]:
    found: set[str] = set()
    parameters = payload.values() if isinstance(payload, dict) else (payload,)
    for text in (leaf for value in parameters for leaf in _leaves(value)):
        if len(text) >= _SHORTEST_SECRET:
            found |= {text, repr(text)[1:-1], json.dumps(text)[1:-1]}
    return found


def _leaves(value: Any) -> Iterator[str]:
    """Texts and numbers at any depth, and the keys of objects."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    elif not isinstance(value, bool) and value is not None:
        yield str(value)


def _frames(error: BaseException, limit_bytes: int) -> str:
    """The innermost frames as file:line function; no source text, no values."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return truncate_error(
        "\n".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames), limit_bytes
    )
