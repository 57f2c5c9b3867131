"""What happens between one node and the database, or between all nodes and their notifications."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from tests.chaos.fault import Fault
from tests.chaos.server import DATABASE, NOT_READY, free_port
from tests.chaos.waiting import until
from tests.chaos.wire import Way

if TYPE_CHECKING:
    from tests.chaos.cluster import Cluster

WIRE = frozenset({"wire"})


class WireFault(Fault):
    """A fault of the wire of the last node."""

    touches = WIRE

    def concerns(self, running: Mapping[str, int]) -> int:
        """Those that the node behind the wire runs."""
        return running.get(self.cluster.wired.name, 0)

    async def heal(self) -> None:
        self.cluster.wire.heal()


class ListenCut(Fault):
    """The connections that listen are ended."""

    name = "LISTEN cut"
    touches = frozenset({"sessions"})

    async def apply(self) -> None:
        await self.cluster.ask(
            lambda conn: conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where usename = 'chaos_node' and query ~* '^(listen|.*pg_notify.*ping)'"
            )
        )


class ListenDeaf(WireFault):
    """The connection that listens hears nothing any more, and is not closed."""

    name = "LISTEN deaf"
    hold_s = 5.0

    async def apply(self) -> None:
        self.cluster.wire.deafen_listeners()


class CutOff(WireFault):
    """No bytes, either way, for longer than the TTL."""

    name = "cut both > TTL"
    ways = Way.IN | Way.OUT
    ttls = 1.5

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        super().__init__(cluster, dice)
        self.hold_s = cluster.ttl_s * self.ttls + (1 if self.ttls > 1 else 0)

    async def apply(self) -> None:
        self.cluster.wire.deafen(self.ways)


class CutOffBriefly(CutOff):
    """The same, for shorter than the TTL."""

    name = "cut both < TTL"
    ttls = 0.5


class CutOut(CutOff):
    """What the node says is not heard."""

    name = "cut out > TTL"
    ways = Way.OUT


class CutIn(CutOff):
    """The node does not hear what is said."""

    name = "cut in > TTL"
    ways = Way.IN


class CutInBriefly(CutOff):
    """The node does not hear what is said for a moment: answers come late."""

    name = "cut in < TTL"
    ways = Way.IN
    ttls = 0.5


class Reset(WireFault):
    """Every connection of the node breaks, and new ones are refused for a while."""

    name = "connections reset"
    hold_s = 2.0

    async def apply(self) -> None:
        self.cluster.wire.cut()


class Slow(WireFault):
    """Every packet takes 80 ms."""

    name = "slow network"
    hold_s = 5.0

    async def apply(self) -> None:
        self.cluster.wire.slow(0.08)


class Pooler(WireFault):
    """The last node is started anew behind PgBouncer in transaction mode, and then without."""

    name = "PgBouncer"
    touches = frozenset({"wire", "nodes", "server"})
    hold_s = 6.0

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        super().__init__(cluster, dice)
        self._direct = cluster.wired.dsn
        self._pooler: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def absent(self) -> str | None:
        return None if shutil.which("pgbouncer") else "pgbouncer"

    async def prepare(self) -> None:
        port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="delayq-chaos-pooler-"))
        self._folder.chmod(0o755)
        file = self._folder / "pgbouncer.ini"
        target = f"host=127.0.0.1 port={self.cluster.primary.port} dbname={DATABASE}"
        file.write_text(
            f"[databases]\n{DATABASE} = {target} user=chaos_node\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            "pool_mode = transaction\ndefault_pool_size = 8\n"
        )
        user = "nobody" if os.geteuid() == 0 else None  # it refuses to run as root
        self._pooler = await asyncio.to_thread(_pgbouncer, file, user)
        dsn = f"postgresql://chaos_node@127.0.0.1:{port}/{DATABASE}?sslmode=disable"
        await until(lambda: self._answers(dsn), 10)
        self.cluster.wired.dsn = dsn

    async def _answers(self, dsn: str) -> bool:
        try:
            conn = await asyncpg.connect(dsn, timeout=3)
        except NOT_READY:
            return False
        await conn.close()
        return True

    async def apply(self) -> None:
        await self._replace()

    async def heal(self) -> None:
        self.cluster.wired.dsn = self._direct
        await self._replace()
        if self._pooler is not None:
            self._pooler.kill()
            self._pooler.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _replace(self) -> None:
        node = self.cluster.wired
        node.wanted = False
        await node.end(signal.SIGTERM)
        node.launch()
        await self.cluster.all_active()


def _pgbouncer(file: Path, user: str | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["pgbouncer", "-q", file], user=user)
