"""A private server: made on first use, shared by all who name its folder, stopped by the last one.

Who may believe what: the `users` lock is the reference count, the `server` lock says that a kept
server lives, the answer on the socket says that it serves. The kernel drops locks with their
processes, so none of the three can be stale. Everything that changes them happens behind `gate`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self
from urllib.parse import quote

from delayq.errors import EmbeddedError
from delayq.postgres.account import Account, server_account
from delayq.postgres.binaries import find_binaries, major_version, reachable_binaries
from delayq.postgres.folder import POLL_S, ServerFolder, locked, try_lock, wait_for
from delayq.postgres.launch import Launch
from delayq.postgres.probe import Answer, probe

START_LIMIT_S = 60.0
STOP_LIMIT_S = 45.0
STILL_IN_USE = "is still in use"

OPTIONS: Mapping[str, str] = {
    "listen_addresses": "",
    "port": "5432",
    "unix_socket_permissions": "0700",
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # Errors of statements quote their values, and a payload must not end up in a file.
    "log_min_messages": "log",
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
    "log_checkpoints": "off",
}


class PrivateServer:
    """A PostgreSQL server in `folder`, reached by a Unix socket alone, without a password.

    `start` makes it if need be, or joins the one that runs; `stop` leaves it, and stops it if
    nobody else uses it. A user that is killed counts as having left, and so does one whose
    process ends without `stop`. Both calls block; neither may run twice at once on one object.

    `options` are server settings beside `OPTIONS` (say `{"fsync": "off"}` for tests); they only
    count for whoever starts the server. `pg_bin` and `allow_system`: see `find_binaries`.
    """

    def __init__(
        self,
        folder: Path | str,
        options: Mapping[str, str] | None = None,
        *,
        pg_bin: Path | None = None,
        allow_system: bool = False,
    ) -> None:
        self._binaries = find_binaries(pg_bin, allow_system)
        major = major_version(self._binaries)
        self._folder = ServerFolder(Path(folder).expanduser().resolve(), major)
        self._options = {**OPTIONS, **(options or {})}
        self._account: Account | None = None
        self._users: int | None = None
        self._owner_pid = 0

    @property
    def folder(self) -> Path:
        """The folder that was named, absolute."""
        return self._folder.path

    @property
    def data(self) -> Path:
        """The data folder of this major version inside it."""
        return self._folder.data

    @property
    def other_majors(self) -> list[str]:
        """Names of data folders of other major versions, whose tasks this server does not see."""
        return self._folder.other_majors()

    @property
    def dsn(self) -> str:
        """A DSN of the database `postgres` as its superuser. Known once started."""
        return self.dsn_of("postgres")

    def dsn_of(self, database: str) -> str:
        """The same for another database of this server (which must exist when it is used)."""
        host = quote(str(self._folder.socket_folder), safe="/")
        return f"postgresql://postgres@/{quote(database, safe='')}?host={host}&port=5432"

    def start(self) -> None:
        """Return once a server answers and cannot go away before `stop`.

        Raises `EmbeddedError` with the reason and the ways out; then nothing of ours is left
        running.
        """
        if self._users is not None:
            raise EmbeddedError("this private server is already started")
        with self._explained():
            self._account = server_account(self._folder.data, self._folder.path)
            self._folder.prepare(self._account)
            with self._gate() as gate:
                self._users = self._join()
                self._owner_pid = os.getpid()
                try:
                    self._bring_up(gate)
                except BaseException:
                    self._leave()
                    raise

    def stop(self) -> None:
        """Leave; return once the server has ended, or at once if others use it. Twice is fine.

        Raises `EmbeddedError` if the server does not end in time; it goes on ending by itself.
        """
        if self._users is None:
            return
        if self._owner_pid != os.getpid():
            # A forked child shares the lock with its parent and must not give it away.
            self._let_go()
            return
        with self._explained():
            try:
                with self._gate():
                    self._leave()
            finally:
                self._let_go()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the count of users -------------------------------------------------------------------

    def _gate(self) -> contextlib.AbstractContextManager[int]:
        gate = self._folder.open_lock("gate", self._account)
        busy = f"another process takes too long to start or stop the server in {self.folder}"
        return locked(gate, START_LIMIT_S, busy)

    def _join(self) -> int:
        users = self._folder.open_lock("users", self._account)
        try:
            # Refused only while a keeper is stopping its server: then a new one is started.
            stopping = f"the server in {self.folder} does not stop"
            wait_for(lambda: try_lock(users, fcntl.LOCK_SH), STOP_LIMIT_S, stopping)
        except BaseException:
            os.close(users)
            raise
        return users

    def _leave(self) -> None:
        """Behind the gate, so nobody can become a user while the last one waits for the end."""
        last = self._is_last()
        if last and not self._is_kept():
            self._stop_orphan()
        self._let_go()
        if last:
            slow = f"the server in {self.folder} does not stop"
            wait_for(lambda: not self._is_kept(), STOP_LIMIT_S, slow)

    def _is_last(self) -> bool:
        if self._users is None:
            return False
        if try_lock(self._users, fcntl.LOCK_EX):
            return True
        # Changing a lock lets go of it for a moment. If it cannot even be shared again, it was
        # the keeper who got it then, and only after the last user.
        return not try_lock(self._users, fcntl.LOCK_SH)

    def _let_go(self) -> None:
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def _is_kept(self) -> bool:
        server = self._folder.open_lock("server", self._account)
        try:
            return not try_lock(server, fcntl.LOCK_SH)
        finally:
            os.close(server)

    # --- starting -----------------------------------------------------------------------------

    def _bring_up(self, gate: int) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        launched = False
        while time.monotonic() < deadline:
            if self._is_kept():
                if probe(self._folder.socket_file) is Answer.READY:
                    return
                time.sleep(POLL_S)
            elif launched and STILL_IN_USE not in self._folder.log_tail():
                raise EmbeddedError(f"PostgreSQL ended while starting: {self._folder.log_tail()}")
            else:
                # "Still in use": processes of a killed server are about to notice and to end.
                time.sleep(POLL_S * 10 if launched else 0)
                self._launch(gate)
                launched = True
        raise EmbeddedError(
            f"a server holds {self._folder.data} but does not answer on "
            f"{self._folder.socket_file}; see {self._folder.log_file}"
        )

    def _launch(self, gate: int) -> None:
        self._stop_orphan()
        if self._folder.has_silent_server():
            raise EmbeddedError(
                f"process {self._folder.pid()} serves {self._folder.data} but does not answer on "
                f"{self._folder.socket_file}; end it with: kill -INT {self._folder.pid()}"
            )
        binaries = reachable_binaries(self._binaries, self._account)
        Launch(self._folder, binaries, self._account, self._options).run(gate)

    def _stop_orphan(self) -> None:
        """Stop a server whose keeper was killed, if there is one: nobody else would.

        It answers on the socket in its data folder, so the pid file there is its own.
        """
        if probe(self._folder.socket_file) is Answer.GONE:
            return
        pid = self._folder.pid()
        if pid is None or pid <= 1:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        slow = f"a server without a keeper (process {pid}) in {self.data} does not stop"
        wait_for(self._is_silent, STOP_LIMIT_S, slow)

    def _is_silent(self) -> bool:
        gone = probe(self._folder.socket_file) is Answer.GONE
        return gone and not self._folder.has_silent_server()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the system refused into one sentence with the ways out."""
        try:
            yield
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EmbeddedError(
                f"cannot run a private server in {self.folder}: {error}; choose another folder "
                "(DELAYQ_EMBEDDED_DIR), start as its owner, or set DELAYQ_DSN"
            ) from error
