"""What is kept of a failed attempt: bounded, storable, and without the payload."""

from __future__ import annotations

import json
import re
import reprlib
import time
from typing import Any, NoReturn

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from delayq.attempt_errors import describe, message_of

AT_US = 1_790_000_000_123_456


def told(error: BaseException, payload: str | None = None, limit: int = 4096) -> dict[str, Any]:
    text = describe(error, attempt=3, at_us=AT_US, payload=payload, limit_bytes=limit)
    found: dict[str, Any] = json.loads(text)
    return found


def raised(error: BaseException) -> BaseException:
    try:
        _raise(error)
    except BaseException as caught:  # noqa: BLE001 - whatever it is, the test looks at it
        return caught


def _raise(error: BaseException) -> NoReturn:
    raise error


def test_an_error_is_told_with_its_attempt_instant_class_message_and_place() -> None:
    found = told(raised(ValueError("no such order")))
    assert found["attempt"] == 3
    assert found["at"] == "2026-09-21T14:13:20.123456+00:00"
    assert (found["error"], found["message"]) == ("ValueError", "no such order")
    assert "test_attempt_errors.py" in found["where"]
    assert "raised" in found["where"]


def test_no_source_line_and_no_value_is_in_the_place() -> None:
    card_number = "4111-1111"
    found = told(raised(ValueError(f"{card_number}")))
    assert "card_number" not in found["where"]
    assert card_number not in found["where"]


# --- without the payload ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "message", "kept"),
    [
        ('{"card": "4111-1111"}', "card 4111-1111 refused", "card […] refused"),
        ('{"a": {"b": ["hunter22"]}}', "hunter22hunter22", "[…][…]"),
        ('{"order": 421337}', "no order 421337", "no order […]"),
        ('{"x": "secret", "y": "secret longer"}', "secret longer", "[…]"),
        ('{"n": 12.375}', "12.375 is odd", "[…] is odd"),
        ('{"n": 7, "ok": true, "no": null}', "7 True None", "7 True None"),
        ("{}", "plain", "plain"),
        ('{"unused": "something"}', "plain", "plain"),
    ],
)
def test_what_stands_in_the_payload_is_blanked(payload: str, message: str, kept: str) -> None:
    assert message_of(ValueError(message), payload, 4096) == kept


LONG = "4111-" + "0123456789" * 30 + "-1111"


def _not_valid(value: object) -> ValidationError:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(dict[str, int]).validate_python(value)
    return refused.value


def _no_number(text: str) -> ValueError:
    with pytest.raises(ValueError, match="invalid literal") as refused:
        int(text)
    return refused.value


@pytest.mark.parametrize(
    "value", [LONG, {"card": LONG}, {LONG: "x"}, {"a": 1, "b": [LONG, LONG], "c": LONG}]
)
def test_a_refused_input_is_not_in_the_error_of_a_validation(value: object) -> None:
    message = message_of(_not_valid(value), json.dumps({"given": value}), 4096)
    assert "validation errors for dict[str,int]: " in message
    assert "Input should be a valid" in message
    assert not re.search(r"4111|0123|6789|1111", message)


@pytest.mark.parametrize(
    "error",
    [
        _no_number(LONG),  # Python cuts it after 200 characters
        ValueError(reprlib.repr(LONG)),
        ValueError(reprlib.repr([LONG, LONG])),
        ValueError(f"{LONG[:20]}, {LONG[:20]} and {LONG[-20:]} {LONG[-20:]}"),
        ValueError(LONG[:-1] + LONG[1:]),
    ],
    ids=repr,
)
def test_what_is_cut_short_is_blanked_all_the_same(error: Exception) -> None:
    message = message_of(error, json.dumps({"card": LONG}), 4096)
    assert "[…]" in message
    assert not re.search(r"4111|0123|6789|1111", message)


def test_what_only_begins_alike_is_kept_from_where_it_differs() -> None:
    payload = json.dumps({"path": "/srv/shop/orders/42"})
    assert message_of(ValueError("no /srv/shop/items"), payload, 4096) == "no […]items"
    assert message_of(ValueError("/srv"), payload, 4096) == "/srv"


@pytest.mark.parametrize("size", [8_800, 100_000])
def test_of_a_text_that_quotes_a_long_document_the_rest_is_whole(size: int) -> None:
    document = "x" * size
    payload = json.dumps({"document": document})
    said = told(ValueError(f"cannot parse {document}: unexpected end"), payload)["message"]
    assert said == "cannot parse […]: unexpected end"
    assert told(KeyError(document), payload)["message"] == "'[…]'"


def test_a_text_that_would_take_seconds_to_blank_is_withheld() -> None:
    payload = json.dumps({"long": "y" * 500_000, "short": [f"value {n:04}" for n in range(1_600)]})
    began = time.process_time()
    said = told(ValueError("z" * 1_500_000), payload)["message"]
    assert said == "(withheld: it might quote the payload)"
    assert time.process_time() - began < 1


def test_a_huge_text_full_of_beginnings_takes_no_time() -> None:
    payload = json.dumps(
        {"word": "abcdefgh-1", **{f"key{n}": f"abcdefgh-{n}x" for n in range(900)}}
    )
    started = time.perf_counter()
    message = message_of(ValueError("abcdefgh" * 500_000), payload, 4096)
    assert time.perf_counter() - started < 2
    assert "abcd" not in message


@pytest.mark.parametrize("payload", ["{", '{"a": ' + "[" * 100_000, "\ud800"])
def test_if_the_payload_cannot_be_read_nothing_is_told(payload: str) -> None:
    assert "withheld" in message_of(ValueError("secret"), payload, 4096)


def test_errors_of_the_driver_are_told_in_words_that_quote_no_row() -> None:
    error = asyncpg.UniqueViolationError("duplicate key")
    error.constraint_name = "orders_pkey"
    error.detail = "Key (id)=(4111-1111) already exists."
    message = message_of(error, None, 4096)
    assert "orders_pkey" in message
    assert "4111" not in message


# --- bounded and storable ---------------------------------------------------------------------


class Unprintable(Exception):
    """Raises when it is printed."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def test_an_exception_that_cannot_be_printed_is_still_a_failure() -> None:
    found = told(Unprintable())
    assert found["error"] == "Unprintable"
    assert "cannot be printed" in found["message"]


def test_nul_and_lone_surrogates_are_replaced() -> None:
    assert told(ValueError("a\0b\ud800c"))["message"] == "a\ufffdb\ufffdc"


def test_a_recursive_failure_keeps_the_innermost_frames_only() -> None:
    def fall(depth: int) -> None:
        if depth == 0:
            raise ValueError("the bottom")
        fall(depth - 1)

    with pytest.raises(ValueError, match="bottom") as caught:
        fall(200)
    where = told(caught.value)["where"]
    assert where.count("\n") == 7


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=3_000), st.integers(0, 500), st.text(max_size=50))
def test_whatever_is_raised_is_bounded_and_can_be_stored(text: str, limit: int, name: str) -> None:
    kind = type(name.replace("\0", "") or "E", (Exception,), {})
    found = told(kind(text), json.dumps({"a": name}), limit)
    stored = json.dumps(found)
    assert "\\u0000" not in stored
    assert len(found["message"].encode()) <= limit
    assert len(found["where"].encode()) <= limit // 2
    assert len(found["error"].encode()) <= 200


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.integers(1, 200))
def test_the_message_stays_within_its_limit_also_after_blanking(secret: str, limit: int) -> None:
    payload = json.dumps({"secret": secret, "four": "abcd"})
    message = message_of(ValueError("abcd" * 1_000), payload, limit)
    assert len(message.encode()) <= limit
