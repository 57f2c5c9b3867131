"""The auditor finds what was planted, each sort in a history that is otherwise clean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.auditor import audit, counted
from tests.chaos.book import Sort
from tests.chaos.evidence import Call, Effect, End, Evidence, Fate, Lease, Row, Span, Start
from tests.chaos.figures import NOWHERE, figures
from tests.chaos.gather import calls_of, orders_lost
from tests.chaos.ledger import Line
from tests.chaos.report import IN_COLUMNS, table
from tests.chaos.timeline import Step, Timeline

S = 1_000_000
HOUR = 3600 * S
T0 = 1_800_000_000 * S
NODE, OTHER = 11, 12


class History:
    """A small run, to be spoilt. Instants are seconds after T0."""

    def __init__(self, steps: list[Step] | None = None) -> None:
        self.calls: list[Call] = []
        self.starts: list[Start] = []
        self.ends: list[End] = []
        self.effects: list[Effect] = []
        self.leases: list[Lease] = []
        self.rows: list[Row] = []
        self.spans: list[Span] = []
        self.orders_lost: list[str] = []
        self.nodes_left: list[str] = []
        self.timeline = Timeline(steps or [])

    def asked(self, verb: str, at_s: float, answer: str | None, **fields: object) -> Call:
        """A call that took a tenth of a second."""
        at_us = T0 + round(at_s * S)
        base = Call(f"c{len(self.calls)}", verb, "work", at_us)
        if answer is not None:
            base = replace(base, answered_us=at_us + S // 10, sure_us=at_us + S // 10)
        call = replace(base, answer=answer, **fields)  # type: ignore[arg-type]  # fields by name
        self.calls.append(call)
        return call

    def made(self, task: int, at_s: float, delay_s: float, **fields: object) -> Call:
        """A task was scheduled."""
        given: dict[str, object] = {"task": task, "ref": f"r{task}", "delay_us": round(delay_s * S)}
        return self.asked("schedule", at_s, "created", **given | fields)

    def leased(self, task: int, token: int, owner: int = NODE) -> None:
        """Somebody took it, or (owner 0) gave it back."""
        self.leases.append(Lease(task, token, owner, len(self.leases)))

    def began(self, task: int, at_s: float, due_s: float, **fields: object) -> Start:
        """A handler started, under a lease."""
        start = Start(task, 100 + task, NODE, 1, "work", f"r{task}", T0 + round(due_s * S),
                      T0 + round(at_s * S))  # fmt: skip
        start = replace(start, **fields)  # type: ignore[arg-type]  # fields by name
        self.starts.append(start)
        self.leased(task, start.token, start.node)
        return start

    def returned(self, start: Start, after_s: float = 0.1) -> None:
        """The handler came to its end."""
        self.ends.append(End(start.task, start.token, "returned", start.at_us + round(after_s * S)))

    def over(self, task: int, state: str = "succeeded", at_s: float = 3, **fields: object) -> None:
        """The task's row."""
        given: dict[str, object] = {"token": 100 + task, "node": NODE, "attempt": 1}
        row = Row(task, "work", state, f"r{task}", finished_reading_us=T0 + round(at_s * S))
        self.rows.append(replace(row, **given | fields))  # type: ignore[arg-type]  # fields by name

    def ran(self, task: int, kind: str = "work", key: str | None = None) -> None:
        """A task that was made at 0, due at 1, and did well at 1.01."""
        self.made(task, 0, 1, kind=kind, key=key)
        start = self.began(task, 1.05, 1.05, kind=kind)
        self.returned(start)
        self.over(task, kind=kind, key=key)

    def charged(self, task: int, **fields: object) -> None:
        """The same, with an effect."""
        self.ran(task, kind="charge")
        self.effects.append(Effect(task, 100 + task, f"r{task}", **fields))  # type: ignore[arg-type]  # fields by name

    def cancelled(self, task: int, at_s: float = 0.5) -> None:
        """A task that was made at 0 and cancelled by its id."""
        self.made(task, 0, 1)
        self.asked("cancel", at_s, "cancelled", task=task)
        self.over(task, "cancelled", at_s + 0.05, token=0, node=None)

    def evidence(self) -> Evidence:
        """What the auditor gets."""
        return Evidence(
            self.calls, self.starts, self.ends, self.effects, self.leases, self.rows, self.spans,
            self.nodes_left, self.orders_lost, frozenset({"charge"}), frozenset({"doomed"}),
            self.timeline,
        )  # fmt: skip

    def found(self) -> Counter[Sort]:
        """What the auditor says."""
        return counted(audit(self.evidence()))


