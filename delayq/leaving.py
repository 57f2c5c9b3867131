"""How a life ends: what was due goes to the peers, what runs may finish, and all is closed.

However it ends (asked to drain, told to stop, buried, cancelled, or by a bug), `leave` is the last
step. Whether everything was handed over decides what the node's row says to its peers.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from delayq.lease import Interruption, Lease, Outcome, Settlement
from delayq.log import log

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.dispatcher import Dispatcher
    from delayq.effects import Effects
    from delayq.executor import Executor
    from delayq.maintenance import Maintenance
    from delayq.membership import Membership
    from delayq.patience import Patience
    from delayq.settler import Settler
    from delayq.threads import Threads
    from delayq.timers import Timers
    from delayq.worker_pool import WorkerPool

_BOUND_S: Final = 10.0
"""Each step of leaving that needs the database gets so long."""
_CANCEL_GRACE_S: Final = 5.0
_PARTING_S: Final = 2.0
"""So long a node that leaves something behind tries to say so."""


@dataclass(slots=True, kw_only=True)
class Leaving:
    """The end of one incarnation; its fields are all who must be told or closed."""

    commons: Commons
    patience: Patience
    timers: Timers
    dispatcher: Dispatcher
    executor: Executor
    settler: Settler
    pool: WorkerPool[Lease]
    effects: Effects
    threads: Threads
    maintenance: Maintenance
    membership: Membership
    _handed_over: bool = field(default=False, init=False)

    async def hand_over(self) -> None:
        """Peers take over at once; what runs may finish; nothing new starts."""
        commons, patience = self.commons, self.patience
        log.bind(node=commons.node, running=len(self.executor.running)).info("node.draining")
        self.timers.stop()
        for lease in self.dispatcher.stop():
            self.settler.settle(Settlement(lease, Outcome.UNSTARTED))
        await patience.bounded("drain", commons.store.drain(), _BOUND_S)
        # a lease in flight comes back to a dispatcher that has stopped, and is given back
        await patience.patiently(self.dispatcher.at_rest, _BOUND_S)
        await patience.until_stopped(self.executor.idle(), commons.settings.drain_timeout_s)
        self.executor.stop(Interruption.SHUTDOWN)
        await patience.patiently(self.executor.idle, _CANCEL_GRACE_S)
        for lease in self.executor.abandon():  # they ignore their cancellation
            self.settler.settle(Settlement(lease, Outcome.RELEASE))
        # a lease of which nothing is known is not handed over, whatever else is
        rested = await patience.briefly(self.dispatcher.at_rest())
        self._handed_over = await patience.patiently(self.settler.flushed, _BOUND_S) and rested

    def abandon(self) -> None:
        """Buried: nothing is ours any more."""
        log.bind(node=self.commons.node).error("node.was_buried")
        self.timers.stop()
        self.dispatcher.stop()
        self.executor.stop(Interruption.LOST)

    async def leave(self) -> None:
        """Whatever fails on the way, and however often this is cancelled, each step is taken."""
        self.timers.stop()
        async with AsyncExitStack() as steps:  # from the last to the first
            steps.callback(self._tell_left)
            steps.push_async_callback(self.commons.store.aclose)
            steps.push_async_callback(self.effects.aclose)
            steps.callback(self.threads.close)
            steps.push_async_callback(self._take_leave)
            steps.push_async_callback(self.membership.stop)
            steps.push_async_callback(self.executor.aclose)
            steps.push_async_callback(self.pool.aclose)
            steps.push_async_callback(self.maintenance.stop)

    def _tell_left(self) -> None:
        log.bind(node=self.commons.node).info("node.left")

    async def _take_leave(self) -> None:
        """Say to the peers what becomes of this node's row, if it has one."""
        if not self.membership.started:
            return
        store, patience = self.commons.store, self.patience
        if not self._handed_over:
            # a lease that is still on its way must not commit after everybody has looked
            await patience.bounded("end_sessions", store.end_sessions(), _PARTING_S)
        seconds = _BOUND_S if self._handed_over else _PARTING_S
        await patience.bounded("leave", store.leave(self._handed_over), seconds)
