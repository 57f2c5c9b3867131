"""The files of a private server: `pg<major>/` with the data, and three lock files beside it.

* `gate`: exclusive while somebody starts, joins or leaves; so only one does at a time.
* `users`: shared by everyone who uses the server; the reference count.
* `server`: held by the keeper for as long as the server lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from delayq.errors import EmbeddedError
from delayq.postgres.account import Account

IGNORED_BY_GIT = "*\n"
IMPOSSIBLE_PID = "2147483646"
SOCKET_NAME = ".s.PGSQL.5432"
POLL_S = 0.005
LOG_LIMIT_BYTES = 1024 * 1024


class ServerFolder:
    """Paths and locks of the server of one major version in one folder; starts nothing."""

    def __init__(self, path: Path, major: int) -> None:
        self.path = path
        self.major = major
        self.data = path / f"pg{major}"
        self.pid_file = self.data / "postmaster.pid"
        self.log_file = self.data / "server.log"
        self._socket_record = self.data / "socket_folder"

    def prepare(self, account: Account | None) -> None:
        """Make the folder, private to the server's user, and hide it from git.

        Raises `EmbeddedError` if it holds somebody else's files: then neither its permissions nor
        a `.gitignore` that hides everything would be right.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {entry.name for entry in self.path.iterdir()} - {".gitignore"}
        if names and not any(name.startswith("pg") and name.endswith(".gate") for name in names):
            raise EmbeddedError(
                f"{self.path} holds other files; choose a folder for the server alone "
                "(DELAYQ_EMBEDDED_DIR)"
            )
        # A folder of somebody else's stays as it is; the data folder in it is private anyway.
        if self.path.stat().st_uid == os.geteuid():
            self.path.chmod(0o700)
            if account is not None:
                os.chown(self.path, account.uid, account.gid)
        # The first lock marks the folder as ours before anything else is in it.
        for name in ("gate", "users", "server"):
            os.close(self.open_lock(name, account))
        ignore = self.path / ".gitignore"
        if not ignore.exists():
            ignore.write_text(IGNORED_BY_GIT)

    def open_lock(self, name: str, account: Account | None) -> int:
        """A new descriptor of a lock file. Locks belong to the descriptor; closing it lets go."""
        path = self.path / f"pg{self.major}.{name}"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if account is not None and os.fstat(lock).st_uid == 0:
            os.fchown(lock, account.uid, account.gid)
        return lock

    def other_majors(self) -> list[str]:
        """The data folders of other major versions, whose tasks this server does not see."""
        found = (entry.name for entry in self.path.glob("pg*") if entry != self.data)
        return sorted(name for name in found if name.removeprefix("pg").isdigit())

    # --- the socket ---------------------------------------------------------------------------

    @property
    def socket_folder(self) -> Path:
        """Where the socket of the running server is."""
        with contextlib.suppress(FileNotFoundError):
            return Path(self._socket_record.read_text())
        return self.data

    @property
    def socket_file(self) -> Path:
        """The socket itself, which clients find by its folder."""
        return self.socket_folder / SOCKET_NAME

    def record_scratch(self, scratch: Path) -> None:
        """Remember that the socket is in `scratch`, its path in the data folder being too long."""
        _replace(self._socket_record, str(scratch))

    def forget_scratch(self) -> None:
        """Remove the place of a dead server's socket, if it was not in the data folder."""
        with contextlib.suppress(OSError):
            if self.socket_folder != self.data:
                self.socket_folder.rmdir()
        self._socket_record.unlink(missing_ok=True)

    def remove_dead_socket(self) -> None:
        """Remove what a killed server left. Only right after a probe found that nobody answers.

        Its lock file names a pid, which may be a stranger's by now and would refuse the start.
        The data folder has its own, better guard.
        """
        self.socket_file.unlink(missing_ok=True)
        self.socket_file.with_name(f"{SOCKET_NAME}.lock").unlink(missing_ok=True)

    # --- the pid file -------------------------------------------------------------------------

    def pid(self) -> int | None:
        """The pid in the data folder's lock file; it proves nothing by itself."""
        try:
            return int(self.pid_file.read_text().split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return None

    def has_silent_server(self) -> bool:
        """Whether the named pid really is a server of this data folder (where /proc can tell)."""
        try:
            return Path(f"/proc/{self.pid()}/cwd").samefile(self.data)
        except OSError:
            return False

    def disown_stranger(self) -> None:
        """Put an impossible pid where a stranger now has the pid of a dead server.

        PostgreSQL would refuse to start. The file is not deleted: its other lines name the shared
        memory, by which PostgreSQL notices processes of the old server that are still at work.
        """
        pid = self.pid()
        if pid is not None and _exists(pid):
            lines = self.pid_file.read_text().split("\n")
            _replace(self.pid_file, "\n".join([IMPOSSIBLE_PID, *lines[1:]]))

    # --- the log ------------------------------------------------------------------------------

    def rotate_log(self) -> None:
        """Set a long log aside, over the one set aside before. Not while a server writes it."""
        with contextlib.suppress(FileNotFoundError):
            if self.log_file.stat().st_size > LOG_LIMIT_BYTES:
                self.log_file.rename(self.log_file.with_name(f"{self.log_file.name}.1"))

    def log_tail(self) -> str:
        """The last lines of the server's log on one line, for error messages."""
        with contextlib.suppress(FileNotFoundError):
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
            return " | ".join(lines[-5:])[-1000:]
        return "it left no log"


@contextlib.contextmanager
def locked(lock: int, limit_s: float, what: str) -> Iterator[int]:
    """Hold an exclusive lock, then close its descriptor. `EmbeddedError(what)` past the limit."""
    try:
        wait_for(lambda: try_lock(lock, fcntl.LOCK_EX), limit_s, what)
        yield lock
    finally:
        os.close(lock)


def try_lock(lock: int, mode: int) -> bool:
    """Take (or change to) the lock at once, or say no."""
    try:
        fcntl.flock(lock, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Ask every few milliseconds until it is so. `EmbeddedError(what)` past the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise EmbeddedError(what)
        time.sleep(POLL_S)


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, for the owner of the folder it is in."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as stream:
        stream.write(text)
    folder = path.parent.stat()
    if folder.st_uid != os.geteuid():
        os.chown(draft, folder.st_uid, folder.st_gid)
    draft.rename(path)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True