def clean() -> History:
    """Something of everything, and nothing wrong."""
    history = History()
    _add_plain_ones(history)
    _add_odd_ones(history)
    return history


def _add_plain_ones(history: History) -> None:
    history.ran(1)
    history.charged(2)
    history.cancelled(3)
    history.ran(4, key="k")
    history.asked("cancel", 5, "not_found", key="k")
    history.asked("cancel", 5, "already_finished", task=1)
    # failed once, then did well under another lease
    history.made(5, 0, 1)
    first = history.began(5, 1.05, 1.05)
    history.ends.append(End(5, first.token, "RuntimeError", first.at_us + 1))
    history.leased(5, first.token, 0)
    history.returned(history.began(5, 1.3, 1.2, token=205, node=OTHER, attempt=2))
    history.over(5, token=205, node=OTHER)
    # moved by its id; the answer of a second move was lost
    history.made(6, 0, 1)
    history.asked("reschedule", 0.2, "moved", task=6, delay_us=2 * S)
    history.asked("reschedule", 0.5, None, task=6, delay_us=9 * S)
    history.returned(history.began(6, 2.3, 2.25))
    history.over(6)


def _add_odd_ones(history: History) -> None:
    # its node died before the handler began; the successor takes its place, and the key
    history.made(12, 0, 1, key="s")
    history.leased(12, 112)
    history.made(12, 1.1, 1, key="s", ref="r13", follow_up=13, on_conflict="replace")
    history.leased(12, 112, 0)
    history.over(12, "cancelled", 4, key="s", successor=13)
    history.asked("schedule", 4.1, "found", task=13, key="s", delay_us=S)
    history.returned(history.began(13, 4.3, 2.15, ref="r13"))
    history.over(13, at_s=4.4, key="s")
    history.asked("cancel", 5, "not_found", key="s")
    # rolled back, and never seen again
    history.asked("schedule", 0, "created", task=7, ref="r7", fate=Fate.ROLLED_BACK, sure_us=None)
    # asked to end while it ran
    history.made(8, 0, 1)
    history.began(8, 1.05, 1.05)
    history.asked("cancel", 1.2, "cancel_requested", task=8)
    history.over(8, "cancelled", 1.4)
    # the same request twice, and its effect once
    for at_s, answer in ((0, "created"), (2, "found")):
        history.asked("schedule", at_s, answer, task=9, ref=f"r9-{at_s}", kind="charge",
                      request="q", delay_us=S)  # fmt: skip
    history.returned(history.began(9, 1.05, 1.05, kind="charge", ref="r9-0"))
    history.effects.append(Effect(9, 109, "r9-0", "q"))
    history.over(9, kind="charge", ref="r9-0")
    # dead, as its kind may be; missed, as its grace allows
    history.made(10, 0, 1, kind="doomed")
    history.began(10, 1.05, 1.05, kind="doomed")
    history.over(10, "dead", kind="doomed")
    history.made(11, 0, 1)
    history.over(11, "missed", has_grace=True)


def test_a_clean_history_gives_zeros() -> None:
    assert audit(clean().evidence()) == []


Spoil = Callable[[History], None]
PLANTED: list[tuple[str, Sort, Spoil]] = []


def planted(sort: Sort) -> Callable[[Spoil], Spoil]:
    """A way of spoiling a clean history, and what it is to be called."""

    def register(spoil: Spoil) -> Spoil:
        PLANTED.append((spoil.__name__, sort, spoil))
        return spoil

    return register


