"""How late a node's event loop was in the last minute, as the node's own probe counted it."""

from __future__ import annotations

from collections.abc import Mapping

from .scenario import NAN


def lag_ms(counters: Mapping[str, object]) -> dict[str, float]:
    """`lag_p99` and `lag_max` in milliseconds; NaN where the node counts nothing of the sort."""
    return {f"lag_{what}": _found(counters, f"loop_lag_{what}_us") for what in ("p99", "max")}


def _found(counters: Mapping[str, object], name: str) -> float:
    value = counters.get(name)
    return value / 1000 if isinstance(value, int) else NAN
