"""Planted payloads, keys, passwords and lease tokens are searched for in all that is written.

Two real nodes log everything that they have to say, as JSON and for people, through every way in
which a task can end and through an outage with a wrong password; the command line answers every
verb in both forms. What may be told is said here, and nothing else may.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import pytest

from delayq.cli.main import run
from delayq.embedded import PrivateServer
from delayq.failures import DRIVER_ERRORS
from delayq.migrate import migrate
from tests.conftest import SHORT
from tests.helpers import connected, wait_for
from tests.nodes import ended, eventually, schedule
from tests.process.secret_app import DOES

if TYPE_CHECKING:
    from delayq.database import Connection

REPOSITORY = Path(__file__).resolve().parents[2]
ROLES = (REPOSITORY / "scripts" / "deploy" / "roles.sql").read_text()

PASSWORD = "PwMarkerA1"
PAYLOAD = "PayMarkerB2"
NUMBER = 4_111_222_233_334_444
HEADER = "HeadMarkerC3"
KEY = "KeyMarkerD4"
REQUEST = "IdemMarkerE5"
NOTE = "NoteMarkerF6"
MARKERS = {
    "password": PASSWORD,
    "payload": PAYLOAD,
    "number": str(NUMBER),
    "header": HEADER,
    "key": KEY,
    "idempotency key": REQUEST,
    "notification": NOTE,
}
# Longer than what libraries quote whole, and a marker wherever they may cut it.
SECRET = "/".join([PAYLOAD] * 40)
NESTED = {f"{PAYLOAD}-name": [f"{PAYLOAD}-leaf", f"a 'quoted'\nlong {PAYLOAD} \\ é"]}


@dataclass
class Written:
    """Everything that was written, by who wrote it. `tokens` are markers as well."""

    texts: dict[str, str] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)

    def leaks(self, *allowed: str) -> list[str]:
        """What stands where it must not, with a little around it."""
        found = []
        for who, text in self.texts.items():
            searched = {name: mark for name, mark in MARKERS.items() if name not in allowed}
            searched |= {f"lease token {token}": token for token in self.tokens}
            for name, mark in searched.items():
                at = text.lower().find(mark.lower())
                if at >= 0:
                    found.append(f"{name} in {who}: …{text[max(0, at - 80) : at + 80]!r}")
        return found


def test_the_search_finds_what_is_there() -> None:
    written = Written({"log": f"it says {PASSWORD.upper()}", "out": "a 123 b"}, {"123"})
    assert [leak.partition(":")[0] for leak in written.leaks()] == [
        "password in log",
        "lease token 123 in out",
    ]
    assert len(written.leaks("password")) == 1


# --- a server that asks for a password ----------------------------------------------------------


class Guarded:
    """A server of its own, whose node role logs in by password; reached by its socket."""

    ROLE = "shop_node"

    def __init__(self, folder: Path) -> None:
        self._server = PrivateServer(folder, {"fsync": "off"}, allow_system=True)

    @property
    def owner_dsn(self) -> str:
        """The superuser's, who needs no password."""
        return self._server.dsn

    def dsn(self, password: str = PASSWORD) -> str:
        """The node role's. Both in the password and in its escaped form the marker stands."""
        user = f"{self.ROLE}:{quote(f'{password}@/%:', safe='')}"
        return self._server.dsn.replace("postgres@", f"{user}@", 1)

    @property
    def log(self) -> str:
        """What the server itself wrote."""
        return (self._server.data / "server.log").read_text(errors="replace")

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def set_up(self) -> None:
        """The schema, the roles, and what the handlers touch."""
        hba = self._server.data / "pg_hba.conf"
        hba.write_text(f"local all {self.ROLE} scram-sha-256\n{hba.read_text()}")
        async with connected(self.owner_dsn) as conn:
            await migrate(conn)
            await conn.execute(ROLES)
            await conn.execute(f"create role {self.ROLE} login in role delayq_node")
            await self.set_password(conn, PASSWORD)
            await conn.execute(
                f"""
                create table things (thing text primary key);
                grant insert on things to {self.ROLE};
                create function shout(text) returns void language plpgsql
                    as $$ begin raise exception 'shouted %', $1; end $$;
                create function choke() returns trigger language plpgsql as $$
                begin
                    raise exception 'no % %', new.key, new.payload using errcode = '22023';
                end $$;
                create trigger choke before update on delayq.tasks for each row
                    when (new.kind = 'does' and new.payload ->> 'what' = 'chokes')
                    execute function choke();
                """
            )

    async def set_password(self, conn: Connection, password: str) -> None:
        """Change it, and end every session of the role."""
        await conn.execute(f"alter role {self.ROLE} password '{password}@/%:'")
        await conn.execute("select pg_reload_conf()")
        await conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = $1", self.ROLE
        )


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    folder = Path(tempfile.mkdtemp(prefix="delayq-secret-"))
    server = Guarded(folder / "pg")
    try:
        await server.start()
        await server.set_up()
        yield server
    finally:
        await server.stop()
        shutil.rmtree(folder, ignore_errors=True)


