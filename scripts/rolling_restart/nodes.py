"""Who is there: the rows of `delayq nodes`, looked at again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Self

from .programs import answer
from .words import Failed

LOOK_S = 0.3
_NEVER = float("-inf")
SHORTEST_TTL_S = 3.0
"""No node is declared dead before it was silent for so long: the settings allow no less."""


@dataclass(frozen=True, slots=True)
class Node:
    """One incarnation. `expires_at` moves with every beat."""

    id: str
    name: str
    host: str
    pid: int
    state: str
    live: bool
    kinds: frozenset[str]
    expires_at: str

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """A node as `delayq nodes --json` has it."""
        return cls(
            id=row["id"], name=row["name"], host=row["host"], pid=row["pid"], state=row["state"],
            live=row["live"], kinds=frozenset(row["kinds"]), expires_at=row["expires_at"] or "",
        )  # fmt: skip

    @property
    def active(self) -> bool:
        """Whether it takes its share, as far as its row knows."""
        return self.live and self.state == "active"


class Watch:
    """The nodes as they were seen last."""

    def __init__(self, delayq: Sequence[str]) -> None:
        self.nodes: dict[str, Node] = {}
        self.trouble: str | None = None
        """why the last look failed"""
        self._delayq = delayq
        self._began = _NEVER
        self._expires_at: dict[str, str] = {}
        self._heard: dict[str, float] = {}

    @property
    def live(self) -> list[Node]:
        """Those whose lease has not run out. One that has just crashed still looks like one."""
        return [node for node in self.nodes.values() if node.live]

    @property
    def active(self) -> list[Node]:
        """Those that take their share."""
        return [node for node in self.nodes.values() if node.active]

    def is_heard(self, node: Node, since: float) -> bool:
        """Whether it did something since then: a row that stands still may be of a dead one."""
        return self._heard.get(node.id, _NEVER) > since

    def look(self) -> None:
        """Look once. Raises Failed if there is no answer."""
        self._began = time.monotonic()
        rows = self._ask("nodes")["nodes"]
        self.nodes = {node.id: node for node in map(Node.of, rows)}
        now = time.monotonic()
        for id, node in self.nodes.items():
            if self._expires_at.get(id) != node.expires_at:
                self._expires_at[id], self._heard[id] = node.expires_at, now

    def looks(self, limit_s: float) -> Iterator[None]:
        """Look until the time is up; one turn for each look that succeeded."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self.look()
            except Failed as error:
                self.trouble = str(error)
            else:
                self.trouble = None
                yield
            if time.monotonic() > deadline:
                return
            time.sleep(LOOK_S)

    def was_buried(self, id: str) -> bool:
        """Whether a node whose row is gone was removed by its peers, instead of leaving.

        They do so once its lease has run out; one that leaves beats until its very end. Raises
        Failed if there is no answer.
        """
        if self._heard.get(id, _NEVER) > self._began - SHORTEST_TTL_S:
            return False
        at: str = self._ask("stats")["at"]
        passed = timedelta(seconds=time.monotonic() - self._began)
        return _instant(at) - passed >= _instant(self._expires_at[id])

    def _ask(self, verb: str) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(answer([*self._delayq, verb, "--json"]))
        except ValueError:
            raise Failed(f"`delayq {verb} --json` answers with something else") from None
        return document


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text)
