"""delayq's connections behind a real PgBouncer, in both of its modes."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from delayq.database import Database, close, parse_dsn
from delayq.errors import DatabaseUnavailable
from delayq.settings import Settings
from tests.chaos.server import free_port
from tests.helpers import absent
from tests.relay import relay

pytestmark = pytest.mark.more

Behind = Callable[..., AbstractAsyncContextManager[Database]]
DROPPED = "plan_cache_mode,jit,default_transaction_isolation,statement_timeout,lock_timeout,"
DROPPED += "idle_in_transaction_session_timeout"


@pytest.fixture
def behind(dsn: str, settings: Settings) -> Behind:
    """Starts a PgBouncer in front of this test's database, with the given configuration."""

    @asynccontextmanager
    async def start(**configuration: str) -> AsyncIterator[Database]:
        # Its user cannot reach the server's socket, so it goes by way of a port.
        async with relay(dsn) as wire:
            with _pgbouncer(wire.dsn, configuration) as port:
                through = f"postgresql://postgres@127.0.0.1:{port}/shop?sslmode=disable"
                await _until_it_answers(Database(parse_dsn(through), settings))
                # Another one: what the waiting learnt is not what the test is about.
                yield Database(parse_dsn(through), settings)

    return start


@contextmanager
def _pgbouncer(dsn: str, configuration: dict[str, str]) -> Iterator[int]:
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None:
        absent("PgBouncer (as root, scripts/test --all installs it where there is apt-get)")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "pgbouncer.ini"
        file.write_text(_configuration(dsn, port, configuration))
        # It refuses to run as root.
        user = "nobody" if os.geteuid() == 0 else None
        process = subprocess.Popen([program, "-q", file], user=user)
        try:
            yield port
        finally:
            process.kill()
            process.wait()


def _configuration(dsn: str, port: int, configuration: dict[str, str]) -> str:
    target = parse_dsn(dsn)
    (host, upstream_port) = target.hosts[0]
    database = f"host={host} port={upstream_port} dbname={target.database} user={target.user}"
    lines = {
        "listen_addr": "127.0.0.1",
        "listen_port": str(port),
        "unix_socket_dir": "",
        "auth_type": "any",
        "default_pool_size": "3",
        **configuration,
    }
    return "\n".join(
        [
            "[databases]",
            f"shop = {database}",
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in lines.items()),
        ]
    )


async def _until_it_answers(database: Database) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await close(await database.connect_control(0, "waiting"))
            except DatabaseUnavailable:
                await asyncio.sleep(0.02)
            else:
                return


@pytest.mark.parametrize("ignored", ["", DROPPED], ids=["refusing", "dropping"])
@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_a_control_connection_gets_its_settings(
    behind: Behind, mode: str, ignored: str
) -> None:
    async with behind(pool_mode=mode, ignore_startup_parameters=ignored) as database:
        conn = await database.connect_control(7, "lease")
        found = await database.read_back(conn)
        assert database.behind_pooler
        assert found["plan_cache_mode"] == "force_custom_plan"
        assert found["jit"] == "off"
        assert found["application_name"] == "delayq/7"
        await close(conn)


@pytest.mark.parametrize("ignored", ["", DROPPED], ids=["refusing", "dropping"])
async def test_a_pool_survives_being_handed_from_backend_to_backend(
    behind: Behind, ignored: str
) -> None:
    async with behind(pool_mode="transaction", ignore_startup_parameters=ignored) as database:
        pool = await database.create_pool(0, 6, "delayq client")
        answers = await asyncio.gather(
            *(pool.fetchval("select $1::int + 1", number) for number in range(200))
        )
        assert answers == list(range(1, 201))
        await pool.close()