# --- nodes --------------------------------------------------------------------------------------


class NodeProcess:
    """`delayq run`, with everything that it writes in one file."""

    def __init__(self, name: str, folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "delayq", "run", "tests.process.secret_app:dq"],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    async def left(self) -> int:
        return await asyncio.to_thread(self.popen.wait, 30)


def _environment(dsn: str, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DELAYQ_", "PG"))}
    short = {f"DELAYQ_{name.upper()}": str(value) for name, value in SHORT.items()}
    return kept | short | {
        "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONFAULTHANDLER": "1",
        "DELAYQ_DSN": dsn, "DELAYQ_EMBEDDED": "0", "DELAYQ_BACKOFF_BASE_S": "0.01",
        "DELAYQ_BACKOFF_MAX_S": "0.05",
        # whichever node runs the task that waits for an hour at the end does not let it finish
        "DELAYQ_DRAIN_TIMEOUT_S": "0.5", **more,
    }  # fmt: skip


@asynccontextmanager
async def _two_nodes(server: Guarded, folder: Path) -> AsyncIterator[list[NodeProcess]]:
    """One logs JSON on the fastest loop that is there, one for people and with asyncio's debug."""
    ways = {
        "json": {"DELAYQ_LOG_FORMAT": "json", "DELAYQ_LOG_LEVEL": "TRACE"},
        "human": {"DELAYQ_LOG_FORMAT": "human", "DELAYQ_LOG_LEVEL": "DEBUG",
                  "DELAYQ_EVENT_LOOP": "asyncio", "PYTHONASYNCIODEBUG": "1"},
    }  # fmt: skip
    nodes = [
        NodeProcess(name, folder, _environment(server.dsn(), **way)) for name, way in ways.items()
    ]
    try:
        await wait_for(lambda: all("node.active" in n.said for n in nodes), "both are active", 30)
        yield nodes
    finally:
        for node in nodes:
            node.popen.kill()
            node.popen.wait()


@asynccontextmanager
async def _looking(server: Guarded, written: Written) -> AsyncIterator[None]:
    """Meanwhile notes what others can see: statements, process titles, lease tokens."""

    async def look_for_ever() -> None:
        while True:
            with suppress(*DRIVER_ERRORS):  # the server is away for a while
                async with connected(server.owner_dsn) as conn:
                    while True:
                        await _look(conn, written)
                        await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)

    looking = asyncio.create_task(look_for_ever())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _look(conn: Connection, written: Written) -> None:
    seen = await conn.fetch(
        "select concat_ws(' ', application_name, query) as text from pg_stat_activity"
        " where usename = $1",
        Guarded.ROLE,
    )
    _add(written, "statements", (row["text"] for row in seen))
    tokens = await conn.fetch(
        "select lease_token from delayq.tasks union select lease_token from delayq.task_history"
        " union select lease_token from delayq.dead_tasks"
    )
    written.tokens |= {str(row[0]) for row in tokens if row[0]}
    _add(written, "process titles", _titles())


