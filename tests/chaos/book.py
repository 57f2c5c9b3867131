"""The evidence, by task: what the checks look up again and again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.evidence import Call, Effect, End, Evidence, Fate, Lease, Row, Start

SHOWN = 40


class Sort(StrEnum):
    """What can be wrong."""

    LOST = "lost"
    EARLY = "early"
    AFTER_CANCEL = "after cancel"
    TWICE = "effects twice"
    ROLLED_BACK = "rolled back"
    STOLEN = "stolen settle"
    KEYS = "keys"
    WRONG = "wrong answer"
    LEASES = "left lease"
    STUCK = "not recovered"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise, when it showed, and the lines that prove it."""

    sort: Sort
    what: str
    at_us: int
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = [*self.evidence[:SHOWN], *(["…"] if len(self.evidence) > SHOWN else [])]
        lines = "".join(f"\n    {line}" for line in shown)
        return f"{self.sort.upper()}: {self.what}{lines}"


@dataclass(frozen=True, slots=True)
class Move:
    """A call that gave a task an instant, between two readings. `call.told`: it certainly did."""

    call: Call
    lowest_us: int
    highest_us: int | None


FINISHED = ("cancelled", "already_finished", "dead")
"""Answers after which a task is over."""


class Book:
    """The evidence of one run with its indexes."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.timeline = evidence.timeline
        self.rows: dict[int, Row] = {row.task: row for row in evidence.rows}
        self.starts = _by_task(evidence.starts)
        self.ends: dict[int, list[End]] = defaultdict(list)
        for end in evidence.ends:
            self.ends[end.task].append(end)
        self.effects: dict[int, list[Effect]] = defaultdict(list)
        for effect in evidence.effects:
            self.effects[effect.task].append(effect)
        self.leases: dict[int, list[Lease]] = defaultdict(list)
        for lease in sorted(evidence.leases, key=lambda lease: lease.seq):
            self.leases[lease.task].append(lease)
        self._by_ref = {row.ref: row.task for row in evidence.rows if row.ref is not None}
        self._by_ref.update((start.ref, start.task) for start in evidence.starts)
        self.calls: dict[int, list[Call]] = defaultdict(list)
        self.by_key: dict[tuple[str, str], list[Call]] = defaultdict(list)
        for call in evidence.calls:
            if call.fate is not Fate.ROLLED_BACK:
                self._enter(call)

    def _enter(self, call: Call) -> None:
        if call.key is not None:
            self.by_key[call.kind, call.key].append(call)
        for task in {self.task_of(call), call.task} - {None}:
            assert task is not None
            self.calls[task].append(call)

    def task_of(self, call: Call) -> int | None:
        """The task that a call made or was about; of a lost answer, by what it left behind."""
        if call.follow_up is not None:
            return call.follow_up
        if call.task is not None:
            return call.task
        return self._by_ref.get(call.ref) if call.ref is not None else None

    def moves(self, task: int) -> list[Move]:
        """Every call that gave this task an instant, or may have."""
        row = self.rows.get(task)
        calls = [*self.calls.get(task, ())]
        if row is not None and row.key is not None:
            # by key nobody knows which task it was: it may have been this one
            calls += [call for call in self.by_key[row.kind, row.key] if call.task is None]
        return [move for call in calls if (move := self._move(call, task)) is not None]

    def _move(self, call: Call, task: int) -> Move | None:
        if call.delay_us is None or call.answer not in (None, "created", "moved", "retry_moved"):
            return None
        if call.follow_up is not None and call.follow_up != task:
            return None
        lowest_us = self.timeline.earliest(call.asked_us) + call.delay_us
        if call.answered_us is None or call.answer is None:
            return Move(call, lowest_us, None)
        shifts = self.timeline.shifts(call.asked_us, call.answered_us)
        lowest_us = call.asked_us + min(shifts) + call.delay_us
        return Move(call, lowest_us, call.answered_us + max(shifts) + call.delay_us)

    def moves_in_force(self, task: int, at_us: int) -> list[Move]:
        """The moves that may have had the last word when something happened at `at_us`."""
        asked = [move for move in self.moves(task) if move.call.asked_us <= at_us]
        sure = [
            move
            for move in asked
            if move.call.told and move.call.task is not None and _sure(move) < at_us
        ]
        return [
            move
            for move in asked
            if not (move.call.told and any(later.call.asked_us > _sure(move) for later in sure))
        ]

    def tells(self, task: int) -> tuple[str, ...]:
        """Every line about a task, in order."""
        lines: list[tuple[int, str]] = [
            (call.asked_us, f"{call}") for call in self.calls.get(task, ())
        ]
        lines += [(start.at_us, f"{start}") for start in self.starts.get(task, ())]
        lines += [(end.at_us, f"{end}") for end in self.ends.get(task, ())]
        tail = [*self.leases.get(task, ()), *self.effects.get(task, ())]
        row = self.rows.get(task)
        return (
            *(text for _, text in sorted(lines)),
            *(f"{thing}" for thing in tail),
            f"{row}" if row is not None else f"no row of task {task}",
        )


def _sure(move: Move) -> int:
    assert move.call.sure_us is not None
    return move.call.sure_us


def _by_task(starts: Iterable[Start]) -> dict[int, list[Start]]:
    found: dict[int, list[Start]] = defaultdict(list)
    for start in sorted(starts, key=lambda start: start.at_us):
        found[start.task].append(start)
    return found


def schedules(book: Book) -> Iterator[Call]:
    """The schedule calls that were told what became of them."""
    for call in book.evidence.calls:
        if call.verb == "schedule" and call.told and call.fate is Fate.COMMITTED:
            yield call
