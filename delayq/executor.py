"""Runs one leased task: from the handler's start to its end, which `outcomes` then judges.

The order of `run` matters: everything between the handler's end and taking the lease out of
`running` happens without an await, so that nobody can cancel the worker for a handler that is
over already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from delayq.context import Context
from delayq.lease import Interruption, Lease, Outcome, Settlement
from delayq.log import log
from delayq.outcomes import Outcomes
from delayq.payload_reader import PayloadReader
from delayq.policy import is_misfire

if TYPE_CHECKING:
    from delayq.bridge import AnyConnection
    from delayq.commons import Commons
    from delayq.effects import Effects
    from delayq.settler import Settler
    from delayq.threads import Threads

_WATCH_S: Final = 0.05
"""Deadlines are watched this coarsely: far cheaper than a timer for each attempt."""


class Executor:
    """Runs attempts on this node; the `Home` of its leases."""

    def __init__(
        self,
        commons: Commons,
        settler: Settler,
        effects: Effects,
        threads: Threads,
        on_over: Callable[[Lease], None],
    ) -> None:
        """`on_over` is told of leases that end without a settlement."""
        self.node = commons.node
        self.loop = asyncio.get_running_loop()
        self.running: dict[int, Lease] = {}
        self._payloads = PayloadReader(commons.store, commons.clock)
        self._clock = commons.clock
        self._database_clock = commons.database_clock
        self._counters = commons.counters
        self._settler = settler
        self._effects = effects
        self._outcomes = Outcomes(commons, settler, on_over)
        self._threads = threads
        self._some_running = asyncio.Event()
        self._watched = False  # the watch knows that something runs
        self._drained: asyncio.Event | None = None  # somebody waits until nothing runs
        self._stopping: Interruption | None = None

    # --- what others ask of it ---------------------------------------------------------------

    def effect(self, lease: Lease) -> AbstractAsyncContextManager[AnyConnection]:
        """The effect of an attempt."""
        return self._effects.effect(lease)

    def request_cancel(self, task_ids: Iterable[int]) -> None:
        """Ask running handlers to end; returning makes them succeed, raising cancels the task."""
        for task_id in task_ids:
            lease = self.running.get(task_id)
            if lease is not None and not lease.cancel_requested:
                lease.cancel_requested = True
                self._interrupt(lease, Interruption.CANCEL)

    def told_of(self, runner: asyncio.Task[Any]) -> dict[str, object]:
        """What this asyncio task runs, as fields of an event. From any thread."""
        for lease in list(self.running.values()):
            if lease.runner is runner:
                return {"task_id": lease.id, "kind": lease.kind}
        return {}

    def stop(self, why: Interruption) -> None:
        """End everything that runs, and whatever would start from now on."""
        self._stopping = why
        self.interrupt_running(why)

    def interrupt_running(self, why: Interruption) -> None:
        """End everything that runs."""
        for lease in list(self.running.values()):
            self._interrupt(lease, why)

    def abandon(self) -> list[Lease]:
        """Let go of what still runs, whatever becomes of it: nothing of it will be written."""
        left = list(self.running.values())
        for lease in left:
            lease.interruption = Interruption.LOST
        self.running.clear()
        if self._drained is not None:
            self._drained.set()
        return left

    async def aclose(self) -> None:
        """Read no more payloads; to be called when nothing runs any more."""
        await self._payloads.aclose()

    async def idle(self) -> None:
        """Return when no handler runs."""
        while self.running:
            if self._drained is None or self._drained.is_set():
                self._drained = asyncio.Event()
            await self._drained.wait()

    async def watch(self) -> None:
        """Cancel attempts that are past their deadline; loops until cancelled."""
        while True:
            await self._some_running.wait()
            await asyncio.sleep(self._enforce_deadlines() / 1e6)
            if not self.running:
                self._watched = False
                self._some_running.clear()

    # --- one attempt -------------------------------------------------------------------------

    async def run(self, lease: Lease, task: asyncio.Task[None]) -> None:
        """Run the handler and hand its outcome to the settler. Raises nothing of the handler's."""
        if not self._begin(lease, task):
            return
        failure: BaseException | None = None
        result: object = None
        try:
            result = await self._open(lease)
        except BaseException as error:  # noqa: BLE001 - whatever it raised is its outcome
            failure = error
        # no await from here on, until nobody can find the lease any more
        self._end(lease, result, failure)
        if self._settler.full and not task.cancelling():  # cancelled: this worker ends anyway
            await self._settler.room()

    def _begin(self, lease: Lease, task: asyncio.Task[None]) -> bool:
        """Note the start. False if the handler must not start any more."""
        monotonic_us = self._clock.monotonic_us()
        now_us = self._database_clock.at_us(monotonic_us)
        if self._stopping is not None:
            self._give_back(lease)
            return False
        if lease.misfire_grace_ms is not None and self._missed(lease, now_us):
            return False
        lease.lateness_us = max(0, now_us - lease.execute_us)
        lease.runner = task
        timeout_ms = lease.timeout_ms
        if timeout_ms is not None:
            lease.deadline_us = now_us + timeout_ms * 1000
            lease.deadline_mono_us = monotonic_us + timeout_ms * 1000
        self.running[lease.id] = lease
        if not self._watched:
            self._watched = True
            self._some_running.set()
        self._counters.fired += 1
        return True

    def _open(self, lease: Lease) -> Awaitable[object]:
        """What to wait for: for most tasks the handler's own coroutine, without one around it."""
        handler, payload = lease.handler, lease.payload
        if payload is None or not handler.is_async:
            return self._call(lease)
        arguments = handler.decode(payload)
        if handler.wants_context:
            return handler.function(Context(lease), **arguments)  # type: ignore[return-value]  # it is async
        return handler.function(**arguments)  # type: ignore[return-value]  # the same

    async def _call(self, lease: Lease) -> object:
        if lease.payload is None:
            await self._fetch_payload(lease)
        if lease.handler.is_async:
            return await self._open(lease)
        arguments = lease.handler.decode(lease.payload or "{}")
        call = partial(lease.handler.invoke, Context(lease), arguments)
        return await self._threads.submit(call)

    def _end(self, lease: Lease, result: object, failure: BaseException | None) -> None:
        self.running.pop(lease.id, None)
        if self._drained is not None and not self.running:
            self._drained.set()
        self._outcomes.ended(lease, result, failure)

    async def _fetch_payload(self, lease: Lease) -> None:
        lease.payload = await self._payloads.read(lease)
        lease.lateness_us = max(0, self._database_clock.now_us() - lease.execute_us)

    def _missed(self, lease: Lease, now_us: int) -> bool:
        if not is_misfire(now_us, lease.due_us, lease.misfire_grace_ms, not lease.never_leased):
            return False
        self._settler.settle(Settlement(lease, Outcome.MISSED))
        return True

    def _give_back(self, lease: Lease) -> None:
        if self._stopping is not Interruption.LOST:
            self._settler.settle(Settlement(lease, Outcome.UNSTARTED))

    # --- interruptions -----------------------------------------------------------------------

    def _interrupt(self, lease: Lease, why: Interruption) -> None:
        thread = not lease.handler.is_async
        if thread and why in (Interruption.TIMEOUT, Interruption.CANCEL):
            # A thread cannot be cancelled: it keeps its worker and its lease until it ends. The
            # flag lets it end by itself.
            lease.cancel_requested = True
            lease.interruption = why
            return
        lease.interruption = why
        if lease.runner is not None:
            lease.runner.cancel()

    def _enforce_deadlines(self) -> int:
        """Interrupt what is overdue; microseconds until the next look."""
        now_us = self._clock.monotonic_us()
        wait_us = round(_WATCH_S * 1e6)
        for lease in list(self.running.values()):
            deadline_us = lease.deadline_mono_us
            if deadline_us is None or lease.interruption in _LEAVING:
                continue
            if deadline_us <= now_us:
                lease.deadline_mono_us = None  # once
                log.bind(task_id=lease.id, kind=lease.kind, attempt=lease.attempt).info(
                    "task.timeout"
                )
                self._interrupt(lease, Interruption.TIMEOUT)
            else:
                wait_us = min(wait_us, deadline_us - now_us)
        return max(1000, wait_us)


_LEAVING: Final = (Interruption.SHUTDOWN, Interruption.LOST)
"""Time-outs are of no use any more. They are after a cancel, which a handler may ignore."""
