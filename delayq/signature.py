"""Reads a handler's function: what it takes, and whether it can be called from stored arguments."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from delayq.context import Context
from delayq.errors import RegistrationError


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a handler, without its context. `annotation` is resolved."""

    name: str
    annotation: Any  # whatever pydantic understands
    required: bool
    positional: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """How a handler is called."""

    wants_context: bool
    is_async: bool
    parameters: tuple[Parameter, ...]


def read_signature(function: Callable[..., object]) -> Signature:
    """The signature of a handler; RegistrationError says what is wrong with it and where."""
    place = place_of(function)
    _check_callable(function, place)
    raw = list(inspect.signature(function).parameters.values())
    for parameter in raw:
        _check_parameter(parameter, place)
    resolved = {parameter.name: _resolve(function, parameter, place) for parameter in raw}
    wants_context = bool(raw) and _is_context(raw[0], resolved[raw[0].name])
    arguments = raw[1:] if wants_context else raw
    if any(resolved[argument.name] is Context for argument in arguments):
        raise RegistrationError(f"{place}: the Context must be the first parameter")
    return Signature(
        wants_context=wants_context,
        is_async=_is_async(function),
        parameters=tuple(_parameter(argument, resolved[argument.name]) for argument in arguments),
    )


def place_of(function: Callable[..., object]) -> str:
    """Where a function is defined, for messages: `shop.orders.expire (orders.py:12)`."""
    inner = inspect.unwrap(function)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    module = getattr(inner, "__module__", type(inner).__module__)
    code = getattr(inner, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{module}.{name}{where}"


def _check_callable(function: object, place: str) -> None:
    if not callable(function) or isinstance(function, type):
        raise RegistrationError(f"{place}: a handler is a function, plain or async")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RegistrationError(f"{place}: a handler must not be a generator; remove the yield")


def _check_parameter(parameter: inspect.Parameter, place: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise RegistrationError(
            f"{place}: {parameter.name!r} takes any number of arguments; "
            "arguments are stored by name, so name each one"
        )
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise RegistrationError(
            f"{place}: parameter {parameter.name!r} is positional-only; "
            "arguments are stored by name, so remove the `/`"
        )
    if parameter.name in ("self", "cls") and parameter.annotation is parameter.empty:
        raise RegistrationError(f"{place}: a handler must be a function, not a method of a class")


def _resolve(function: Callable[..., object], parameter: inspect.Parameter, place: str) -> Any:
    """The annotation as a type. Only of this parameter: others may not be importable here."""
    if parameter.annotation is parameter.empty:
        return Any
    inner = inspect.unwrap(function)
    # A Context that is imported for type checkers only is known all the same.
    names = {"Context": Context, **getattr(inner, "__globals__", {})}
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, globalns=names, include_extras=True)[parameter.name]
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise RegistrationError(
            f"{place}: the annotation of {parameter.name!r} cannot be resolved ({error}); "
            "define or import its type at the top level of the module"
        ) from error


def _is_context(parameter: inspect.Parameter, annotation: Any) -> bool:
    if parameter.kind is parameter.KEYWORD_ONLY:
        return False
    unannotated = parameter.annotation is parameter.empty
    return annotation is Context or (unannotated and parameter.name == "ctx")


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose call is async
    )


def _parameter(parameter: inspect.Parameter, annotation: Any) -> Parameter:
    return Parameter(
        name=parameter.name,
        annotation=annotation,
        required=parameter.default is parameter.empty,
        positional=parameter.kind is not parameter.KEYWORD_ONLY,
    )
