"""A PostgreSQL that speaks TLS, with certificates of a CA of its own, for one module of tests.

It lets roles in by TCP, with and without encryption, so that a test can tell which of the two a
session has. Clients trust `authority`; the server trusts it too, and `strangers` are signed by
another one.
"""

from __future__ import annotations

import itertools
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlencode

from delayq.database import Database
from delayq.dsn import parse_dsn
from delayq.migrate import migrate
from delayq.postgres import binaries
from delayq.postgres.account import run_as
from delayq.settings import load_settings
from tests.certificates import Authority, Pair
from tests.chaos.server import PostgresServer, Tools, free_port
from tests.conftest import TEST_PG_BIN
from tests.helpers import absent, connected
from tests.nodes import eventually

PASSWORD = "planted-marker-of-the-password"
TEMPLATE = "migrated"
HBA = """\
hostnossl all postgres  127.0.0.1/32 trust
hostssl   all certified 127.0.0.1/32 cert
host      all all       127.0.0.1/32 scram-sha-256
"""


@dataclass(frozen=True, slots=True)
class Session:
    """One session of the role `shop`, as the server sees it."""

    name: str
    encrypted: bool
    version: str | None


class TlsServer:
    """The server, reached as `localhost`, which its certificate holds, or as 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder, "ca")
        self.strangers = Authority(folder, "another-ca")
        self.certified = self.authority.issue("certified", "certified")
        self.stranger = self.strangers.issue("stranger", "certified")
        self._good = self.authority.issue("server", "localhost", hosts=("localhost",))
        self._forged = self.strangers.issue("forged", "localhost", hosts=("localhost",))
        self._numbers = itertools.count(1)
        self._tools = Tools(_binaries())
        self._server = PostgresServer(self._tools, folder / "pg", free_port())

    async def start(self) -> None:
        """Make it, with a migrated template and the roles, and return when it answers."""
        await self._server.initialise()
        self._demand_tls()
        self._install(self._good)
        self._put("root.crt", self.authority.cert.read_text())
        self._put("hba.conf", HBA)
        with (self._data / "postgresql.conf").open("a") as conf:
            # in the file, where `alter system` goes before it
            conf.write(f"ssl = on\nhba_file = '{self._data}/hba.conf'\nssl_ca_file = 'root.crt'\n")
        await self._server.start(log_connections="on")
        async with self.observer("postgres") as conn:
            await conn.execute(f"create role shop superuser login password '{PASSWORD}'")
            await conn.execute("create role certified superuser login")
            await conn.execute(f"create database {TEMPLATE}")
        async with self.observer(TEMPLATE) as conn:
            await migrate(conn)

    async def stop(self) -> None:
        """End it."""
        await self._server.stop("immediate")

    @asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """The name of a migrated database for one test."""
        name = f"test_{next(self._numbers)}"
        async with self.observer("postgres") as admin:
            await admin.execute(f"create database {name} template {TEMPLATE}")
            yield name
            await admin.execute(f"drop database {name} with (force)")

    def dsn(
        self,
        database: str,
        *,
        user: str = f"shop:{PASSWORD}",
        host: str = "localhost",
        **tls: Any,
    ) -> str:
        """The DSN of a role, with TLS parameters."""
        query = urlencode({name: str(value) for name, value in tls.items()})
        return f"postgresql://{user}@{host}:{self._server.port}/{database}?{query}"

    @asynccontextmanager
    async def observer(self, database: str) -> AsyncIterator[Any]:
        """The superuser's own connection, which is not encrypted."""
        dsn = f"postgresql://postgres@127.0.0.1:{self._server.port}/{database}?sslmode=disable"
        async with connected(dsn) as conn:
            yield conn

    async def sessions(self, database: str) -> list[Session]:
        """Those of the role `shop` in that database just now."""
        async with self.observer(database) as conn:
            rows = await conn.fetch(
                "select application_name as name, s.ssl as encrypted, s.version"
                "  from pg_stat_activity a join pg_stat_ssl s using (pid)"
                " where a.usename = 'shop' and a.datname = current_database()"
            )
        return [Session(**row) for row in rows]

    def admissions(self, database: str) -> list[str]:
        """A line of the server's log for every session of `shop` that there ever was."""
        log = (self.folder / "pg" / "log").read_text()
        words = f"connection authorized: user=shop database={database} "
        return [line for line in log.splitlines() if words in line]

    # --- what it shows to clients ---------------------------------------------------------------

    @asynccontextmanager
    async def forged_certificate(self, database: str) -> AsyncIterator[None]:
        """New sessions see one for the right name, signed by somebody whom nobody trusts."""
        await self._show(self._forged, self.strangers, database)
        try:
            yield
        finally:
            await self._show(self._good, self.authority, database)

    @asynccontextmanager
    async def without_tls(self, database: str) -> AsyncIterator[None]:
        """New sessions are offered none."""
        await self._offer_tls(database, False)
        try:
            yield
        finally:
            await self._offer_tls(database, True)

    async def _offer_tls(self, database: str, offered: bool) -> None:
        async with self.observer(database) as conn:
            await conn.execute(f"alter system set ssl = {'on' if offered else 'off'}")
            await conn.execute("select pg_reload_conf()")
        await eventually(
            lambda: self._connects(self.dsn(database, sslmode="require"), offered),
            f"TLS is offered: {offered}",
        )

    async def _show(self, pair: Pair, signed_by: Authority, database: str) -> None:
        self._install(pair)
        async with self.observer(database) as conn:
            await conn.execute("select pg_reload_conf()")
        dsn = self.dsn(database, sslmode="verify-full", sslrootcert=signed_by.cert)
        await eventually(lambda: self._connects(dsn, True), "the certificate is shown")

    async def _connects(self, dsn: str, wanted: bool) -> bool:
        try:
            async with connected(dsn):
                return wanted
        except (ssl.SSLError, ConnectionError):
            return not wanted

    # --- its files ------------------------------------------------------------------------------

    @property
    def _data(self) -> Path:
        return self.folder / "pg" / "data"

    def _install(self, pair: Pair) -> None:
        self._put("server.key", pair.key.read_text())
        self._put("server.crt", pair.cert.read_text())

    def _put(self, name: str, text: str) -> None:
        file = self._data / name
        file.write_text(text)
        file.chmod(0o600)
        if (account := self._tools.account) is not None:
            os.chown(file, account.uid, account.gid)

    def _demand_tls(self) -> None:
        command = [f"{self._tools.folder}/postgres", "-D", f"{self._data}", "-C", "ssl_library"]
        if run_as(self._tools.account, command).stdout.strip() == "":
            _give_up()


def client(dsn: str) -> Database:
    """What a process has of a database; settings that give up soon."""
    return Database(parse_dsn(dsn), load_settings(connect_timeout_s=5))


def _binaries() -> Path:
    if chosen := os.environ.get(TEST_PG_BIN):
        return Path(chosen)
    # the wheel's server was built without TLS, the system's with it
    found = (folder for folder in binaries._candidates(allow_system=True)
             if folder.parent.name != "pginstall" and binaries._complete(folder))  # fmt: skip
    return next(found, None) or _give_up()


def _give_up() -> NoReturn:
    absent("a PostgreSQL server with TLS (such as Debian's)")
