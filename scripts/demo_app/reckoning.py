"""What happened, from three witnesses that do not know each other.

The `orders` table (what the business sees), delayq's tables (what the scheduler says) and the
ledger (what handlers wrote outside their transactions). Nothing here was counted while the demo
ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from delayq.bridge import AnyConnection

from . import ledger
from .nodes import KIND, Held


@dataclass(frozen=True, slots=True)
class Order:
    """One row of `orders`."""

    id: int
    state: str
    expires_us: int
    task: int
    moves: int
    expirations: int


@dataclass(frozen=True, slots=True)
class Ended:
    """One task as delayq's history has it."""

    task: int
    state: str
    due_us: int
    started_us: int | None
    lateness_us: int | None
    attempt: int
    node: int | None


@dataclass(frozen=True, slots=True)
class Restart:
    """The node that was sent SIGTERM: what it held, and how it left."""

    name: str
    held: Held
    status: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is looked at. `unfinished`: tasks that delayq still has, pending or dead."""

    orders: list[Order]
    history: list[Ended]
    unfinished: list[int]
    entries: list[ledger.Entry]
    restart: Restart


_ORDERS = """
    select id, state, delayq.micros(expires_at) as expires_us, task_id as task, moves, expirations
      from orders order by id
"""
_HISTORY = """
    select id as task, state, delayq.micros(due_at) as due_us,
           delayq.micros(started_at) as started_us, lateness_us, attempt, node
      from delayq.task_history where kind = $1 order by id
"""
_UNFINISHED = "select id from delayq.tasks union all select id from delayq.dead_tasks"


async def gather(conn: AnyConnection, path: Path, restart: Restart) -> Evidence:
    return Evidence(
        [Order(*row) for row in await conn.fetch(_ORDERS)],
        [Ended(*row) for row in await conn.fetch(_HISTORY, KIND)],
        [row["id"] for row in await conn.fetch(_UNFINISHED)],
        ledger.read(path),
        restart,
    )


@dataclass(frozen=True, slots=True)
class Reckoning:
    """The figures of the table. Lists hold order numbers; all but the first four stay empty."""

    scheduled: list[int]
    fired: list[int]
    cancelled: list[int]
    moved: list[int]
    lateness_ms: list[float]
    tried_again: list[int]
    lost: list[int] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    fired_though_cancelled: list[int] = field(default_factory=list)
    not_moved: list[int] = field(default_factory=list)
    finished_by_leaver: int = 0
    interrupted: int = 0
    taken_over: int = 0
    paid_meanwhile: int = 0
    status: int = 0

    def faults(self) -> list[str]:
        """What is wrong with the table, in sentences. None: every promise was kept."""
        found = [
            ("lost", self.lost),
            ("fired twice", self.twice),
            ("fired early", self.early),
            ("fired though cancelled", self.fired_though_cancelled),
            ("moved, and fired at another instant", self.not_moved),
        ]
        faults = [f"{what}: orders {orders}" for what, orders in found if orders]
        if len(self.scheduled) != len(self.fired) + len(self.cancelled):
            faults.append("fired and cancelled do not add up to scheduled")
        if not (self.scheduled and self.fired and self.cancelled and self.moved):
            faults.append("nothing was scheduled, fired, cancelled or moved")
        return faults + self._faults_of_the_restart()

    def _faults_of_the_restart(self) -> list[str]:
        checks = [
            (self.status == 0, f"the node that was replaced left with status {self.status}"),
            (self.finished_by_leaver > 0, "the node that was replaced finished nothing"),
            (self.interrupted == 0, f"{self.interrupted} running tasks were interrupted"),
            (self.taken_over > 0, "nothing that it held was fired by another node"),
        ]
        return [fault for holds, fault in checks if not holds]


def reckon(evidence: Evidence) -> Reckoning:
    orders, entries = evidence.orders, evidence.entries
    by_task = {ended.task: ended for ended in evidence.history}
    ends = {order.id: by_task[order.task] for order in orders if order.task in by_task}
    expired = Counter(entry.order for entry in entries if entry.what == ledger.EXPIRED)
    started = {entry.order for entry in entries if entry.what == ledger.STARTED}
    succeeded = [ended for ended in ends.values() if ended.state == "succeeded"]
    held, restart = evidence.restart.held, evidence.restart
    moved = [order for order in orders if order.moves]
    return Reckoning(
        scheduled=[order.id for order in orders],
        fired=[n for n, ended in ends.items() if ended.state == "succeeded"],
        cancelled=[n for n, ended in ends.items() if ended.state == "cancelled"],
        moved=[order.id for order in moved],
        lateness_ms=[(ended.lateness_us or 0) / 1000 for ended in succeeded],
        tried_again=[n for n, ended in ends.items() if ended.attempt > 1],
        lost=[order.id for order in orders if is_lost(order, ends.get(order.id), expired)],
        twice=sorted(twice(evidence, expired)),
        early=sorted({*early_by_history(ends), *early_by_ledger(entries)}),
        fired_though_cancelled=[o.id for o in orders if o.state == "paid" and o.id in started],
        not_moved=[o.id for o in moved if o.id in ends and ends[o.id].due_us != o.expires_us],
        finished_by_leaver=sum(ran_on(by_task, task, held.node) for task in held.running),
        interrupted=sum(not ran_on(by_task, task, held.node) for task in held.running),
        taken_over=sum(fired_elsewhere(by_task, task, held.node) for task in held.pending),
        paid_meanwhile=sum(was_cancelled(by_task, task) for task in held.pending),
        status=restart.status,
    )


def is_lost(order: Order, ended: Ended | None, expired: Counter[int]) -> bool:
    """True unless all three tell the same: paid and cancelled, or expired and succeeded."""
    if ended is None:
        return True
    if order.state == "paid":
        return ended.state != "cancelled"
    told = expired[order.id] > 0 and order.expirations > 0
    return not (order.state == "expired" and ended.state == "succeeded" and told)


def twice(evidence: Evidence, expired: Counter[int]) -> set[int]:
    """Orders whose effect came twice, that ended twice, or an attempt of which began twice."""
    numbers = {order.task: order.id for order in evidence.orders}
    ended = Counter(numbers.get(ended.task, 0) for ended in evidence.history)
    ended.update(numbers.get(task, 0) for task in evidence.unfinished)
    attempts = Counter(
        (entry.order, entry.attempt) for entry in evidence.entries if entry.what == ledger.STARTED
    )
    return {
        *(order.id for order in evidence.orders if order.expirations > 1),
        *more_than_once(ended),
        *more_than_once(expired),
        *(order for order, _ in (key for key, count in attempts.items() if count > 1)),
    }


def more_than_once(counted: Counter[int]) -> Iterable[int]:
    return (order for order, count in counted.items() if count > 1)


def early_by_history(ends: dict[int, Ended]) -> Iterable[int]:
    for order, ended in ends.items():
        too_soon = ended.started_us is not None and ended.started_us < ended.due_us
        if too_soon or (ended.lateness_us or 0) < 0:
            yield order


def early_by_ledger(entries: list[ledger.Entry]) -> Iterable[int]:
    """Both clocks are this computer's, so that the ledger's may be held against the database's."""
    return (entry.order for entry in entries if entry.at_us < entry.due_us)


