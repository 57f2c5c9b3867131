"""What a scenario is: figures of delayq beside raw ones, and the targets they have to meet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .options import Sizes
    from .server import Ground


class Measure(StrEnum):
    """How a figure is held against its target."""

    RATIO = "ratio"
    """delayq / raw of the same run"""
    DIFFERENCE = "difference"
    """delayq - raw of the same run"""
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Target:
    """What the median over the runs has to reach."""

    measure: Measure
    least: float | None = None
    most: float | None = None

    def value(self, ours: float, raw: float) -> float:
        """One run's figure as the target sees it."""
        if self.measure is Measure.RATIO:
            return ours / raw if raw else float("nan")
        return ours - raw if self.measure is Measure.DIFFERENCE else ours

    def met(self, value: float) -> bool:
        """False for NaN too."""
        if self.least is not None:
            return value >= self.least
        return self.most is not None and value <= self.most

    def __str__(self) -> str:
        sign, limit = (">=", self.least) if self.least is not None else ("<=", self.most)
        words = {"ratio": "ratio ", "difference": "+", "value": ""}[self.measure]
        return f"{words}{sign} {limit:g}" if words != "+" else f"raw {sign} +{limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `key` names it in the samples, both delayq's and the raw one."""

    key: str
    title: str
    unit: str
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run of a scenario found."""

    ours: dict[str, float]
    raw: dict[str, float]
    faults: dict[str, int] = field(default_factory=dict)
    """tasks lost, started twice, or early: all should be 0"""
    notes: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing that is measured, and what the raw figure beside it does."""

    name: str
    about: str
    raw_about: str
    figures: tuple[Figure, ...]
    run: Callable[[Ground, Sizes], Awaitable[Sample]]
