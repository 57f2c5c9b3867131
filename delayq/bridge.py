"""The effect for plain functions: a thread works in a transaction that lives on the event loop.

One task on the loop, the owner, enters the effect, runs the thread's calls one at a time and
leaves it. It is one task because `async with` blocks may have to be left by the task that
entered them, and because cancelling it (shutdown, lost lease) rolls the transaction back
while the thread is still in its own code. The thread waits in short slices, so that a loop
that has stopped is noticed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent import futures
from contextlib import AbstractAsyncContextManager
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from delayq.database import Connection, PooledConnection
from delayq.errors import EffectInterrupted

if TYPE_CHECKING:
    import asyncpg

AnyConnection: TypeAlias = Connection | PooledConnection
"""A connection of the caller's own, or one lent by a pool."""

T = TypeVar("T")
Work: TypeAlias = Callable[[AnyConnection], Awaitable[T]]

WAIT_LIMIT_S = 120.0
_SLICE_S = 0.25


class BlockingConnection:
    """The effect's connection as a thread sees it. Its methods are asyncpg's, and block.

    They raise what asyncpg raises, or EffectInterrupted once the node is leaving; everything
    in the block is then rolled back.
    """

    __slots__ = ("_bridge",)

    def __init__(self, bridge: EffectBridge) -> None:
        self._bridge = bridge

    def run(self, work: Work[T], *, limit_s: float = WAIT_LIMIT_S) -> T:
        """The result of `await work(connection)` on the event loop.

        For whatever has no method here, such as scheduling a follow-up task:
        `conn.run(lambda c: ship.options(conn=c).after(60, order_id=1))`.
        """
        return self._bridge.call(work, limit_s)

    def execute(self, query: str, *args: object, timeout: float | None = None) -> str:
        """Runs a statement; its status text comes back."""
        return self.run(
            lambda conn: conn.execute(query, *args, timeout=timeout), limit_s=_limit(timeout)
        )

    def executemany(
        self, query: str, args: Iterable[Sequence[object]], *, timeout: float | None = None
    ) -> None:
        """Runs a statement once for each sequence of arguments."""
        self.run(
            lambda conn: conn.executemany(query, args, timeout=timeout), limit_s=_limit(timeout)
        )

    def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> list[asyncpg.Record]:
        """All rows."""
        return self.run(
            lambda conn: conn.fetch(query, *args, timeout=timeout), limit_s=_limit(timeout)
        )

    def fetchrow(
        self, query: str, *args: object, timeout: float | None = None
    ) -> asyncpg.Record | None:
        """The first row, or None."""
        return self.run(
            lambda conn: conn.fetchrow(query, *args, timeout=timeout), limit_s=_limit(timeout)
        )

    def fetchval(
        self, query: str, *args: object, column: int = 0, timeout: float | None = None
    ) -> Any:  # the database decides its type
        """One column of the first row, or None."""
        return self.run(
            lambda conn: conn.fetchval(query, *args, column=column, timeout=timeout),
            limit_s=_limit(timeout),
        )


class EffectBridge:
    """Carries one effect between the thread that uses it and the loop that owns it."""

    __slots__ = ("_body_error", "_entered", "_jobs", "_lock", "_loop", "_open", "_owner")

    def __init__(
        self,
        open_effect: Callable[[], AbstractAsyncContextManager[AnyConnection]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._open = open_effect
        self._loop = loop
        self._lock = Lock()
        self._jobs: asyncio.Queue[_Job[Any] | None] = asyncio.Queue(maxsize=4)
        self._entered: futures.Future[None] = futures.Future()
        self._body_error: Exception | None = None

    def enter(self, limit_s: float = WAIT_LIMIT_S) -> BlockingConnection:
        """Enters the effect; what entering it raises (LeaseLost, …) is raised here."""
        self._owner = _spawn(self._own(), self._loop)
        self._wait(self._entered, limit_s)
        return BlockingConnection(self)

    def call(self, work: Work[T], limit_s: float) -> T:
        """The result of `work` on the loop. Calls from several threads take turns."""
        with self._lock:
            job: _Job[T] = _Job(work)
            self._send(job)
            return self._wait(job.answer, limit_s)

    def leave(self, error: BaseException | None, limit_s: float = WAIT_LIMIT_S) -> None:
        """Commits, or rolls back if the body raised `error`, which then goes its own way."""
        self._body_error = _carried(error)
        try:
            self._send(None)
            self._wait(self._owner, limit_s)
        except (_BodyStopped, EffectInterrupted):
            if error is None:
                raise
        except BaseException as raised:
            if raised is not error:
                raise

    async def _own(self) -> None:
        async with self._open() as connection:
            self._entered.set_result(None)
            while (job := await self._jobs.get()) is not None:
                await job.run(connection)
            if self._body_error is not None:
                raise self._body_error

    def _send(self, job: _Job[Any] | None) -> None:
        if self._owner.done():
            return  # `_wait` sees it and raises what ended the owner
        try:
            self._loop.call_soon_threadsafe(self._jobs.put_nowait, job)
        except RuntimeError as closed:
            raise EffectInterrupted(_STOPPED) from closed

    def _wait(self, answer: futures.Future[T], limit_s: float) -> T:
        for _ in range(math.ceil(limit_s / _SLICE_S)):
            watched: set[futures.Future[Any]] = {answer, self._owner}
            futures.wait(watched, _SLICE_S, futures.FIRST_COMPLETED)
            if answer.done() and not answer.cancelled():
                return answer.result()
            if self._owner.done():
                self._raise_ended()
            if not self._loop.is_running():
                break
        # Also stops the statement in flight, if the loop ever turns again.
        self._owner.cancel()
        raise EffectInterrupted(_STOPPED)

    def _raise_ended(self) -> None:
        if self._owner.cancelled():
            raise EffectInterrupted(_STOPPED)
        self._owner.result()
        raise EffectInterrupted("the effect has ended; use its connection inside the block only")


class _Job(Generic[T]):
    """One piece of work for the owner, and where its answer goes."""

    __slots__ = ("_work", "answer")

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self.answer: futures.Future[T] = futures.Future()

    async def run(self, connection: AnyConnection) -> None:
        try:
            result = await self._work(connection)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asked
            self.answer.set_exception(error)
        else:
            self.answer.set_result(result)


class _BodyStopped(Exception):
    """Rolls back for a body error that must not pass through a loop, such as SystemExit."""


def _carried(error: BaseException | None) -> Exception | None:
    if error is None or (isinstance(error, Exception) and not isinstance(error, StopIteration)):
        return error
    return _BodyStopped()


def _spawn(
    owner: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop
) -> futures.Future[None]:
    try:
        return asyncio.run_coroutine_threadsafe(owner, loop)
    except RuntimeError as closed:
        owner.close()
        raise EffectInterrupted(_STOPPED) from closed


def _limit(timeout: float | None) -> float:
    """A call's own time limit comes first; the bridge's is the net below it."""
    return WAIT_LIMIT_S if timeout is None else timeout + _GRACE_S


_GRACE_S = 30.0
_STOPPED = "the node's event loop has stopped or does not answer; the effect is rolled back"