def _add(written: Written, who: str, texts: Iterator[str] | Any) -> None:
    known = written.texts.setdefault(who, "")
    for text in texts:
        if text not in known:
            known += f"{text}\n"
    written.texts[who] = known


def _titles() -> Iterator[str]:
    """Of every process of delayq and of PostgreSQL, its backends among them."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            title = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "delayq" in title or "postgres" in title:
                yield title


# --- the scenario -------------------------------------------------------------------------------


def _payload(what: str, **more: object) -> dict[str, Any]:
    return {"what": what, "secret": SECRET, "nested": NESTED, "number": NUMBER} | more


async def _schedule(
    conn: Connection, name: str, payload: dict[str, Any], kind: str = "does", **options: Any
) -> int:
    """A task with a marker in each of its parts."""
    more = {"headers": json.dumps({"trace": HEADER}), "key": f"{KEY}-{kind}-{name}",
            "idempotency_key": f"{REQUEST}-{kind}-{name}"}  # fmt: skip
    return await schedule(conn, kind, payload, **(more | options))


async def _every_end(conn: Connection) -> None:
    """Schedule tasks that end in every way there is, and wait until they did."""
    await _strangers_say(conn, 1)
    ways = {name: await _schedule(conn, name, _payload(name)) for name in (*DOES, "says all")}
    waits, snoozed = ways.pop("waits"), ways.pop("snoozes")
    second = timedelta(seconds=0.2)
    ways["times out"] = await _schedule(conn, "times out", _payload("waits"), timeout=second)
    for name in ("exits", "sql", "raises"):
        payload = {"what": name, "secret": SECRET}
        ways[f"plain {name}"] = await _schedule(conn, name, payload, kind="plain")
    ways["odd"] = await _schedule(conn, "odd", {f"{PAYLOAD}-odd": SECRET, "number": PAYLOAD})
    ways["large"] = await _schedule(conn, "large", _payload("raises", secret=SECRET * 50))
    ways["missed"] = await conn.fetchval(
        "insert into delayq.tasks (kind, payload, key, execute_at, misfire_grace_ms)"
        " values ('does', $1, $2, clock_timestamp() - interval '1 hour', 1) returning id",
        json.dumps(_payload("returns")), f"{KEY}-missed",
    )  # fmt: skip
    ways["set aside"] = await _schedule(conn, "chokes", _payload("chokes"))
    await _schedule(conn, "unserved", _payload("returns"), kind="nobody_serves_this")
    await _cancel_and_steal(conn, waits)
    for task_id in (*ways.values(), waits):
        await ended(conn, task_id, 30)
    assert await conn.fetchval("select state from delayq.tasks where id = $1", snoozed) == "pending"


async def _forgotten_on(conn: Connection, nodes: list[NodeProcess]) -> None:
    """Until each node ran one that leaves a failed task and a failed callback to its loop."""
    for n in range(40):
        if all("Exception in callback" in node.said for node in nodes):
            return
        await ended(conn, await _schedule(conn, f"forgets {n}", _payload("forgets")))
    raise AssertionError("forty tasks were run by one node alone")


async def _strangers_say(conn: Connection, task_id: int) -> None:
    for text in (NOTE, f"kind {NOTE}", f"due\n{task_id}:1:1:{NOTE}", f"due\n{NOTE}", f"scan {NOTE}",
                 f"cancel {NOTE}", f"join {NOTE}", f"due\n{NOTE}:{NOTE}:{NOTE}"):  # fmt: skip
        await conn.execute("select pg_notify('delayq', $1)", text)


async def _cancel_and_steal(conn: Connection, waits: int) -> None:
    stolen = await _schedule(conn, "stolen", _payload("waits"))
    running = "select count(*) = 2 from delayq.tasks where id = any($1) and state = 'running'"
    await eventually(lambda: conn.fetchval(running, [waits, stolen]), "both wait", 20)
    await conn.execute("select delayq.cancel($1)", waits)
    # as if somebody else had adopted it: its end finds another token
    token = secrets.randbits(62)
    await conn.execute("update delayq.tasks set lease_token = $2 where id = $1", stolen, token)
    await conn.execute("select delayq.cancel($1)", stolen)


async def _outage(server: Guarded, nodes: list[NodeProcess], written: Written) -> None:
    """A password that is no longer right, then a server that is away, then all is well."""
    async with connected(server.owner_dsn) as conn:
        running = await _schedule(conn, "outage", _payload("waits"))
        is_running = "select state = 'running' from delayq.tasks where id = $1"
        await eventually(lambda: conn.fetchval(is_running, running), "it runs", 20)
        await server.set_password(conn, "another")
        refused = "password are wrong"
        await wait_for(lambda: all(refused in n.said for n in nodes), "both are refused", 30)
    await asyncio.to_thread(_commands_in_trouble, server, written)
    await server.stop()
    away = "cannot be reached"
    await wait_for(lambda: all(away in n.said for n in nodes), "both see nobody", 30)
    await server.start()
    async with connected(server.owner_dsn) as conn:
        await server.set_password(conn, PASSWORD)
        assert await conn.fetchval("select delayq.cancel($1)", running) in (
            "cancelled", "cancel_requested", "already_finished",
        )  # fmt: skip
        after = await _schedule(conn, "after", _payload("raises"))
        assert (await ended(conn, after, 40)).state == "dead"


def _commands_in_trouble(server: Guarded, written: Written) -> None:
    """The program as it fails, at its most talkative."""
    nowhere = f"postgresql://app:{PASSWORD}%2F@127.0.0.1:1/shop"
    malformed = f"postgresql://app:{PASSWORD}/x@127.0.0.1/shop"
    trusted = server.owner_dsn.replace("postgres@", f"postgres:{PASSWORD}@")
    commands: list[tuple[str, str, int]] = [
        (server.dsn(), "run tests.process.secret_app:dq", 3),
        (server.dsn(f"not-{PASSWORD}"), "doctor --json", 3),
        (server.dsn(), "schedule does - --in 1m", 3),
        (nowhere, "migrate", 3),
        (malformed, "nodes --json", 2),
        (trusted, "show 999999", 1),
    ]
    for dsn, command, code in commands:
        done = subprocess.run(
            [sys.executable, "-m", "delayq", *command.split()],
            cwd=REPOSITORY.anchor, input=json.dumps(_payload("returns")), text=True,
            env=_environment(dsn, DELAYQ_LOG_LEVEL="TRACE"), capture_output=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, done
        _add(written, f"delayq {command}", [done.stdout, done.stderr])


@pytest.mark.timeout(180)
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
async def test_two_nodes_write_nothing_secret_whatever_happens(
    guarded: Guarded, tmp_path: Path
) -> None:
    written = Written()
    async with _two_nodes(guarded, tmp_path) as nodes, _looking(guarded, written):
        async with connected(guarded.owner_dsn) as conn:
            await _every_end(conn)
            await _forgotten_on(conn, nodes)
        await _outage(guarded, nodes, written)
        json_node, human_node = nodes
        async with connected(guarded.owner_dsn) as conn:
            await _schedule(conn, "at the end", _payload("waits"))
            written.texts["errors in the tables"] = await _stored_errors(conn)
        json_node.popen.terminate()
        assert await json_node.left() == 0
        human_node.popen.send_signal(signal.SIGABRT)  # the dump of all threads
        assert await human_node.left() == -signal.SIGABRT
        for node in nodes:
            written.texts[f"the log of the {node.name} node"] = node.said
        written.texts["the log of PostgreSQL"] = guarded.log
    _all_was_met(nodes, written)
    assert written.leaks() == []


async def _stored_errors(conn: Connection) -> str:
    rows = await conn.fetch(
        "select errors::text as text from delayq.task_history"
        " union all select errors::text from delayq.dead_tasks"
        " union all select errors::text from delayq.tasks"
        " union all select to_jsonb(n)::text from delayq.nodes n"
    )
    return "\n".join(row["text"] for row in rows)


def _all_was_met(nodes: list[NodeProcess], written: Written) -> None:
    """Else the search proves little."""
    json_log, human_log = (node.said for node in nodes)
    for log in (json_log, human_log):
        for event in ("task.attempt_failed", "task.dead", "beat.failed", "listen.retry",
                      "Task exception was never retrieved", "Exception in callback"):  # fmt: skip
            assert event in log
        assert "Traceback" not in log
    both = json_log + human_log
    for event in (
        "task.timeout", "task.set_aside", "task.failed_after_its_effect", "lease.lost",
        "library.warning",
    ):  # fmt: skip
        assert event in both, event
    assert "Current thread" in human_log
    assert json.loads(json_log.splitlines()[0])["event"]
    errors = written.texts["errors in the tables"]
    for words in ("[…]", "ValidationError", "ArgumentsRefused", "SystemExit", "TimeoutError"):
        assert words in errors, words
    assert len(written.tokens) > len(DOES)
    assert "Lease those" in written.texts["statements"]
    assert re.search(r"-m delayq run", written.texts["process titles"])
    assert f"postgres: {Guarded.ROLE}" in written.texts["process titles"]


# --- the command line ---------------------------------------------------------------------------


class Said(NamedTuple):
    """What a command wrote, and its exit code."""

    code: int
    text: str


Delayq = Callable[..., Said]


@pytest.fixture
def delayq(dsn: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Delayq:
    """Runs a command in this process, on this test's database, by a DSN with a password."""
    monkeypatch.setenv("DELAYQ_DSN", dsn.replace("postgres@", f"postgres:{PASSWORD}@", 1))
    monkeypatch.setattr("delayq.log.configure", lambda *_: None)

    def call(*arguments: str) -> Said:
        code = run(arguments)
        said = capfd.readouterr()
        return Said(code, said.out + said.err)

    return call