def ran_on(history: dict[int, Ended], task: int, node: int) -> bool:
    return task in history and history[task].node == node


def fired_elsewhere(history: dict[int, Ended], task: int, node: int) -> bool:
    ended = history.get(task)
    return ended is not None and ended.state == "succeeded" and ended.node != node


def was_cancelled(history: dict[int, Ended], task: int) -> bool:
    return task in history and history[task].state == "cancelled"


def table_of(told: Reckoning, restart: Restart) -> list[tuple[str, str, str]]:
    """Name, value, remark."""
    late = told.lateness_ms or [0.0]
    held = restart.held
    finished = f"{told.finished_by_leaver} finished by it"
    elsewhere = f"{told.taken_over} fired by the others, {told.paid_meanwhile} paid"
    return [
        ("scheduled", str(len(told.scheduled)), ""),
        ("fired", str(len(told.fired)), f"{len(told.tried_again)} of them at the second attempt"),
        ("cancelled", str(len(told.cancelled)), "paid"),
        ("moved", str(len(told.moved)), "given more time"),
        ("lateness, median", f"{median(late):.1f} ms", ""),
        ("lateness, maximum", f"{max(late):.1f} ms", ""),
        ("lost", str(len(told.lost)), ""),
        ("twice", str(len(told.twice)), ""),
        ("early", str(len(told.early)), ""),
        (f"{restart.name} at SIGTERM", f"{len(held.running)} running", finished),
        ("", f"{len(held.pending)} pending", elsewhere),
    ]
