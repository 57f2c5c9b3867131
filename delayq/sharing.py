"""Statements that concurrent callers share: schedules without keys, cancels and moves by id.

While one statement is in flight the next batch gathers, so one call alone is not delayed and
fifty cost about as much as one. A row that fails, fails alone; a task that a stranger holds locked
is left out, and its caller goes alone to wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from delayq.batching import Batcher
from delayq.failures import is_transient
from delayq.model import Cancel, Reschedule, ScheduledTask, TaskRequest
from delayq.task_store import Move

if TYPE_CHECKING:
    from delayq.lanes import Lanes
    from delayq.task_store import TaskStore

MAX_ROWS: Final = 500
MAX_BYTES: Final = 4 * 1_048_576
_MAX_WAITING: Final = 10_000

MAY_BE_THERE: Final = (
    "the outcome is unknown: the task may have been scheduled; with an idempotency_key it is safe "
    "to schedule it again"
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
            size_of=size_of,
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
        if answer is None:
            found = await self._lanes.patient(
                lambda conn: self._store.cancel_many(conn, [task_id])
            )
            answer = found[task_id]
        return _certain(answer)

    async def move(self, move: Move) -> Reschedule:
        """Move by id; a task that a stranger holds locked is waited for alone."""
        answer = await self._moves.submit(move)
        if answer is None:
            found = await self._lanes.patient(
                lambda conn: self._store.reschedule_many(conn, [move])
            )
            answer = found[move.id]
        return _certain(answer)

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

    async def _cancel_batch(self, ids: list[int]) -> list[Cancel | None | Exception]:
        answers = await self._lanes.shared(
            lambda conn: self._store.cancel_many(conn, ids, wait=False)
        )
        return [_next_answer(answers, task_id) for task_id in ids]

    async def _move_batch(self, moves: list[Move]) -> list[Reschedule | None | Exception]:
        answers = await self._lanes.shared(
            lambda conn: self._store.reschedule_many(conn, moves, wait=False)
        )
        return [answers[move.id] for move in moves]


def size_of(request: TaskRequest) -> int:
    """About how many bytes a request adds to a statement."""
    return len(request.payload) + len(request.headers)


def chunks(requests: Sequence[TaskRequest]) -> list[list[TaskRequest]]:
    """The requests in order, in pieces of a size that one statement may have."""
    pieces: list[list[TaskRequest]] = []
    room = 0
    for request in requests:
        if not pieces or len(pieces[-1]) == MAX_ROWS or size_of(request) > room:
            pieces.append([])
            room = MAX_BYTES
        pieces[-1].append(request)
        room -= size_of(request)
    return pieces


def _next_answer(answers: dict[int, Cancel | None], task_id: int) -> Cancel | None:
    """The answer for a caller; of several that cancel one task, only the first cancelled it."""
    answer = answers[task_id]
    if answer is Cancel.CANCELLED:
        answers[task_id] = Cancel.ALREADY_FINISHED
    return answer


def _certain(answer: A | None) -> A:
    if answer is None:
        raise RuntimeError("delayq: a statement that waits for locks answered `locked`")
    return answer
