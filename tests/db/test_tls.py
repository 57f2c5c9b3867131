"""Nodes, clients and the command line over TLS, on a real server with certificates of our own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from delayq import Context, DelayQ
from delayq.database import Database, close
from delayq.errors import AuthenticationFailed, DatabaseUnavailable, DelayQError, InvalidArgument
from delayq.node import Node
from delayq.settings import Settings, load_settings
from tests.certificates import encrypted
from tests.conftest import SHORT, Logged
from tests.nodes import Application, ended, eventually, schedule
from tests.tls_server import PASSWORD, Session, TlsServer, client

pytestmark = pytest.mark.more

REPOSITORY = Path(__file__).resolve().parents[2]
KEY_PASSWORD = "planted-marker-of-the-key"
CONTROL_CONNECTIONS = 7
APP = """
from delayq import Context, DelayQ

dq = DelayQ()

@dq.task
async def greet(ctx: Context) -> None:
    async with ctx.effect() as conn:
        await conn.execute("select 1")
    print("hello", flush=True)
"""


@pytest.fixture(scope="module")
def tls() -> Iterator[TlsServer]:
    folder = Path(tempfile.mkdtemp(prefix="delayq-tls-"))
    folder.chmod(0o755)  # for the server's account
    try:
        server = TlsServer(folder)
        try:
            asyncio.run(server.start())
            yield server
        finally:
            asyncio.run(server.stop())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def shop(tls: TlsServer) -> AsyncIterator[str]:
    """The name of this test's own database on that server."""
    async with tls.database() as name:
        yield name


@pytest.fixture
def verified(tls: TlsServer, shop: str) -> str:
    """The DSN as it should be."""
    return tls.dsn(shop, sslmode="verify-full", sslrootcert=tls.authority.cert)


def _settings(dsn: str) -> Settings:
    return load_settings(dsn=dsn, embedded=False, **SHORT)


async def _stored(tls: TlsServer, shop: str) -> int:
    async with tls.observer(shop) as conn:
        return int(await conn.fetchval("select count(*) from delayq.tasks"))


# --- everything is encrypted ------------------------------------------------------------------


async def test_every_session_of_a_node_and_its_client_is_encrypted(
    tls: TlsServer, shop: str, verified: str
) -> None:
    """Leases, settlements, sweeps, LISTEN, the beat's thread, effects, clients."""
    dq = DelayQ(settings=_settings(verified))
    inside, go_on = asyncio.Event(), asyncio.Event()

    @dq.task
    async def waits(ctx: Context) -> None:
        async with ctx.effect():
            inside.set()
            await go_on.wait()

    @dq.task
    def plain(ctx: Context) -> None:
        with ctx.effect() as conn:
            conn.execute("select 1")

    async with dq.node() as node, tls.observer(shop) as conn:
        tasks = [await waits.after(0), await plain.after(0.2)]
        await inside.wait()

        async def all_there() -> list[Session]:
            found = await tls.sessions(shop)
            own = [one for one in found if one.name == f"delayq/{node.id}"]
            return found if len(own) > CONTROL_CONNECTIONS else []

        # the effect's is one more
        sessions: list[Session] = await eventually(all_there, "every connection of the node")
        assert {one.name for one in sessions} == {f"delayq/{node.id}", "delayq client"}
        assert [one for one in sessions if not one.encrypted] == []
        go_on.set()
        for task in tasks:
            assert (await ended(conn, task.id)).state == "succeeded"
    # and those that the looks above did not meet
    _all_encrypted(tls.admissions(shop), CONTROL_CONNECTIONS + 2)


def _all_encrypted(admissions: list[str], at_least: int) -> None:
    assert len(admissions) >= at_least
    assert [line for line in admissions if "SSL enabled (protocol=TLSv1" not in line] == []


async def test_without_tls_the_same_looks_show_that_nothing_is_encrypted(
    tls: TlsServer, shop: str
) -> None:
    """So the test above would notice."""
    database = client(tls.dsn(shop, sslmode="disable"))
    conn = await database.connect_control(1, "beat")
    assert await tls.sessions(shop) == [Session("delayq/1", False, None)]
    assert "SSL" not in tls.admissions(shop)[0]
    await close(conn)


