"""Statements that concurrent callers share: schedules without keys, cancels and moves by id.

While one statement is in flight the next batch gathers, so one call alone is not delayed and
fifty cost about as much as one. A row that fails, fails alone; a task that a stranger holds locked
is left out, and its caller goes alone to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from delayq.batches import BATCH_BYTES, size_of
from delayq.batching import Batcher, Weight
from delayq.failures import is_transient
from delayq.model import Cancel, Reschedule, ScheduledTask, TaskRequest
from delayq.task_rows import Move

if TYPE_CHECKING:
    from delayq.lanes import Lanes
    from delayq.task_store import TaskStore

_MAX_ROWS: Final = 500
_MAX_WAITING: Final = 10_000
_WORTH_TWO: Final = 16
"""As few schedules cost more in two statements than in one."""

_MAY_BE_THERE: Final = (
    "the outcome is unknown: the task may have been scheduled; with an idempotency_key it would be "
    "safe to schedule it again"
)


class Sharing:
    """A batch or two of each verb in flight at a time, each on a connection of the pool."""

    def __init__(self, lanes: Lanes, store: TaskStore) -> None:
        self._lanes = lanes
        self._store = store
        self._schedules = Batcher[TaskRequest, ScheduledTask](
            self._schedule_batch,
            max_size=_MAX_ROWS,
            max_waiting=_MAX_WAITING,
            in_flight=2,
            share_above=_WORTH_TWO,
            unsplittable=is_transient,
            weight=Weight(size_of, BATCH_BYTES),
        )
        self._cancels = Batcher[int, Cancel | None](
            self._cancel_batch,
            max_size=_MAX_ROWS,
            max_waiting=_MAX_WAITING,
            unsplittable=is_transient,
        )
        self._moves = Batcher[Move, Reschedule | None](
            self._move_batch,
            max_size=_MAX_ROWS,
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
                    lambda conn: store.schedule_plain(conn, request), _MAY_BE_THERE
                )
            ]
        return list(
            await self._lanes.shared(
                lambda conn: store.schedule_many(conn, requests), _MAY_BE_THERE
            )
        )

    async def _cancel_batch(self, ids: list[int]) -> list[Cancel | Exception | None]:
        answers = await self._lanes.shared(lambda conn: self._store.cancel_unlocked(conn, ids))
        return [_next_answer(answers, task_id) for task_id in ids]

    async def _move_batch(self, moves: list[Move]) -> list[Reschedule | Exception | None]:
        answers = await self._lanes.shared(
            lambda conn: self._store.reschedule_unlocked(conn, moves)
        )
        return [answers[move.id] for move in moves]


def doubt_about(requests: Iterable[TaskRequest]) -> str:
    """What to say if nobody knows whether these were scheduled."""
    if all(request.idempotency_key is not None for request in requests):
        return "the outcome is unknown; schedule again: the idempotency_key makes that safe"
    return _MAY_BE_THERE


def _next_answer(answers: dict[int, Cancel | None], task_id: int) -> Cancel | None:
    """The answer for a caller; of several that cancel one task, only the first cancelled it."""
    answer = answers[task_id]
    if answer is Cancel.CANCELLED:
        answers[task_id] = Cancel.ALREADY_FINISHED
    return answer
