"""Who owns a bucket and who stands by: rendezvous hashing of (bucket, incarnation).

Every node computes the same order from the same node table, without a word to the others. If
a node leaves, each of its buckets goes to the node that ranked second there, its understudy,
and no other bucket moves. Views that differ for a moment are harmless: the lease decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Final

BUCKETS: Final = 256
"""How many buckets the tasks are spread over; `delayq.bucket` in the schema agrees."""

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


class Role(Enum):
    """What a node is for one kind in one bucket: first in rank, or second."""

    OWNER = "owner"
    UNDERSTUDY = "understudy"


_Row = tuple[Role | None, ...]
_NO_ROLE: Final[_Row] = (None,) * BUCKETS


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of one node, for each of its kinds and each bucket."""

    owned: frozenset[int] = frozenset()
    """Buckets that the node owns for at least one kind."""
    understudied: frozenset[int] = frozenset()
    """Buckets in which the node is the understudy for at least one kind."""
    _rows: Mapping[str, _Row] = field(default_factory=dict)

    def role(self, kind: str, bucket: int) -> Role | None:
        """The node's role for tasks of `kind` in `bucket` (0 to 255), or None."""
        row = self._rows.get(kind)
        return None if row is None else row[bucket]

    def gained(self, before: Roles) -> frozenset[int]:
        """Buckets that hold a role for a kind which had none `before`: not loaded yet.

        A bucket whose understudy becomes its owner is not among them; its timers are held.
        """
        return frozenset(
            bucket
            for kind, row in self._rows.items()
            for bucket, (new, old) in enumerate(
                zip(row, before._rows.get(kind, _NO_ROLE), strict=True)
            )
            if new is not None and old is None
        )


def bucket_of(task_id: int) -> int:
    """The bucket of a task; `delayq.bucket(id)` computes the same."""
    return (task_id ^ (task_id >> 8)) & (BUCKETS - 1)


def score(bucket: int, incarnation: int) -> int:
    """How strongly a node is drawn to a bucket: 64 bits, the same on every node, for ever.

    For one bucket this is a bijection of the incarnation, so two nodes never tie.
    """
    return _mix((incarnation & _MASK) ^ _SALTS[bucket])


def ranks(nodes: Mapping[int, frozenset[str]], kinds: Iterable[str], me: int) -> Roles:
    """The roles of node `me` for `kinds`, given which kinds each active node serves.

    A kind that `nodes` does not list for `me` gives no role. Computed once per distinct set
    of serving nodes: 256 comparisons for each node in it.
    """
    rows: dict[str, _Row] = {}
    computed: dict[frozenset[int], _Row] = {}
    for kind in kinds:
        serving = frozenset(node for node, served in nodes.items() if kind in served)
        if me in serving:
            if serving not in computed:
                computed[serving] = _row(serving, me)
            rows[kind] = computed[serving]
    distinct = computed.values()
    return Roles(
        owned=_buckets(distinct, Role.OWNER),
        understudied=_buckets(distinct, Role.UNDERSTUDY),
        _rows=rows,
    )


def _row(serving: frozenset[int], me: int) -> _Row:
    mine = _scores(me)
    ahead = [0] * BUCKETS
    for node in serving - {me}:
        theirs = _scores(node)
        ahead = [n + (a > b) for n, a, b in zip(ahead, theirs, mine, strict=True)]
    roles = {0: Role.OWNER, 1: Role.UNDERSTUDY}
    return tuple(roles.get(count) for count in ahead)


def _buckets(rows: Iterable[_Row], role: Role) -> frozenset[int]:
    return frozenset(bucket for row in rows for bucket, has in enumerate(row) if has is role)


@lru_cache(maxsize=256)
def _scores(incarnation: int) -> tuple[int, ...]:
    return tuple(score(bucket, incarnation) for bucket in range(BUCKETS))


def _mix(x: int) -> int:
    """The finalizer of splitmix64, by Sebastiano Vigna after David Stafford: a bijection."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


_SALTS: Final = tuple(_mix((bucket + 1) * _GOLDEN & _MASK) for bucket in range(BUCKETS))