Delayq = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, Any]:
    """How a process is started that inherits nothing from this one's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DELAYQ_", "PG"))}
    own = {"PYTHONPATH": str(REPOSITORY), "DELAYQ_EMBEDDED": "0", "DELAYQ_LOG_FORMAT": "json"}
    return {"cwd": tmp_path, "env": kept | own, "text": True}


@pytest.fixture
def delayq(outside: dict[str, Any]) -> Delayq:
    """Runs a command."""

    def run(dsn: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        more = {"env": outside["env"] | {"DELAYQ_DSN": dsn} | env}
        return subprocess.run(
            [sys.executable, "-m", "delayq", *arguments],
            capture_output=True, timeout=40, check=False, **(outside | more),
        )  # fmt: skip

    return run


def _run_a_node(outside: dict[str, Any], dsn: str) -> subprocess.Popen[str]:
    more = {"env": outside["env"] | {"DELAYQ_DSN": dsn}}
    return subprocess.Popen(
        [sys.executable, "-m", "delayq", "run", "app:dq"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **(outside | more),
    )  # fmt: skip


async def test_the_command_line_and_a_node_as_a_process_are_encrypted_too(
    tls: TlsServer, shop: str, verified: str, delayq: Delayq, outside: dict[str, Any]
) -> None:
    (outside["cwd"] / "app.py").write_text(APP)
    node = _run_a_node(outside, verified)
    try:
        given = await asyncio.to_thread(delayq, verified, "schedule", "greet", "{}", "--in", "0s")
        assert given.returncode == 0, given.stderr
        assert node.stdout is not None
        assert await asyncio.to_thread(node.stdout.readline) == "hello\n"
        doctor = await asyncio.to_thread(delayq, verified, "doctor", "--json")
        checks = {check["check"]: check["status"] for check in json.loads(doctor.stdout)["checks"]}
        assert (checks["connection"], checks["listen"]) == ("ok", "ok")
        nodes = await asyncio.to_thread(delayq, verified, "nodes", "--json")
        assert [one["pid"] for one in json.loads(nodes.stdout)["nodes"]] == [node.pid]
        node.terminate()
        _, said = await asyncio.to_thread(node.communicate, timeout=30)
        assert node.returncode == 0, said
    finally:
        node.kill()
        node.communicate()
    _all_encrypted(tls.admissions(shop), CONTROL_CONNECTIONS + 4)


# --- who is not who he should be ---------------------------------------------------------------


async def _refusal(dsn: str) -> DelayQError:
    """What a client and a node say alike, at once and without a password."""
    dq = DelayQ(settings=_settings(dsn))

    @dq.task
    async def greet() -> None: ...

    said: list[DelayQError] = []
    async with asyncio.timeout(10):
        with pytest.raises(DelayQError) as refused:
            async with dq:
                await greet.after(0)
        said.append(refused.value)
        node = Node(client(dsn), dq.registry, dq.settings)
        with pytest.raises(DelayQError) as refused:
            await node.start()
        said.append(refused.value)
    for error in said:
        assert PASSWORD not in "".join(traceback.format_exception(error))
    texts = [str(error).partition("connection to ")[2] for error in said]
    assert type(said[0]) is type(said[1])
    assert texts[0] == texts[1] != ""
    return said[0]


async def test_a_server_of_another_ca_is_refused_and_nothing_is_stored(
    tls: TlsServer, shop: str, delayq: Delayq, outside: dict[str, Any]
) -> None:
    (outside["cwd"] / "app.py").write_text(APP)
    dsn = tls.dsn(shop, sslmode="verify-full", sslrootcert=tls.strangers.cert)
    for mode in ("require", "verify-ca", "verify-full"):
        error = await _refusal(dsn.replace("verify-full", mode))
        assert type(error) is AuthenticationFailed
        assert f"/{shop} as shop: the server's certificate is not trusted: " in str(error)
        assert "sslrootcert must name the certificate of the CA that signed it" in str(error)
    for command in ("schedule greet {} --in 0s", "run app:dq", "nodes", "migrate"):
        said = await asyncio.to_thread(delayq, dsn, *command.split())
        assert (said.returncode, said.stdout) == (3, ""), said
        assert said.stderr.count("\n") == 1
        assert "sslrootcert must name" in said.stderr
        assert PASSWORD not in said.stderr
    doctor = await asyncio.to_thread(delayq, dsn, "doctor")
    assert doctor.returncode == 3
    assert "sslrootcert must name" in doctor.stdout
    assert PASSWORD not in doctor.stdout + doctor.stderr
    assert await _stored(tls, shop) == 0
    assert tls.admissions(shop) == []


async def test_a_name_that_the_certificate_does_not_hold_is_refused_unless_only_the_ca_counts(
    tls: TlsServer, shop: str
) -> None:
    def dsn(mode: str) -> str:
        return tls.dsn(shop, host="127.0.0.1", sslmode=mode, sslrootcert=tls.authority.cert)

    error = await _refusal(dsn("verify-full"))
    assert type(error) is AuthenticationFailed
    assert "the server's certificate is for another host: IP address mismatch" in str(error)
    assert "connect by a name that it holds, or check the CA alone" in str(error)
    assert tls.admissions(shop) == []
    await close(await client(dsn("verify-ca")).connect_control(1, "beat"))
    _all_encrypted(tls.admissions(shop), 1)


async def test_a_server_without_tls_is_refused_if_it_is_asked_for(
    tls: TlsServer, shop: str, verified: str
) -> None:
    async with tls.without_tls(shop):
        for dsn in (tls.dsn(shop, sslmode="require"), verified):
            error = await _refusal(dsn)
            assert type(error) is AuthenticationFailed
            assert "the server offers no TLS, and sslmode asks for it" in str(error)
        assert tls.admissions(shop) == []
        # the default, as libpq's, is to take what there is
        await close(await client(tls.dsn(shop)).connect_control(1, "beat"))
        assert len(tls.admissions(shop)) == 1


# --- certificates of clients --------------------------------------------------------------------


def _certified(tls: TlsServer, shop: str, **files: Any) -> Database:
    root = tls.authority.cert
    return client(tls.dsn(shop, user="certified", sslmode="verify-full", sslrootcert=root, **files))


async def test_a_client_is_let_in_by_its_certificate(tls: TlsServer, shop: str) -> None:
    pair = tls.certified
    locked = encrypted(pair, KEY_PASSWORD)
    keys: list[dict[str, Any]] = [{"sslkey": pair.key}]
    keys.append({"sslkey": locked, "sslpassword": KEY_PASSWORD})
    for more in keys:
        conn = await _certified(tls, shop, sslcert=pair.cert, **more).connect_control(1, "beat")
        row = await conn.fetchrow(
            "select current_user, client_dn from pg_stat_ssl where pid = pg_backend_pid()"
        )
        assert row is not None
        assert tuple(row) == ("certified", "/CN=certified")
        await close(conn)


async def test_a_client_without_the_right_certificate_is_told(tls: TlsServer, shop: str) -> None:
    with pytest.raises(AuthenticationFailed, match="requires a valid client certificate"):
        await _certified(tls, shop).connect_control(1, "beat")
    pair = tls.stranger
    # which of the two: the server's word may be lost with the connection
    with pytest.raises((AuthenticationFailed, DatabaseUnavailable), match="see sslcert"):
        await _certified(tls, shop, sslcert=pair.cert, sslkey=pair.key).connect_control(1, "beat")


async def test_the_password_of_a_key_is_in_no_error(tls: TlsServer, shop: str) -> None:
    locked = encrypted(tls.certified, KEY_PASSWORD)
    wrong = f"not-{KEY_PASSWORD}"
    with pytest.raises(InvalidArgument, match="sslpassword does not open it") as refused:
        _certified(tls, shop, sslcert=tls.certified.cert, sslkey=locked, sslpassword=wrong)
    assert KEY_PASSWORD not in "".join(traceback.format_exception(refused.value))


# --- what stands in for the URL -----------------------------------------------------------------


async def test_the_environment_speaks_where_the_url_is_silent(
    tls: TlsServer, shop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    monkeypatch.setenv("PGSSLROOTCERT", str(tls.authority.cert))
    await close(await client(tls.dsn(shop)).connect_control(1, "beat"))
    with pytest.raises(AuthenticationFailed, match="for another host"):
        await client(tls.dsn(shop, host="127.0.0.1")).connect_control(1, "beat")
    monkeypatch.setenv("PGSSLROOTCERT", str(tls.strangers.cert))
    with pytest.raises(AuthenticationFailed, match="not trusted"):
        await client(tls.dsn(shop)).connect_control(1, "beat")
    named = tls.dsn(shop, sslrootcert=tls.authority.cert)
    await close(await client(named).connect_control(1, "beat"))
    _all_encrypted(tls.admissions(shop), 2)


@pytest.mark.parametrize("by", ["url", "environment"])
async def test_the_roots_of_the_system_verify_everything(
    tls: TlsServer, shop: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "environment":
        monkeypatch.setenv("PGSSLROOTCERT", "system")
    named: dict[str, Any] = {"sslrootcert": "system"} if by == "url" else {}
    with pytest.raises(AuthenticationFailed, match="not trusted"):
        await client(tls.dsn(shop, **named)).connect_control(1, "beat")
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.authority.cert))  # now the system trusts it
    await close(await client(tls.dsn(shop, **named)).connect_control(1, "beat"))
    with pytest.raises(AuthenticationFailed, match="for another host"):
        await client(tls.dsn(shop, host="127.0.0.1", **named)).connect_control(1, "beat")
    _all_encrypted(tls.admissions(shop), 1)


# --- certificates change while nodes run --------------------------------------------------------


Trouble = Callable[[TlsServer, str, Path], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def _forged(tls: TlsServer, shop: str, _root: Path) -> AsyncIterator[None]:
    async with tls.forged_certificate(shop):
        yield


@asynccontextmanager
async def _no_root(_tls: TlsServer, _shop: str, root: Path) -> AsyncIterator[None]:
    _rename(root, root.with_suffix(".away"))
    yield
    _rename(root.with_suffix(".away"), root)


def _rename(this: Path, that: Path) -> None:
    this.rename(that)


@pytest.mark.parametrize(("trouble", "words"), [(_forged, "not trusted"), (_no_root, "no file")])
async def test_a_node_outlives_certificates_that_do_not_fit_for_a_while(
    tls: TlsServer, shop: str, logged: list[Logged], tmp_path: Path, trouble: Trouble, words: str
) -> None:
    """It was buried meanwhile, so it has to connect anew: that must not be its end."""
    root = tmp_path / "root.crt"
    root.write_text(tls.authority.cert.read_text())
    dsn = tls.dsn(shop, sslmode="verify-full", sslrootcert=root)
    app = Application(_settings(dsn))

    @app.task
    async def greet() -> None: ...

    async def met() -> bool:
        return any(words in one.text for one in logged if one.event.startswith("node."))

    async with tls.observer(shop) as conn, app.node(dsn) as node:
        await ended(conn, await schedule(conn, "greet"))
        before = node.id
        async with trouble(tls, shop, root):
            await conn.execute("update delayq.nodes set state = 'dead'")
            await eventually(met, "the trouble is told")
        task_id = await schedule(conn, "greet")
        assert (await ended(conn, task_id, 20)).state == "succeeded"
        assert node.id != before
    assert not [one for one in logged if PASSWORD in one.text]


async def test_a_root_that_is_gone_is_an_outage_for_whoever_was_connected_before(
    tls: TlsServer, shop: str, tmp_path: Path
) -> None:
    root = tmp_path / "root.crt"
    root.write_text(tls.authority.cert.read_text())
    database = client(tls.dsn(shop, sslmode="verify-full", sslrootcert=root))
    await close(await database.connect_control(1, "beat"))
    root.write_text("")  # half replaced
    with pytest.raises(DatabaseUnavailable, match=r"sslrootcert: .* holds no certificate"):
        await database.connect_control(1, "beat")
    root.write_text(tls.authority.cert.read_text())
    await close(await database.connect_control(1, "beat"))
