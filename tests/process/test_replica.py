"""Dashboards may read from a standby; whatever writes is refused there in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncpg
import pytest

from tests.chaos.server import DATABASE, PostgresServer, Tools, free_port
from tests.helpers import absent, connected

Delayq = Callable[..., "subprocess.CompletedProcess[str]"]
READING = ("stats", "list", "list --state succeeded", "show 1", "nodes", "dead list")
WRITING = (
    ["schedule", "works", "{}", "--in", "5m"],
    ["cancel", "1"],
    ["reschedule", "1", "--in", "5m"],
    ["run-now", "1"],
    ["pause", "works"],
)


def delayq(dsn: str) -> Delayq:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "delayq", *arguments],
            env=os.environ | {"DELAYQ_DSN": dsn},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


@pytest.fixture
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, str]]:
    """The DSNs of a primary with one task, and of a standby that has caught up."""
    tools = Tools()
    if not tools.has("pg_basebackup"):
        absent("a PostgreSQL with pg_basebackup")
    folder = Path(tmp_path_factory.mktemp("replica", numbered=True))
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # the server's account must get there
    primary = PostgresServer(tools, folder / "primary", free_port())
    standby = PostgresServer(tools, folder / "standby", free_port())
    try:
        await primary.initialise()
        await primary.start()
        async with connected(primary.dsn(database="postgres")) as conn:
            await conn.execute(f"create database {DATABASE}")
        call = delayq(primary.dsn())
        assert call("migrate").returncode == 0
        assert call("schedule", "works", "{}", "--in", "1h").returncode == 0
        await standby.clone(primary)
        yield primary.dsn(), standby.dsn()
    finally:
        for server in (standby, primary):
            await server.stop("immediate")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_standby_answers_what_reads_and_refuses_what_writes(pair: tuple[str, str]) -> None:
    primary, standby = pair
    call = delayq(standby)
    for verb in READING:
        said = call(*verb.split(), "--json")
        assert said.returncode == 0, (verb, said.stderr)
        json.loads(said.stdout)
    assert json.loads(call("list", "--json").stdout)["tasks"][0]["kind"] == "works"
    for words in WRITING:
        said = call(*words)
        assert said.returncode not in (0, 70), (words, said.stderr)
        assert said.stderr.count("\n") == 1, (words, said.stderr)
        assert "read-only" in said.stderr, (words, said.stderr)
    async with connected(primary) as conn:
        assert await conn.fetchval("select count(*) from delayq.tasks where state = 'pending'") == 1
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
        async with connected(standby) as conn:
            await conn.execute("delete from delayq.tasks")
