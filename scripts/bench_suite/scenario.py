"""What a scenario is: figures of delayq beside raw ones, and the targets they have to meet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .server import Ground
    from .sizes import Sizes

NAN = float("nan")


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
    of: str | None = None
    """Instead of raw: the figure of delayq, of the same run and scenario, that it is a ratio of."""

    def value(self, ours: float, raw: float) -> float:
        """One run's figure as the target sees it, beside what it is held against."""
        if self.measure is Measure.RATIO:
            return ours / raw if raw else NAN
        return ours - raw if self.measure is Measure.DIFFERENCE else ours

    def met(self, value: float) -> bool:
        """False for NaN too."""
        if self.least is not None:
            return value >= self.least
        return self.most is not None and value <= self.most

    def __str__(self) -> str:
        sign, limit = (">=", self.least) if self.least is not None else ("<=", self.most)
        if self.measure is Measure.DIFFERENCE:
            return f"raw {sign} +{limit:g}"
        if self.measure is Measure.VALUE:
            return f"{sign} {limit:g}"
        return f"of {self.of} {sign} {limit:g}" if self.of else f"ratio {sign} {limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `key` names it in the samples, both delayq's and the raw one."""

    key: str
    title: str
    unit: str
    target: Target | None = None
    alone: bool = False
    """There is nothing raw of this sort."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run of a scenario found. NaN: it could not be measured here."""

    ours: dict[str, float]
    raw: dict[str, float] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    """tasks lost, started twice, or early: all should be 0"""
    notes: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing that is measured, and what the raw figure beside it does."""

    name: str
    about: str
    raw_about: str
    figures: tuple[Figure, ...] | Callable[[Sizes], tuple[Figure, ...]]
    """a function, where the sizes say which there are"""
    run: Callable[[Ground, Sizes], Awaitable[Sample]]
    brief: bool = True
    """False: only run with --full, or when it is named"""

    def figures_at(self, sizes: Sizes) -> tuple[Figure, ...]:
        """The figures of a run with these sizes."""
        return self.figures if isinstance(self.figures, tuple) else self.figures(sizes)
