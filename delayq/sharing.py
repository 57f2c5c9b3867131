"""Statements that concurrent callers share: schedules without keys, cancels and moves by id.

While one statement is in flight the next batch gathers, so one call alone is not delayed and
fifty cost about as much as one. A row that fails, fails alone; a task that a stranger holds locked
is left out, and its caller goes alone to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from delayq.batching import Batcher
from delayq.failures import is_transient
from delayq.model import Cancel, Reschedule, ScheduledTask, TaskRequest
from delayq.task_store import Move

if TYPE_CHECKING:
    from delayq.lanes import Lanes
    from delayq.task_store import AnyConnection, TaskStore

Numbered: TypeAlias = tuple[int, TaskRequest]

MAX_ROWS: Final = 500
MAX_BYTES: Final = 4 * 1_048_576
_MAX_WAITING: Final = 10_000

MAY_BE_THERE: Final = (
    "the outcome is unknown: the task may have been scheduled; with an idempotency_key it would be "
    "safe to schedule it again"
)


class Sharing:
    """One batch of each verb in flight at a time, each on its own connection of the pool."""

    def __init__(self, lanes: Lanes, store: TaskStore) -> None:
        self._lanes = lanes
        self._store = store
        self._schedules = Batcher[TaskRequest, ScheduledTask](
            self._schedule_batch,
            max_size=MAX_ROWS,
            max_waiting=_MAX_WAITING,
            unsplittable=is_transient,
            size_of=_size_of,
            max_bytes=MAX_BYTES,
        )
        self._cancels = Batcher[int, Cancel | None](
            self._cancel_batch,
            max_size=MAX_ROWS,
            max_waiting=_MAX_WAITING,
            unsplittable=is_transient,
        )
        self._moves = Batcher[Move, Reschedule | None](
            self._move_batch,
            max_size=MAX_ROWS,
            max_waiting=_MAX_WAITING,
            unsplittable=is_transient,
        )

    async def close(self) -> None:
        """Take nothing more, and return when everything taken has its answer."""
        await self._schedules.close()
        await self._cancels.close()
        await self._moves.close()

    async def schedule(self, request: TaskRequest) -> ScheduledTask:
        """Write a task that has neither key nor idempotency key."""
        return await self._schedules.submit(request)

    async def cancel(self, task_id: int) -> Cancel:
        """Cancel by id; a task that a stranger holds locked is waited for alone."""
        answer = await self._cancels.submit(task_id)
        if answer is not None:
            return answer
        found = await self._lanes.patient(lambda conn: self._store.cancel_many(conn, [task_id]))
        return found[task_id]

    async def move(self, move: Move) -> Reschedule:
        """Move by id; a task that a stranger holds locked is waited for alone."""
        answer = await self._moves.submit(move)
        if answer is not None:
            return answer
        found = await self._lanes.patient(lambda conn: self._store.reschedule_many(conn, [move]))
        return found[move.id]

    async def _schedule_batch(self, requests: list[TaskRequest]) -> list[ScheduledTask | Exception]:
        store = self._store
        if len(requests) == 1:
            request = requests[0]
            return [
                await self._lanes.shared(
                    lambda conn: store.schedule_plain(conn, request), MAY_BE_THERE
                )
            ]
        return list(
            await self._lanes.shared(lambda conn: store.schedule_many(conn, requests), MAY_BE_THERE)
        )

    async def _cancel_batch(self, ids: list[int]) -> list[Cancel | Exception | None]:
        answers = await self._lanes.shared(lambda conn: self._store.cancel_unlocked(conn, ids))
        return [_next_answer(answers, task_id) for task_id in ids]

    async def _move_batch(self, moves: list[Move]) -> list[Reschedule | Exception | None]:
        answers = await self._lanes.shared(
            lambda conn: self._store.reschedule_unlocked(conn, moves)
        )
        return [answers[move.id] for move in moves]


async def schedule_all(
    conn: AnyConnection, store: TaskStore, requests: Sequence[TaskRequest]
) -> list[ScheduledTask]:
    """Schedule all or none, in a transaction on `conn` (a savepoint, if it is in one).

    Those with keys go in the order of their keys, so that two such calls cannot deadlock.
    """
    answers: dict[int, ScheduledTask] = {}
    plain = [(nr, request) for nr, request in enumerate(requests) if not request.alone]
    alone = [(nr, request) for nr, request in enumerate(requests) if request.alone]
    async with conn.transaction():
        for chunk in _chunks(plain):
            written = await store.schedule_many(conn, [request for _, request in chunk])
            answers |= zip((nr for nr, _ in chunk), written, strict=True)
        for nr, request in sorted(alone, key=_lock_order):
            answers[nr] = await store.schedule_one(conn, request)
    return [answers[nr] for nr in range(len(requests))]


def _size_of(request: TaskRequest) -> int:
    """About how many bytes a request adds to a statement."""
    return len(request.payload) + len(request.headers)


def _lock_order(numbered: Numbered) -> tuple[str, str, str, int]:
    number, request = numbered
    return request.kind, request.key or "", request.idempotency_key or "", number


def _chunks(requests: Iterable[Numbered]) -> list[list[Numbered]]:
    """The requests in order, in pieces of a size that one statement may have."""
    pieces: list[list[Numbered]] = []
    room = 0
    for numbered in requests:
        size = _size_of(numbered[1])
        if not pieces or len(pieces[-1]) == MAX_ROWS or size > room:
            pieces.append([])
            room = MAX_BYTES
        pieces[-1].append(numbered)
        room -= size
    return pieces


def _next_answer(answers: dict[int, Cancel | None], task_id: int) -> Cancel | None:
    """The answer for a caller; of several that cancel one task, only the first cancelled it."""
    answer = answers[task_id]
    if answer is Cancel.CANCELLED:
        answers[task_id] = Cancel.ALREADY_FINISHED
    return answer
