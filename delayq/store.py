"""The node's half of the rooms that speak SQL: one method a statement, nothing decided but how to
ask where somebody holds locks.

Every actor gets a connection of its own, so a slow statement of one delays none of the others:
lease, settle, sweep (window, overdue), look (small reads, lone retries), upkeep (adoption,
partitions, pruning).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from delayq.control import ControlConnection
from delayq.database import Database
from delayq.errors import DatabaseTimeout
from delayq.failures import met_a_lock
from delayq.plans import BY_ID, IN_INDEX_ORDER
from delayq.statements import statement

if TYPE_CHECKING:
    import asyncpg


_LOCKS_S: Final = 1.0
"""Having met a lock, leases step over locks for so long, in seconds."""


class Arming(NamedTuple):
    """What it takes to arm a timer."""

    id: int
    execute_at_us: int
    kind: str
    priority: int


class Found(NamedTuple):
    """What a look at a task found."""

    id: int
    state: str
    execute_at_us: int
    now_us: int
    """the database's clock when it was looked at"""


class Settled(NamedTuple):
    """The database's verdict on a settlement; `execute_at_us` if the task is pending again."""

    id: int
    verdict: str
    execute_at_us: int | None


class RunningRow(NamedTuple):
    """One row in state running, whoever owns it."""

    bucket: int
    id: int
    owner: int
    token: int
    deadline_us: int
    execute_at_us: int


@dataclass(slots=True)
class Cursors:
    """Where the load of the window stands, bucket by bucket: the last row loaded, and the edge."""

    buckets: list[int]
    at_us: list[int]
    kinds: list[str]
    ids: list[int]
    until_us: list[int]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the window, and the marks that tell a failover."""

    xmin: int
    server_started_us: int
    rows: list[tuple[int, int, int, str, int]]
    """(id, bucket, execute_at_us, kind, priority), by bucket in index order"""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What a lease statement must know about the kinds that this node serves."""

    kinds: list[str]
    max_attempts: list[int]
    timeouts_ms: list[int | None]
    deadlines: list[bool]
    with_grace: list[str]


