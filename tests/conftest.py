"""One PostgreSQL server for the whole run, one template database per worker, one copy per test.

The server is delayq's own embedded one (the wheel's binaries, else the system's) with fsync off,
in a temporary folder that the workers share. DELAYQ_TEST_PG_BIN names other binaries to start
(a folder with initdb and postgres), DELAYQ_TEST_DSN a running server to use instead.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import itertools
import os
import secrets
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from loguru import logger

from delayq.database import Database, parse_dsn
from delayq.embedded import PrivateServer, find_binaries
from delayq.migrate import migrate
from delayq.settings import PREFIX, Settings, load_settings
from tests.helpers import Server, connected, create_database, drop_database
from tests.wall_clock import WallClock

if TYPE_CHECKING:
    from loguru import Message

    from delayq.database import Connection

TEST_DSN = "DELAYQ_TEST_DSN"
TEST_PG_BIN = "DELAYQ_TEST_PG_BIN"
FOLDER = "TESTS_OF_DELAYQ_FOLDER"
TURNS = "TESTS_OF_DELAYQ_TURNS"
ABSENT = "TESTS_OF_DELAYQ_ABSENT"
FOLDER_PREFIX = "delayq-tests-"
FIGURES = "figures"  # what a test records under this name is printed after all tests
SERVER_OPTIONS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_prepared_transactions": "10",
}
MEMORY_WANTED = 4 * 2**30
# The shortest intervals that the settings allow, so that tests of many beats stay short.
SHORT: dict[str, Any] = {
    "beat_interval_s": 0.75,
    "lease_ttl_s": 3.0,
    "sweep_interval_s": 0.5,
    "understudy_delay_ms": 500,
}
_numbers = itertools.count(1)
Databases = Callable[[], AbstractAsyncContextManager[str]]


# --- what runs, and what did not ------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow or more")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: runs while no other test does, on all workers")
    # Started in the background of a script, this session ignores SIGINT, and so would every
    # program that it starts: those which are sent one would never end.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        return
    parent = _fast_disk()
    _remove_what_killed_runs_left(parent)
    # Workers inherit the environment, and with it the folders that they share: the server's, and
    # the one of the locks by which they take turns.
    for name in (FOLDER, TURNS):
        folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=parent)
        os.environ[name] = folder
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))


def _fast_disk() -> Path:
    """Memory if there is plenty of it: copying a database takes a third of the time there."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > MEMORY_WANTED
    return memory if roomy and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def _remove_what_killed_runs_left(parent: Path) -> None:
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (PermissionError, ValueError):
            continue


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    later = [item for item in items if item.get_closest_marker("slow") or _is_more(item)]
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]


def _is_more(item: pytest.Item) -> bool:
    return item.get_closest_marker("more") is not None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    for report in (*stats.get("passed", []), *stats.get("failed", [])):
        for name, value in report.user_properties:
            if name == FIGURES and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")
    skipped = stats.get("skipped", [])
    missing = Counter(_reason(report) for report in skipped)
    for what, tests in sorted(missing.items()):
        terminalreporter.write_line(f"ABSENT  {what}: {tests} tests did not run")
    # for whoever runs several sessions and lists what was absent after the last one
    if path := os.environ.get(ABSENT):
        with Path(path).open("a") as file:
            file.writelines(f"{what}\n" for what in sorted(missing))


def _reason(report: Any) -> str:
    told = report.longrepr
    reason = str(told[2]) if isinstance(told, tuple) else str(told)
    return " ".join(reason.removeprefix("Skipped: ").removeprefix("absent: ").split())


