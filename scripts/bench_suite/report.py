"""What came out: a table for people, JSON for programs, and whether the targets were met."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .numbers import median
from .scenario import NAN, Figure, Measure, Sample, Scenario, Target

HEADINGS = ("figure", "unit", "delayq", "raw", "ratio", "target", "")


@dataclass(frozen=True, slots=True)
class Line:
    """One figure over all runs."""

    figure: Figure
    ours: tuple[float, ...]
    raw: tuple[float, ...]
    """NaN if there is nothing raw of this sort"""
    base: tuple[float, ...] = ()
    """the figure of delayq that the target names, where it names one"""

    def against(self, target: Target) -> float:
        """The median over the runs of what each run's figure is worth to the target."""
        others = self.base if target.of else self.raw
        return median([target.value(a, b) for a, b in zip(self.ours, others, strict=True)])

    @property
    def ratio(self) -> float:
        """The median of the runs' ratios, delayq / raw."""
        return self.against(Target(Measure.RATIO))

    @property
    def passed(self) -> bool | None:
        """None without a target."""
        target = self.figure.target
        return None if target is None else target.met(self.against(target))


def lines_of(figures: Sequence[Figure], samples: Sequence[Sample]) -> list[Line]:
    """The lines of one scenario."""
    return [_line(figure, samples) for figure in figures]


def _line(figure: Figure, samples: Sequence[Sample]) -> Line:
    base = figure.target.of if figure.target else None
    return Line(
        figure,
        tuple(sample.ours[figure.key] for sample in samples),
        tuple(NAN if figure.alone else sample.raw[figure.key] for sample in samples),
        tuple(sample.ours[base] for sample in samples) if base else (),
    )


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found, and where."""

    facts: dict[str, str]
    scenarios: dict[str, Scenario]
    figures: dict[str, tuple[Figure, ...]]
    samples: dict[str, list[Sample]]
    """by the scenario's name, one for each run"""
    failures: Sequence[str] = ()
    """runs of scenarios that found nothing, and why"""

    @property
    def faults(self) -> list[str]:
        """What was lost, started twice or early, over all runs."""
        return [
            f"{name}, run {run}: {fault} {count}"
            for name, samples in self.samples.items()
            for run, sample in enumerate(samples, 1)
            for fault, count in sample.faults.items()
            if count
        ]

    @property
    def lines(self) -> list[tuple[str, Line]]:
        """All lines with their scenario's name."""
        return [
            (name, line)
            for name, samples in self.samples.items()
            if samples
            for line in lines_of(self.figures[name], samples)
        ]

    @property
    def passed(self) -> bool:
        """All targets met, and nothing went wrong."""
        trouble = self.failures or self.faults
        return not trouble and all(line.passed is not False for _, line in self.lines)

    def as_text(self) -> str:
        """For people."""
        facts = [f"{name}: {value}" for name, value in self.facts.items()]
        rows = [HEADINGS, *(_row(line) for _, line in self.lines)]
        raws = ["", "median (least to most) over the runs; the ratio is the median of their ratios"]
        for name in self.samples:
            scenario = self.scenarios[name]
            raws += [f"{name}: {scenario.about}", f"    raw: {scenario.raw_about}"]
        faults = [f"FAULT {fault}" for fault in self.faults]
        failures = [f"FAILED {failure}" for failure in self.failures]
        return "\n".join([*facts, "", *_columns(rows), *raws, *self._notes(), *faults, *failures])

    def _notes(self) -> list[str]:
        """What the runs noted, each note with what every run found."""
        found: dict[str, list[str]] = {}
        for name, samples in self.samples.items():
            for sample in samples:
                for key, value in sample.notes.items():
                    text = _number(value) if isinstance(value, float) else str(value)
                    found.setdefault(f"{name}: {key}", []).append(text)
        return [
            f"{what} {', '.join(dict.fromkeys(values))}" for what, values in sorted(found.items())
        ]

    def as_json(self) -> str:
        """For programs. What could not be measured is null."""
        document = {
            "facts": self.facts,
            "passed": self.passed,
            "faults": self.faults,
            "failures": list(self.failures),
            "figures": [_record(name, line) for name, line in self.lines],
            "runs": {
                name: [asdict(sample) for sample in samples]
                for name, samples in self.samples.items()
            },
        }
        return json.dumps(_plain(document), indent=1, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _record(name: str, line: Line) -> dict[str, object]:
    target = line.figure.target
    return {
        "scenario": name,
        "figure": line.figure.key,
        "title": line.figure.title,
        "unit": line.figure.unit,
        "delayq": median(line.ours),
        "raw": median(line.raw),
        "ratio": line.ratio,
        "target": None if target is None else str(target),
        "reached": None if target is None else line.against(target),
        "passed": line.passed,
    }


def _row(line: Line) -> tuple[str, ...]:
    target = line.figure.target
    return (
        line.figure.title,
        line.figure.unit,
        _range(line.ours),
        "" if line.figure.alone else _range(line.raw),
        "" if line.figure.alone else f"{line.ratio:.2f}",
        "" if target is None else str(target),
        "" if target is None else _verdict(line, target),
    )


def _verdict(line: Line, target: Target) -> str:
    word = "pass" if line.passed else "FAIL"
    value = line.against(target)
    shown = f"{value:+.2f}" if target.measure is Measure.DIFFERENCE else f"{value:.3g}"
    return f"{word} ({shown})"


def _range(values: Sequence[float]) -> str:
    if len(values) == 1:
        return _number(values[0])
    return f"{_number(median(values))} ({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    drawn = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [drawn[0], "-" * max(map(len, drawn)), *drawn[1:]]