@planted(Sort.LOST)
def a_task_is_nowhere(history: History) -> None:
    history.made(20, 0, 1)


@planted(Sort.LOST)
def a_task_still_waits(history: History) -> None:
    history.made(20, 0, 1)
    history.over(20, "pending", token=0)


@planted(Sort.LOST)
def a_task_succeeded_and_nobody_ran_it(history: History) -> None:
    history.made(20, 0, 1)
    history.leased(20, 120)
    history.began(20, 1.2, 1.1)
    history.over(20)


@planted(Sort.LOST)
def an_effect_is_missing(history: History) -> None:
    history.ran(20, kind="charge")


@planted(Sort.LOST)
def a_task_was_cancelled_and_nobody_asked(history: History) -> None:
    history.made(20, 0, 1)
    history.over(20, "cancelled", token=0)


@planted(Sort.LOST)
def a_task_was_cancelled_by_what_was_rolled_back(history: History) -> None:
    history.made(20, 0, 1)
    history.asked("cancel", 0.5, "cancelled", task=20, fate=Fate.ROLLED_BACK, sure_us=None)
    history.over(20, "cancelled", token=0)


@planted(Sort.LOST)
def a_task_was_missed_without_a_grace(history: History) -> None:
    history.made(20, 0, 1)
    history.over(20, "missed")


@planted(Sort.LOST)
def a_task_died_that_cannot_fail(history: History) -> None:
    history.made(20, 0, 1)
    history.began(20, 1.2, 1.1)
    history.over(20, "dead")


@planted(Sort.LOST)
def a_task_that_was_made_under_a_lost_answer_still_waits(history: History) -> None:
    history.asked("schedule", 0, None, ref="r20", delay_us=S, fate=Fate.UNKNOWN)
    history.over(20, "pending", token=0)


@planted(Sort.LOST)
def a_committed_transaction_is_forgotten(history: History) -> None:
    history.orders_lost.append("tx")


@planted(Sort.LOST)
def a_follow_up_of_an_effect_is_missing(history: History) -> None:
    history.charged(20, follows=True)


@planted(Sort.EARLY)
def a_handler_began_before_its_instant(history: History) -> None:
    history.made(20, 0, 1)
    history.returned(history.began(20, 1.04, 1.05))
    history.over(20)


@planted(Sort.EARLY)
def a_handler_began_before_where_it_was_moved(history: History) -> None:
    history.made(20, 0, 1)
    history.asked("reschedule", 0.2, "moved", task=20, delay_us=9 * S)
    history.returned(history.began(20, 1.2, 1.05))
    history.over(20)


@planted(Sort.EARLY)
def a_retry_began_before_its_instant(history: History) -> None:
    history.ran(20)
    history.returned(history.began(20, 1.3, 1.4, token=220, attempt=2))
    history.rows[-1] = replace(history.rows[-1], token=220)


@planted(Sort.AFTER_CANCEL)
def a_cancelled_task_began(history: History) -> None:
    history.cancelled(20)
    history.began(20, 1.05, 1.05)


@planted(Sort.AFTER_CANCEL)
def a_task_that_was_cancelled_by_its_key_began(history: History) -> None:
    history.made(20, 0, 1, key="k2")
    history.asked("cancel", 0.5, "cancelled", key="k2")
    history.over(20, "cancelled", 0.55, token=0, node=None, key="k2")
    history.began(20, 1.05, 1.05)


@planted(Sort.TWICE)
def an_effect_is_there_twice(history: History) -> None:
    history.charged(20)
    history.effects.append(history.effects[-1])


@planted(Sort.TWICE)
def an_effect_was_written_under_another_lease(history: History) -> None:
    history.charged(20)
    history.effects[-1] = replace(history.effects[-1], token=999)
    history.ends.append(End(20, 120, "already", T0 + 2 * S))  # not lost, then


