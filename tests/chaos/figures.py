"""What a run showed, fault by fault: violations, lateness, and how long it took to recover."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.book import Book, Sort, Violation
from tests.chaos.evidence import Evidence, Span

NOWHERE = "(none)"
"""For what happened while no fault was on."""
NO_LATENESS = frozenset({"newcomer", "leaver"})
"""Kinds that wait for a version of the code."""


@dataclass
class Figures:
    """One line of the table."""

    fault: str
    applied: int = 0
    counted: int = 0
    under_way: int = 0
    violations: Counter[Sort] = field(default_factory=Counter)
    lateness_us: list[int] = field(default_factory=list)
    recovery_us: list[int] = field(default_factory=list)
    fewest_running: int | None = None
    due_per_s: list[float] = field(default_factory=list)


def figures(evidence: Evidence, violations: Iterable[Violation]) -> list[Figures]:
    """A line for each fault, in alphabetical order, and one for the time between them."""
    table: dict[str, Figures] = defaultdict(lambda: Figures(""))
    lateness = sorted(_lateness(evidence))
    due_us = [due for due, _ in lateness]
    for span in evidence.spans:
        line = table[span.fault]
        _add_span(line, span)
        first, last = (bisect_right(due_us, us) for us in (span.applied_us, span.recovered_us))
        line.lateness_us += [late for _, late in lateness[first:last]]
        before = bisect_right(due_us, span.applied_us - 2_000_000)
        line.due_per_s.append((first - before) / 2)
    for violation in violations:
        table[_blamed(evidence.spans, violation)].violations[violation.sort] += 1
    calm = [late for due, late in lateness if not _within(evidence.spans, due)]
    table[NOWHERE].lateness_us = calm
    for fault, line in table.items():
        line.fault = fault
    return sorted(table.values(), key=lambda line: (line.fault == NOWHERE, line.fault.lower()))


def _add_span(line: Figures, span: Span) -> None:
    line.applied += 1
    line.counted += span.under_way > 0
    line.under_way += span.under_way
    line.recovery_us.append(span.recovered_us - span.healed_us)
    if line.fewest_running is None or span.running < line.fewest_running:
        line.fewest_running = span.running


def _lateness(evidence: Evidence) -> Iterable[tuple[int, int]]:
    """When the first start of each task was due, by the true clock, and how late it was."""
    book = Book(evidence)
    for starts in book.starts.values():
        start = starts[0]
        if start.kind in NO_LATENESS:
            continue
        # not before its maker was sure of it: the task of a late commit is due when it commits
        made = [
            move.call.sure_us if move.call.sure_us is not None else move.call.asked_us
            for move in book.moves(start.task)
        ]
        known = [at_us for at_us in made if at_us <= start.at_us]
        due_us = book.timeline.due_since(
            start.execute_reading_us, max(known, default=0), start.at_us
        )
        yield due_us, max(0, start.at_us - due_us)


def _within(spans: Sequence[Span], at_us: int) -> bool:
    return any(span.applied_us <= at_us <= span.recovered_us for span in spans)


def _blamed(spans: Sequence[Span], violation: Violation) -> str:
    on = [s for s in spans if s.applied_us <= violation.at_us <= s.recovered_us]
    before = [s for s in spans if s.applied_us <= violation.at_us]
    if on:
        return on[-1].fault
    return max(before, key=lambda s: s.applied_us).fault if before else NOWHERE


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0
