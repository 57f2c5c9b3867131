"""The table of a run, and the sentences around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.chaos.book import Sort, Violation
from tests.chaos.evidence import Evidence
from tests.chaos.figures import NOWHERE, Figures, figures, percentile

HEAD = ("fault", "applied", "counted", "under way", "lost", "early", "twice", "after cancel",
        "wrong", "p99 ms", "max ms", "recovery s", "running", "due/s")  # fmt: skip
IN_COLUMNS = (
    (Sort.LOST, Sort.STUCK),
    (Sort.EARLY,),
    (Sort.TWICE, Sort.ROLLED_BACK, Sort.STOLEN),
    (Sort.AFTER_CANCEL,),
    (Sort.WRONG, Sort.KEYS, Sort.LEASES),
)
"""Every sort of violation is in one column."""
SHOWN = 20


def table(evidence: Evidence, violations: Sequence[Violation]) -> str:
    """The table as text: a line a fault, then the sum."""
    lines = figures(evidence, violations)
    rows = [HEAD, *(_row(line) for line in lines), _total(lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    text = []
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        text.append(" | ".join([first.strip().ljust(widths[0]), *rest]))
    text.insert(1, "-+-".join("-" * width for width in widths))
    return "\n".join(text)


def _row(line: Figures) -> tuple[str, ...]:
    hit = line.fault != NOWHERE
    return (
        line.fault,
        str(line.applied) if hit else "",
        str(line.counted) if hit else "",
        str(line.under_way) if hit else "",
        *_violations(line.violations),
        f"{percentile(line.lateness_us, 0.99) / 1000:.0f}",
        f"{max(line.lateness_us, default=0) / 1000:.0f}",
        f"{max(line.recovery_us) / 1e6:.1f}" if hit and line.recovery_us else "",
        str(line.fewest_running) if hit else "",
        f"{min(line.due_per_s):.0f}" if hit and line.due_per_s else "",
    )


def _violations(found: Counter[Sort]) -> list[str]:
    return [str(sum(found[sort] for sort in column)) for column in IN_COLUMNS]


def _total(lines: Sequence[Figures]) -> tuple[str, ...]:
    every = [late for line in lines for late in line.lateness_us]
    found: Counter[Sort] = Counter()
    for line in lines:
        found += line.violations
    return (
        "all",
        str(sum(line.applied for line in lines)),
        str(sum(line.counted for line in lines)),
        str(sum(line.under_way for line in lines)),
        *_violations(found),
        f"{percentile(every, 0.99) / 1000:.0f}",
        f"{max(every, default=0) / 1000:.0f}",
        "",
        "",
        "",
    )


def summary(evidence: Evidence, violations: Sequence[Violation]) -> str:
    """How much there was to look at, and what was wrong with it."""
    states = Counter(row.state for row in evidence.rows)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    answered = Counter(call.answer or "no answer" for call in evidence.calls)
    calls = ", ".join(f"{count} {answer}" for answer, count in answered.most_common())
    text = [
        f"{len(evidence.rows)} tasks ({told})",
        f"{len(evidence.starts)} starts, {len(evidence.effects)} effects",
        f"{len(evidence.calls)} calls ({calls})",
    ]
    text += [str(violation) for violation in violations[:SHOWN]]
    if len(violations) > SHOWN:
        text.append(f"… and {len(violations) - SHOWN} more")
    return "\n".join(text)
