"""Were the answers true, and the keys kept?

Calls overlap, so each is judged by what must have been so during all of it: an answer is false if
no moment between the question and the answer fits it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.book import FINISHED, Book, Sort, Violation, schedules
from tests.chaos.evidence import Call, Fate


@dataclass(frozen=True, slots=True)
class Life:
    """A task is certainly live from `from_us` to `until_us`: nothing can have ended it."""

    task: int
    from_us: float
    until_us: float

    def covers(self, call: Call) -> bool:
        """True if it was live during the whole call."""
        return self.from_us < call.asked_us and (call.answered_us or math.inf) < self.until_us


def keys(book: Book) -> Iterator[Violation]:
    """A key has one live task at a time, and every answer about it fits one moment."""
    lives = _lives(book)
    for (kind, key), calls in book.by_key.items():
        for call in calls:
            if call.answered_us is None:
                continue
            others = [life for life in lives[kind, key] if life.covers(call)]
            why = _key_broken(book, call, others)
            if why is not None:
                what = f"key {key} of {kind}: {why}"
                lines = tuple(line for life in others for line in book.tells(life.task))
                yield Violation(Sort.KEYS, what, call.answered_us, (f"{call}", *lines))


def _key_broken(book: Book, call: Call, held: list[Life]) -> str | None:
    match call.verb, call.answer:
        case "schedule", "created" if call.follow_up is None:
            other = [life.task for life in held if life.task != call.task]
            return f"task {call.task} was made while {other[0]} held it" if other else None
        case "schedule", "found" if call.task is not None:
            return _wrong_holder(book, call, call.task, held)
        case "schedule", "key_taken":
            known = _possible_holders(book, call)
            return None if known else "taken, they said, and nobody ever had it"
        case (("cancel" | "reschedule" | "run_now"), "not_found"):
            return f"not found, and task {held[0].task} held it" if held else None
    return None


def _wrong_holder(book: Book, call: Call, task: int, held: list[Life]) -> str | None:
    row = book.rows.get(task)
    if row is not None and (row.kind, row.key) != (call.kind, call.key):
        return f"they said that task {task} holds it, whose key is {row.key}"
    other = [life.task for life in held if life.task != task]
    if other:
        return f"they said that task {task} holds it, and {other[0]} did"
    over = [
        earlier
        for earlier in book.calls.get(task, ())
        if earlier.verb == "cancel"
        and earlier.answer in FINISHED
        and earlier.sure_us is not None
        and earlier.sure_us < call.asked_us
    ]
    return f"they said that task {task} holds it, which was over" if over else None


def _possible_holders(book: Book, call: Call) -> bool:
    return any(row.kind == call.kind and row.key == call.key for row in book.evidence.rows)


def _lives(book: Book) -> dict[tuple[str, str], list[Life]]:
    """Keyed tasks, from when their maker was sure to the first thing that can end them."""
    lives: dict[tuple[str, str], list[Life]] = defaultdict(list)
    for call in schedules(book):
        if call.key is None or call.answer != "created" or call.follow_up is not None:
            continue
        assert call.task is not None
        assert call.sure_us is not None
        row = book.rows.get(call.task)
        if row is not None and row.has_grace:
            continue  # it may end by itself
        ends = [*_runs_after(book, call, call.task), *_endings_after(book, call, call.task)]
        life = Life(call.task, call.sure_us, min(ends, default=math.inf))
        lives[call.kind, call.key].append(life)
    return lives


def _runs_after(book: Book, call: Call, task: int) -> Iterator[int]:
    for start in book.starts.get(task, ()):
        if start.at_us >= call.asked_us:
            yield start.at_us


def _endings_after(book: Book, call: Call, task: int) -> Iterator[int]:
    """When somebody asked for what may have ended the task that this call made."""
    assert call.key is not None
    for other in [*book.calls[task], *book.by_key[call.kind, call.key]]:
        before = other.answered_us is not None and other.answered_us < call.asked_us
        if not before and _may_end(other):
            yield other.asked_us


def _may_end(call: Call) -> bool:
    """A cancel; or a successor, which takes the place of a holder whose node died."""
    if call.verb == "cancel":
        return call.answer not in ("not_found", "already_finished")
    waits = call.follow_up is not None or call.answer is None
    return call.verb == "schedule" and call.on_conflict == "replace" and waits


def answers(book: Book) -> Iterator[Violation]:
    """What callers were told about a task by its id."""
    for call in book.evidence.calls:
        if call.verb == "schedule" or call.task is None or call.answer is None:
            continue
        why = _untrue(book, call, call.task)
        if why is not None:
            what = f"{call.verb} of task {call.task} was answered {call.answer}: {why}"
            yield Violation(Sort.WRONG, what, call.answered_us or 0, book.tells(call.task))


def _untrue(book: Book, call: Call, task: int) -> str | None:
    committed = call.told and call.fate is Fate.COMMITTED
    state = book.rows[task].state if task in book.rows else None
    wrong, why = False, f"it is {state}"
    match call.answer:
        case "cancelled":
            wrong = committed and state != "cancelled"
        case "cancel_requested" if committed:
            wrong = state not in ("cancelled", "succeeded")
            if _leased_again(book, call, task):
                wrong, why = True, "it was leased more than once afterwards"
        case "dead":
            wrong = state != "dead"
        case "already_finished":
            wrong, why = not _can_be_over(book, call, task), "nothing can have ended it by then"
        case "running":
            wrong, why = not book.leases.get(task), "nobody ever had a lease on it"
        case "not_found":
            wrong, why = _made_before(book, call, task), "it had been made"
    return why if wrong else None


def _leased_again(book: Book, call: Call, task: int) -> bool:
    assert call.sure_us is not None
    later = {start.token for start in book.starts.get(task, ()) if start.at_us > call.sure_us}
    return len(later) > 1


def _can_be_over(book: Book, call: Call, task: int) -> bool:
    assert call.answered_us is not None
    ran = any(start.at_us < call.answered_us for start in book.starts.get(task, ()))
    row = book.rows.get(task)
    cancels = [*book.calls.get(task, ())]
    if row is not None and row.key is not None:
        cancels += book.by_key[row.kind, row.key]
    asked = any(
        other.verb == "cancel" and other is not call and other.asked_us < call.answered_us
        for other in cancels
    )
    leased = bool(book.leases.get(task))  # ended by its node without a start: missed, or cancelled
    return ran or asked or (row is not None and (row.has_grace or leased))


def _made_before(book: Book, call: Call, task: int) -> bool:
    return any(
        maker.sure_us is not None and maker.sure_us < call.asked_us
        for maker in book.calls.get(task, ())
        if maker.verb == "schedule" and maker.told
    )


def requests(book: Book) -> Iterator[Violation]:
    """Whoever sends the same request gets the same task, and one of them made it."""
    by_request: dict[str, list[Call]] = defaultdict(list)
    for call in schedules(book):
        if call.request is not None:
            by_request[call.request].append(call)
    for request, calls in by_request.items():
        tasks = {call.task for call in calls}
        made = [call for call in calls if call.answer == "created"]
        if len(tasks) > 1 or len(made) > 1:
            what = f"request {request} was answered with tasks {sorted(t or 0 for t in tasks)}"
            yield Violation(
                Sort.WRONG, what, calls[-1].asked_us, tuple(f"{call}" for call in calls)
            )
