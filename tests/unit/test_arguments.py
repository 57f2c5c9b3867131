"""Arguments must come back from the database as they went in, or be refused with a clear word."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, Optional, Union
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, JsonValue, SecretStr
from typing_extensions import TypedDict

from delayq.arguments import ArgumentCodec
from delayq.errors import ArgumentsRefused, InvalidArgument, RegistrationError
from delayq.payload import encode_payload, payload_from_json
from delayq.signature import Parameter, read_signature

BERLIN = ZoneInfo("Europe/Berlin")
SECRET = "4111-1111-1111-1111"


class Colour(Enum):
    RED = "red"
    THREE = 3


class Level(IntEnum):
    HIGH = 9


@dataclass
class Line:
    sku: str
    price: Decimal
    blob: bytes = b""
    seen: list[datetime] = field(default_factory=list)


@dataclass(eq=False)
class WithoutEquality:
    count: int


class Order(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    id: UUID
    lines: list[Line] = []
    due: datetime | None = None


class Loose(BaseModel):
    blob: bytes


class Special(Order):
    extra: int = 1


class Node(BaseModel):
    kids: list[Node] = []


class Point(TypedDict):
    x: int
    y: int


def short(value: object) -> str | None:
    """A name for huge integers, which pytest cannot print."""
    return "huge" if isinstance(value, int) and value.bit_length() > 99 else None


BROKEN: Any = {"kids": [SECRET]}


def codec(annotation: Any, *, limit: int = 1_048_576) -> ArgumentCodec:
    return ArgumentCodec([Parameter("value", annotation, True, True)], "here", limit)


def of(function: Callable[..., object]) -> ArgumentCodec:
    return ArgumentCodec(read_signature(function).parameters, "here")


def as_jsonb(text: str) -> str:
    """What `text::jsonb::text` gives: keys by length then bytes, numbers without exponents."""
    number = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*')
    plain = number.sub(lambda m: m[0] if m[0][0] == '"' else _digits(Decimal(m[0])), text)
    return _sorted(json.loads(plain, parse_int=_Raw, parse_float=_Raw))


class _Raw(str):
    __slots__ = ()


def _sorted(node: Any) -> str:
    if isinstance(node, _Raw):
        return str(node)
    if isinstance(node, list):
        return "[" + ", ".join(map(_sorted, node)) + "]"
    if isinstance(node, dict):
        keys = sorted(node, key=lambda key: (len(key.encode()), key.encode()))
        return (
            "{"
            + ", ".join(
                f"{json.dumps(key, ensure_ascii=False)}: {_sorted(node[key])}" for key in keys
            )
            + "}"
        )
    return json.dumps(node, ensure_ascii=False)


def _digits(number: Decimal) -> str:
    # numeric has no negative zero
    return f"{number or number.copy_abs():f}"


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def refused(annotation: Any, value: object) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        codec(annotation).encode((), {"value": value})
    assert SECRET not in str(caught.value)
    assert len(str(caught.value)) < 300
    return caught.value


ORDER = Order(
    id=UUID(int=7),
    lines=[Line("a", Decimal("1.10"), b"\xff\x00", [datetime(2026, 3, 1, tzinfo=UTC)])],
    due=datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
)
ROUND_TRIPS: list[tuple[Any, object]] = [
    (int, 2**70),
    (int, 10**400),
    (int, -(10**4299)),
    (float, 1.0),
    (float, 1e22),
    (float, 1e300),
    (float, 5e-324),
    (float, 0.1),
    (int | float, 1.0),
    (int | float, 1e300),
    (int | float, 1),
    (Any, 1e22),
    (Any, {"deep": [1e300, "1e22", None, True]}),
    (bool | int, True),
    (str, "1e+22"),
    (str, 'quote " backslash \\ \\u0000 😀'),
    (bytes, b"\xff\x00"),
    (bytes | str, b"text"),
    (Decimal, Decimal("1.10")),
    (Decimal, Decimal("1E+400")),
    (Decimal, Decimal(-0)),
    (UUID, UUID(int=5)),
    (UUID | str, UUID(int=5)),
    (Colour, Colour.RED),
    (Colour, Colour.THREE),
    (Level, Level.HIGH),
    (Literal["a", 1], 1),
    (date, date.max),
    (time, time(23, 59, 59, 999999)),
    (datetime, datetime(2026, 1, 1, 12, 0, 0, 1)),  # noqa: DTZ001 - data may be naive
    (datetime, datetime.max.replace(tzinfo=UTC)),
    (datetime, datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=0)),
    (datetime, datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1)),
    (timedelta, timedelta.max),
    (timedelta, timedelta(microseconds=-1)),
    (Optional[int], None),  # noqa: UP045 - users write it
    (Union[int, str], "42"),  # noqa: UP007 - the old spelling is the case
    (Union[int, str], 42),  # noqa: UP007 - the old spelling is the case
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2)),
    (set[int], {1, 2}),
    (frozenset[UUID], frozenset({UUID(int=1)})),
    (dict[int, str], {1: "a"}),
    (dict[UUID, list[tuple[int, Decimal]]], {UUID(int=1): [(1, Decimal("0.10"))]}),
    (dict[Colour, datetime], {Colour.RED: datetime(2026, 1, 1, tzinfo=UTC)}),
    (Line, ORDER.lines[0]),
    (Order, ORDER),
    (list[Order | Line], [ORDER, ORDER.lines[0]]),
    (Point, {"x": 1, "y": 2}),
    (Node, Node(kids=[Node()])),
    (Annotated[int, Field(gt=0)], 5),
    (Any, 10**400),
]


@pytest.mark.parametrize(
    ("annotation", "value"), ROUND_TRIPS, ids=[str(n) for n in range(len(ROUND_TRIPS))]
)
def test_values_come_back_from_jsonb_exactly(annotation: Any, value: object) -> None:
    one = codec(annotation)
    back = one.decode(as_jsonb(one.encode((), {"value": value})))["value"]
    if isinstance(value, datetime) and isinstance(back, datetime):
        assert back.utcoffset() == value.utcoffset()
        assert back.replace(tzinfo=None, fold=0) == value.replace(tzinfo=None, fold=0)
    elif isinstance(value, Order):
        assert back.model_dump_json() == value.model_dump_json()
    elif value != [ORDER, ORDER.lines[0]]:
        assert back == value
    assert type(back) is type(value)


def test_a_class_without_equality_is_compared_by_its_fields() -> None:
    one = codec(list[WithoutEquality])
    back = one.decode(one.encode((), {"value": [WithoutEquality(3)]}))["value"]
    assert back[0].count == 3


def test_a_tuple_where_any_sequence_will_do_arrives_as_a_list() -> None:
    one = codec(Sequence[int])
    assert one.decode(one.encode((), {"value": (1, 2)})) == {"value": [1, 2]}


def test_a_mapping_where_any_mapping_will_do_arrives_as_a_dict() -> None:
    one = codec(Mapping[str, int])
    assert one.decode(one.encode((), {"value": {"a": 1}})) == {"value": {"a": 1}}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.from_regex(r"[a-z\\\"]{0,5}", fullmatch=True), inner)
    ),
    max_leaves=20,
)


@given(json_values)
def test_any_json_value_comes_back_from_jsonb_with_its_types(value: Any) -> None:
    one = codec(Any)
    back = one.decode(as_jsonb(one.encode((), {"value": value})))["value"]
    assert back == value
    # ... and 1.0 is no 1; only a negative zero loses its sign, since numeric has none.
    assert repr(_ordered(back)) == repr(_ordered(value)) or "-0.0" in repr(value)


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return [_ordered(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (int, SECRET, "valid integer"),
        (int, True, "valid integer"),
        (int, None, "valid integer"),
        (str, 5, "valid string"),
        (UUID, SECRET, "UUID"),
        (Colour, "red", "Colour"),
        (Order, {"id": SECRET}, "at id: Input should be an instance of UUID"),
        (list[int], [1, SECRET], "at 1: "),
        (Annotated[str, Field(max_length=3)], SECRET, "at most 3"),
        (float, float("nan"), "finite"),
        (float, float("inf"), "finite"),
        (Decimal, Decimal("NaN"), "finite"),
        (Decimal, Decimal("sNaN"), ""),
        (Any, float("nan"), "NaN"),
        (Any, {"a": [float("-inf")]}, "at a.0: is NaN or infinite"),
        (Any, Decimal("Infinity"), "NaN or infinite"),
        (int, 10**4300, "4300 digits"),
        (int, 10**9999, "4300 digits"),
        (Any, {"a": 10**4300}, "at a: is an integer of more than 4300 digits"),
        (str, "a\0b", "NUL"),
        (str, "\\\0", "NUL"),
        (dict[str, list[str]], {"notes": ["", "\0"]}, "at notes.1: holds a NUL"),
        (dict[str, int], {"a\0": 1}, "a key holds a NUL"),
        (dict[str, str], {SECRET: "\0"}, "at *: holds a NUL"),
        (Line, Line("a\0", Decimal(1)), "at sku: holds a NUL"),
        (Order, Order(id=UUID(int=1), lines=[Line("\0", Decimal(1))]), "at lines.0.sku"),
        (str, "\ud800", "lone surrogate"),
        (Any, ["\udfff"], "at 0: holds a lone surrogate"),
        (Any, {"\ud800": 1}, "a key holds a lone surrogate"),
        (Any, nested(100), "100 levels"),
        (Any, nested(2_000), "100 levels"),
        (list[Any], nested(2_000), "100 levels"),
        (JsonValue, nested(2_000), "100 levels"),
        (Any, nested(200_000), "100 levels"),
        (Any, object(), "JSON"),
        (Any, datetime(2026, 1, 1, tzinfo=UTC), "annotate"),
        (Any, {1: "a"}, "annotate"),
        (Any, b"bytes", "annotate"),
        (Any, {1, 2}, "annotate"),
        (UUID | str, str(UUID(int=5)), "annotate"),
        (bytes | str, "text", "annotate"),
        (Node | Loose, Loose(blob=b"\xff"), "at blob: holds bytes that are no text"),
        (Order, Special(id=UUID(int=1)), "annotate"),
        (SecretStr, SecretStr(SECRET), "annotate"),
        (dict[tuple[int, int], int], {(1, 2): 3}, "annotate"),
        (Node, Node.model_construct(**BROKEN), "annotate"),
    ],
    ids=short,
)
def test_a_value_that_would_not_come_back_is_refused(
    annotation: Any, value: object, said: str
) -> None:
    error = refused(annotation, value)
    assert error.field == "value"
    assert said in str(error)


def test_a_structure_that_contains_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert "contains itself" in str(refused(Any, circle))


def test_recursive_models_a_hundred_deep_are_refused() -> None:
    node = Node()
    for _ in range(3_000):
        node = Node.model_construct(kids=[node])
    assert "100 levels" in str(refused(Node, node))


def test_nesting_is_allowed_up_to_the_limit() -> None:
    one = codec(Any)
    assert one.decode(one.encode((), {"value": nested(99)})) == {"value": nested(99)}


def test_brackets_in_text_are_no_nesting() -> None:
    codec(Any).encode((), {"value": '[{"' * 500})


def test_the_limit_counts_bytes_of_utf8() -> None:
    text = "é" * 20
    assert codec(str, limit=52).encode((), {"value": text}) == f'{{"value":"{text}"}}'
    with pytest.raises(InvalidArgument, match="payload: must be at most 51 bytes"):
        codec(str, limit=51).encode((), {"value": text})


def test_arguments_bind_like_a_call() -> None:
    def handler(first: int, second: str = "s", *, third: float = 1.0) -> None: ...

    one = of(handler)
    assert one.encode((1,), {}) == '{"first":1}'
    assert one.encode((1, "b"), {"third": 2.5}) == '{"first":1,"second":"b","third":2.5}'


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "first: is missing"),
        ((1, "a", 2.0), {}, "payload: the handler takes 2 positional"),
        ((1,), {"first": 2}, "first: is given twice"),
        ((1,), {"frist": 2}, "frist: is no parameter"),
    ],
)
def test_a_call_that_does_not_fit_names_the_parameter(
    args: tuple[object, ...], kwargs: dict[str, object], said: str
) -> None:
    def handler(first: int, second: str = "s", *, third: float = 1.0) -> None: ...

    with pytest.raises(InvalidArgument, match=said):
        of(handler).encode(args, kwargs)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (f'{{"value": ["{SECRET}"]}}', "value: list_type|value: dataclass_type"),
        ("{}", "value: missing"),
        (f'{{"value": {{"sku": "a", "price": "{SECRET}"}}}}', r"value\.price: decimal_parsing"),
        (f'{{"value": {{"sku": "a", "price": "1"}}, "{SECRET}": 1}}', r"\*: (extra|unexpected)"),
        ("[]", "payload: dict_type"),
        (f'{{"value": {SECRET}', "payload: json_invalid"),
        ("[" * 5_000, "payload: json_invalid"),
        ('{"value": ' + "1" * 5_000 + "}", "payload: json_invalid"),
        ("", "payload: json_invalid"),
    ],
)
def test_stored_arguments_that_do_not_fit_are_refused_without_their_values(
    payload: str, said: str
) -> None:
    with pytest.raises(ArgumentsRefused, match=said) as caught:
        codec(Line).decode(payload)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_keys_of_the_data_are_not_named_when_arguments_are_refused() -> None:
    with pytest.raises(ArgumentsRefused, match=r"value\.\*: int_type") as caught:
        codec(dict[str, int]).decode(f'{{"value": {{"{SECRET}": "x"}}}}')
    assert SECRET not in str(caught.value)


def test_a_validator_that_breaks_refuses_the_arguments() -> None:
    @dataclass
    class Broken:
        x: int

        def __post_init__(self) -> None:
            raise KeyError(SECRET)

    with pytest.raises(ArgumentsRefused, match="KeyError") as caught:
        codec(Broken).decode('{"value": {"x": 1}}')
    assert SECRET not in str(caught.value)


def test_bytes_are_decoded_as_well_as_text() -> None:
    assert codec(int).decode(b'{"value": 42}') == {"value": 42}


def test_an_annotation_that_json_cannot_carry_is_refused_at_registration() -> None:
    with pytest.raises(RegistrationError, match="here: the annotation of 'value'"):
        codec(bytearray)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ([1], "mapping"),
        ("text", "mapping"),
        ({"a": object()}, "JSON"),
        ({"a": {1}}, "JSON"),
        ({"a": ["\0"]}, "a: at 0: holds a NUL"),
        ({1: 2}, "JSON"),
        ({"a": nested(2_000)}, "100 levels"),
        ({"a": "x" * 100}, "at most 60 bytes"),
    ],
)
def test_untyped_payloads_are_checked_too(payload: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        encode_payload(payload, 60 if "a" in payload and payload["a"] == "x" * 100 else 1_000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        "null",
        b"\xff",
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1e999}',
        '{"a": "\\u0000"}',
        '{"a": "\\ud800"}',
        '{"a": 1} x',
        '{"a": ' + "[" * 2_000,
        '{"a": ' + "[" * 150 + "]" * 150 + "}",
    ],
)
def test_json_text_from_outside_must_be_a_storable_object(text: str | bytes) -> None:
    with pytest.raises(InvalidArgument):
        payload_from_json(text)


def test_json_text_from_outside_is_kept_as_it_is() -> None:
    assert payload_from_json('{"b": [1, 2.0, 1e22], "a": "\\u00e9"}') == (
        '{"b":[1,2.0,10000000000000000000000.0],"a":"é"}'
    )
