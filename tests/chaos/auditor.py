"""Compares the three witnesses of a run, and reports every promise that was broken.

The ledger (what callers were told and handlers did), the business tables (effects and orders) and
delayq's own tables do not know each other. Nothing here touches a database or a file.
"""

from __future__ import annotations

from collections import Counter

from tests.chaos import answers, promises
from tests.chaos.book import Book, Sort, Violation
from tests.chaos.evidence import Evidence, Span

CHECKS = (
    promises.lost,
    promises.early,
    promises.after_cancel,
    promises.twice,
    promises.rolled_back,
    promises.stolen,
    promises.left_leases,
    answers.keys,
    answers.answers,
    answers.requests,
)


def audit(evidence: Evidence) -> list[Violation]:
    """Every violation, in the order of the checks. None: every promise was kept."""
    book = Book(evidence)
    found = [violation for check in CHECKS for violation in check(book)]
    return found + [_stuck(span) for span in evidence.spans if span.error is not None]


def _stuck(span: Span) -> Violation:
    return Violation(Sort.STUCK, f"{span.fault}: {span.error}", span.healed_us)


def counted(violations: list[Violation]) -> Counter[Sort]:
    """How many there are of each sort."""
    return Counter(violation.sort for violation in violations)
