"""A request is right, or is refused by one error that names the field; nothing in between."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq.errors import InvalidArgument
from delayq.instants import (
    EPOCH,
    delay_to_us,
    duration_to_ms,
    instant_from_text,
    instant_from_us,
    instant_to_us,
)
from delayq.model import OnConflict, TaskRequest
from delayq.request import (
    MISSING,
    RequestForm,
    build_request,
    check_target,
    check_targets,
    parse_when,
)

NAN, INF = float("nan"), float("inf")
BERLIN = ZoneInfo("Europe/Berlin")
WEST = timezone(timedelta(hours=-5))


def build(**options: Any) -> TaskRequest:
    given: dict[str, Any] = {"kind": "k", **options}
    if "at" not in given:
        given.setdefault("delay", 5)
    return build_request(given.pop("kind"), **given)


def test_a_full_request_says_everything_in_integers_and_json() -> None:
    built = build(
        payload='{"a":1}',
        delay=timedelta(minutes=5),
        key="order:42",
        on_conflict="replace",
        idempotency_key="once",
        priority=-7,
        max_attempts=3,
        timeout=timedelta(seconds=20),
        misfire_grace=0.5,
        headers={"trace": "x", "n": 1, "ok": True, "none": None},
    )
    assert built == TaskRequest(
        kind="k",
        payload='{"a":1}',
        delay_us=300_000_000,
        key="order:42",
        on_conflict=OnConflict.REPLACE,
        idempotency_key="once",
        priority=-7,
        max_attempts=3,
        timeout_ms=20_000,
        misfire_grace_ms=500,
        headers='{"trace":"x","n":1,"ok":true,"none":null}',
    )


def test_what_is_not_given_is_left_to_the_handler() -> None:
    assert build(delay=0) == TaskRequest(kind="k", delay_us=0)


def short(value: object) -> str | None:
    """A name for huge integers, which pytest cannot print."""
    return "huge" if isinstance(value, int) and value.bit_length() > 99 else None


HUGE = 10**400


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("delay", -1, "negative"),
        ("delay", -0.000_001, "negative"),
        ("delay", timedelta(microseconds=-1), "negative"),
        ("delay", timedelta.min, "negative"),
        ("delay", -HUGE, "negative"),
        ("delay", NAN, "finite"),
        ("delay", INF, "finite"),
        ("delay", -INF, "finite"),
        ("delay", HUGE, "6900 years"),
        ("delay", 10**5000, "6900 years"),
        ("delay", 1e308, "6900 years"),
        ("delay", timedelta.max, "6900 years"),
        ("delay", timedelta(days=365 * 9_974), "6900 years"),
        ("delay", True, "timedelta, or seconds"),
        ("delay", "5", "timedelta, or seconds"),
        ("delay", None, "timedelta, or seconds"),
        ("delay", Decimal("NaN"), "timedelta, or seconds"),
        ("delay", Decimal(5), "timedelta, or seconds"),
        ("delay", 5j, "timedelta, or seconds"),
        ("delay", datetime.now(UTC), "timedelta, or seconds"),
        ("at", datetime(2026, 1, 1), "aware"),  # noqa: DTZ001 - naive on purpose
        ("at", datetime.max, "aware"),  # noqa: DTZ901 - naive on purpose
        ("at", datetime.min, "aware"),  # noqa: DTZ901 - naive on purpose
        ("at", datetime.max.replace(tzinfo=UTC), "2000 to 8999"),
        ("at", datetime.min.replace(tzinfo=UTC), "2000 to 8999"),
        ("at", datetime.max.replace(tzinfo=BERLIN), "2000 to 8999"),
        ("at", datetime(9999, 12, 31, 23, 59, tzinfo=WEST), "2000 to 8999"),
        ("at", datetime(9000, 1, 1, tzinfo=UTC), "2000 to 8999"),
        ("at", datetime(8999, 12, 31, 19, tzinfo=WEST), "2000 to 8999"),
        ("at", datetime(1999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), "2000 to 8999"),
        ("at", 5, "aware datetime"),
        ("at", 1e9, "aware datetime"),
        ("at", None, "aware datetime"),
        ("at", "2026-01-01T00:00:00Z", "aware datetime"),
        ("at", date(2026, 1, 1), "aware datetime"),
        ("kind", "", "empty"),
        ("kind", "k" * 501, "500 bytes"),
        ("kind", "é" * 251, "500 bytes"),
        ("kind", "a\0", "NUL"),
        ("kind", "\ud800", "surrogate"),
        ("kind", None, "text"),
        ("key", "", "empty"),
        ("key", "k" * 501, "500 bytes"),
        ("key", "\0", "NUL"),
        ("key", "\udfff", "surrogate"),
        ("key", 42, "text"),
        ("key", b"k", "text"),
        ("idempotency_key", "", "empty"),
        ("idempotency_key", "k" * 501, "500 bytes"),
        ("idempotency_key", "a\0b", "NUL"),
        ("on_conflict", "bogus", "'keep', 'replace' or 'error'"),
        ("on_conflict", None, "'keep', 'replace' or 'error'"),
        ("on_conflict", [], "'keep', 'replace' or 'error'"),
        ("priority", 101, "from -100 to 100"),
        ("priority", -101, "from -100 to 100"),
        ("priority", HUGE, "from -100 to 100"),
        ("priority", True, "from -100 to 100"),
        ("priority", 1.0, "from -100 to 100"),
        ("priority", None, "from -100 to 100"),
        ("max_attempts", 0, "from 1 to 10000"),
        ("max_attempts", 10_001, "from 1 to 10000"),
        ("max_attempts", "5", "from 1 to 10000"),
        ("timeout", 0, "1 millisecond and 365 days"),
        ("timeout", -1, "1 millisecond and 365 days"),
        ("timeout", 0.0004, "1 millisecond and 365 days"),
        ("timeout", timedelta(days=366), "1 millisecond and 365 days"),
        ("timeout", timedelta.max, "1 millisecond and 365 days"),
        ("timeout", HUGE, "1 millisecond and 365 days"),
        ("timeout", NAN, "finite"),
        ("timeout", False, "timedelta, or seconds"),
        ("misfire_grace", INF, "finite"),
        ("misfire_grace", "1h", "timedelta, or seconds"),
        ("headers", "x", "mapping"),
        ("headers", [("a", 1)], "mapping"),
        ("headers", {1: "a"}, "map text"),
        ("headers", {"a": [1]}, "map text"),
        ("headers", {"a": b"x"}, "map text"),
        ("headers", {"a": NAN}, "at a: is NaN"),
        ("headers", {"a": "\0"}, "at a: holds a NUL"),
        ("headers", {"a": "\ud800"}, "at a: holds a lone surrogate"),
        ("headers", {"a": 10**4300}, "4300 digits"),
        ("headers", {"a": "x" * 16_384}, "16384 bytes"),
    ],
    ids=short,
)
def test_nonsense_is_refused_by_an_error_that_names_the_field(
    field: str, value: Any, said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert said in str(caught.value)


def test_a_delay_and_an_instant_together_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="not both"):
        build_request("k", delay=5, at=datetime.now(UTC))


def test_neither_a_delay_nor_an_instant_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="delay: give a delay"):
        build_request("k")


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="prioriti"):
        build(prioriti=5)


@pytest.mark.parametrize(
    ("delay", "microseconds"),
    [
        (0, 0),
        (-0.0, 0),
        (1, 1_000_000),
        (0.1, 100_000),
        (0.000_001, 1),
        (timedelta(minutes=5), 300_000_000),
        (timedelta(microseconds=1), 1),
        (timedelta(days=6_900 * 365), 6_900 * 365 * 86_400_000_000),
    ],
)
def test_delays_are_exact_microseconds(delay: Any, microseconds: int) -> None:
    assert delay_to_us(delay) == microseconds


@pytest.mark.parametrize(
    ("local", "utc"),
    [
        (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=0), datetime(2026, 10, 25, 0, 30)),  # noqa: DTZ001 - naive on purpose
        (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1), datetime(2026, 10, 25, 1, 30)),  # noqa: DTZ001 - naive on purpose
        (datetime(2026, 7, 1, 12, tzinfo=BERLIN), datetime(2026, 7, 1, 10)),  # noqa: DTZ001 - naive on purpose
        (datetime(2000, 1, 1, 1, tzinfo=BERLIN), datetime(2000, 1, 1)),  # noqa: DTZ001 - naive on purpose
        (datetime(1999, 12, 31, 19, tzinfo=WEST), datetime(2000, 1, 1)),  # noqa: DTZ001 - naive on purpose
        (datetime(9000, 1, 1, 0, 30, tzinfo=BERLIN), datetime(8999, 12, 31, 23, 30)),  # noqa: DTZ001 - naive on purpose
    ],
)
def test_local_instants_convert_exactly_also_in_the_hour_that_repeats(
    local: datetime, utc: datetime
) -> None:
    assert instant_from_us(instant_to_us(local)) == utc.replace(tzinfo=UTC)


@given(
    st.datetimes(
        datetime(2000, 1, 2),  # noqa: DTZ001 - naive on purpose
        datetime(8999, 12, 30),  # noqa: DTZ001 - naive on purpose
        timezones=st.timezones(),
    )
)
def test_every_aware_instant_keeps_its_microsecond(instant: datetime) -> None:
    back = instant_from_us(instant_to_us(instant))
    assert (back - EPOCH) == (instant.astimezone(UTC) - EPOCH)


def test_the_year_12000_is_refused_as_text() -> None:
    with pytest.raises(InvalidArgument, match="at: must be ISO 8601"):
        instant_from_text("12000-01-01T00:00:00Z")


@pytest.mark.parametrize("text", ["", "now", "2026-13-01T00:00:00Z"])
def test_text_that_is_no_instant_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="ISO 8601"):
        instant_from_text(text)


def test_text_without_an_offset_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="aware"):
        instant_from_text("2026-01-01T00:00:00")


def test_text_with_an_offset_is_an_instant() -> None:
    assert instant_from_text("2026-01-01T01:00:00+01:00") == instant_to_us(
        datetime(2026, 1, 1, tzinfo=UTC)
    )


@pytest.mark.parametrize(("duration", "ms"), [(0.001, 1), (timedelta(days=365), 31_536_000_000)])
def test_durations_reach_from_a_millisecond_to_a_year(duration: Any, ms: int) -> None:
    assert duration_to_ms(duration, "timeout") == ms


def test_names_of_the_longest_length_pass() -> None:
    assert build(key="é" * 250).key == "é" * 250


def test_a_member_of_a_text_enum_becomes_its_text() -> None:
    assert type(build(key=OnConflict.KEEP).key) is str


def test_a_task_is_named_by_id_or_by_kind_and_key() -> None:
    assert check_target(7, "k", None) == 7
    assert check_target(None, "k", "key") == ("k", "key")


@pytest.mark.parametrize(
    ("id", "kind", "key", "field"),
    [
        (None, "k", None, "id"),
        (7, "k", "key", "id"),
        (0, "k", None, "id"),
        (2**63, "k", None, "id"),
        (True, "k", None, "id"),
        ("7", "k", None, "id"),
        (None, None, "key", "kind"),
        (None, "k", "", "key"),
    ],
)
def test_a_task_named_twice_or_badly_is_refused(id: Any, kind: Any, key: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_target(id, kind, key)
    assert caught.value.field == field


def test_many_tasks_are_named_by_ids_or_by_kind_and_key_prefix() -> None:
    assert check_targets((id for id in (9, 7, 9)), None, None) == [7, 9]
    assert check_targets([], None, None) == []
    assert check_targets(None, "k", "order:4%_") == ("k", "order:4%_")


@pytest.mark.parametrize(
    ("ids", "kind", "key_prefix", "field"),
    [
        (None, None, None, "ids"),
        (None, "k", None, "ids"),
        ([7], "k", None, "ids"),
        ([7], "k", "order:", "ids"),
        ([7], None, "order:", "ids"),
        ([7, 0], None, None, "id"),
        ([7, "8"], None, None, "id"),
        (None, None, "order:", "kind"),
        (None, "", "order:", "kind"),
        (None, "k", "", "key_prefix"),
        (None, "k", "a\0", "key_prefix"),
        (None, "k", 7, "key_prefix"),
        (None, "k", "x" * 501, "key_prefix"),
    ],
)
def test_many_tasks_named_twice_or_badly_are_refused(
    ids: Any, kind: Any, key_prefix: Any, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_targets(ids, kind, key_prefix)
    assert caught.value.field == field


def test_a_form_that_was_checked_once_makes_requests_like_those_that_are_built_singly() -> None:
    options: dict[str, Any] = {"key": "order:42", "priority": 3, "timeout": 5, "headers": {"a": 1}}
    form = RequestForm("k", **options)
    for delay in (0, 7.5):
        wanted = build_request("k", '{"n":1}', delay=delay, **options)
        assert form.fill('{"n":1}', parse_when(delay, MISSING)) == wanted
    at = datetime(2026, 5, 1, 9, tzinfo=UTC)
    assert form.fill("{}", parse_when(MISSING, at)) == build_request("k", at=at, **options)
