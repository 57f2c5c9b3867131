"""Builds a `TaskRequest`: everything a caller can ask for, validated and encoded.

Separate from how the request travels, so that the client, other drivers and HTTP share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Enum
from typing import Final, Literal, TypeAlias, TypedDict, Unpack

from delayq.errors import InvalidArgument
from delayq.instants import Delay, delay_to_us, duration_to_ms, instant_to_us
from delayq.model import OnConflict, TaskRequest
from delayq.payload import encode_payload

HeaderValue: TypeAlias = str | int | float | bool | None
Target: TypeAlias = int | tuple[str, str]
"""The task that a verb is about: its id, or (kind, key) of a live one."""
Targets: TypeAlias = list[int] | tuple[str, str]
"""The tasks that a bulk verb is about: their ids, or (kind, key_prefix) of live ones."""
When: TypeAlias = tuple[int | None, int | None]
"""(delay in microseconds, instant in microseconds since 1970), one of them None."""
NOW: Final[When] = (0, None)

MAX_NAME_BYTES = 500
MAX_HEADER_BYTES = 16_384
MAX_ATTEMPTS = 10_000
MAX_PRIORITY = 100
MAX_ID = 2**63 - 1


class _Missing(Enum):
    MISSING = "missing"


MISSING: Final = _Missing.MISSING
"""Not given; unlike None, which a caller may pass by mistake and which is refused."""

Maybe: TypeAlias = Literal[_Missing.MISSING]


class RequestOptions(TypedDict, total=False):
    """What a caller may say about one task beside its kind, arguments and instant."""

    key: str | None
    on_conflict: OnConflict | Literal["keep", "replace", "error"]
    idempotency_key: str | None
    priority: int
    max_attempts: int | None
    timeout: Delay | None
    misfire_grace: Delay | None
    headers: Mapping[str, HeaderValue] | None


class RequestForm:
    """Everything about a request but payload and instant, checked once: for many of one kind.

    InvalidArgument names the first field that is wrong.
    """

    __slots__ = ("_kind", "_options")

    def __init__(self, kind: str, **options: Unpack[RequestOptions]) -> None:
        _check_options(options)
        self._kind = check_name(kind, "kind")
        self._options = (
            _optional_name(options.get("key"), "key"),
            check_on_conflict(options.get("on_conflict", OnConflict.KEEP)),
            _optional_name(options.get("idempotency_key"), "idempotency_key"),
            check_priority(options.get("priority", 0)),
            _optional_attempts(options.get("max_attempts")),
            _optional_ms(options.get("timeout"), "timeout"),
            _optional_ms(options.get("misfire_grace"), "misfire_grace"),
            encode_headers(options.get("headers")),
        )

    def fill(self, payload: str, when: When) -> TaskRequest:
        """The request with this payload, to run at this time; both are checked already."""
        delay_us, execute_at_us = when
        return TaskRequest(self._kind, payload, delay_us, execute_at_us, *self._options)


def build_request(
    kind: str,
    payload: str = "{}",
    *,
    delay: Delay | Maybe = MISSING,
    at: datetime | Maybe = MISSING,
    **options: Unpack[RequestOptions],
) -> TaskRequest:
    """The request to run `kind` after `delay` or `at` an instant (exactly one of them).

    `payload` is JSON text from `ArgumentCodec.encode`, `encode_payload` or `payload_from_json`.
    `timeout`, `misfire_grace` and `max_attempts` that are not given stay None: the handler's
    policy then decides. InvalidArgument names the first field that is wrong.
    """
    return RequestForm(kind, **options).fill(payload, parse_when(delay, at))


def parse_when(delay: Delay | Maybe, at: datetime | Maybe) -> When:
    """When a task is to run, from the two ways to say it; exactly one of them is to be given."""
    if at is MISSING:
        if delay is MISSING:
            raise InvalidArgument("delay", "give a delay, or an instant with `at`")
        return delay_to_us(delay), None
    if delay is not MISSING:
        raise InvalidArgument("at", "give a delay or an instant, not both")
    return None, instant_to_us(at)


def check_name(value: object, field: str) -> str:
    """The kind, key or idempotency key as a plain str, if the database can hold it."""
    if not isinstance(value, str):
        raise InvalidArgument(field, "must be text (a str)")
    if not value:
        raise InvalidArgument(field, "must not be empty")
    if "\0" in value:
        raise InvalidArgument(field, "must not hold a NUL character; remove it")
    if _utf8_length(value, field) > MAX_NAME_BYTES:
        raise InvalidArgument(field, f"must be at most {MAX_NAME_BYTES} bytes of UTF-8; shorten it")
    return str.__str__(value)


def check_target(id: int | None, kind: str | None, key: str | None) -> Target:
    """The task that a verb is about. With an id the kind is not looked at."""
    if (id is None) == (key is None):
        raise InvalidArgument("id", "name the task either by id or by kind and key")
    if id is not None:
        return check_id(id)
    return check_name(_given(kind), "kind"), check_name(_given(key), "key")


def check_id(value: object) -> int:
    """The id of a task: a whole number above 0."""
    return _whole(value, "id", 1, MAX_ID)


def check_node(value: object) -> int:
    """The number of a node."""
    return _whole(value, "id", -MAX_ID - 1, MAX_ID)


def check_targets(ids: Iterable[int] | None, kind: str | None, key_prefix: str | None) -> Targets:
    """The tasks that a bulk verb is about; each id once, in order. The prefix is plain text."""
    if (ids is None) == (key_prefix is None) or (ids is not None and kind is not None):
        raise InvalidArgument("ids", "name the tasks either by ids or by kind and key_prefix")
    if ids is not None:
        return sorted({check_id(id) for id in ids})
    if key_prefix == "":
        raise InvalidArgument(
            "key_prefix",
            "must not be empty: that would be every task of the kind that has a key; give the "
            "ids of those that you mean",
        )
    return check_name(_given(kind), "kind"), check_name(key_prefix, "key_prefix")


def check_on_conflict(value: object) -> OnConflict:
    """The answer to a taken key as its enum."""
    if isinstance(value, str) and value in set(OnConflict):
        return OnConflict(value)
    raise InvalidArgument("on_conflict", "must be 'keep', 'replace' or 'error'")


def check_priority(value: object) -> int:
    """A priority from -100 to 100; higher goes first."""
    return _whole(value, "priority", -MAX_PRIORITY, MAX_PRIORITY)


def check_max_attempts(value: object) -> int:
    """A number of attempts from 1 to 10,000."""
    return _whole(value, "max_attempts", 1, MAX_ATTEMPTS)


def encode_headers(headers: Mapping[str, HeaderValue] | None) -> str:
    """Headers as JSON text, at most 16 KiB: text to text, number, bool or None."""
    if headers is None:
        return "{}"
    if not isinstance(headers, Mapping):
        raise InvalidArgument("headers", "must be a mapping of text to plain values")
    if not all(map(_is_header, headers.items())):
        raise InvalidArgument("headers", "must map text to text, numbers, booleans or None")
    return encode_payload(headers, MAX_HEADER_BYTES, "headers")


def _check_options(options: RequestOptions) -> None:
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")


def _is_header(item: tuple[object, object]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], str | int | float | None)


def _optional_name(value: str | None, field: str) -> str | None:
    return None if value is None else check_name(value, field)


def _optional_attempts(value: int | None) -> int | None:
    return None if value is None else check_max_attempts(value)


def _optional_ms(value: Delay | None, field: str) -> int | None:
    return None if value is None else duration_to_ms(value, field)


def _given(value: str | None) -> str:
    return "" if value is None else value


def _whole(value: object, field: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(field, f"must be a whole number from {least} to {most}")
    return int(value)


def _utf8_length(value: str, field: str) -> int:
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        pass
    raise InvalidArgument(field, "must not hold lone surrogates; decode the text properly")
