"""What JSON may be stored: one text that comes back from jsonb exactly as it was meant.

Shared by typed arguments, untyped payloads and headers. The checks run on the JSON text, at
C speed; only when one fails is the value walked, to name the place.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json, to_json

from delayq.errors import InvalidArgument

MAX_BYTES = 1_048_576
MAX_DEPTH = 100

# Python and pydantic refuse to read longer integers (sys.int_info.default_max_str_digits).
_MAX_DIGITS = 4_300
_MAX_BITS = 14_284
_MAX_SHOWN = 64

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_NOT_BRACKETS = re.compile(rf'{_STRING}|[^\[\]{{}}"]+')
_LARGE_FLOAT = re.compile(rf"{_STRING}|-?\d+(?:\.\d+)?[eE]\+?\d+")
_MAYBE_LARGE_FLOAT = re.compile(r"\d[eE]\+?\d")

_NOT_JSON = (
    "holds a value that JSON cannot bring back as it is; annotate the handler's parameter with "
    "its exact type, or pass plain JSON values"
)

Path = tuple[str, ...]


def encode_payload(
    payload: Mapping[str, object], limit: int = MAX_BYTES, field: str = "payload"
) -> str:
    """JSON text of an untyped payload: a mapping of JSON values by argument name.

    InvalidArgument if it is no mapping or would not come back from JSON as it is.
    """
    if not isinstance(payload, Mapping):
        raise InvalidArgument(field, "must be a mapping of argument names to JSON values")
    text = write_json(_untyped, dict(payload), limit, field)
    try:
        intact = survives(payload, from_json(text))
    except ValueError:
        intact = False
    if not intact:
        raise explain(payload, field)
    return text


def payload_from_json(text: str | bytes, limit: int = MAX_BYTES, field: str = "payload") -> str:
    """Stored form of JSON text that came from outside; InvalidArgument unless it is an object."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgument(field, f"must be a JSON object, at most {MAX_DEPTH} levels deep")
    return encode_payload(value, limit, field)


def write_json(
    to_text: Callable[[Any], bytes], value: Mapping[str, object], limit: int, field: str
) -> str:
    """The JSON text of `value` by `to_text`, checked against everything that jsonb refuses."""
    raw = _try(to_text, value)
    if raw is None:
        parts = ({name: part} for name, part in value.items())
        raise explain(next((p for p in parts if _try(to_text, p) is None), value), field)
    if b"\\u0000" in raw and _has_nul(raw):
        raise explain(value, field)
    text = _plain_floats(raw.decode())
    if len(text.encode()) > limit:
        raise InvalidArgument(field, f"must be at most {limit} bytes of JSON; store a reference")
    if depth_of(text) > MAX_DEPTH:
        raise explain(value, field)
    return text


def explain(value: Mapping[str, object], field: str) -> InvalidArgument:
    """The error that names the flaw in `value` and where it is.

    A payload consists of arguments, so there the field is the argument.
    """
    only = tuple(map(str, value)) if len(value) == 1 else ()
    path, reason = find_flaw(value) or (only, _NOT_JSON)
    if field == "payload" and path and _harmless(path[0]):
        field, path = path[0], path[1:]
    return InvalidArgument(field, f"at {show(path)}: {reason}" if path else reason)


def show(path: Path) -> str:
    """A path such as `order.lines.3`, with keys that may be data shown as `*`."""
    return ".".join(part if _harmless(part) else "*" for part in path)


def find_flaw(value: object) -> tuple[Path, str] | None:
    """Where and why `value` cannot be stored, or None. Walks without recursion, depth first."""
    stack: list[tuple[Path, object]] = [((), value)]
    while stack:
        path, node = stack.pop()
        if len(path) >= MAX_DEPTH and children(node) is not None:
            return path[:3], f"is nested more than {MAX_DEPTH} levels deep (or contains itself)"
        reason = _flaw_of_leaf(node)
        if reason is not None:
            return path, reason
        for name, child in children(node) or ():
            if _flaw_of_leaf(name) is not None:
                return path, f"a key {_flaw_of_leaf(name)}"
            stack.append(((*path, str(name)), child))
    return None