# --- whose turn it is ---------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the wait comes before the test's own time limit
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What another worker's test would falsify (milliseconds, open transactions) runs alone."""
    alone = item.get_closest_marker("alone") is not None
    with _turn(fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
        return (yield)


@contextmanager
def _turn(kind: int) -> Iterator[None]:
    folder = Path(os.environ[TURNS])
    with (folder / "gate").open("w") as gate, (folder / "turn").open("w") as turn:
        # In the order of arrival: else whoever wants to be alone is passed by for ever.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(turn, kind)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)  # a forked child may hold the file open


# --- no test reads the settings of whoever runs it -----------------------------------------------


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith((PREFIX, "PG")):
            monkeypatch.delenv(name)
    monkeypatch.setitem(Settings.model_config, "env_file", None)


@pytest.fixture(autouse=True)
def _no_sinks_left_behind() -> Iterator[None]:
    """The command line makes a sink of a stream that lasts as long as the test."""
    before = set(logger._core.handlers)  # type: ignore[attr-defined]  # loguru has no list of them
    yield
    for sink in set(logger._core.handlers) - before:  # type: ignore[attr-defined]  # nor here
        logger.remove(sink)


# --- the server -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server(worker_id: str) -> Iterator[Server]:
    """The running server, with a migrated template database."""
    template = f"template_{worker_id}_{secrets.token_hex(3)}"
    with _running_server() as dsn:
        server = asyncio.run(_with_template(dsn, template))
        yield server
        asyncio.run(drop_database(server, template))


@contextmanager
def _running_server() -> Iterator[str]:
    if dsn := os.environ.get(TEST_DSN):
        yield dsn
        return
    chosen = os.environ.get(TEST_PG_BIN)
    # Whoever names the same folder shares one server: it is counted by file locks.
    binaries = find_binaries(Path(chosen) if chosen else None, allow_system=True)
    with PrivateServer(os.environ[FOLDER], _options(binaries), pg_bin=binaries) as server:
        yield server.dsn


def _options(binaries: Path) -> dict[str, str]:
    libraries = binaries.parent.glob("lib/**/pg_stat_statements.*")
    if any(path.suffix in (".so", ".dylib") for path in libraries):
        return SERVER_OPTIONS | {"shared_preload_libraries": "pg_stat_statements"}
    return SERVER_OPTIONS


async def _with_template(dsn: str, template: str) -> Server:
    async with connected(dsn) as admin:
        version = admin.get_server_version().major
    server = Server(dsn, template, version)
    await create_database(server, template)
    async with connected(server.dsn_of(template)) as conn:
        await migrate(conn)
    return server


# --- one database for each test ---------------------------------------------------------------


@pytest.fixture
async def dsn(server: Server) -> AsyncIterator[str]:
    """The DSN of a migrated database that this test has to itself."""
    async with _database(server, server.template) as dsn:
        yield dsn


@pytest.fixture
def databases(server: Server) -> Databases:
    """Makes such databases, for a test that starts over."""
    return lambda: _database(server, server.template)


@pytest.fixture
async def empty_dsn(server: Server) -> AsyncIterator[str]:
    """The DSN of a database without a schema."""
    async with _database(server, None) as dsn:
        yield dsn


@asynccontextmanager
async def _database(server: Server, template: str | None) -> AsyncIterator[str]:
    name = f"test_{os.getpid()}_{next(_numbers)}"
    await create_database(server, name, template)
    yield server.dsn_of(name)
    await drop_database(server, name)


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[Connection]:
    """A plain connection to this test's database."""
    async with connected(dsn) as conn:
        yield conn


@pytest.fixture
def settings(dsn: str) -> Settings:
    """Settings with short intervals, for this test's database."""
    return load_settings(dsn=dsn, embedded=False, **SHORT)


@pytest.fixture
def database(dsn: str, settings: Settings) -> Database:
    """delayq's own view of this test's database."""
    return Database(parse_dsn(dsn), settings)


# --- what was logged -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logged:
    """One event that was logged: its name, its fields, and all of it as text."""

    level: str
    event: str
    fields: dict[str, Any]
    text: str


@pytest.fixture
def logged() -> Iterator[list[Logged]]:
    """Everything that is logged during the test, at every level."""
    events: list[Logged] = []

    def take(message: Message) -> None:
        record = message.record
        text = f"{message} {record['extra']} {record['exception']}"
        events.append(Logged(record["level"].name, record["message"], record["extra"], text))

    sink = logger.add(take, level=0, diagnose=True, backtrace=True)
    yield events
    logger.remove(sink)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    """The wall clock of this process, to be set."""
    return WallClock(monkeypatch)
