"""How much goes into one statement: very many items, cut into batches as they come.

Bounded in rows and in bytes, and so that the event loop goes on turning while they are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from delayq.errors import InvalidArgument
from delayq.model import TaskRequest

T = TypeVar("T")

BATCH_ROWS: Final = 1_000
BATCH_BYTES: Final = 4 * 1_048_576
_TURN_ROWS: Final = 100
"""So many requests are made in one turn of the event loop: about a millisecond."""


def size_of(request: TaskRequest) -> int:
    """About how many bytes a request adds to a statement."""
    return len(request.payload) + len(request.headers)


async def gathered(requests: Iterable[TaskRequest]) -> AsyncIterator[list[TaskRequest]]:
    """The requests in order. InvalidArgument if something else is among them."""
    batch: list[TaskRequest] = []
    room = BATCH_BYTES
    for number, request in enumerate(requests):
        if number % _TURN_ROWS == 0:
            await asyncio.sleep(0)
        if not isinstance(request, TaskRequest):
            raise InvalidArgument(
                "requests", "must be TaskRequests, as request_after and request_at make them"
            )
        size = size_of(request)
        if batch and (len(batch) == BATCH_ROWS or size > room):
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append(request)
        room -= size
    if batch:
        yield batch


async def sliced(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """The items in order."""
    for start in range(0, len(items), BATCH_ROWS):
        yield items[start : start + BATCH_ROWS]


async def pages(read: Callable[[str, int], Awaitable[list[str]]]) -> AsyncIterator[list[str]]:
    """What `read` finds beyond a key, so many at the most, and then beyond the last of these."""
    keys = await read("", BATCH_ROWS)
    while keys:
        yield keys
        keys = await read(keys[-1], BATCH_ROWS) if len(keys) == BATCH_ROWS else []


def pieces(part: range, count: int) -> list[range]:
    """A range, cut into at most so many pieces of about one size."""
    step = -(-len(part) // count)
    return [part[start : start + step] for start in range(0, len(part), step)]
