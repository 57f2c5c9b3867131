"""Starting a server that does not run: its data if there is none, a place for its socket, keeper.

The caller holds the gate and has made sure that no server of this data folder lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from delayq.errors import EmbeddedError
from delayq.postgres import keeper
from delayq.postgres.account import Account, can_enter, run_as, server_environment
from delayq.postgres.folder import SOCKET_NAME, ServerFolder, try_lock
from delayq.postgres.probe import SOCKET_PATH_LIMIT

KEEPER_LIMIT_S = 30.0


class Order(TypedDict):
    """What the keeper is told."""

    account: list[int] | None
    command: list[str]
    environment: dict[str, str]
    log: str
    scratch: str | None
    users_fd: int
    server_fd: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a server."""

    folder: ServerFolder
    binaries: Path
    account: Account | None
    options: Mapping[str, str]

    def run(self, gate: int) -> None:
        """Return once the keeper is on its way; it holds the `server` lock while the server lives.

        Raises `EmbeddedError` if there can be no server.
        """
        if not self.folder.data.exists():
            self._make_data(gate)
        self.folder.remove_dead_socket()
        self.folder.disown_stranger()
        self.folder.rotate_log()
        with self._entrance(self.folder.data) as (data, opened), self._locks() as locks:
            order = self._order(data, *locks)
            _run_keeper(order, self.folder.path, (*locks, *opened))

    # --- data ---------------------------------------------------------------------------------

    def _make_data(self, gate: int) -> None:
        """Run initdb in a draft folder, then rename it: a half-made one is never taken as whole."""
        data = self.folder.data
        for left in data.parent.glob(f"{data.name}.draft-*"):
            shutil.rmtree(left, ignore_errors=True)
        draft = data.with_name(f"{data.name}.draft-{secrets.token_hex(4)}")
        draft.mkdir(mode=0o700)
        try:
            self._give(draft)
            self._initdb(draft, gate)
            draft.rename(data)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        _sync(data.parent)

    def _initdb(self, draft: Path, gate: int) -> None:
        locale = ["--locale=C"]
        if self.folder.major >= 17:
            locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        if self.options.get("fsync") == "off":
            locale += ["--no-sync"]
        with self._entrance(draft) as (data, opened):
            fixed = ["-D", data, "-U", "postgres", "-E", "UTF8", "-A", "trust"]
            # It also gets the gate: if this process is killed, whoever comes next waits for it.
            command = [str(self.binaries / "initdb"), *fixed, *locale]
            made = run_as(self.account, command, pass_fds=(gate, *opened))
        if made.returncode != 0:
            raise EmbeddedError(
                f"initdb failed: {made.stderr.strip()[-1000:]}; choose another folder "
                "(DELAYQ_EMBEDDED_DIR), start as a user of this system, or set DELAYQ_DSN"
            )

    @contextlib.contextmanager
    def _entrance(self, folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
        """How the server's user gets into its folder: by its path, else by an open descriptor.

        A project of root's is often below /root, which nobody else may pass through. Opening up
        the folders above would be wrong, and a descriptor needs no way.
        """
        if self.account is None or can_enter(self.account, folder):
            yield str(folder), ()
            return
        if not Path("/proc/self/fd").is_dir():
            raise EmbeddedError(
                f"user {self.account.name!r}, as whom PostgreSQL must run, cannot reach {folder}"
            )
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{opened}", (opened,)
        finally:
            os.close(opened)

    def _give(self, folder: Path) -> None:
        if self.account is not None:
            os.chown(folder, self.account.uid, self.account.gid)

    # --- keeper -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locks(self) -> Iterator[tuple[int, int]]:
        """`users`, not yet locked, and `server`, locked here so that no moment finds it free."""
        users = self.folder.open_lock("users", self.account)
        server = self.folder.open_lock("server", self.account)
        try:
            if not try_lock(server, fcntl.LOCK_EX):
                raise EmbeddedError(f"a server is still running in {self.folder.data}")
            yield users, server
        finally:
            os.close(users)
            os.close(server)

    def _order(self, data: str, users: int, server: int) -> Order:
        scratch = self._place_socket()
        # A list of folders: quoted, or a comma or a space would make two of one.
        quoted = '"' + (scratch or data).replace('"', '""') + '"'
        command = [str(self.binaries / "postgres"), "-D", data]
        for name, value in {**self.options, "unix_socket_directories": quoted}.items():
            command += ["-c", f"{name}={value}"]
        account = self.account
        return Order(
            account=[account.uid, account.gid, *account.groups] if account else None,
            command=command,
            environment=server_environment(),
            log=f"{data}/{self.folder.log_file.name}",
            scratch=scratch,
            users_fd=users,
            server_fd=server,
        )

    def _place_socket(self) -> str | None:
        """A private folder for the socket if a client could not name it in the data folder."""
        self.folder.forget_scratch()
        if _can_be_named(self.folder.data):
            return None
        for parent in (Path(tempfile.gettempdir()), Path("/tmp")):  # noqa: S108 -- mkdtemp in it
            if _can_be_named(parent / "delayq-01234567") and can_enter(self.account, parent):
                scratch = Path(tempfile.mkdtemp(prefix="delayq-", dir=parent))
                self._give(scratch)
                self.folder.record_scratch(scratch)
                return str(scratch)
        raise EmbeddedError(
            f"a socket can be neither in {self.folder.path} nor in the temporary folder: their "
            "paths are too long or too odd; choose another folder (DELAYQ_EMBEDDED_DIR)"
        )


def _can_be_named(folder: Path) -> bool:
    """Whether a DSN can name a socket in it: short, no comma (it separates hosts), plain text."""
    path = str(folder / SOCKET_NAME)
    short = len(os.fsencode(path)) <= SOCKET_PATH_LIMIT
    return short and "," not in path and path.isprintable()


def _run_keeper(order: Order, folder: Path, fds: tuple[int, ...]) -> None:
    # `folder` is for people who read `ps`; isolated and without `site` it starts in 10 ms.
    started = subprocess.run(
        [_interpreter(), "-I", "-S", keeper.__file__, folder],
        input=json.dumps(order),
        cwd="/",
        env=server_environment(),
        capture_output=True,
        text=True,
        errors="replace",
        pass_fds=fds,
        start_new_session=True,
        timeout=KEEPER_LIMIT_S,
        check=False,
    )
    if started.returncode != 0:
        raise EmbeddedError(f"cannot start PostgreSQL: {started.stderr.strip()[-500:]}")


def _interpreter() -> str:
    # In a frozen program `sys.executable` is that program.
    found = None if getattr(sys, "frozen", False) else sys.executable
    found = found or shutil.which("python3")
    if not found:
        raise EmbeddedError("no Python interpreter found to look after the server; set DELAYQ_DSN")
    return found


def _sync(folder: Path) -> None:
    # initdb synced the contents; the new name is only as durable as the folder that holds it.
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
