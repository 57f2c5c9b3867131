"""The customers: a process that schedules, cancels and moves, and writes down every answer.

`python -m tests.chaos.customers` works until SIGTERM. CHAOS_SEED is the seed of its choices;
CHAOS_LOAD multiplies what it does in a second.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import asyncpg

from delayq import DelayQError, KeyTaken, ScheduledTask, TaskRequest
from delayq.dsn import parse_dsn
from delayq.failures import DRIVER_ERRORS
from delayq.request import build_request
from tests.chaos import application as app
from tests.chaos.ledger import note
from tests.chaos.world import LOAD, SEED

if TYPE_CHECKING:
    from delayq.bridge import AnyConnection
    from delayq.database import Pool

FAILURES = (DelayQError, *DRIVER_ERRORS)
"""What a call may raise while its database is in trouble; everything else is a bug and ends us."""
KEYS = 40
IN_FLIGHT = 60
BULK = 25


class ChangeOfMind(Exception):
    """The customer rolls back."""


class Customers:
    """All of them, sharing one client and one pool."""

    def __init__(self, pool: Pool, dice: random.Random) -> None:
        self._pool = pool
        self._dice = dice
        self._numbers = itertools.count(1)
        self._known: list[tuple[int, str]] = []  # ids of tasks that may still be pending
        self._requests: list[str] = []

    # --- one call, and what is written about it -------------------------------------------------

    def name(self) -> str:
        """A name that nothing else has."""
        return f"{os.getpid()}-{next(self._numbers)}"

    async def _tell(self, verb: str, ask: Awaitable[Any], **fields: object) -> Any:
        """Make a call between two lines of the ledger."""
        name = self.name()
        note("call", name=name, verb=verb, **fields)
        try:
            answer = await ask
        except KeyTaken as taken:
            note("answer", name=name, answer="key_taken", task=taken.task_id)
            return None
        except FAILURES as error:
            note("failed", name=name, error=type(error).__name__)
            raise
        if isinstance(answer, ScheduledTask):
            note("answer", name=name, answer="created" if answer.created else "found",
                 task=answer.id, follow_up=answer.follow_up)  # fmt: skip
        else:
            note("answer", name=name, answer=str(answer))
        return answer

    async def schedule(
        self, kind: str, delay_s: float, conn: AnyConnection | None = None, **given: Any
    ) -> None:
        """Schedule one task. `given`: options of the call and, in `arguments`, of the handler."""
        ref = self.name()
        arguments = {"ref": ref, **given.pop("arguments", {})}
        tx = given.pop("tx", None)
        answer = await self._tell(
            "schedule",
            app.dq.send(kind, arguments, delay=delay_s, conn=conn, **given),
            kind=kind, ref=ref, key=given.get("key"), on_conflict=given.get("on_conflict"),
            request=given.get("idempotency_key"), delay_us=round(delay_s * 1e6), tx=tx,
            grace="misfire_grace" in given,
        )  # fmt: skip
        if answer is not None and delay_s > 1:
            self._known.append((answer.id, kind))
            del self._known[:-200]

    # --- what they do ---------------------------------------------------------------------------

    async def bulk(self) -> None:
        """Many at once, with an order, in one transaction."""
        async with self._transaction() as (conn, tx):
            wanted = [self._bulk_request() for _ in range(BULK)]
            names = [self.name() for _ in wanted]
            for name, (request, ref) in zip(names, wanted, strict=True):
                note("call", name=name, verb="schedule", kind=request.kind, ref=ref, tx=tx,
                     delay_us=request.delay_us)  # fmt: skip
            made = await app.dq.schedule_many([request for request, _ in wanted], conn=conn)
            for name, task in zip(names, made, strict=True):
                note("answer", name=name, answer="created", task=task.id)

    def _bulk_request(self) -> tuple[TaskRequest, str]:
        kind = self._dice.choices(["work", "charge", "plain"], [60, 33, 7])[0]
        ref = self.name()
        arguments: dict[str, object] = {"ref": ref, "ms": self._duration_ms()}
        if kind == "charge":
            arguments["follows"] = self._dice.random() < 0.05
        handler = app.dq.registry[kind]
        payload = handler.encode((), arguments)
        return build_request(kind, payload, delay=self._delay_s()), ref

    async def in_transaction(self) -> None:
        """One order and its task; some think better of it, some take their time."""
        async with self._transaction() as (conn, tx):
            arguments = {"ms": self._duration_ms(), "follows": False}
            await self.schedule("charge", self._delay_s(), conn, tx=tx, arguments=arguments)
            fate = self._dice.random()
            if fate < 0.15:
                raise ChangeOfMind
            if fate < 0.3:  # the task is due before it is committed
                await asyncio.sleep(self._dice.uniform(0.3, 2.5))

    async def odd(self) -> None:
        """A task that does not go well."""
        kinds = {"flaky": 40, "doomed": 8, "hang": 10, "drowsy": 30, "leaver": 6, "newcomer": 6}
        kind = self._dice.choices([*kinds], [*kinds.values()])[0]
        arguments = {"times": self._dice.randint(1, 3)} if kind == "flaky" else {}
        await self.schedule(kind, self._delay_s(), arguments=arguments)

    async def stall(self) -> None:
        """A task that blocks its node."""
        await self.schedule("stall", 0.2, arguments={"ms": self._dice.randint(200, 1200)})

    async def crash(self) -> None:
        """A task that takes its node down."""
        await self.schedule("crash", 0.2)

    async def single(self) -> None:
        """One task, without more ado."""
        grace: dict[str, Any] = {"misfire_grace": 0.05} if self._dice.random() < 0.1 else {}
        await self.schedule("work", self._delay_s(), arguments={"ms": self._duration_ms()},
                            priority=self._dice.randint(-2, 2), **grace)  # fmt: skip

    async def long(self) -> None:
        """A task that is likely to be running when something happens."""
        await self.schedule("work", 0.5, arguments={"ms": self._dice.randint(2000, 4500)})

    async def by_key(self) -> None:
        """Schedule under a key that others use too, or cancel or move what holds it."""
        key = f"k{self._dice.randrange(KEYS)}"
        chosen = self._dice.random()
        if chosen < 0.12:
            await self._tell("cancel", app.dq.cancel(kind="keyed", key=key), kind="keyed", key=key)
        elif chosen < 0.18:
            await self._move(kind="keyed", key=key)
        else:
            mode = self._dice.choice(["keep", "replace", "replace", "error"])
            arguments = {"ms": self._dice.choice([20, 200, 1500])}
            await self.schedule("keyed", self._dice.uniform(0, 4), key=key, on_conflict=mode,
                                arguments=arguments)  # fmt: skip

    async def key_in_transaction(self) -> None:
        """The same, cancelling in a transaction that may be rolled back."""
        key = f"k{self._dice.randrange(KEYS)}"
        async with self._transaction() as (conn, tx):
            cancel = app.dq.cancel(kind="keyed", key=key, conn=conn)
            await self._tell("cancel", cancel, kind="keyed", key=key, tx=tx)
            await self.schedule("keyed", self._dice.uniform(0, 3), conn, tx=tx, key=key,
                                on_conflict="keep", arguments={"ms": 50})  # fmt: skip
            if self._dice.random() < 0.3:
                raise ChangeOfMind

    async def request(self) -> None:
        """A request that is sent again and again."""
        if len(self._requests) < 5 or self._dice.random() < 0.5:
            self._requests.append(self.name())
            del self._requests[:-30]
        request = self._dice.choice(self._requests)
        await self.schedule("order_once", self._dice.uniform(0, 2), idempotency_key=request,
                            arguments={"request": request, "ms": 100})  # fmt: skip

    async def cancel(self) -> None:
        """Cancel a task by its id, perhaps in the last moment; some in a transaction."""
        task, kind = self._pick()
        if self._dice.random() < 0.3:
            async with self._transaction() as (conn, tx):
                ask = app.dq.cancel(task, conn=conn)
                await self._tell("cancel", ask, task=task, kind=kind, tx=tx)
                if self._dice.random() < 0.3:
                    raise ChangeOfMind
            return
        await self._tell("cancel", app.dq.cancel(task), task=task, kind=kind)

    async def move(self) -> None:
        """Move a task, or make it due now."""
        task, kind = self._pick()
        await self._move(task=task, kind=kind)

    async def _move(self, *, kind: str, task: int | None = None, key: str | None = None) -> None:
        target: dict[str, Any] = {"id": task} if task is not None else {"kind": kind, "key": key}
        if self._dice.random() < 0.3:
            ask = app.dq.run_now(**target)
            await self._tell("run_now", ask, task=task, kind=kind, key=key, delay_us=0)
        else:
            delay_s = self._dice.uniform(0.1, 4)
            ask = app.dq.reschedule(**target, delay=delay_s)
            await self._tell("reschedule", ask, task=task, kind=kind, key=key,
                             delay_us=round(delay_s * 1e6))  # fmt: skip

    def _pick(self) -> tuple[int, str]:
        if not self._known:
            raise ChangeOfMind
        return self._known.pop(self._dice.randrange(len(self._known)))

    def _delay_s(self) -> float:
        return self._dice.choice([0.0, 0.3, 1.0, 1.5, 2.0, 3.0, 5.0]) + self._dice.random()

    def _duration_ms(self) -> int:
        return self._dice.choice([50, 200, 300, 400, 600])

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[tuple[AnyConnection, str]]:
        """A transaction with an order in it; the ledger learns what became of it."""
        tx = self.name()
        async with self._pool.acquire(timeout=5) as conn:
            transaction = conn.transaction()
            await transaction.start()
            try:
                await conn.execute("insert into chaos.orders values ($1)", tx)
                yield conn, tx
            except BaseException:
                note("rolled_back", tx=tx)
                with suppress(*FAILURES):
                    await transaction.rollback()
                raise
            note("committing", tx=tx)
            await transaction.commit()
            note("committed", tx=tx)


RATES: dict[str, float] = {
    "bulk": 8, "in_transaction": 8, "single": 10, "long": 5, "odd": 10, "stall": 0.15,
    "crash": 0.02, "by_key": 14, "key_in_transaction": 3, "request": 6, "cancel": 6, "move": 6,
}  # fmt: skip
"""How often in a second, on average."""


async def keep_going(do: Callable[[], Awaitable[None]], rate: float, dice: random.Random) -> None:
    """Do something again and again, as often as `rate` says, several at once if it takes long."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def once() -> None:
        try:
            with suppress(ChangeOfMind, *FAILURES):
                await do()
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(dice.expovariate(rate))
            await room.acquire()
            group.create_task(once())


async def main() -> None:
    """Work until SIGTERM, then let go at once: what has no answer by then is left unknown."""
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    dice = random.Random(int(os.environ[SEED]))
    load = float(os.environ.get(LOAD, "1"))
    dsn = parse_dsn(os.environ["DELAYQ_DSN"])
    pool = asyncpg.create_pool(**dsn.connect_arguments(), min_size=0, max_size=12, timeout=3,
                               command_timeout=15)  # fmt: skip
    async with pool, app.dq:
        customers = Customers(pool, dice)
        busy = [
            asyncio.create_task(keep_going(getattr(customers, name), rate * load, dice))
            for name, rate in RATES.items()
        ]
        stop = asyncio.create_task(done.wait())
        await asyncio.wait([stop, *busy], return_when=asyncio.FIRST_COMPLETED)
        for one in busy:
            one.cancel()
        ends = await asyncio.gather(*busy, return_exceptions=True)
        pool.terminate()
    for end in ends:
        if not isinstance(end, asyncio.CancelledError) and isinstance(end, BaseException):
            raise end


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