def survives(given: object, back: object) -> bool:
    """True if `back` is what `given` meant: equal, but for sequences that became lists.

    Parts are compared one by one where equality itself is unsure, as it is for aware datetimes
    in an hour that repeats and for classes without `__eq__`.
    """
    if _equal(given, back):
        return True
    given_parts, back_parts = children(given), children(back)
    if given_parts is None or back_parts is None or not _same_shape(given, back):
        return False
    pairs, others = dict(given_parts), dict(back_parts)
    return pairs.keys() == others.keys() and all(survives(pairs[n], others[n]) for n in pairs)


def children(node: object) -> Iterator[tuple[object, object]] | None:
    """The named parts of a container, model or dataclass; None for anything else."""
    if isinstance(node, Mapping):
        return iter(node.items())
    if isinstance(node, list | tuple | set | frozenset):
        return enumerate(node)
    if isinstance(node, BaseModel):
        return iter(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return ((field.name, getattr(node, field.name, None)) for field in dataclasses.fields(node))
    return None


def _untyped(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")


def _try(to_text: Callable[[Any], bytes], value: object) -> bytes | None:
    try:
        return to_text(value)
    except (ValueError, RecursionError):  # PydanticSerializationError is a ValueError
        return None


def _equal(given: object, back: object) -> bool:
    try:
        if given == back:
            return True
        # Same instant, different zone object: in a repeated hour Python says "not equal".
        return given.isoformat() == back.isoformat()  # type: ignore[attr-defined, no-any-return]  # both have one
    except Exception:  # noqa: BLE001 - __eq__ is the application's code and may raise anything
        return False


def _same_shape(given: object, back: object) -> bool:
    if isinstance(given, list | tuple) and isinstance(back, list | tuple):
        return True
    if isinstance(given, Mapping) and isinstance(back, Mapping):
        return True
    return type(given) is type(back) and not isinstance(given, set | frozenset)


def _flaw_of_leaf(node: object) -> str | None:
    if isinstance(node, str):
        return _flaw_of_text(node)
    if isinstance(node, bytes):
        return _flaw_of_bytes(node)
    if isinstance(node, int) and node.bit_length() > _MAX_BITS:
        return f"is an integer of more than {_MAX_DIGITS} digits; pass it as text"
    if isinstance(node, float | Decimal) and not _finite(node):
        return "is NaN or infinite, which JSON cannot hold; use None or text"
    return None


def _flaw_of_bytes(node: bytes) -> str | None:
    try:
        node.decode()
    except UnicodeDecodeError:
        return (
            "holds bytes that are no text; annotate the parameter as bytes, or give its model "
            "ser_json_bytes='base64' and val_json_bytes='base64'"
        )
    return None


def _finite(number: float | Decimal) -> bool:
    return number.is_finite() if isinstance(number, Decimal) else math.isfinite(number)


def _flaw_of_text(text: str) -> str | None:
    if "\0" in text:
        return "holds a NUL character, which PostgreSQL cannot store; remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds a lone surrogate, which is no character; decode the text properly"
    return None


def _has_nul(raw: bytes) -> bool:
    """True unless every `\\u0000` is a backslash of the text followed by the letters u0000."""
    return re.search(rb"(?<!\\)(?:\\\\)*\\u0000", raw) is not None


def _plain_floats(text: str) -> str:
    """Writes 1e+22 as digits and `.0`: jsonb would drop the exponent and with it the float."""
    if _MAYBE_LARGE_FLOAT.search(text) is None:
        return text
    return _LARGE_FLOAT.sub(_plain_float, text)


def _plain_float(match: re.Match[str]) -> str:
    token = match[0]
    return token if token.startswith('"') else f"{int(float(token))}.0"


def depth_of(text: str) -> int:
    """How many levels deep a JSON text is nested; 0 if that is nothing to mind."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return 0
    depth = deepest = 0
    for bracket in _NOT_BRACKETS.sub("", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _harmless(part: str) -> bool:
    return len(part) <= _MAX_SHOWN and (part.isidentifier() or part.isdecimal())
