"""Nodes that are told to leave, killed, frozen, replaced, and that have the wrong time."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING

from tests.chaos.fault import Fault, NodeFault
from tests.chaos.waiting import until

if TYPE_CHECKING:
    from tests.chaos.cluster import Cluster


class Terminate(NodeFault):
    """One node drains and leaves; another takes its place."""

    name = "SIGTERM"

    async def apply(self) -> None:
        await self.node.end(signal.SIGTERM)


class Kill(NodeFault):
    """One node is gone at once."""

    name = "SIGKILL"

    async def apply(self) -> None:
        await self.node.end(signal.SIGKILL)


class KillAll(Fault):
    """All nodes are gone at once."""

    name = "SIGKILL of all"
    touches = frozenset({"nodes", "wire"})

    async def apply(self) -> None:
        await asyncio.gather(*(node.end(signal.SIGKILL) for node in self.cluster.nodes))


class Freeze(NodeFault):
    """One node stands still for longer than its TTL, and goes on as if nothing had been."""

    name = "SIGSTOP > TTL"

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        super().__init__(cluster, dice)
        self.hold_s = cluster.ttl_s * 1.5 + 1

    async def apply(self) -> None:
        self.node.send(signal.SIGSTOP)

    async def heal(self) -> None:
        self.node.send(signal.SIGCONT)


class Nap(Freeze):
    """The same, for shorter than the TTL."""

    name = "SIGSTOP < TTL"

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        super().__init__(cluster, dice)
        self.hold_s = cluster.ttl_s * 0.5


class RollingRestart(Fault):
    """A new version of the code comes in, node by node: it adds one kind and drops another."""

    name = "rolling restart"
    touches = frozenset({"nodes", "wire"})

    async def apply(self) -> None:
        new = "2" if self.cluster.nodes[0].version == "1" else "1"
        for node in self.cluster.nodes:
            node.wanted = False
            node.version = new
            await node.end(signal.SIGTERM)
            node.launch()
            await self._is_active(node.pid)

    async def _is_active(self, pid: int) -> None:
        sql = "select exists (select from delayq.nodes where pid = $1 and state = 'active')"
        await until(lambda: self.cluster.ask(lambda conn: conn.fetchval(sql, pid)), 30)


class WrongTime(Fault):
    """The wall clocks of the nodes are off by hours, and are set while they run."""

    name = "node clocks off"
    touches = frozenset({"node clocks"})
    hold_s = 4.0

    async def apply(self) -> None:
        for node in self.cluster.nodes:
            node.set_clock(self.dice.choice([-7200, -3600, 3600, 5 * 3600]))

    async def heal(self) -> None:
        for node in self.cluster.nodes:
            node.set_clock(0)
