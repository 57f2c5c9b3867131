"""The bulk verbs: many schedules, cancels or moves in one call, in bounded statements.

Without a connection of the caller's each statement commits by itself, and is held up neither by
a stranger's lock nor by another bulk verb (see `passes`). With one, see `bulk_inside`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from delayq.batches import gathered, pages, pieces, sliced
from delayq.bulk_inside import inside, schedule_inside
from delayq.errors import BulkStopped
from delayq.failures import translated
from delayq.lanes import LockHeld
from delayq.model import Cancel, Reschedule, ScheduledTask, TaskRequest
from delayq.passes import Answers, Passes, Progress
from delayq.sharing import doubt_about
from delayq.task_rows import Move, Said

if TYPE_CHECKING:
    from delayq.lanes import Lanes
    from delayq.request import Targets, When
    from delayq.task_store import AnyConnection, TaskStore

    A = TypeVar("A", Cancel, Reschedule)
    T = TypeVar("T", int, str)
    Found: TypeAlias = Mapping[T, Said[A] | None]
    # Does a batch on a connection. The flag: wait for locks, or else None for what is locked.
    Act: TypeAlias = Callable[[AnyConnection, Sequence[T], bool], Awaitable[Found[T, A]]]

_GLANCE_MS: Final = 10
_PIECES: Final = 8
MAX_GLANCES: Final = 32
"""How often one batch may meet a lock while it is cut into pieces around them."""


class Bulk:
    """Carries out the bulk verbs. What it is given was checked already."""

    def __init__(self, lanes: Lanes, store: TaskStore) -> None:
        self._lanes = lanes
        self._store = store

    # --- scheduling ---------------------------------------------------------------------------

    async def schedule(
        self,
        requests: Iterable[TaskRequest],
        progress: Progress | None = None,
        conn: AnyConnection | None = None,
    ) -> list[ScheduledTask]:
        """Schedule all of them: the surviving tasks, in their order."""
        if conn is not None:
            return await schedule_inside(conn, self._store, requests, progress)
        passes = Passes(self._schedule, self._schedule_alone, progress)
        try:
            await passes.run(gathered(requests))
        except BulkStopped as stopped:
            stopped.tasks = passes.answers
            raise
        return [task for task in passes.answers if task is not None]  # all of them, by now

    async def _schedule(
        self, batch: Sequence[TaskRequest], answers: Answers[ScheduledTask]
    ) -> None:
        if any(request.alone for request in batch):
            await self._schedule_around_locks(batch, answers)
            return
        answers[:] = await self._lanes.brief(
            lambda conn: self._store.schedule_many(conn, batch), doubt_about(batch)
        )

    async def _schedule_around_locks(
        self, batch: Sequence[TaskRequest], answers: Answers[ScheduledTask]
    ) -> None:
        """A key that a stranger is just taking shows only in that the statement waits for it."""
        parts, glances = deque([range(len(batch))]), 0
        while parts and glances < MAX_GLANCES:
            part = parts.popleft()
            try:
                found = await self._schedule_at_a_glance(batch[part.start : part.stop])
            except LockHeld:
                glances += 1
                if len(part) > 1:
                    parts += pieces(part, _PIECES)
            else:
                answers[part.start : part.stop] = found

    async def _schedule_at_a_glance(self, requests: Sequence[TaskRequest]) -> list[ScheduledTask]:
        return await self._lanes.brief(
            lambda conn: self._store.schedule_keyed(conn, requests, _GLANCE_MS),
            doubt_about(requests),
        )

    async def _schedule_alone(self, request: TaskRequest) -> ScheduledTask:
        return await self._lanes.alone(
            lambda conn, ms: self._store.schedule_one(conn, request, ms), doubt_about([request])
        )

    # --- changing one's mind ------------------------------------------------------------------

    async def cancel(
        self,
        targets: Targets,
        progress: Progress | None = None,
        conn: AnyConnection | None = None,
    ) -> dict[int, Cancel]:
        """Cancel all of them: the answers by id."""
        store = self._store
        if isinstance(targets, list):

            async def by_ids(
                c: AnyConnection, ids: Sequence[int], wait: bool
            ) -> Found[int, Cancel]:
                cancel = store.cancel_many if wait else store.cancel_unlocked
                return _said(await cancel(c, ids))

            return await self._act(by_ids, sliced(targets), progress, conn)
        kind = targets[0]
        return await self._act(
            lambda c, keys, wait: store.cancel_keys(c, kind, keys, wait=wait),
            self._keys(targets, conn),
            progress,
            conn,
        )

    async def move(
        self,
        targets: Targets,
        when: When,
        progress: Progress | None = None,
        conn: AnyConnection | None = None,
    ) -> dict[int, Reschedule]:
        """Move all of them: the answers by id."""
        store = self._store
        if isinstance(targets, list):

            async def by_ids(
                c: AnyConnection, ids: Sequence[int], wait: bool
            ) -> Found[int, Reschedule]:
                move = store.reschedule_many if wait else store.reschedule_unlocked
                return _said(await move(c, [Move(id, *when) for id in ids]))

            return await self._act(by_ids, sliced(targets), progress, conn)
        kind = targets[0]
        return await self._act(
            lambda c, keys, wait: store.reschedule_keys(c, kind, keys, when, wait=wait),
            self._keys(targets, conn),
            progress,
            conn,
        )

    async def _act(
        self,
        act: Act[T, A],
        batches: AsyncIterator[Sequence[T]],
        progress: Progress | None,
        conn: AnyConnection | None,
    ) -> dict[int, A]:
        if conn is not None:
            return _by_id(
                await inside(conn, batches, lambda batch: _all(act, conn, batch), progress)
            )

        async def send(batch: Sequence[T], answers: Answers[Said[A]]) -> None:
            found = await self._lanes.brief(lambda c: act(c, batch, False))
            answers[:] = [found[item] for item in batch]

        async def wait(item: T) -> Said[A] | None:
            return (await self._lanes.patient(lambda c: act(c, [item], True)))[item]

        passes = Passes(send, wait, progress)
        try:
            await passes.run(batches)
        except BulkStopped as stopped:
            stopped.answers = _by_id(passes.answers)
            raise
        return _by_id(passes.answers)

    def _keys(
        self, target: tuple[str, str], conn: AnyConnection | None
    ) -> AsyncIterator[Sequence[str]]:
        """The keys of a kind that begin with a prefix, a page at a time."""

        async def read(beyond: str, limit: int) -> list[str]:
            if conn is None:
                return await self._lanes.brief(
                    lambda c: self._store.keys_page(c, target, beyond, limit)
                )
            with translated():
                return await self._store.keys_page(conn, target, beyond, limit)

        return pages(read)


async def _all(act: Act[T, A], conn: AnyConnection, batch: Sequence[T]) -> Iterable[Said[A] | None]:
    return (await act(conn, batch, True)).values()


def _said(answers: Mapping[int, A | None]) -> Found[int, A]:
    return {id: None if said is None else Said(id, said) for id, said in answers.items()}


def _by_id(said: Iterable[Said[A] | None]) -> dict[int, A]:
    """The answers by id; without those for keys that were free when it was their turn."""
    return {one.id: one.answer for one in said if one is not None and one.id is not None}
