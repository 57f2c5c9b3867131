"""Was a task lost, early, run though cancelled, applied twice, settled by a stranger?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.chaos.book import Book, Move, Sort, Violation, schedules
from tests.chaos.evidence import Fate, Row, Start

LIVE = ("pending", "running")
STALE_US = 2_000_000
"""A step back of the clock between a lease and the start of its handler, whose loop was busy."""
NEXT = ".next"
"""Ends the reference of a task that another one scheduled inside of its effect."""


def lost(book: Book) -> Iterator[Violation]:
    """Every promised task is in exactly one place, and got there by a way that there is."""
    for tx in book.evidence.orders_lost:
        yield Violation(Sort.LOST, f"the database has forgotten the transaction {tx}", 0)
    for call in schedules(book):
        task = book.task_of(call)
        if task is not None and task not in book.rows:
            yield Violation(
                Sort.LOST, f"task {task} is nowhere", call.sure_us or 0, book.tells(task)
            )
    for row in book.evidence.rows:
        why = _wrong_end(book, row)
        if why is not None:
            yield Violation(
                Sort.LOST, f"task {row.task} {why}", _about(book, row.task), book.tells(row.task)
            )
    for task, count in Counter(row.task for row in book.evidence.rows).items():
        if count > 1:
            what = f"task {task} is in {count} places"
            yield Violation(Sort.TWICE, what, _about(book, task), book.tells(task))


def _about(book: Book, task: int) -> int:
    """When something last happened to a task, for finding the fault that was on."""
    times = [start.at_us for start in book.starts.get(task, ())]
    times += [call.asked_us for call in book.calls.get(task, ())]
    row = book.rows.get(task)
    if row is not None and row.finished_reading_us is not None:
        times.append(book.timeline.true_latest(row.finished_reading_us))
    return max(times, default=0)


def _wrong_end(book: Book, row: Row) -> str | None:
    match row.state:
        case "cancelled":
            reason = row.successor is not None or _cancel_asked(book, row)
            return None if reason else "was cancelled, and nobody asked for it"
        case "missed":
            return None if row.has_grace else "was missed, and has no grace"
        case "dead":
            return None if row.kind in book.evidence.may_die else "is dead, and cannot fail"
        case "succeeded":
            return None if _did_run(book, row) else "succeeded, and nobody ran it to its end"
    return f"is {row.state} after the end"


def _cancel_asked(book: Book, row: Row) -> bool:
    asked = [*book.calls.get(row.task, ())]
    if row.key is not None:
        asked += book.by_key[row.kind, row.key]
    return any(
        call.verb == "cancel" and call.answer in (None, "cancelled", "cancel_requested")
        for call in asked
    )


def _did_run(book: Book, row: Row) -> bool:
    ends = {end.how for end in book.ends.get(row.task, ()) if end.token == row.token}
    if row.kind not in book.evidence.effect_kinds:
        return "returned" in ends
    written = any(effect.token == row.token for effect in book.effects.get(row.task, ()))
    return written or "already" in ends


def early(book: Book) -> Iterator[Violation]:
    """No handler began before its instant by the database's clock, nor before where it was moved.

    What fires again (a retry, say) has an instant of its own by then, of a clock that may have been
    set back since. And at its first lease it is fired for an instant that somebody gave it.
    """
    for start in book.evidence.starts:
        reading_us = book.timeline.latest(start.at_us, start.at_us - STALE_US)
        moves = book.moves_in_force(start.task, start.at_us)
        given = [move.lowest_us for move in moves] if not _fired_since(book, start, moves) else []
        lowest_us = min(given, default=start.execute_reading_us)
        too_early_us = max(lowest_us, start.execute_reading_us) - reading_us
        if too_early_us > 0:
            what = f"task {start.task} began {too_early_us} us early"
            yield Violation(Sort.EARLY, what, start.at_us, book.tells(start.task))
        elif (
            _is_first(book, start)
            and moves
            and not any(
                move.lowest_us <= start.execute_reading_us
                and (move.highest_us is None or start.execute_reading_us <= move.highest_us)
                for move in moves
            )
        ):
            what = f"task {start.task} fired for an instant that nobody gave it"
            yield Violation(Sort.WRONG, what, start.at_us, book.tells(start.task))


def _fired_since(book: Book, start: Start, moves: Sequence[Move]) -> bool:
    """Whether it began before already, after everything that may have moved it was over."""
    over_us = max((move.call.answered_us or start.at_us for move in moves), default=start.at_us)
    return any(over_us < other.at_us < start.at_us for other in book.starts[start.task])


def _is_first(book: Book, start: Start) -> bool:
    before = {lease.token for lease in book.leases.get(start.task, ()) if lease.owner}
    return start.attempt == 1 and before <= {start.token} and book.starts[start.task][0] is start


def after_cancel(book: Book) -> Iterator[Violation]:
    """Nothing begins once a cancel has been told to have worked, or the row says so itself."""
    for task, starts in book.starts.items():
        over_us = _cancelled_us(book, task)
        for start in starts:
            if over_us is not None and start.at_us > over_us:
                what = f"task {task} began {start.at_us - over_us} us after it was cancelled"
                yield Violation(Sort.AFTER_CANCEL, what, start.at_us, book.tells(task))


def _cancelled_us(book: Book, task: int) -> int | None:
    told = [
        call.sure_us
        for call in book.calls.get(task, ())
        if call.verb == "cancel" and call.answer == "cancelled" and call.sure_us is not None
    ]
    row = book.rows.get(task)
    if row is not None and row.state == "cancelled" and row.token == 0:
        assert row.finished_reading_us is not None
        told.append(book.timeline.true_latest(row.finished_reading_us))
    return min(told, default=None)


def twice(book: Book) -> Iterator[Violation]:
    """An effect is there once, under the lease that the task was settled with."""
    for task, effects in book.effects.items():
        row = book.rows.get(task)
        if len(effects) > 1:
            what = f"the effect of task {task} is there {len(effects)} times"
            yield Violation(Sort.TWICE, what, _about(book, task), book.tells(task))
        elif row is None or row.state != "succeeded" or row.token != effects[0].token:
            what = f"the effect of task {task} is there without its completion"
            yield Violation(Sort.TWICE, what, _about(book, task), book.tells(task))
    requests = Counter(e.request for e in book.evidence.effects if e.request is not None)
    for request, count in requests.items():
        if count > 1:
            what = f"the effect of request {request} is there {count} times"
            tasks = [e.task for e in book.evidence.effects if e.request == request]
            lines = tuple(line for task in tasks for line in book.tells(task))
            yield Violation(Sort.TWICE, what, _about(book, tasks[-1]), lines)


def rolled_back(book: Book) -> Iterator[Violation]:
    """What was scheduled in a transaction that did not commit has never been."""
    gone = {
        call.ref: call
        for call in book.evidence.calls
        if call.fate is Fate.ROLLED_BACK and call.ref is not None
    }
    seen = {row.ref: row.task for row in book.evidence.rows if row.ref is not None}
    seen |= {start.ref: start.task for start in book.evidence.starts}
    for ref in gone.keys() & seen.keys():
        call = gone[ref]
        what = f"{ref} was rolled back, and there is task {seen[ref]}"
        yield Violation(Sort.ROLLED_BACK, what, call.asked_us, (f"{call}", *book.tells(seen[ref])))
    yield from _follow_ups(book)


def _follow_ups(book: Book) -> Iterator[Violation]:
    written = {effect.ref + NEXT: effect for effect in book.evidence.effects if effect.follows}
    there = Counter(row.ref for row in book.evidence.rows if (row.ref or "").endswith(NEXT))
    for ref in written.keys() | there.keys():
        assert ref is not None
        count = there.get(ref, 0)
        if ref not in written:
            what = f"{ref} was scheduled inside of an effect that is not there"
            yield Violation(Sort.ROLLED_BACK, what, 0)
        elif count != 1:
            sort = Sort.TWICE if count else Sort.LOST
            task = written[ref].task
            what = f"{ref} is there {count} times"
            yield Violation(sort, what, _about(book, task), book.tells(task))


def stolen(book: Book) -> Iterator[Violation]:
    """A task that succeeded was settled under its last lease, by the node that ran it."""
    for row in book.evidence.rows:
        if row.state != "succeeded":
            continue
        leases = book.leases.get(row.task, [])
        runners = {s.node for s in book.starts.get(row.task, ()) if s.token == row.token}
        if not leases or leases[-1].token != row.token or leases[-1].owner == 0:
            why = "was settled under a lease that had ended"
        elif runners != {row.node}:
            why = f"was settled by node {row.node}, and ran on {sorted(runners)}"
        else:
            continue
        yield Violation(
            Sort.STOLEN, f"task {row.task} {why}", _about(book, row.task), book.tells(row.task)
        )


def left_leases(book: Book) -> Iterator[Violation]:
    """When all is over nobody owns anything."""
    for row in book.evidence.rows:
        if row.state == "running":
            what = f"task {row.task} is still leased to node {row.node}"
            yield Violation(Sort.LEASES, what, _about(book, row.task), book.tells(row.task))
    for node in book.evidence.nodes_left:
        yield Violation(Sort.LEASES, f"node {node} left its row behind", 0)