class Store:
    """The statements of one incarnation of a node."""

    def __init__(self, database: Database, incarnation: int) -> None:
        self.incarnation = incarnation
        self._locks_until_s = 0.0
        self._lease = ControlConnection(database, incarnation, "lease", BY_ID)
        self._settle = ControlConnection(database, incarnation, "settle", BY_ID)
        self._sweep = ControlConnection(database, incarnation, "sweep", IN_INDEX_ORDER)
        self._look = ControlConnection(database, incarnation, "look")
        self._upkeep = ControlConnection(database, incarnation, "upkeep")
        self._sql = {
            name: statement(name)
            for name in (
                "activate adopt cancel_flags clock drain drop_partitions end_sessions forget"
                " hint_horizon holds lease leave look make_partitions overdue payloads"
                " prune_default prune_idempotency register running set_aside settle"
                " settle_succeeded tell_apart window"
            ).split()
        }

    async def open(self) -> None:
        """Connect all of them, so that the first task finds them ready."""
        for connection in self._connections():
            await connection.open()

    async def aclose(self) -> None:
        """End the sessions."""
        for connection in self._connections():
            await connection.aclose()

    def _connections(self) -> tuple[ControlConnection, ...]:
        return self._lease, self._settle, self._sweep, self._look, self._upkeep

    # --- the life of a node ---------------------------------------------------------------

    async def register(
        self, name: str, host: str, pid: int, version: str, kinds: list[str], ttl_ms: int
    ) -> None:
        """Write this node's row, as joining."""
        await self._sweep.fetch(
            self._sql["register"], self.incarnation, name, host, pid, version, kinds, ttl_ms
        )

    async def activate(self) -> bool:
        """Take a share. False if the row is not joining any more (buried, or asked to drain)."""
        return bool(await self._sweep.fetch(self._sql["activate"], self.incarnation))

    async def drain(self) -> None:
        """Say that this node stops firing; peers take over at once."""
        await self._look.fetch(self._sql["drain"], self.incarnation)

    async def leave(self, handed_over: bool) -> None:
        """Remove this node's row; if something is left, mark it dead: peers adopt that at once."""
        await self._look.fetch(self._sql["leave"], self.incarnation, handed_over)

    async def end_sessions(self) -> None:
        """End the other sessions of this incarnation, and whatever statement they are in."""
        await self._look.fetch(self._sql["end_sessions"], self.incarnation)

    async def hint_horizon_us(self) -> int:
        """How far ahead writes are hinted."""
        rows = await self._sweep.fetch(self._sql["hint_horizon"])
        return int(rows[0][0])

    async def clock_us(self) -> int:
        """The database's clock."""
        rows = await self._sweep.fetch(self._sql["clock"])
        return int(rows[0][0])

    # --- leases ----------------------------------------------------------------------------

    async def lease(
        self, ids: list[int], nonce: int, terms: LeaseTerms, ahead_us: int, inline_bytes: int
    ) -> list[asyncpg.Record]:
        """Lease those that are due and free; a row each, for `Lease`.

        A row that somebody holds locked is left out. The statement that can do so costs more, so
        it is asked only if the plain one has met a lock, then and for a second.
        """
        monotonic_s = time.monotonic()
        if monotonic_s >= self._locks_until_s:
            try:
                return await self._lease_rows(ids, nonce, terms, ahead_us, inline_bytes, False)
            except DatabaseTimeout as error:
                if not met_a_lock(error):
                    raise
            self._locks_until_s = monotonic_s + _LOCKS_S
        return await self._lease_rows(ids, nonce, terms, ahead_us, inline_bytes, True)

    async def _lease_rows(
        self,
        ids: list[int],
        nonce: int,
        terms: LeaseTerms,
        ahead_us: int,
        inline_bytes: int,
        around_locks: bool,
    ) -> list[asyncpg.Record]:
        return await self._lease.fetch(
            self._sql["lease"],
            _array(ids),
            self.incarnation,
            nonce,
            terms.kinds,
            terms.max_attempts,
            terms.timeouts_ms,
            terms.deadlines,
            ahead_us,
            inline_bytes,
            terms.with_grace,
            ids[0],
            around_locks,
        )

    async def holds(self, ids: list[int], nonce: int) -> list[tuple[int, int]]:
        """(id, token) of what the lease statement with this nonce holds."""
        rows = await self._look.fetch(self._sql["holds"], ids, nonce)
        return [(row[0], row[1]) for row in rows]

    async def payloads(
        self, ids: list[int], tokens: list[int], most_bytes: int
    ) -> dict[int, str | None]:
        """Payloads too long to come with the lease, by id; None for those beyond `most_bytes`.

        At least one is not beyond. Those whose lease is lost are left out.
        """
        rows = await self._look.fetch(self._sql["payloads"], ids, tokens, most_bytes)
        return {row[0]: row[1] for row in rows}

    async def look(self, ids: list[int]) -> list[Found]:
        """What became of these tasks; those that are live no more are left out."""
        return [Found(*row) for row in await self._look.fetch(self._sql["look"], ids)]

    async def set_aside(self, task_id: int, error: str) -> bool:
        """Move a pending row that fails every lease to the dead tasks."""
        return bool(await self._look.fetch(self._sql["set_aside"], task_id, error))

    # --- settlements -----------------------------------------------------------------------

    async def settle_succeeded(
        self, ids: list[int], tokens: list[int], lateness_us: list[int]
    ) -> int:
        """The hot path: how many of them were settled; none if somebody holds one locked."""
        try:
            return await self._settle.execute(
                self._sql["settle_succeeded"], _array(ids), _array(tokens), _array(lateness_us)
            )
        except DatabaseTimeout as error:
            if not met_a_lock(error):
                raise
            return 0

    async def settle(
        self,
        ids: list[int],
        tokens: list[int],
        lateness_us: list[int | None],
        outcomes: list[str],
        delays_us: list[int | None],
        errors: list[str | None],
        errors_kept: int,
    ) -> list[Settled]:
        """Settle with outcomes; answers only for those that it settled."""
        rows = await self._settle.fetch(
            self._sql["settle"],
            ids,
            tokens,
            lateness_us,
            outcomes,
            delays_us,
            errors,
            errors_kept,
            False,
        )
        return [Settled(*row) for row in rows]

    async def tell_apart(self, ids: list[int], tokens: list[int]) -> dict[int, str]:
        """For settlements without an answer: the verdict, `running` (locked) or `lost`, by id."""
        rows = await self._look.fetch(self._sql["tell_apart"], ids, tokens)
        return {row[0]: row[1] for row in rows}

    # --- the window ------------------------------------------------------------------------

    async def window(
        self, cursors: Cursors, kinds: Sequence[str], limit: int, newer_than: int | None
    ) -> Page:
        """A page of the window from the cursors on; `limit` rows a bucket at the most."""
        rows = await self._sweep.fetch(
            self._sql["window"],
            cursors.buckets,
            cursors.at_us,
            cursors.kinds,
            cursors.ids,
            cursors.until_us,
            list(kinds),
            limit,
            newer_than,
        )
        marks = next(row for row in rows if row[0] is None)
        return Page(marks[5], marks[6], [row[:5] for row in rows if row is not marks])

    async def overdue(
        self,
        buckets: list[int],
        from_us: int,
        until_us: int,
        kinds: Sequence[str],
        held: list[int],
        limit: int,
    ) -> list[Arming]:
        """Overdue tasks that are not held here, oldest first."""
        per_bucket = max(4, -(-limit // 8))
        rows = await self._sweep.fetch(
            self._sql["overdue"],
            buckets,
            from_us,
            until_us,
            list(kinds),
            held,
            min(limit, per_bucket),
            limit,
        )
        return [Arming(*row) for row in rows]

    async def cancel_flags(self, ids: list[int]) -> list[int]:
        """Those of the running tasks that were asked to end."""
        return [row[0] for row in await self._look.fetch(self._sql["cancel_flags"], ids)]

    # --- orphans ---------------------------------------------------------------------------

    async def running(
        self, after: tuple[int, int], until_bucket: int, until_us: int, limit: int
    ) -> list[RunningRow]:
        """Running rows beyond `after` (bucket, id), up to and with a bucket, by bucket and id."""
        rows = await self._upkeep.fetch(self._sql["running"], *after, until_bucket, until_us, limit)
        return [RunningRow(*row) for row in rows]

    async def adopt(self, ids: list[int], overdue_us: int) -> list[Settled]:
        """Take over what dead or missing nodes ran, or live ones long past the deadline."""
        rows = await self._upkeep.fetch(self._sql["adopt"], ids, overdue_us)
        return [Settled(*row) for row in rows]

    async def forget(self, nodes: list[int]) -> list[int]:
        """Remove the rows of those of these nodes that are dead."""
        return [row[0] for row in await self._upkeep.fetch(self._sql["forget"], nodes)]

    # --- upkeep ----------------------------------------------------------------------------

    async def make_partitions(self, days: int) -> list[str]:
        """The answers of `delayq.make_partitions`, from today on."""
        rows = await self._upkeep.fetch(self._sql["make_partitions"], days)
        return [row["answer"] for row in rows]

    async def drop_partitions(self, days: int) -> list[str]:
        """The answers of `delayq.drop_partitions` for history older than `days`."""
        rows = await self._upkeep.fetch(self._sql["drop_partitions"], days)
        return [row["answer"] for row in rows]

    async def prune_default(self, days: int, rows: int) -> bool:
        """One batch of the default partition. True if it came back full: there may be more."""
        counts = await self._upkeep.fetch(self._sql["prune_default"], days, rows)
        return bool(counts[0][0] >= rows)

    async def prune_idempotency(
        self, days: int, after: tuple[str, str], rows: int
    ) -> tuple[str, str] | None:
        """One page of idempotency rows beyond `after` (kind, key): note the ends, drop the old.

        After which row the next page begins; None: that was the last one.
        """
        ends = await self._upkeep.fetch(self._sql["prune_idempotency"], days, *after, rows)
        return (ends[0][0], ends[0][1]) if ends else None


def _array(numbers: list[int]) -> str:
    """The text of a PostgreSQL array: many times cheaper to make than the driver's encoding."""
    return "{" + str(numbers)[1:-1] + "}"