WAYS = ((), ("--json",))
ERRORS = '[{"attempt": 5, "error": "ValueError", "message": "no […] here"}]'
LIVE = """
    insert into delayq.tasks (kind, payload, headers, key, execute_at)
    values ('does', $1, $2, $3, clock_timestamp() + interval '1 hour') returning id
"""
RUNNING = """
    update delayq.tasks set state = 'running', lease_owner = 1, lease_token = $2, attempt = 1
     where id = $1
"""
DEAD = """
    insert into delayq.dead_tasks (
        id, kind, payload, headers, key, idempotency_key, priority, due_at, execute_at, created_at,
        attempt, interruptions, errors, lease_token, finished_at)
    select nextval(pg_get_serial_sequence('delayq.tasks', 'id')), 'does', $1, $2, $3, $4, 0, now(),
           now(), now(), 5, 0, $5, 7001234567890123456, now()
    returning id
"""
TOKEN = "7001234567890123456"


class Rows(NamedTuple):
    """Tasks that the commands are about, as text."""

    live: str
    running: str
    dead: str
    also_dead: str


@pytest.fixture
def rows(dsn: str) -> Rows:
    return asyncio.run(_rows(dsn))


async def _rows(dsn: str) -> Rows:
    payload, headers = json.dumps(_payload("returns")), json.dumps({"trace": HEADER})
    async with connected(dsn) as conn:
        live = [await conn.fetchval(LIVE, payload, headers, f"{KEY}-{n}") for n in range(3)]
        await conn.execute(RUNNING, live[2], int(TOKEN))
        dead = [
            await conn.fetchval(DEAD, payload, headers, f"{KEY}-{n}", f"{REQUEST}-{n}", ERRORS)
            for n in range(3, 5)
        ]
    return Rows(str(live[0]), str(live[2]), *map(str, dead))


