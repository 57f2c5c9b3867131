"""What a fault is: something that is done to the cluster, and undone after a while."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tests.chaos.cluster import Cluster, Node


class Fault:
    """One fault. `hold_s` passes between `apply` and `heal`.

    `touches` names what it needs to itself; two faults that touch nothing in common may be on at
    the same time.
    """

    name: ClassVar[str]
    touches: ClassVar[frozenset[str]] = frozenset()
    hold_s: float = 0.0

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        self.cluster = cluster
        self.dice = dice

    def absent(self) -> str | None:
        """What this machine lacks for it, if anything."""
        return None

    async def prepare(self) -> None:
        """What has to be there before it can happen."""

    def concerns(self, running: Mapping[str, int]) -> int:
        """How many of the running tasks (by node) it meets."""
        return sum(running.values())

    async def apply(self) -> None:
        """Let it happen."""
        raise NotImplementedError

    async def heal(self) -> None:
        """Undo it, as far as that is not up to delayq."""


class NodeFault(Fault):
    """A fault of one node, chosen at random."""

    touches = frozenset({"nodes"})

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        super().__init__(cluster, dice)
        self.node: Node = dice.choice(cluster.nodes)

    def concerns(self, running: Mapping[str, int]) -> int:
        """Those that it runs."""
        return running.get(self.node.name, 0)
