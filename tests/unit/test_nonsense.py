"""Whatever a caller sends is taken as it was meant, or refused by one error that names a field.

Nothing else is ever raised, and no error repeats what was sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from delayq.errors import ArgumentsRefused, InvalidArgument, InvalidSettings
from delayq.handler_policy import PolicyDefaults, PolicyOptions, build_policy
from delayq.handlers import Registry, Scheduler, make_task_decorator
from delayq.instants import MAX_DELAY_US, instant_to_us
from delayq.payload import encode_payload, payload_from_json
from delayq.request import RequestOptions, build_request, check_target
from delayq.settings import Settings, load_settings
from tests.nonsense import ANYTHING, JSON, SECRET, STORABLE, Fuzz

SECRETS = f'{{"{SECRET}": "{SECRET}", '


def refused(call: Callable[[], object]) -> InvalidArgument | None:
    """The refusal; None if it was taken. Anything else that is raised fails the test."""
    try:
        call()
    except InvalidArgument as refusal:
        error = refusal
    else:
        return None
    said = str(error)
    assert said.startswith(f"{error.field}: ")
    assert len(said) < 400
    assert SECRET not in said
    assert "\n" not in said
    return error


# --- what must hold for any value -----------------------------------------------------------------


def payload_part(value: Any) -> None:
    payload = {f"{SECRET}-key": SECRET, "value": value}
    if refused(lambda: encode_payload(payload)) is None:
        assert json.loads(encode_payload(payload)).keys() == payload.keys()


def whole_payload(value: Any) -> None:
    taken = refused(lambda: encode_payload(value)) is None
    assert isinstance(value, dict) or not taken


def payload_text(value: Any) -> None:
    refused(lambda: payload_from_json(value))
    if type(value) is str:
        refused(lambda: payload_from_json(SECRETS + f'"value": {value}}}'))
        refused(lambda: payload_from_json(SECRETS + f"{value}}}"))


ANNOTATIONS: dict[str, Any] = {
    "integer": int, "number": float, "text": str, "flag": bool, "raw": bytes, "when": datetime,
    "wait": timedelta, "many": list[int], "named": dict[str, float], "any": Any,
    "maybe": int | None, "pair": tuple[int, str],
}  # fmt: skip


def _handler(annotation: Any) -> Any:
    def handles(argument: Any) -> None:
        """Takes one."""

    handles.__annotations__["argument"] = annotation
    task = make_task_decorator(Registry(), cast(Scheduler, None), PolicyDefaults())
    return task(handles)


HANDLERS = {name: _handler(annotation) for name, annotation in ANNOTATIONS.items()}


def argument(name: str, value: Any) -> None:
    handler = HANDLERS[name]
    if refused(lambda: handler.encode((value,), {})) is None:
        assert list(handler.decode(handler.encode((value,), {}))) == ["argument"]


def stored_argument(name: str, value: Any) -> None:
    """What is in the row may have been written by anybody."""
    if not isinstance(value, str | bytes):
        return
    for text in (value, f'{{"argument": {value!r}}}'):
        said = ""
        try:
            HANDLERS[name].decode(text)
        except ArgumentsRefused as error:
            said = str(error)
        assert SECRET not in said


def option(name: str, value: Any) -> None:
    given_options = cast(RequestOptions, {name: value})
    error = refused(lambda: build_request("kind", delay=0, **given_options))
    assert error is None or error.field == name


def kind(value: Any) -> None:
    error = refused(lambda: build_request(value, delay=0))
    assert error is None or error.field == "kind"


def delay(value: Any) -> None:
    error = refused(lambda: build_request("kind", delay=value))
    assert error is None or error.field == "delay"
    if error is None:
        assert 0 <= (build_request("kind", delay=value).delay_us or 0) <= MAX_DELAY_US


def at(value: Any) -> None:
    error = refused(lambda: build_request("kind", at=value))
    assert error is None or error.field == "at"


def target(value: Any) -> None:
    for named in ((value, None, None), (None, "kind", value), (None, value, "key")):
        error = refused(lambda named=named: check_target(*named))  # type: ignore[misc]  # a default is no argument
        assert error is None or error.field in ("id", "kind", "key")


def handler_option(name: str, value: Any) -> None:
    options = cast(PolicyOptions, {name: value})
    error = refused(lambda: build_policy(options, PolicyDefaults()))
    assert error is None or error.field in (name, "backoff_base")


def refused_settings(call: Callable[[], object]) -> str | None:
    try:
        call()
    except InvalidSettings as refusal:
        error = refusal
    else:
        return None
    said = str(error)
    assert "DELAYQ_" in said
    assert SECRET not in said
    assert "\n" not in said
    assert error.__cause__ is None
    return said


def setting(name: str, value: Any) -> None:
    said = refused_settings(lambda: load_settings(**{name: value}))
    assert said is None or f"DELAYQ_{name.upper()}" in said


def variable(name: str, value: Any) -> None:
    try:
        os.environ[f"DELAYQ_{name.upper()}"] = str(value)
    except Exception:  # noqa: BLE001 - no environment can hold it
        return
    try:
        said = refused_settings(load_settings)
        assert said is None or f"DELAYQ_{name.upper()}" in said
    finally:
        del os.environ[f"DELAYQ_{name.upper()}"]


Property = Callable[[Any], None]
PROPERTIES: dict[str, Property] = {
    "payload part": payload_part, "payload": whole_payload, "payload text": payload_text,
    "kind": kind, "delay": delay, "at": at, "target": target,
    **{f"argument {name}": partial(argument, name) for name in ANNOTATIONS},
    **{f"stored {name}": partial(stored_argument, name) for name in ANNOTATIONS},
    **{f"option {name}": partial(option, name) for name in sorted(RequestOptions.__annotations__)},
    **{f"handler {name}": partial(handler_option, name)
       for name in sorted(PolicyOptions.__annotations__)},
    **{f"setting {name}": partial(setting, name) for name in sorted(Settings.model_fields)},
    **{f"variable {name}": partial(variable, name) for name in sorted(Settings.model_fields)},
}  # fmt: skip
SLOW = ("setting", "variable")
"""Building all settings takes a millisecond."""


@pytest.mark.parametrize("what", PROPERTIES)
def test_any_value_is_taken_or_refused_by_one_error_that_names_the_field(what: str) -> None:
    fuzz = Fuzz()
    for _ in range(15 if what.startswith(SLOW) else 1_000):
        value = fuzz.anything()
        try:
            PROPERTIES[what](value)
        except Exception as error:
            error.add_note(f"seed {fuzz.seed}, a {type(value).__name__}")
            raise


@pytest.mark.more
@pytest.mark.parametrize("what", PROPERTIES)
def test_a_search_for_a_value_that_breaks_this_finds_none(what: str) -> None:
    def check(value: Any) -> None:
        PROPERTIES[what](value)

    _search(ANYTHING, 100)(check)


def _search(strategy: st.SearchStrategy[Any], examples: int) -> Callable[[Property], None]:
    every = hypothesis_settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return lambda check: every(given(strategy)(check))()


def test_whatever_json_can_say_is_taken() -> None:
    def check(payload: dict[str, Any]) -> None:
        assert json.loads(encode_payload(payload)) == payload

    _search(st.dictionaries(STORABLE, JSON, max_size=4), 60)(check)


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"a":' * 200_000, "9" * 1_000_000, "\x00"])
def test_long_nonsense_is_refused_too(text: str) -> None:
    assert refused(lambda: payload_from_json(text)) is not None
    assert refused(lambda: payload_from_json(f'{{"a": {text}}}')) is not None


def test_any_environment_is_taken_or_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz = Fuzz()
    names = sorted(Settings.model_fields)
    for _ in range(200):
        with monkeypatch.context() as patch:
            for name in fuzz.dice.sample(names, 6):
                number = str(fuzz.dice.choice([0, 1, 2, 5, 50, 5_000, 0.5, 1e9]))
                patch.setenv(f"DELAYQ_{name.upper()}", number)
            refused_settings(load_settings)


class Broken(tzinfo):
    """A zone that does not say how far it is, or says that it is further than a day is long."""

    def __init__(self, offset: timedelta | None) -> None:
        self.offset = offset

    def utcoffset(self, _when: datetime | None) -> timedelta:
        if self.offset is None:
            raise NotImplementedError
        return self.offset

    def dst(self, _when: datetime | None) -> None:
        return None

    def tzname(self, _when: datetime | None) -> str:
        return "nowhere"


@pytest.mark.parametrize("offset", [None, timedelta(days=400)], ids=["silent", "absurd"])
def test_a_time_zone_that_is_none_is_refused_by_the_name_of_the_field(
    offset: timedelta | None,
) -> None:
    error = refused(lambda: instant_to_us(datetime(2026, 1, 1, tzinfo=Broken(offset))))
    assert error is not None
    assert error.field == "at"