def _leaks(delayq: Delayq, command: list[str], code: int, *allowed: str) -> list[str]:
    found = []
    for way in WAYS:
        said = delayq(*command, *way)
        assert said.code == code, (command, said)
        written = Written({f"delayq {command[0]} {' '.join(way)}": said.text}, {TOKEN})
        found += written.leaks(*allowed)
    return found


@pytest.mark.parametrize(
    "command", ["stats", "nodes", "doctor", "migrate", "pause does", "resume does"]
)
def test_reports_tell_nothing_of_a_task(delayq: Delayq, rows: Rows, command: str) -> None:
    assert _leaks(delayq, command.split(), 0) == []


@pytest.mark.parametrize("command", ["list", "list --state dead", "dead list"])
def test_lists_show_handles_and_no_payload(delayq: Delayq, rows: Rows, command: str) -> None:
    handles = ("key", "header", "idempotency key")
    assert _leaks(delayq, command.split(), 0, *handles) == []
    assert KEY in delayq(*command.split()).text


def test_show_alone_shows_a_payload_and_neither_token_nor_password(
    delayq: Delayq, rows: Rows
) -> None:
    shown = ("payload", "number", "key", "header", "idempotency key")
    for task in (rows.live, rows.running, rows.dead):
        assert _leaks(delayq, ["show", task], 0, *shown) == []
        for way in WAYS:
            said = delayq("show", task, *way).text
            assert SECRET in said
            assert str(NUMBER) in said


