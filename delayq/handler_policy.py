"""What a handler says about its attempts: limits, back-off, and which errors are worth a retry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypedDict

from delayq.errors import InvalidArgument
from delayq.instants import Delay, duration_to_ms
from delayq.request import check_max_attempts, check_priority

ErrorClasses: TypeAlias = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class PolicyDefaults:
    """What holds for handlers that do not say otherwise; from the settings."""

    max_attempts: int = 5
    backoff_base_us: int = 1_000_000
    backoff_max_us: int = 3_600_000_000


@dataclass(frozen=True, slots=True)
class HandlerPolicy:
    """How the attempts of one handler are limited and repeated."""

    max_attempts: int
    backoff_base_us: int
    backoff_max_us: int
    timeout_ms: int | None = None
    misfire_grace_ms: int | None = None
    retry_on: tuple[type[Exception], ...] = (Exception,)
    give_up_on: tuple[type[Exception], ...] = ()
    max_concurrency: int | None = None
    priority: int = 0


class PolicyOptions(TypedDict, total=False):
    """What `@dq.task(...)` takes beside kind and aliases. Durations: timedelta, or seconds."""

    max_attempts: int | None
    timeout: Delay | None
    misfire_grace: Delay | None
    backoff_base: Delay | None
    backoff_max: Delay | None
    retry_on: ErrorClasses
    give_up_on: ErrorClasses
    max_concurrency: int | None
    priority: int


def build_policy(options: PolicyOptions, defaults: PolicyDefaults) -> HandlerPolicy:
    """The policy of a handler; InvalidArgument names the first option that is wrong."""
    _check_options(options)
    max_attempts = options.get("max_attempts")
    base_us = _backoff_us(options.get("backoff_base"), "backoff_base", defaults.backoff_base_us)
    max_us = _backoff_us(options.get("backoff_max"), "backoff_max", defaults.backoff_max_us)
    if base_us > max_us:
        raise InvalidArgument("backoff_base", "must not be longer than backoff_max")
    return HandlerPolicy(
        max_attempts=(
            defaults.max_attempts if max_attempts is None else check_max_attempts(max_attempts)
        ),
        backoff_base_us=base_us,
        backoff_max_us=max_us,
        timeout_ms=_optional_ms(options.get("timeout"), "timeout"),
        misfire_grace_ms=_optional_ms(options.get("misfire_grace"), "misfire_grace"),
        retry_on=_error_classes(options.get("retry_on", Exception), "retry_on"),
        give_up_on=_error_classes(options.get("give_up_on", ()), "give_up_on"),
        max_concurrency=_concurrency(options.get("max_concurrency")),
        priority=check_priority(options.get("priority", 0)),
    )


def _check_options(options: PolicyOptions) -> None:
    unknown = options.keys() - PolicyOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")


def _backoff_us(duration: Delay | None, field: str, default_us: int) -> int:
    return default_us if duration is None else duration_to_ms(duration, field) * 1000


def _optional_ms(duration: Delay | None, field: str) -> int | None:
    return None if duration is None else duration_to_ms(duration, field)


def _error_classes(classes: object, field: str) -> tuple[type[Exception], ...]:
    found = classes if isinstance(classes, tuple) else (classes,)
    if not all(isinstance(one, type) and issubclass(one, Exception) for one in found):
        raise InvalidArgument(field, "must be an Exception class or a tuple of them")
    return found


def _concurrency(limit: object) -> int | None:
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidArgument("max_concurrency", "must be a whole number of at least 1")
    return limit
