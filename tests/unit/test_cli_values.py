"""What people type becomes values, or a refusal that does not repeat it."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import click
import pytest

from delayq.cli.values import (
    Duration,
    Instant,
    Kinds,
    TaskId,
    headers_of,
    payload_text,
    when,
)
from delayq.errors import InvalidArgument
from delayq.request import MISSING


@pytest.mark.parametrize("text", ["1", "9007199254740993", str(2**63 - 1)])
def test_task_ids_are_exact(text: str) -> None:
    assert TaskId().convert(text, None, None) == int(text)


@pytest.mark.parametrize(
    "text", ["0", "-1", "", "1.0", "1e3", "x", str(2**63), "\uff11", "9" * 5000]
)
def test_what_is_no_task_id_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="whole number"):
        TaskId().convert(text, None, None)


def test_durations_have_units() -> None:
    assert Duration().convert("1h30m", None, None) == timedelta(minutes=90)
    for nonsense in ("5", "-5m", "nan", "", "5 parsecs"):
        with pytest.raises(click.BadParameter, match="units"):
            Duration().convert(nonsense, None, None)


def test_instants_have_an_offset() -> None:
    at = Instant().convert("2026-05-01T11:00:00+02:00", None, None)
    assert at == datetime(2026, 5, 1, 9, tzinfo=UTC)
    for nonsense in ("2026-05-01T11:00:00", "tomorrow", "", "9999-01-01T00:00:00Z"):
        with pytest.raises(click.BadParameter):
            Instant().convert(nonsense, None, None)


def test_kinds_are_separated_by_commas() -> None:
    assert Kinds().convert(" a, b,,a ", None, None) == ("a", "b")
    with pytest.raises(click.BadParameter):
        Kinds().convert(" , ", None, None)


def test_a_task_is_due_after_a_delay_or_at_an_instant() -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    assert when(timedelta(0), None) == (timedelta(0), MISSING)
    assert when(None, at) == (MISSING, at)
    for both in ((None, None), (timedelta(1), at)):
        with pytest.raises(click.UsageError, match="--in"):
            when(*both)


@pytest.mark.parametrize(
    "text", ["TOPSECRET", '{"token": TOPSECRET}', '["TOPSECRET"]', '{"a":NaN}']
)
def test_a_refused_payload_is_not_repeated(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        payload_text(text, 1_000)
    assert "TOPSECRET" not in str(refused.value)


def test_a_payload_keeps_its_big_integers() -> None:
    assert str(2**70 + 1) in payload_text(f'{{"n": {2**70 + 1}}}', 1_000)
    assert payload_text(None, 1_000) == "{}"


def test_a_payload_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        payload_text('{"a": "\udcff"}', 1_000)


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def type_in(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))

    return type_in


def test_a_dash_reads_the_payload_from_standard_input(type_in: Callable[[bytes], None]) -> None:
    type_in('{"a": "ä"}'.encode())
    assert "ä" in payload_text("-", 1_000)


def test_standard_input_is_read_to_its_limit_only(type_in: Callable[[bytes], None]) -> None:
    type_in(b'{"a": "' + b"x" * 10_000 + b'"}')
    with pytest.raises(InvalidArgument, match="payload"):
        payload_text("-", 1_000)


def test_headers_are_names_and_texts() -> None:
    assert headers_of(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for nonsense in ("a", "=1"):
        with pytest.raises(InvalidArgument, match="name=value"):
            headers_of([nonsense])
