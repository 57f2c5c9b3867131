"""Nodes that are told to leave, killed, frozen, replaced, and that have the wrong time."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import signal
import subprocess
import sys

from tests.chaos.cluster import NODE_ROLE, REPOSITORY, Cluster
from tests.chaos.fault import Fault, NodeFault
from tests.chaos.ledger import note

ROLLS, PAUSE_S = 20, 1.5
"""So often, and after such a pause, a rolling restart is begun again: an outage takes 22 s."""


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
    """A new version of the code comes in, node by node: it adds one kind and drops another.

    `scripts/rolling-restart` ends the nodes; whoever watches over them starts what has ended. A
    node may crash just then, or the database be away: as people would, this goes on with the rest.
    """

    name = "rolling restart"
    touches = frozenset({"nodes", "wire"})

    async def apply(self) -> None:
        nodes = self.cluster.nodes
        before = {node.name: node.pid for node in nodes}
        new = "2" if nodes[0].version == "1" else "1"
        for node in nodes:
            node.version = new
        said = ""
        for _ in range(ROLLS):
            left = [node.name for node in nodes if node.pid == before[node.name]]
            if not left:
                return
            status, said = await self._roll(left)
            note("rolled", nodes=left, status=status, said=said)
            await asyncio.sleep(0 if status == 0 else PAUSE_S)
        raise RuntimeError(f"the nodes cannot be restarted: {said}")

    async def _roll(self, names: list[str]) -> tuple[int, str]:
        delayq = shlex.join([sys.executable, "-m", "delayq"])
        process = await asyncio.create_subprocess_exec(
            sys.executable, REPOSITORY / "scripts/rolling-restart", "--delayq", delayq,
            "--timeout", "20", "--restart", "kill -TERM {pid}", *names, cwd=self.cluster.folder,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{REPOSITORY}",
                 "PYTHONDONTWRITEBYTECODE": "1", "DELAYQ_EMBEDDED": "0",
                 "DELAYQ_DSN": self.cluster.dsn(NODE_ROLE)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode is not None
        return process.returncode, said.decode()


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
