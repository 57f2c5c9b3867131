"""Everything that runs: a database server (sometimes two), nodes, customers, and a wire.

Nodes are `delayq run` processes. One that ends unasked, by a fault or by a handler that takes it
down, is started again, as systemd would.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg

from delayq.failures import is_transient
from delayq.migrate import migrate
from tests.chaos.ledger import LEDGER, note, now_us
from tests.chaos.server import DATABASE, NOT_READY, PostgresServer, Tools, free_port
from tests.chaos.timeline import Step
from tests.chaos.waiting import until
from tests.chaos.wire import Wire, wire
from tests.chaos.world import LOAD, SCHEMA, SEED, VERSION

if TYPE_CHECKING:
    from delayq.database import Connection

REPOSITORY = Path(__file__).resolve().parents[2]
NODE_ROLE, APP_ROLE = "chaos_node", "chaos_app"
NODES = 4
START_LIMIT_S = 30.0
SETTINGS: dict[str, dict[str, object]] = {
    "short": {"beat_interval_s": 0.75, "lease_ttl_s": 3.0, "sweep_interval_s": 0.7},
    "default": {},
}
_CLOCK = """
    create or replace function delayq.clock() returns timestamptz
        language sql volatile parallel safe
    as $$ select pg_catalog.clock_timestamp() + interval '{shift_us} microseconds' $$
"""
_LOOK = """
    select (select count(*) from delayq.tasks t
             where t.state = 'pending' and t.execute_at < delayq.clock() - interval '1 s'
               and t.kind in (select unnest(n.kinds) from delayq.nodes n where n.state = 'active')
           ) as overdue,
           (select count(*) from delayq.tasks t
             where t.state = 'running'
               and not exists (select from delayq.nodes n where n.id = t.lease_owner
                                and n.state <> 'dead' and n.expires_at > delayq.clock()
                                and n.pid = any ($1::int[]))
           ) as orphans,
           (select count(distinct n.pid) from delayq.nodes n
             where n.state = 'active' and n.expires_at > delayq.clock() and n.pid = any ($1::int[])
           ) as active,
           (select count(*) from delayq.tasks t where t.state = 'running') as running,
           (select count(*) from delayq.tasks t
             where t.state = 'pending' and t.execute_at > delayq.clock()
               and t.execute_at < delayq.clock() + interval '1 s') as soon
"""
_BY_NODE = """
    select n.name, count(*) as running
      from delayq.tasks t join delayq.nodes n on n.id = t.lease_owner
     where t.state = 'running' group by n.name
"""


@dataclass(frozen=True, slots=True)
class State:
    """What is going on, as the database says.

    `overdue`: due for a second; `orphans`: run by a process that is gone; `soon`: due within a
    second, as far as they are scheduled already.
    """

    overdue: int
    orphans: int
    active: int
    running: int
    soon: int


class Node:
    """One place for a node: the process in it may change, the name stays."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.version = "1"
        self.wanted = False
        self.dsn: str | None = None  # another one than everybody's
        self.exits: Counter[int] = Counter()
        self._clock = folder / f"{name}.clock"
        self._log = folder / f"{name}.log"
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self.set_clock(0)

    def set_clock(self, offset_s: int) -> None:
        """Falsify its wall clock, also while it runs."""
        # written in place: the process has it mapped
        mode = "r+b" if self._clock.exists() else "w+b"
        with self._clock.open(mode) as file:
            file.write(struct.pack("=q", offset_s * 1_000_000_000))

    def launch(self) -> None:
        """Start its process, without waiting for it."""
        self.wanted = True
        environment = self._environment | {VERSION: self.version, "CHAOS_CLOCK": f"{self._clock}"}
        if self.dsn is not None:
            environment["DELAYQ_DSN"] = self.dsn
        command = ["-m", "delayq", "run", "tests.chaos.application:dq", "--name", self.name]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command], env=environment, cwd=self._log.parent,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process of now."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send its process a signal, if it is there."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self, number: signal.Signals, limit_s: float = 30.0) -> int:
        """Send the process of now a signal; its exit status, once it has ended."""
        process = self._process
        assert process is not None
        self.send(number)
        return await asyncio.to_thread(process.wait, limit_s)

    def revive(self) -> bool:
        """Start it again if it ended and should run."""
        if not self.wanted or self._process is None or (status := self._process.poll()) is None:
            return False
        self.exits[status] += 1
        self.launch()
        return True

    def said(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-3000:] if self._log.exists() else ""

    def destroy(self) -> None:
        """Whatever happened: it does not run afterwards."""
        self.wanted = False
        if self._process is not None:
            self.send(signal.SIGCONT)
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()