@planted(Sort.TWICE)
def the_effect_of_a_request_is_there_twice(history: History) -> None:
    history.charged(20, request="twice")
    history.charged(21, request="twice")


@planted(Sort.TWICE)
def a_task_is_in_two_places(history: History) -> None:
    history.ran(20)
    history.rows.append(history.rows[-1])


@planted(Sort.ROLLED_BACK)
def a_task_of_a_rolled_back_transaction_ran(history: History) -> None:
    history.made(20, 0, 1, fate=Fate.ROLLED_BACK, sure_us=None)
    history.returned(history.began(20, 1.2, 1.1))
    history.over(20)


@planted(Sort.ROLLED_BACK)
def a_follow_up_came_of_an_effect_that_is_not_there(history: History) -> None:
    history.made(20, 0, 1, ref="r20.next")
    history.returned(history.began(20, 1.2, 1.1, ref="r20.next"))
    history.over(20, ref="r20.next")


@planted(Sort.STOLEN)
def a_task_was_settled_under_a_lease_that_another_one_followed(history: History) -> None:
    history.ran(20)
    history.leased(20, 120, 0)
    history.leased(20, 220, OTHER)


@planted(Sort.STOLEN)
def a_task_was_settled_under_a_lease_that_was_given_back(history: History) -> None:
    history.ran(20)
    history.leased(20, 120, 0)


@planted(Sort.STOLEN)
def a_task_was_settled_by_a_node_that_did_not_run_it(history: History) -> None:
    history.ran(20)
    history.rows[-1] = replace(history.rows[-1], node=OTHER)


@planted(Sort.LEASES)
def a_node_left_its_row(history: History) -> None:
    history.nodes_left.append("n1 active")


@planted(Sort.KEYS)
def a_key_had_two_tasks(history: History) -> None:
    history.ran(20, key="k3")
    history.made(21, 0.3, 1, key="k3")
    history.returned(history.began(21, 1.5, 1.35))
    history.over(21, key="k3")


@planted(Sort.KEYS)
def the_wrong_task_was_named_as_the_holder_of_a_key(history: History) -> None:
    history.ran(20, key="k3")
    history.asked("schedule", 0.5, "found", task=1, key="k3", delay_us=S)


@planted(Sort.KEYS)
def a_holder_was_named_that_had_been_cancelled(history: History) -> None:
    history.cancelled(20)
    history.rows[-1] = replace(history.rows[-1], key="k3")
    history.asked("schedule", 2, "found", task=20, key="k3", delay_us=S)


@planted(Sort.KEYS)
def a_cancel_by_key_did_not_find_the_holder(history: History) -> None:
    history.ran(20, key="k3")
    history.asked("cancel", 0.5, "not_found", key="k3")


@planted(Sort.KEYS)
def a_key_was_said_to_be_taken_that_nobody_had(history: History) -> None:
    history.asked("schedule", 0.5, "key_taken", key="k9")


@planted(Sort.WRONG)
def a_task_fired_for_an_instant_that_nobody_gave_it(history: History) -> None:
    history.made(20, 0, 1)
    history.returned(history.began(20, 2, 1.5))
    history.over(20)


@planted(Sort.WRONG)
def a_cancel_was_said_to_have_worked(history: History) -> None:
    history.ran(20)
    history.asked("cancel", 1.2, "cancelled", task=20)


@planted(Sort.WRONG)
def a_task_was_retried_although_its_cancel_was_requested(history: History) -> None:
    history.ran(20)
    history.asked("cancel", 1.1, "cancel_requested", task=20)
    history.began(20, 1.4, 1.3, token=220, attempt=2)
    history.returned(history.began(20, 1.6, 1.5, token=320, attempt=3))
    history.rows[-1] = replace(history.rows[-1], token=320)


@planted(Sort.WRONG)
def a_task_was_said_to_be_over_that_had_not_begun(history: History) -> None:
    history.ran(20)
    history.leases.pop()
    history.asked("cancel", 0.5, "already_finished", task=20)


