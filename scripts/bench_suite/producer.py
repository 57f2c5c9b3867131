"""A process of its own that schedules and cancels through delayq's client, on command."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from .application import dq, noop
from .callers import rate_for, rate_over
from .commands import obey

_CHUNK = 5_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FAR = timedelta(hours=1)


async def schedule(
    *, count: int, first_us: int, step_us: int = 0, number: int = 0
) -> Mapping[str, object]:
    """Tasks number, number + 1, …, the first due at `first_us`, `step_us` apart; their ids."""
    ids: list[int] = []
    for start in range(0, count, _CHUNK):
        requests = [
            noop.options().request_at(
                _EPOCH + timedelta(microseconds=first_us + i * step_us), number + i
            )
            for i in range(start, min(count, start + _CHUNK))
        ]
        ids += [task.id for task in await dq.schedule_many(requests)]
    return {"ids": ids}


async def rate(*, seconds: float, callers: int) -> Mapping[str, object]:
    """Single calls of `after`, an hour ahead."""
    return {"per_s": await rate_for(seconds, callers, lambda: noop.after(_FAR, 7))}


async def cancel(*, ids: list[int], callers: int) -> Mapping[str, object]:
    """Single calls of `cancel`; how many answered that the task will not run."""
    cancelled = 0

    async def one(task_id: int) -> None:
        nonlocal cancelled
        answer = await dq.cancel(task_id)  # in a line of its own: another caller counts meanwhile
        cancelled += bool(answer)

    return {"per_s": await rate_over(ids, callers, one), "cancelled": cancelled}


async def main() -> None:
    """Obey until standard input ends."""
    async with dq:
        await obey({"schedule": schedule, "rate": rate, "cancel": cancel})


if __name__ == "__main__":
    asyncio.run(main())