def test_verbs_answer_without_what_the_task_holds(delayq: Delayq, rows: Rows) -> None:
    """A key is echoed to whoever named the task by it."""
    by_key = ["--kind", "does", "--key", f"{KEY}-1"]
    commands: list[tuple[list[str], list[str]]] = [
        (["reschedule", rows.live, "--in", "2h"], []),
        (["run-now", rows.live], []),
        (["reschedule", *by_key, "--in", "2h"], ["key"]),
        (["run-now", *by_key], ["key"]),
        (["cancel", *by_key], ["key"]),
        (["cancel", rows.live], []),
        (["cancel", "--kind", "does", "--key-prefix", KEY], []),
        (["dead", "revive", rows.dead], []),
        (["dead", "discard", rows.also_dead], []),
        (["dead", "revive", "--kind", "does", "--all"], []),
        (["drain", "nobody"], []),
    ]
    for command, allowed in commands:
        for way in WAYS:
            said = delayq(*command, *way)
            assert said.code in (0, 1), (command, said)  # yes, or no since it was done before
            assert Written({" ".join(command[:2]): said.text}, {TOKEN}).leaks(*allowed) == []


def test_schedule_tells_nothing_of_what_it_was_given(delayq: Delayq, rows: Rows) -> None:
    payload = json.dumps(_payload("returns"))
    more = ["--in", "1h", "--header", f"trace={HEADER}", "--idempotency-key", REQUEST]
    assert _leaks(delayq, ["schedule", "does", payload, "--key", f"{KEY}-x", *more], 0) == []
    taken = ["schedule", "does", payload, "--key", f"{KEY}-1", "--on-conflict"]
    assert _leaks(delayq, [*taken, "keep", "--in", "1h"], 0) == []
    assert _leaks(delayq, [*taken, "replace", "--in", "1h"], 0) == []
    assert _leaks(delayq, [*taken, "error", "--in", "1h"], 1) == []


@pytest.mark.parametrize(
    "given",
    [
        [f'{{"secret": "{PAYLOAD}"'],
        [f'["{PAYLOAD}", {NUMBER}]'],
        [f'{{"a": "{PAYLOAD}\\u0000"}}'],
        [f'{{"a": NaN, "b": "{PAYLOAD}"}}'],
        [PAYLOAD],
        ["{", f'"secret":"{PAYLOAD}"', "}"],
        ["{}", "--header", HEADER],
        ["{}", "--header", f"a={HEADER}\0"],
        ["{}", "--key", f"{KEY}\0"],
        ["{}", "--key", KEY * 100],
        ["{}", "--idempotency-key", REQUEST * 100],
        [json.dumps({"a": PAYLOAD * 200_000})],
    ],
    ids=lambda given: given[-1][:20],
)
def test_what_schedule_refuses_is_not_quoted(delayq: Delayq, given: list[str]) -> None:
    assert _leaks(delayq, ["schedule", "does", *given, "--in", "1h"], 2) == []