@planted(Sort.WRONG)
def a_task_was_not_found_that_had_been_made(history: History) -> None:
    history.ran(20)
    history.asked("reschedule", 0.5, "not_found", task=20, delay_us=S)


@planted(Sort.WRONG)
def a_task_was_said_to_be_dead_that_did_well(history: History) -> None:
    history.ran(20)
    history.asked("reschedule", 2, "dead", task=20, delay_us=S)


@planted(Sort.WRONG)
def one_request_was_answered_with_two_tasks(history: History) -> None:
    for task in (20, 21):
        history.ran(task)
        history.calls[-1] = replace(history.calls[-1], request="again")


@planted(Sort.STUCK)
def a_fault_was_not_recovered_from(history: History) -> None:
    history.spans.append(Span("SIGKILL", T0, T0, T0 + 60 * S, 5, 60, "7 overdue"))


@pytest.mark.parametrize(("name", "sort", "spoil"), PLANTED, ids=[name for name, _, _ in PLANTED])
def test_what_was_planted_is_found(name: str, sort: Sort, spoil: Spoil) -> None:
    history = clean()
    spoil(history)
    found = audit(history.evidence())
    assert sort in counted(found), f"{name}: {found}"
    assert all(str(violation) for violation in found)


def test_a_lease_that_is_left_is_found() -> None:
    history = clean()
    history.made(20, 0, 1)
    history.began(20, 1.2, 1.1)
    history.over(20, "running")
    found = history.found()
    assert found[Sort.LEASES] == 1
    assert found[Sort.LOST] == 1  # it did not end, either


def test_every_sort_can_be_planted_and_is_in_one_column() -> None:
    assert {sort for _, sort, _ in PLANTED} == {*Sort}
    assert sorted(sort for column in IN_COLUMNS for sort in column) == sorted(Sort)


# --- the clock of the database -----------------------------------------------------------------


def test_a_step_of_the_databases_clock_makes_nobody_early_or_late() -> None:
    ahead = Step(T0 + 5 * S, T0 + 5 * S + 1000, HOUR)
    back = Step(T0 + 8 * S, T0 + 8 * S + 1000, 0)
    history = History([ahead, back])
    # due in 20 minutes, it fires when the clock leaps; due in an hour, when it is there again
    history.made(1, 0, 1200)
    history.returned(history.began(1, 5.2, 1200.05))
    history.over(1, at_s=3605.4)
    history.made(2, 6, 3)
    history.returned(history.began(2, 3609.2, 3609.1))
    history.over(2, at_s=3609.4)
    assert history.found() == Counter()
    (line,) = figures(history.evidence(), [])
    assert line.lateness_us == [199_000, 100_000]


def test_a_task_that_fires_before_the_stepped_clock_says_so_is_early() -> None:
    history = History([Step(T0 + 5 * S, T0 + 5 * S + 1000, -HOUR)])
    history.made(1, 0, 8)
    history.returned(history.began(1, 8.1, 8.05))
    history.over(1, at_s=9)
    assert history.found() == Counter({Sort.EARLY: 1})


@pytest.mark.parametrize("moved_again", [False, True])
def test_a_retry_after_the_clock_was_set_back_has_an_instant_of_its_own(moved_again: bool) -> None:
    history = History([Step(T0, T0 + 1000, HOUR), Step(T0 + 8 * S, T0 + 8 * S + 1000, 0)])
    history.made(1, 2, 3)
    first = history.began(1, 5.2, 3605.1)
    history.ends.append(End(1, first.token, "RuntimeError", first.at_us + S))
    if moved_again:  # since then it must wait for what it was told
        history.asked("reschedule", 10, "moved", task=1, delay_us=60 * S)
    history.returned(history.began(1, 12.5, 12.4, attempt=2))
    history.over(1, at_s=13, attempt=2)
    assert history.found()[Sort.EARLY] == int(moved_again)


