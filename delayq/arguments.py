"""Turns a call's arguments into stored JSON and back, by the handler's own annotations.

Arguments are stored as one JSON object by parameter name. Scheduling is strict (what a type
checker would refuse is refused) and proves that the text comes back as what was given.
Running uses one compiled validator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NotRequired, Required

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import CoreConfig, ErrorDetails, SchemaSerializer
from typing_extensions import TypedDict

from delayq.errors import ArgumentsRefused, InvalidArgument, RegistrationError
from delayq.payload import MAX_BYTES, explain, show, survives, write_json
from delayq.signature import Parameter

_CONFIG = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    ser_json_bytes="base64",
    val_json_bytes="base64",
    hide_input_in_errors=True,
    protected_namespaces=(),
)
_MAX_PROBLEMS = 10
_MAX_PARTS = 6

_ABOUT_CALLS = {
    "missing": "is missing; the handler requires it",
    "extra_forbidden": "is no parameter of the handler",
}

# Messages of these types speak of the annotation only; others may quote the value.
_TELLING = frozenset(
    {
        "missing",
        "extra_forbidden",
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "string_too_short",
        "string_too_long",
        "string_pattern_mismatch",
        "finite_number",
        "timezone_aware",
        "timezone_naive",
        "enum",
        "literal_error",
        "is_instance_of",
    }
)


class ArgumentCodec:
    """The arguments of one handler, both ways."""

    __slots__ = ("_known", "_limit", "_parse", "_positional", "_to_text", "_validate")

    def __init__(self, parameters: Sequence[Parameter], place: str, limit: int = MAX_BYTES) -> None:
        """RegistrationError (with `place`) if an annotation is none that JSON can carry."""
        adapter = _adapter(parameters, place)
        schema: Any = adapter.core_schema
        serializer = SchemaSerializer(schema, CoreConfig(ser_json_bytes="base64"))
        self._to_text: Callable[[object], bytes] = partial(serializer.to_json, warnings=False)
        self._parse = adapter.validator.validate_json
        self._validate = partial(adapter.validator.validate_python, strict=True)
        self._positional = tuple(p.name for p in parameters if p.positional)
        self._known = frozenset(p.name for p in parameters) | frozenset(_field_names(schema))
        self._limit = limit

    def encode(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """JSON text of a call's arguments.

        InvalidArgument, naming the parameter, for a wrong type or a value that would not come
        back from the database as it is.
        """
        value = self._checked(self._bound(args, kwargs))
        text = write_json(self._to_text, value, self._limit, "payload")
        self._prove(value, text)
        return text

    def decode(self, payload: str | bytes) -> dict[str, Any]:
        """The keyword arguments for the handler; ArgumentsRefused if they do not fit it."""
        try:
            return self._parse(payload)  # type: ignore[no-any-return]  # pydantic's is Any
        except ValidationError as error:
            problems = self._problems(error)
        except Exception as error:  # noqa: BLE001 - validators are the application's code
            problems = [type(error).__name__]
        # Outside of the except block: a chained error would carry the values into logs.
        raise ArgumentsRefused("the arguments do not fit the handler: " + "; ".join(problems))

    def _bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        if len(args) > len(self._positional):
            raise InvalidArgument(
                "payload", f"the handler takes {len(self._positional)} positional arguments"
            )
        given = dict(zip(self._positional, args, strict=False))
        if not kwargs:
            return given
        for name in kwargs:
            if name in given:
                raise InvalidArgument(name, "is given twice, by position and by name")
        return {**given, **kwargs}

    def _checked(self, given: dict[str, object]) -> dict[str, object]:
        try:
            return self._validate(given)  # type: ignore[no-any-return]  # the same
        except ValidationError as error:
            problem = _first(error)
        except RecursionError:
            problem = None
        if problem is None or problem["type"].startswith("recursion"):
            raise explain(given, "payload")
        raise InvalidArgument(*self._described(problem))

    def _prove(self, value: dict[str, object], text: str) -> None:
        back, culprit = self._read_back(text)
        if culprit is None and survives(value, back):
            return
        # one by one, to name the one that does not
        for name, given in value.items():
            if name == culprit or (culprit is None and not survives(given, back.get(name))):
                raise explain({name: given}, "payload")
        if culprit is not None:
            raise explain(value, "payload")

    def _read_back(self, text: str) -> tuple[dict[str, Any], object]:
        try:
            return self._parse(text), None
        except ValidationError as error:
            return {}, next(iter(_first(error)["loc"]), "payload")
        except Exception:  # noqa: BLE001 - whatever it is, the node would meet it too
            return {}, "payload"

    def _described(self, problem: ErrorDetails) -> tuple[str, str]:
        """(parameter, what is wrong) in words that hold no value."""
        kind, location = problem["type"], problem["loc"]
        field = str(location[0]) if location else "payload"
        if len(location) == 1 and kind in _ABOUT_CALLS:
            return field, _ABOUT_CALLS[kind]
        telling = kind in _TELLING or kind.endswith("_type")
        where = f"at {self._where(location[1:_MAX_PARTS])}: " if location[1:] else ""
        return field, f"{where}{problem['msg'] if telling else 'is not valid'} ({kind})"

    def _problems(self, error: ValidationError) -> list[str]:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return [f"{self._place(one)}: {one['type']}" for one in found[:_MAX_PROBLEMS]]

    def _place(self, problem: ErrorDetails) -> str:
        location = problem["loc"]
        if len(location) == 1 and problem["type"] == "extra_forbidden":
            return show((str(location[0]),))  # what another version of the handler takes
        return self._where(location[:_MAX_PARTS])

    def _where(self, location: Iterable[int | str]) -> str:
        parts = [str(p) if isinstance(p, int) or p in self._known else "*" for p in location]
        return ".".join(parts) or "payload"


def _first(error: ValidationError) -> ErrorDetails:
    return error.errors(include_url=False, include_context=False, include_input=False)[0]


def _adapter(parameters: Sequence[Parameter], place: str) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(_arguments_type(parameters))
    except (PydanticUserError, TypeError, NameError) as error:
        culprit = _culprit(parameters)
        raise RegistrationError(
            f"{place}: the annotation of {culprit} cannot be stored as JSON "
            f"({str(error).splitlines()[0]}); pass an id or plain data instead"
        ) from error


def _arguments_type(parameters: Sequence[Parameter]) -> Any:
    fields = {
        p.name: Required[p.annotation] if p.required else NotRequired[p.annotation]
        for p in parameters
    }
    arguments = TypedDict("Arguments", fields)  # type: ignore[misc]  # made from a signature
    arguments.__pydantic_config__ = _CONFIG  # type: ignore[attr-defined]  # pydantic's
    return arguments


def _culprit(parameters: Sequence[Parameter]) -> str:
    for parameter in parameters:
        try:
            TypeAdapter(_arguments_type([parameter]))
        except (PydanticUserError, TypeError, NameError):
            return repr(parameter.name)
    return "its parameters"


def _field_names(schema: Any) -> set[str]:
    """The names of all fields of models, dataclasses and typed dicts inside a core schema."""
    names: set[str] = set()
    stack, seen = [schema], set()
    while stack:
        node = stack.pop()
        if id(node) in seen or not isinstance(node, dict | list):
            continue
        seen.add(id(node))
        if isinstance(node, list):
            names.update(str(f["name"]) for f in node if isinstance(f, dict) and "name" in f)
            stack.extend(node)
        else:
            fields = node.get("fields")
            names.update(fields if isinstance(fields, dict) else ())
            stack.extend(node.values())
    return names
