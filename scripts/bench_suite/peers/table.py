"""What came out: a table for README.md with its footnotes, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..numbers import median
from ..scenario import Figure
from .measures import Measure, Outcome
from .systems import System

NONE = "—"
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """A run that came to nothing."""

    reason: str
    """begins with `failed: `, so that it can stand in a note"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one system over all runs."""

    values: tuple[float, ...]
    note: str
    """what a reader has to know of it; never empty if there is no value"""

    @property
    def median(self) -> float | None:
        """None if it was never found."""
        return median(self.values) if self.values else None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found."""

    facts: Mapping[str, str]
    systems: Sequence[System]
    described: Mapping[str, Facts]
    """by system, what its adapter says; missing for those that could not be run here"""
    absent: Mapping[str, str]
    """by system, why it could not be run here"""
    measures: Sequence[Measure]
    runs: dict[str, dict[str, list[Outcome | Failed]]] = field(default_factory=dict)
    """by measure and system, in the order of the runs"""

    def add(self, measure: str, system: str, found: Outcome | Failed) -> None:
        """One run's finding."""
        self.runs.setdefault(measure, {}).setdefault(system, []).append(found)

    def cell(self, measure: Measure, figure: Figure, system: str) -> Cell:
        """One figure of one system."""
        found = [run for run in self._runs(measure.name, system) if isinstance(run, Outcome)]
        values = tuple(run.figures[figure.key] for run in found if figure.key in run.figures)
        return Cell(values, "; ".join(self._notes(measure.name, figure.key, system)))

    def _notes(self, measure: str, figure: str, system: str) -> list[str]:
        if system in self.absent:
            return [self.absent[system]]
        facts = self.described.get(system, {})
        if measure in facts.get("cannot", {}):
            return [facts["cannot"][measure]]
        runs = self._runs(measure, system)
        if not runs:
            return ["not run"]
        notes = [facts["remarks"][measure]] if measure in facts.get("remarks", {}) else []
        for run in runs:
            notes += [run.reason] if isinstance(run, Failed) else run.notes.get(figure, ())
        return list(dict.fromkeys(notes))

    def _runs(self, measure: str, system: str) -> list[Outcome | Failed]:
        return self.runs.get(measure, {}).get(system, [])

    @property
    def complete(self) -> bool:
        """True if delayq itself was measured without a failure."""
        ours = [found for by_system in self.runs.values() for found in by_system.get("delayq", [])]
        return not any(isinstance(found, Failed) for found in ours)

    def as_text(self) -> str:
        """For README.md: a Markdown table and what is to be known of it."""
        footnotes: dict[str, int] = {}
        rows = [
            _row(
                [figure.title, *(self._drawn(measure, figure, s, footnotes) for s in self.systems)]
            )
            for measure in self.measures
            for figure in measure.figures
        ]
        head = _row(["", *(system.title for system in self.systems)])
        rule = "|---" * (1 + len(self.systems)) + "|"
        lines = [head, rule, *rows, ""]
        lines += [f"[{number}] {note}" for note, number in footnotes.items()]
        lines += ["", *self._abouts(), "", *(f"* {line}" for line in self._settings()), ""]
        return "\n".join(lines + [f"{name}: {value}" for name, value in self.facts.items()])

    def _drawn(
        self, measure: Measure, figure: Figure, system: System, footnotes: dict[str, int]
    ) -> str:
        cell = self.cell(measure, figure, system.name)
        shown = NONE if cell.median is None else shown_as(cell.median, figure.unit)
        if not cell.note:
            return shown
        # A note may hold for several systems, so it says whose it is only where it has to.
        note = f"{system.title}: {cell.note}"
        return f"{shown} [{footnotes.setdefault(note, len(footnotes) + 1)}]"

    def _abouts(self) -> list[str]:
        return [f"* {measure.name}: {measure.about}" for measure in self.measures]

    def _settings(self) -> list[str]:
        return [
            f"{system.title} ({versions_of(self.described[system.name])}):"
            f" {self.described[system.name]['settings']}."
            f" Documented in: {self.described[system.name]['documented']}"
            for system in self.systems
            if system.name in self.described
        ]

    def as_json(self) -> str:
        """For programs."""
        return json.dumps(
            {
                "facts": dict(self.facts),
                "systems": {system.name: self._system(system) for system in self.systems},
                "figures": [
                    self._record(measure, figure)
                    for measure in self.measures
                    for figure in measure.figures
                ],
            },
            indent=1,
            ensure_ascii=False,
        )

    def _system(self, system: System) -> dict[str, object]:
        facts = dict(self.described.get(system.name, {}))
        return {**facts, "absent": self.absent.get(system.name)}

    def _record(self, measure: Measure, figure: Figure) -> dict[str, object]:
        cells = {system.name: self.cell(measure, figure, system.name) for system in self.systems}
        return {
            "measure": measure.name,
            "figure": figure.key,
            "title": figure.title,
            "unit": figure.unit,
            "medians": {name: cell.median for name, cell in cells.items()},
            "runs": {name: list(cell.values) for name, cell in cells.items()},
            "notes": {name: cell.note for name, cell in cells.items() if cell.note},
        }


def versions_of(facts: Facts) -> str:
    """The system's version, then what it stands on."""
    own, *others = [f"{name} {version}" for name, version in facts["versions"].items()]
    return ", ".join([own.split()[-1], *others, f"Python {facts['python']}"])


def shown_as(value: float, unit: str) -> str:
    """As people read it; a rate's unit is in its title."""
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return number if unit == "/s" else f"{number} {unit}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