def test_the_timeline_knows_which_readings_were_possible() -> None:
    line = Timeline([Step(10 * S, 11 * S, HOUR), Step(20 * S, 21 * S, 0)])
    assert (line.earliest(5 * S), line.latest(5 * S)) == (5 * S, 5 * S)
    assert (line.earliest(10 * S), line.latest(10 * S)) == (10 * S, 10 * S + HOUR)
    # an open transaction remembers the old one for half a second
    assert (line.earliest(11 * S + 1), line.latest(11 * S + 1)) == (11 * S + 1, 11 * S + 1 + HOUR)
    assert (line.earliest(15 * S), line.latest(15 * S)) == (15 * S + HOUR, 15 * S + HOUR)
    assert line.latest(25 * S, since_us=20 * S) == 25 * S + HOUR
    assert line.due_since(5 * S, 0, 8 * S) == 5 * S
    assert line.due_since(5 * S, 0, 15 * S) == 5 * S
    assert line.due_since(5 * S, 6 * S, 25 * S) == 6 * S
    assert line.due_since(500 * S, 0, 15 * S) == 11 * S
    assert line.due_since(15 * S + HOUR, 0, 16 * S) == 15 * S
    # it was due before the clock was put back, and is again an hour later
    assert line.due_since(15 * S + HOUR, 0, 16 * S + HOUR) == 15 * S + HOUR
    assert line.due_since(15 * S + HOUR, 0, 25 * S) == 25 * S
    assert line.true_latest(15 * S + HOUR) == 15 * S + HOUR
    assert line.true_latest(30 * S) == 30 * S


# --- reading the ledger -------------------------------------------------------------------------


def test_what_became_of_a_transaction_is_told_by_its_commit_or_by_its_order() -> None:
    def lines(tx: str, *, end: str | None) -> list[Line]:
        call = {"what": "call", "name": tx, "verb": "schedule", "kind": "work", "tx": tx, "at": 1}
        answer = {"what": "answer", "name": tx, "answer": "created", "task": 1, "at": 2}
        return [call, answer, *([{"what": end, "tx": tx, "at": 3}] if end else [])]

    written = [
        *lines("done", end="committed"), *lines("undone", end="rolled_back"),
        *lines("doubtful", end="committing"), *lines("vain", end="committing"),
        {"what": "end", "at": 9},
    ]  # fmt: skip
    calls = {call.name: call for call in calls_of(written, {"done", "doubtful"})}
    assert {name: (call.fate, call.sure_us) for name, call in calls.items()} == {
        "done": (Fate.COMMITTED, 3),
        "undone": (Fate.ROLLED_BACK, None),
        "doubtful": (Fate.COMMITTED, 9),
        "vain": (Fate.ROLLED_BACK, None),
    }
    assert orders_lost(written, {"doubtful"}) == ["done"]


# --- the figures --------------------------------------------------------------------------------


def test_lateness_and_violations_are_charged_to_the_fault_that_was_on() -> None:
    history = clean()
    history.spans.append(Span("SIGKILL", T0 + 10 * S, T0 + 10 * S, T0 + 14 * S, 7, 60))
    history.made(20, 9, 2)
    history.began(20, 12, 11.05)
    history.asked("cancel", 11.5, "cancelled", task=20)
    history.over(20, "cancelled", 11.55)
    evidence = history.evidence()
    by_fault = {line.fault: line for line in figures(evidence, audit(evidence))}
    assert by_fault["SIGKILL"].lateness_us == [0.95 * S]
    assert by_fault["SIGKILL"].violations == Counter({Sort.AFTER_CANCEL: 1})
    assert by_fault["SIGKILL"].recovery_us == [4 * S]
    assert by_fault[NOWHERE].violations == Counter()
    text = table(evidence, audit(evidence))
    (row,) = (line for line in text.splitlines() if line.startswith("SIGKILL"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[:9] == ["SIGKILL", "1", "1", "7", "0", "0", "0", "1", "0"]
    assert cells[9:12] == ["950", "950", "4.0"]
