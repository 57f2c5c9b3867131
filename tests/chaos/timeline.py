"""What the database's clock showed at each true instant, given that somebody stepped it.

delayq takes all its time from one SQL function, which the chaos moves by hours. A step takes
effect at some moment between its statement and the answer, so a question about that while has two
answers; whoever asks takes the one that accuses nobody falsely. A transaction that was open then
may go by the old function for a while longer: a real clock has no such memory, so nobody is
accused for it either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

OLD_READINGS_US = 500_000
"""How long after a step an open transaction may still see the clock as it was."""


@dataclass(frozen=True, slots=True)
class Step:
    """The clock was moved between two true instants; it then shows `shift_us` more than is true."""

    begun_us: int
    done_us: int
    shift_us: int


class Timeline:
    """Readings of the database's clock. Without steps it is true."""

    def __init__(self, steps: Sequence[Step] = ()) -> None:
        self._steps = sorted(steps, key=lambda step: step.begun_us)

    def shifts(self, from_us: int, to_us: int) -> list[int]:
        """Every shift that may have been in force at some moment from `from_us` to `to_us`."""
        found = [0] if not self._steps or from_us <= self._over_us(0) else []
        for number, step in enumerate(self._steps):
            last = number + 1 == len(self._steps)
            if step.begun_us <= to_us and (last or from_us <= self._over_us(number + 1)):
                found.append(step.shift_us)
        return found

    def latest(self, at_us: int, since_us: int | None = None) -> int:
        """The highest reading that anybody can have seen from `since_us` to `at_us`."""
        return at_us + max(self.shifts(at_us if since_us is None else since_us, at_us))

    def earliest(self, at_us: int) -> int:
        """The lowest reading that anybody can have seen at `at_us`."""
        return at_us + min(self.shifts(at_us, at_us))

    def due_since(self, reading_us: int, from_us: int, at_us: int) -> int:
        """Since when, without a break, the clock had shown that or more at `at_us`.

        Not before `from_us`. What is due in an hour again, since the clock was put back, is not
        late for having been due before. `at_us` if the clock does not show it then.
        """
        done = [step.done_us for step in self._steps if from_us < step.done_us < at_us]
        edges = [from_us, *done, at_us]
        since_us: int | None = None
        for begun_us, over_us in pairwise(edges):
            due_us = reading_us - self._shift_after(begun_us)
            if due_us > over_us:
                since_us = None
            elif due_us > begun_us or since_us is None:
                since_us = max(due_us, begun_us)
        return at_us if since_us is None else since_us

    def true_latest(self, reading_us: int) -> int:
        """The last true instant at which the clock can have shown exactly that."""
        found = [
            reading_us - shift_us
            for shift_us in {0, *(step.shift_us for step in self._steps)}
            if shift_us in self.shifts(reading_us - shift_us, reading_us - shift_us)
        ]
        return max(found, default=reading_us)

    def _over_us(self, number: int) -> int:
        """When nobody sees any more what was before that step."""
        return self._steps[number].done_us + OLD_READINGS_US

    def _shift_after(self, at_us: int) -> int:
        past = [step.shift_us for step in self._steps if step.done_us <= at_us]
        return past[-1] if past else 0
