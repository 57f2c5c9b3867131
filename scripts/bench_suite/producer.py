"""A process of its own that schedules and changes its mind through delayq's client, on command."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from time import perf_counter, time_ns
from typing import TYPE_CHECKING

from .application import compute, dq, noop, wait
from .callers import rate_for, rate_over
from .commands import obey

if TYPE_CHECKING:
    from delayq.model import TaskRequest

_CHUNK = 5_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FAR = timedelta(hours=1)


async def schedule(
    *,
    count: int,
    first_us: int,
    step_us: int = 0,
    number: int = 0,
    kind: str = "noop",
    ms: float = 0.0,
    priority: int = 0,
) -> Mapping[str, object]:
    """Tasks number, number + 1, …, the first due at `first_us`, `step_us` apart; their ids."""
    ids: list[int] = []
    for start in range(0, count, _CHUNK):
        requests = [
            _request(first_us + i * step_us, number + i, kind, ms, priority)
            for i in range(start, min(count, start + _CHUNK))
        ]
        ids += [task.id for task in await dq.schedule_many(requests)]
    return {"ids": ids}


def _request(at_us: int, number: int, kind: str, ms: float, priority: int) -> TaskRequest:
    at = _instant(at_us)
    if kind == "noop":
        return noop.options(priority=priority).request_at(at, number)
    handler = {"wait": wait, "compute": compute}[kind]
    return handler.options(priority=priority).request_at(at, number, ms)


def _instant(at_us: float) -> datetime:
    return _EPOCH + timedelta(microseconds=at_us)


async def stream(*, call_us: list[float], due_us: list[float]) -> Mapping[str, object]:
    """Task i is scheduled by a call of its own at the instant call_us[i], for due_us[i]."""
    loop = asyncio.get_running_loop()
    ahead_s = loop.time() - time_ns() / 1e9
    calls: list[asyncio.Task[object]] = []

    async def call(number: int) -> None:
        await noop.at(_instant(due_us[number]), number)

    for number, at_us in enumerate(call_us):
        await asyncio.sleep(at_us / 1e6 + ahead_s - loop.time())
        calls.append(asyncio.create_task(call(number)))
    await asyncio.gather(*calls)
    return {"over_us": time_ns() / 1000}


async def flood(
    *, seconds: float, callers: int, ahead_s: float, number: int
) -> Mapping[str, object]:
    """Single calls by many callers, soon due; how many, and since when."""
    numbers = itertools.count(number)
    began_ns = time_ns()
    await rate_for(seconds, callers, lambda: noop.after(ahead_s, next(numbers)))
    return {"count": next(numbers) - number, "began_ns": began_ns}


async def rate(*, seconds: float, callers: int) -> Mapping[str, object]:
    """Single calls of `after`, an hour ahead."""
    return {"per_s": await rate_for(seconds, callers, lambda: noop.after(_FAR, 7))}


async def bulk(*, count: int) -> Mapping[str, object]:
    """One call of `schedule_many`, an hour ahead, that makes its requests as it goes; then one
    whose requests were made before."""
    options = noop.options()
    began = perf_counter()
    tasks = await dq.schedule_many(options.request_after(_FAR, n) for n in range(count))
    ended = perf_counter()
    requests = [options.request_after(_FAR, n) for n in range(count)]
    called = perf_counter()
    tasks += await dq.schedule_many(requests)
    return {
        "per_s": count / (ended - began),
        "call_per_s": count / (perf_counter() - called),
        "ids": [task.id for task in tasks],
    }


async def change(*, verb: str, ids: list[int], callers: int) -> Mapping[str, object]:
    """Single calls by id; how many answered that it was done."""
    done = 0

    async def one(task_id: int) -> None:
        nonlocal done
        answer = await _ONE[verb](task_id)  # in a line of its own: another caller counts meanwhile
        done += bool(answer)

    return {"per_s": await rate_over(ids, callers, one), "done": done}


async def change_bulk(*, verb: str, ids: list[int]) -> Mapping[str, object]:
    """One call for all of them."""
    began = perf_counter()
    answers = await _MANY[verb](ids)
    return {
        "per_s": len(ids) / (perf_counter() - began),
        "done": sum(map(bool, answers.values())),
    }


_ONE: Mapping[str, Callable[[int], Awaitable[object]]] = {
    "cancel": dq.cancel,
    "reschedule": lambda task_id: dq.reschedule(task_id, delay=2 * _FAR),
}
_MANY: Mapping[str, Callable[[list[int]], Awaitable[Mapping[int, object]]]] = {
    "cancel": dq.cancel_many,
    "reschedule": lambda ids: dq.reschedule_many(ids, delay=2 * _FAR),
}
_ALL = (schedule, stream, flood, rate, bulk, change, change_bulk)


async def main() -> None:
    """Obey until standard input ends."""
    async with dq:
        await obey({command.__name__: command for command in _ALL})


if __name__ == "__main__":
    asyncio.run(main())
