"""What happens to the database: restarts, failover, ended sessions, locks, refusals, its clock."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import asyncpg

from tests.chaos.fault import Fault
from tests.chaos.server import DATABASE, NOT_READY, PostgresServer
from tests.chaos.waiting import until

if TYPE_CHECKING:
    from delayq.database import Connection
    from tests.chaos.cluster import Cluster

HOUR_US = 3_600_000_000
SERVER = frozenset({"server"})


class Restart(Fault):
    """The server is shut down and started again."""

    name = "restart fast"
    touches = SERVER
    mode = "fast"

    async def apply(self) -> None:
        await self.cluster.primary.stop(self.mode)

    async def heal(self) -> None:
        await self.cluster.primary.start()


class Crash(Restart):
    """The server crashes, and recovers."""

    name = "restart immediate"
    mode = "immediate"


class Outage(Restart):
    """The server is away for longer than the TTL."""

    name = "outage > TTL"

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        super().__init__(cluster, dice)
        self.hold_s = cluster.ttl_s * 1.5


class Failover(Fault):
    """The primary crashes, its synchronous standby is promoted, all find it by their DSN."""

    name = "failover"
    touches = SERVER

    def absent(self) -> str | None:
        missing = [name for name in ("pg_basebackup", "pg_ctl") if not self.cluster.tools.has(name)]
        return ", ".join(missing) or None

    @property
    def standby(self) -> PostgresServer:
        """The one that is not the primary."""
        return next(s for s in self.cluster.servers if s is not self.cluster.primary)

    async def prepare(self) -> None:
        await self.standby.clone(self.cluster.primary)
        async with self.cluster.admin() as conn:
            await conn.execute("alter system set synchronous_standby_names = '*'")
            await conn.execute("select pg_reload_conf()")
        await until(lambda: self.cluster.ask(_follows), 30)

    async def apply(self) -> None:
        standby = self.standby
        await self.cluster.primary.stop("immediate")
        await standby.promote()
        self.cluster.primary = standby
        # it has nobody to wait for; the setting came with the copy only if it was made twice
        await self.cluster.ask(_alone)


async def _follows(conn: Connection) -> bool:
    sql = "select exists (select from pg_stat_replication where sync_state = 'sync')"
    return bool(await conn.fetchval(sql))


async def _alone(conn: Connection) -> None:
    await conn.execute("alter system reset synchronous_standby_names")
    await conn.execute("select pg_reload_conf()")


class EndSessions(Fault):
    """Some sessions are ended, whoever has them."""

    name = "sessions ended"
    touches = frozenset({"sessions"})

    async def apply(self) -> None:
        share = self.dice.choice([0.2, 0.5, 1.0])
        await self.cluster.ask(
            lambda conn: conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where usename like 'chaos%' and random() < $1",
                share,
            )
        )


class Full(Fault):
    """Statements fail as on a full disk, now and then."""

    name = "disk full"
    touches = frozenset({"statements"})
    hold_s = 3.0

    async def apply(self) -> None:
        await self._fail(self.dice.choice([0.1, 0.5, 1.0]))

    async def heal(self) -> None:
        await self._fail(0.0)

    async def _fail(self, share: float) -> None:
        await self.cluster.ask(lambda conn: conn.execute("update chaos.failing set share = $1",
                                                         share))  # fmt: skip


class ClockAhead(Fault):
    """The database's clock leaps an hour ahead, and back."""

    name = "clock +1 h"
    touches = frozenset({"clock"})
    hold_s = 3.0
    shift_us = HOUR_US

    async def apply(self) -> None:
        await self.cluster.step_clock(self.shift_us)

    async def heal(self) -> None:
        await self.cluster.step_clock(0)


class ClockBack(ClockAhead):
    """The database's clock falls back an hour, and is put right."""

    name = "clock -1 h"
    shift_us = -HOUR_US


class Held(Fault):
    """A fault that is a session which holds something."""

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        super().__init__(cluster, dice)
        self._conn: Connection | None = None

    async def apply(self) -> None:
        await until(self._takes, 60)

    async def _takes(self) -> bool:
        """False while another fault keeps the server away."""
        with suppress(*NOT_READY):
            self._conn = conn = await asyncpg.connect(self.cluster.primary.dsn(), timeout=5)
            await conn.execute("begin")
            await self.hold(conn)
            return True
        return False

    async def hold(self, conn: Connection) -> None:
        """Take it."""
        raise NotImplementedError

    async def heal(self) -> None:
        if self._conn is not None:
            with suppress(*NOT_READY):
                await self._conn.execute("rollback")
                await self._conn.close(timeout=5)


class LongTransaction(Held):
    """Somebody has a transaction open, with locks on some pending tasks."""

    name = "long transaction"
    touches = frozenset({"locks"})
    hold_s = 5.0

    async def hold(self, conn: Connection) -> None:
        await conn.execute("insert into chaos.orders values ('held ' || txid_current())")
        await conn.execute(
            "select from delayq.tasks where state = 'pending' order by id desc limit 20"
            " for update skip locked"
        )


class LockedTable(Held):
    """A migration holds the table of tasks for ten seconds."""

    name = "tasks locked 10 s"
    touches = frozenset({"locks"})
    hold_s = 10.0

    async def hold(self, conn: Connection) -> None:
        await conn.execute("lock table delayq.tasks in access exclusive mode")


class NoConnections(Fault):
    """Every connection is taken, and some that were had are lost."""

    name = "out of connections"
    touches = frozenset({"sessions"})
    hold_s = 4.0

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        super().__init__(cluster, dice)
        self._taken: list[Connection] = []

    async def apply(self) -> None:
        await self._take_all()
        await self.cluster.ask(
            lambda conn: conn.execute(
                "select pg_terminate_backend(pid) from ("
                "  select pid from pg_stat_activity where usename = 'chaos_node'"
                "   order by random() limit 8) as victims"
            )
        )
        await self._take_all()

    async def _take_all(self) -> None:
        # as an ordinary role: those reserved for superusers stay free for us
        host = f"127.0.0.1:{self.cluster.primary.port}"
        dsn = f"postgresql://chaos_app@{host}/{DATABASE}?sslmode=disable"
        with suppress(*NOT_READY):  # too many, or another fault keeps the server away
            while True:
                self._taken.append(await asyncpg.connect(dsn, timeout=5))

    async def heal(self) -> None:
        for conn in self._taken:
            conn.terminate()


class NoPrivilege(Fault):
    """The nodes' role lacks a privilege for a while."""

    name = "privilege revoked"
    touches = frozenset({"statements"})
    hold_s = 3.0

    async def apply(self) -> None:
        what = self.dice.choice(
            ["insert on delayq.task_history", "update on delayq.tasks", "update on delayq.nodes",
             "select, update on delayq.tasks", "delete on delayq.tasks"]
        )  # fmt: skip
        await self.cluster.ask(lambda conn: conn.execute(f"revoke {what} from delayq_node"))

    async def heal(self) -> None:
        await self.cluster.ask(lambda conn: conn.execute("select delayq.grant_node('delayq_node')"))
