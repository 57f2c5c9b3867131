"""What the starts of a worker come to that was let loose on tasks that were due."""

from __future__ import annotations

from dataclasses import dataclass

from ..processes import BenchError


@dataclass(frozen=True, slots=True)
class Drained:
    """How the tasks of such a worker went."""

    starts_ns: list[int]
    """the first start of each, in order"""
    over_ns: int
    notes: tuple[str, ...]

    @property
    def per_s(self) -> float:
        """Tasks a second over the whole time."""
        return len(self.starts_ns) * 1e9 / (self.over_ns - self.starts_ns[0])

    def quarter_per_s(self, which: int) -> float:
        """Starts a second in one quarter of the tasks, 0 to 3. Raises BenchError if too few."""
        each = len(self.starts_ns) // 4
        if each < 2:
            raise BenchError(f"only {len(self.starts_ns)} started, too few to tell")
        part = self.starts_ns[which * each : (which + 1) * each]
        return (each - 1) * 1e9 / max(1, part[-1] - part[0])


def drained_of(
    starts: list[tuple[int, int]], count: int, over_ns: int, cut_s: float | None
) -> Drained:
    """What these starts come to. Raises BenchError if there are none before the end."""
    first: dict[int, int] = {}
    for number, at_ns in starts:
        if 0 <= number < count and at_ns < over_ns:
            first.setdefault(number, at_ns)
    if not first:
        raise BenchError("its worker started nothing")
    notes = []
    if cut_s is not None:
        notes.append(f"cut off after {cut_s:g} s")
    elif len(first) < count:
        notes.append(f"{count - len(first):,} of {count:,} never started")
    return Drained(sorted(first.values()), over_ns, tuple(notes))
