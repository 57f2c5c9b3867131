"""Bulk verbs on the caller's own connection: inside its transaction, all or nothing.

What waits for a lock waits here and now, with the locks that were taken before. So they are taken
in one order for everybody, by id or by key, and two bulk verbs of one sort do not wait for each
other in a circle. (Of two sorts, or among other statements of the caller's, they may: then the
database undoes one of them, and it is a TransactionConflict.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from delayq.batches import gathered
from delayq.failures import DRIVER_ERRORS, translated
from delayq.model import ScheduledTask, TaskRequest

if TYPE_CHECKING:
    from delayq.passes import Progress
    from delayq.task_store import AnyConnection, TaskStore

T = TypeVar("T")
R = TypeVar("R")
Numbered: TypeAlias = tuple[int, TaskRequest]


async def inside(
    conn: AnyConnection,
    batches: AsyncIterator[Sequence[T]],
    send: Callable[[Sequence[T]], Awaitable[Iterable[R]]],
    progress: Progress | None,
) -> list[R]:
    """Send the batches one after another; what `send` answered for all of them."""
    answers: list[R] = []
    async with _all_or_nothing(conn):
        async for batch in batches:
            with translated():
                answers += await send(batch)
            if progress is not None:
                progress(len(answers))
    return answers


async def schedule_inside(
    conn: AnyConnection,
    store: TaskStore,
    requests: Iterable[TaskRequest],
    progress: Progress | None,
) -> list[ScheduledTask]:
    """Schedule all of them: the surviving tasks in their order."""

    async def send(batch: Sequence[Numbered]) -> Iterable[tuple[int, ScheduledTask]]:
        numbers, wanted = zip(*batch, strict=True)
        schedule = store.schedule_keyed if wanted[0].alone else store.schedule_many
        return zip(numbers, await schedule(conn, wanted), strict=True)

    done = await inside(conn, _plain_first(requests), send, progress)
    done.sort(key=lambda numbered: numbered[0])
    return [task for _, task in done]


async def _plain_first(requests: Iterable[TaskRequest]) -> AsyncIterator[Sequence[Numbered]]:
    """Those without keys as they come, then the others in the order of their locks."""
    alone: list[Numbered] = []
    count = 0
    async for batch in gathered(requests):
        numbered = list(enumerate(batch, start=count))
        count += len(batch)
        alone += [one for one in numbered if one[1].alone]
        if plain := [one for one in numbered if not one[1].alone]:
            yield plain
    alone.sort(key=_lock_order)
    start = 0
    async for batch in gathered(request for _, request in alone):
        yield alone[start : start + len(batch)]
        start += len(batch)


def _lock_order(numbered: Numbered) -> tuple[str, str, str, int]:
    number, request = numbered
    return request.kind, request.key or "", request.idempotency_key or "", number


@asynccontextmanager
async def _all_or_nothing(conn: AnyConnection) -> AsyncIterator[None]:
    """A transaction, or a savepoint of the one that is open.

    Errors of the caller's own code (a generator of requests that reads a file) pass as they are.
    """
    transaction = conn.transaction()
    with translated():
        await transaction.start()
    try:
        yield
    except BaseException:
        with suppress(*DRIVER_ERRORS):  # a broken connection has undone it already
            await transaction.rollback()
        raise
    with translated():
        await transaction.commit()
