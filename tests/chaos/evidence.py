"""The evidence of a run, as plain data: what callers and handlers wrote down, and what is stored.

Nothing here judges. Instants that end in `_us` are true ones; those of delayq's own columns are
readings of the database's clock and end in `_reading_us`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tests.chaos.timeline import Timeline


class Fate(StrEnum):
    """What became of the transaction that a call was part of."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a customer, with what came back.

    `answer` None: no answer came, so it happened or not. `sure_us`: from when on everybody must
    see what it did; None if nobody was told. `task`: the id that was named, or that came back.
    """

    name: str
    verb: str
    kind: str
    asked_us: int
    answered_us: int | None = None
    sure_us: int | None = None
    answer: str | None = None
    fate: Fate = Fate.COMMITTED
    task: int | None = None
    follow_up: int | None = None
    ref: str | None = None
    key: str | None = None
    on_conflict: str | None = None
    request: str | None = None
    delay_us: int | None = None

    @property
    def told(self) -> bool:
        """True if an answer came and everything that it speaks of is certainly committed."""
        return self.answer is not None and self.sure_us is not None


@dataclass(frozen=True, slots=True)
class Start:
    """A handler began. `execute_reading_us`: when this attempt was to fire, as it was told."""

    task: int
    token: int
    node: int
    attempt: int
    kind: str
    ref: str
    execute_reading_us: int
    at_us: int


@dataclass(frozen=True, slots=True)
class End:
    """A handler ended: `returned`, `already` (effect applied before), or the error's class."""

    task: int
    token: int
    how: str
    at_us: int


@dataclass(frozen=True, slots=True)
class Effect:
    """One committed business row that a handler wrote through `ctx.effect()`."""

    task: int
    token: int
    ref: str
    request: str | None = None
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Lease:
    """One change of a task's ownership, seen by a trigger: `owner` 0 means given back."""

    task: int
    token: int
    owner: int
    seq: int
    execute_reading_us: int = 0
    at_reading_us: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One task in delayq's tables after the run: live, finished or dead."""

    task: int
    kind: str
    state: str
    ref: str | None
    key: str | None = None
    token: int = 0
    node: int | None = None
    attempt: int = 0
    has_grace: bool = False  # it may be missed
    successor: int | None = None
    finished_reading_us: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One fault: from when it was applied until everything had recovered from it.

    `under_way`: tasks that ran where it hit; `running`: tasks that ran anywhere. `error`: what was
    still wrong when nobody waited any longer.
    """

    fault: str
    applied_us: int
    healed_us: int
    recovered_us: int
    under_way: int
    running: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is looked at.

    `effect_kinds` succeed by an effect alone, `may_die` may end as dead tasks. `nodes_left` are the
    rows of nodes that remain although every process has ended in peace. `orders_lost` were
    committed, and the database has forgotten them.
    """

    calls: list[Call] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    nodes_left: list[str] = field(default_factory=list)
    orders_lost: list[str] = field(default_factory=list)
    effect_kinds: frozenset[str] = frozenset()
    may_die: frozenset[str] = frozenset()
    timeline: Timeline = field(default_factory=Timeline)
