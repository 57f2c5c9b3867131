"""Ten thousand callers who change their minds: every answer agrees with what the handlers saw.

Two nodes run the tasks while callers schedule with keys in all modes, cancel and reschedule the
very same tasks at the moment they fall due. Each request carries a number of its own; the
ledger of the handlers says which numbers started, and when by the database's clock.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayq import (
    Cancel,
    Context,
    DelayQ,
    KeyTaken,
    OnConflict,
    Reschedule,
    ScheduledTask,
    Settings,
)
from tests.nodes import no_live_tasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import asyncpg

    from delayq.database import Connection

KEYS = 100
CALLERS = 50
QUIET_S = 60


@dataclass
class Ledger:
    """What callers were told, and what handlers saw; task ids throughout."""

    started: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    created: dict[int, int] = field(default_factory=dict)  # number -> id, for answers `created`
    kept: list[tuple[int, int]] = field(default_factory=list)  # (number, id that was there)
    waiting: dict[int, int] = field(default_factory=dict)  # number -> follow-up id
    cancelled: set[int] = field(default_factory=set)
    requested: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    ids: list[int] = field(default_factory=list)
    moved: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    refused: int = 0


class Caller:
    """Does random things to random keys, and writes down each answer."""

    def __init__(self, dq: DelayQ, ledger: Ledger, seed: int) -> None:
        self.dq = dq
        self.ledger = ledger
        self.random = random.Random(seed)

    async def act(self, number: int) -> None:
        key = f"k{self.random.randrange(KEYS)}"
        choice = self.random.random()
        if choice < 0.55:
            await self.schedule(number, key)
        elif choice < 0.7:
            await self.cancel_key(key)
        elif choice < 0.85:
            await self.cancel_id()
        else:
            await self.move_id()

    async def schedule(self, number: int, key: str) -> None:
        mode = self.random.choice(list(OnConflict))
        delay = self.random.choice([0.0, 0.0, 0.02, 0.1, 0.3])
        try:
            task = await self.dq.send(
                "note", {"number": number}, delay=delay, key=key, on_conflict=mode
            )
        except KeyTaken as taken:
            assert mode is OnConflict.ERROR
            self.ledger.kept.append((number, taken.task_id))
            return
        self.note(number, mode, task)

    def note(self, number: int, mode: OnConflict, task: ScheduledTask) -> None:
        if task.follow_up is not None and mode is OnConflict.REPLACE:
            self.ledger.waiting[number] = task.follow_up
            self.ledger.ids.append(task.follow_up)
        elif task.created:
            self.ledger.created[number] = task.id
            self.ledger.ids.append(task.id)
        else:
            assert mode is OnConflict.KEEP, mode
            self.ledger.kept.append((number, task.id))

    async def cancel_key(self, key: str) -> None:
        answer = await self.dq.cancel(kind="note", key=key)
        if answer is Cancel.NOT_FOUND:
            self.ledger.refused += 1

    async def cancel_id(self) -> None:
        if not self.ledger.ids:
            return
        task_id = self.random.choice(self.ledger.ids[-KEYS:])
        answer = await self.dq.cancel(task_id)
        assert answer is not Cancel.NOT_FOUND, task_id
        place = {
            Cancel.CANCELLED: self.ledger.cancelled,
            Cancel.CANCEL_REQUESTED: self.ledger.requested,
            Cancel.ALREADY_FINISHED: self.ledger.finished,
        }[answer]
        place.add(task_id)

    async def move_id(self) -> None:
        if not self.ledger.ids:
            return
        task_id = self.random.choice(self.ledger.ids[-KEYS:])
        answer = await self.dq.reschedule(task_id, delay=timedelta(milliseconds=50))
        assert answer is not Reschedule.NOT_FOUND, task_id
        if answer is Reschedule.MOVED:
            self.ledger.moved[task_id].append(1)


@pytest.mark.parametrize(
    "operations",
    [pytest.param(1_500), pytest.param(10_000, marks=pytest.mark.more)],
)
@pytest.mark.timeout(300)
async def test_every_answer_agrees_with_what_the_handlers_saw(
    settings: Settings, conn: Connection, operations: int
) -> None:
    """C027."""
    ledger = Ledger()
    seed = random.randrange(2**32)
    async with AsyncExitStack() as stack:
        apps = [_application(settings, ledger) for _ in range(2)]
        for app in apps:
            await stack.enter_async_context(app.node())
        numbers = iter(range(operations))
        callers = [Caller(apps[n % 2], ledger, seed + n) for n in range(CALLERS)]
        async with asyncio.TaskGroup() as group:
            for caller in callers:
                group.create_task(_call(caller, numbers))
        await no_live_tasks(conn, QUIET_S)
    history = {
        row["id"]: row
        for row in await conn.fetch(
            "select id, state, payload ->> 'number' as number, errors, started_at, execute_at"
            "  from delayq.task_history"
        )
    }
    _audit(ledger, history, seed)


async def _call(caller: Caller, numbers: Iterator[int]) -> None:
    for number in numbers:  # one iterator, shared by all callers
        await caller.act(number)


def _application(settings: Settings, ledger: Ledger) -> DelayQ:
    dq = DelayQ(settings=settings)

    @dq.task
    async def note(ctx: Context, number: int) -> None:
        ledger.started[ctx.id].append(number)
        await asyncio.sleep(random.choice([0, 0, 0.005, 0.03]))

    return dq


def _audit(ledger: Ledger, history: Mapping[int, asyncpg.Record], seed: int) -> None:
    said = f"seed {seed}"
    # every task that was promised ended, and nothing else did
    promised = set(ledger.created.values()) | set(ledger.waiting.values())
    assert promised == set(history), said
    # no number ran twice, no task ran twice
    numbers = [number for runs in ledger.started.values() for number in runs]
    assert len(numbers) == len(set(numbers)), said
    assert all(len(runs) == 1 for runs in ledger.started.values()), said
    # cancelled means: not one run; finished means: there is an end to show
    assert not ledger.cancelled & ledger.started.keys(), said
    assert all(history[task_id]["state"] == "cancelled" for task_id in ledger.cancelled), said
    assert all(task_id in history for task_id in ledger.finished), said
    # asked to end means: it was running, so it had started
    assert ledger.requested <= ledger.started.keys(), said
    for task_id, row in history.items():
        runs = ledger.started.get(task_id, [])
        if row["state"] == "succeeded":
            # what ran is what the last replacement left in the row
            assert runs == [int(str(row["number"]))], (said, task_id)
            assert row["started_at"] >= row["execute_at"], (said, task_id)
        elif row["state"] == "cancelled" and not runs:
            assert json.loads(str(row["errors"])) == [], (said, task_id)
    # a refused request names a task that was really there, and its own number never ran
    assert all(task_id in promised for _, task_id in ledger.kept), said
    assert not {number for number, _ in ledger.kept} & set(numbers), said
