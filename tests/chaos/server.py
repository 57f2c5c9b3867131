"""A PostgreSQL of the chaos's own: restarted, crashed, cloned into a replica and promoted.

It listens on a port (a pooler's and a wire's other end, and several hosts in one URL need one),
without passwords, for this computer alone.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import asyncpg

from delayq.embedded import find_binaries
from delayq.failures import DRIVER_ERRORS
from delayq.postgres.account import Account, run_as, server_account, server_environment
from delayq.postgres.binaries import reachable_binaries
from tests.chaos.waiting import until

DATABASE = "chaos"
OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",  # the computer does not crash, only the server does
    "max_connections": "90",
    "shared_buffers": "64MB",
    "max_wal_size": "512MB",
    "wal_keep_size": "128MB",
    "wal_retrieve_retry_interval": "100ms",
    "timezone": "UTC",
    "log_min_messages": "warning",
    "log_min_error_statement": "panic",
    "autovacuum_naptime": "5s",
}
START_LIMIT_S = 60.0
NOT_READY = DRIVER_ERRORS


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Tools:
    """Where the server's programs are, and as whom they must run."""

    def __init__(self, pg_bin: Path | None = None) -> None:
        self.account: Account | None = server_account()
        found = find_binaries(pg_bin, allow_system=True)
        self.folder = reachable_binaries(found, self.account)

    def has(self, program: str) -> bool:
        """Whether there is a program of that name."""
        return (self.folder / program).exists()

    def run(self, program: str, *arguments: str) -> None:
        """Run a program to its end; RuntimeError with what it said if it fails."""
        done = run_as(self.account, [self.folder / program, *arguments])
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr.strip()[-1000:]}")

    def make_folder(self, folder: Path) -> None:
        """A folder that the server's account owns."""
        folder.mkdir(mode=0o700, parents=True)
        if self.account is not None:
            os.chown(folder, self.account.uid, self.account.gid)


class PostgresServer:
    """One data folder on one port. `start`, `stop` and `clone` block no event loop."""

    def __init__(self, tools: Tools, folder: Path, port: int) -> None:
        self.port = port
        self._tools = tools
        self._data = folder / "data"
        self._sockets = folder / "sockets"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        tools.make_folder(folder)
        tools.make_folder(self._sockets)

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def dsn(self, user: str = "postgres", database: str = DATABASE) -> str:
        """Where it is reached."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}?sslmode=disable"

    async def initialise(self) -> None:
        """Make the data folder."""
        arguments = ["-D", f"{self._data}", "-U", "postgres", "-E", "UTF8", "-A", "trust"]
        arguments += ["--locale=C", "--no-sync"]
        await asyncio.to_thread(self._tools.run, "initdb", *arguments)
        hba = self._data / "pg_hba.conf"
        with hba.open("a") as file:
            file.write("host replication all 127.0.0.1/32 trust\n")

    async def start(self, **options: str) -> None:
        """Return when it answers."""
        given = OPTIONS | {"port": f"{self.port}"} | options
        given["unix_socket_directories"] = f"{self._sockets}"
        command = [f"{self._tools.folder / 'postgres'}", "-D", f"{self._data}"]
        command += [part for name, value in given.items() for part in ("-c", f"{name}={value}")]
        self._process = await asyncio.to_thread(self._launch, command)
        await until(self._answers, START_LIMIT_S)

    def _launch(self, command: list[str]) -> subprocess.Popen[bytes]:
        account = self._tools.account
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                user=account.uid if account else None,
                group=account.gid if account else None,
                extra_groups=account.groups if account else None,
                env=server_environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=0o077,
                start_new_session=True,
            )

    async def _answers(self) -> bool:
        if not self.runs:
            raise RuntimeError(f"the server ended: {self.said()}")
        try:
            conn = await asyncpg.connect(self.dsn(database="postgres"), timeout=3)
        except NOT_READY:
            return False
        await conn.close()
        return True

    async def stop(self, mode: str = "fast") -> None:
        """Return when it has ended. `immediate` is a crash, with a recovery at the next start."""
        if self._process is None:
            return
        if self.runs:
            self._process.send_signal(signal.SIGQUIT if mode == "immediate" else signal.SIGINT)
        await asyncio.to_thread(self._process.wait, 60)

    async def clone(self, primary: PostgresServer) -> None:
        """Become a standby of another one that runs, from nothing."""
        await self.stop("immediate")
        await asyncio.to_thread(shutil.rmtree, self._data, ignore_errors=True)
        source = primary.dsn(database="postgres")
        await asyncio.to_thread(
            self._tools.run, "pg_basebackup", "-D", f"{self._data}", "-d", source, "-X", "stream",
            "-c", "fast", "-R", "--no-sync",
        )  # fmt: skip
        await self.start()

    async def promote(self) -> None:
        """Stop being a standby."""
        await asyncio.to_thread(self._tools.run, "pg_ctl", "promote", "-D", f"{self._data}", "-w")

    def said(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-2000:]