class Cluster:
    """All of it. Made by `cluster`."""

    def __init__(self, folder: Path, tools: Tools, settings: str, seed: int, load: float) -> None:
        self.folder = folder
        self.tools = tools
        self.servers = [
            PostgresServer(tools, folder / f"postgres-{number}", free_port()) for number in (1, 2)
        ]
        self.primary = self.servers[0]
        self.settings = settings
        self.shift_us = 0
        self._seed = seed
        self._load = load
        self._customers: subprocess.Popen[bytes] | None = None
        self.nodes = [Node(f"n{n}", folder, self._environment(NODE_ROLE)) for n in range(NODES)]
        self._wire: Wire | None = None

    @property
    def wire(self) -> Wire:
        """The way of the last node to the database."""
        assert self._wire is not None
        return self._wire

    @property
    def wired(self) -> Node:
        """The node behind the wire."""
        return self.nodes[-1]

    @property
    def ttl_s(self) -> float:
        """After which silence a node is declared dead."""
        return float(str(SETTINGS[self.settings].get("lease_ttl_s", 15.0)))

    def dsn(self, user: str) -> str:
        """Both servers: whoever connects finds the one that can be written."""
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return (
            f"postgresql://{user}@{hosts}/{DATABASE}"
            "?sslmode=disable&target_session_attrs=read-write"
        )

    def _environment(self, role: str) -> dict[str, str]:
        settings: dict[str, object] = {
            "embedded": 0, "effect_connections": 5, "client_connections": 6,
            "drain_timeout_s": 2, "connect_timeout_s": 3, "log_format": "json",
        }  # fmt: skip
        settings |= SETTINGS[self.settings] | {"dsn": self.dsn(role)}
        return {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests/chaos/off_clock"),
                                           str(REPOSITORY)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            LEDGER: os.environ[LEDGER],
            SEED: str(self._seed),
            LOAD: str(self._load),
            **{f"DELAYQ_{name.upper()}": str(value) for name, value in settings.items()},
        }  # fmt: skip

    # --- the database ---------------------------------------------------------------------------

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[Connection]:
        """A connection of the superuser, for whom some are reserved."""
        conn = await asyncpg.connect(self.primary.dsn(), timeout=5, command_timeout=20)
        try:
            yield conn
        finally:
            await conn.close(timeout=5)

    async def ask(self, work: Callable[[Connection], Awaitable[Any]], limit_s: float = 60) -> Any:
        """Do something on a connection of the superuser, again until it works."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while True:
            try:
                async with self.admin() as conn:
                    return await work(conn)
            except NOT_READY as error:
                if not is_transient(error) or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def state(self) -> State:
        """What is going on."""
        pids = [node.pid for node in self.nodes if node.runs]
        row = await self.ask(lambda conn: conn.fetchrow(_LOOK, pids))
        return State(**dict(row))

    async def running_by_node(self) -> dict[str, int]:
        """How many tasks each node runs."""
        rows = await self.ask(lambda conn: conn.fetch(_BY_NODE))
        return {row["name"]: row["running"] for row in rows}

    async def step_clock(self, shift_us: int) -> None:
        """Let the database's clock show so much more than is true."""
        self.shift_us = shift_us
        begun_us = now_us()
        note("step_begun", shift=shift_us)
        await self.ask(lambda conn: conn.execute(_CLOCK.format(shift_us=shift_us)))
        note("step", begun=begun_us, shift=shift_us)

    # --- start and end --------------------------------------------------------------------------

    async def start(self, wire: Wire) -> None:
        """Everything but the customers."""
        self._wire = wire
        await self.primary.initialise()
        await self.primary.start()
        await self._prepare()
        host = f"127.0.0.1:{wire.port}"
        self.wired.dsn = f"postgresql://{NODE_ROLE}@{host}/{DATABASE}?sslmode=disable"
        for node in self.nodes:
            node.launch()
        await self.all_active()

    async def _prepare(self) -> None:
        conn = await asyncpg.connect(self.primary.dsn(database="postgres"))
        await conn.execute(f"create database {DATABASE}")
        await conn.close()
        roles = (REPOSITORY / "scripts/deploy/roles.sql").read_text()
        async with self.admin() as conn:
            real = await conn.fetchval("select (extract(epoch from clock_timestamp()) * 1e6)::int8")
            assert abs(real - now_us()) < 1_000_000, "the server has another clock than we"
            await migrate(conn)
            await conn.execute(roles)
            await conn.execute(SCHEMA)
            for role, of in ((NODE_ROLE, "delayq_node"), (APP_ROLE, "delayq_app")):
                await conn.execute(f"create role {role} login")
                await conn.execute(f"grant {of} to {role}")
                await conn.execute(f"grant usage on schema chaos to {role}")
                await conn.execute(f"grant select, insert on chaos.orders, chaos.effects to {role}")

    async def all_active(self, limit_s: float = START_LIMIT_S) -> None:
        """Return when every node takes its share."""

        async def look() -> bool:
            return (await self.state()).active == len(self.nodes)

        await until(look, limit_s)

    async def supervise(self) -> None:
        """Start ended nodes again; loops until cancelled."""
        while True:
            for node in self.nodes:
                if node.revive():
                    note("restarted", node=node.name)
            if self._customers is not None and self._customers.poll() not in (None, 0):
                raise RuntimeError(f"the customers ended: {self._said_by_customers()}")
            await asyncio.sleep(0.1)

    def send_customers(self) -> None:
        """Let the customers in."""
        with (self.folder / "customers.log").open("ab") as log:
            self._customers = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.customers"], cwd=self.folder,
                env=self._environment(APP_ROLE), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    async def dismiss_customers(self) -> None:
        """Send the customers home."""
        if self._customers is None:
            return
        self._customers.terminate()
        status = await asyncio.to_thread(self._customers.wait, 30)
        if status != 0:
            raise RuntimeError(f"the customers ended with {status}: {self._said_by_customers()}")

    def _said_by_customers(self) -> str:
        return (self.folder / "customers.log").read_text(errors="replace")[-3000:]

    async def dismiss_nodes(self) -> None:
        """Let every node drain and leave; RuntimeError if one does not do so in peace."""
        for node in self.nodes:
            node.wanted = False
        ends = await asyncio.gather(*(node.end(signal.SIGTERM) for node in self.nodes))
        for node, status in zip(self.nodes, ends, strict=True):
            if status != 0:
                raise RuntimeError(f"{node.name} left with {status}: {node.said()}")

    def end_all(self) -> None:
        """Kill what is left."""
        for node in self.nodes:
            node.destroy()
        if self._customers is not None:
            self._customers.kill()
            self._customers.wait()


@asynccontextmanager
async def cluster(
    folder: Path, *, settings: str, seed: int, load: float, pg_bin: Path | None = None
) -> AsyncIterator[Cluster]:
    """A cluster that works; nothing of it runs after the block."""
    them = Cluster(folder, Tools(pg_bin), settings, seed, load)
    async with AsyncExitStack() as stack:
        for server in them.servers:
            stack.push_async_callback(server.stop, "immediate")
        stack.callback(them.end_all)
        way = await stack.enter_async_context(wire(lambda: them.primary.port))
        await them.start(way)
        yield them


def steps_of(lines: list[dict[str, Any]]) -> list[Step]:
    """The steps of the database's clock, from the ledger."""
    return [Step(line["begun"], line["at"], line["shift"])
            for line in lines if line["what"] == "step"]  # fmt: skip
