"""As whom the server runs: PostgreSQL refuses to run as root, so root lends it another user."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from delayq.errors import EmbeddedError

PREFERRED = ("postgres", "nobody")


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this computer with its groups, as the system calls want them."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


def server_account(*places: Path) -> Account | None:
    """The user that the server must run as; None means as whoever runs this process.

    For root it is the owner of the first of `places` that exists and is not root's (a data folder
    only works for its owner), else `postgres`, else `nobody`. Raises `EmbeddedError` if there is
    neither.
    """
    if os.geteuid() != 0:
        return None
    for place in places:
        owner = _owner(place)
        if owner is not None and owner.st_uid != 0:
            return _allowed(_by_number(owner.st_uid, owner.st_gid))
    for name in PREFERRED:
        with contextlib.suppress(KeyError):
            return _allowed(_by_entry(pwd.getpwnam(name)))
    raise EmbeddedError(
        "PostgreSQL refuses to run as root, and this system has neither a user 'postgres' nor "
        "'nobody' to run it as; start as an ordinary user, or set DELAYQ_DSN"
    )


def run_as(
    account: Account | None,
    command: Sequence[str | Path],
    *,
    pass_fds: Sequence[int] = (),
    limit_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end in a clean environment and return what it said.

    Raises OSError if the account cannot reach the program, `TimeoutExpired` past `limit_s`.
    """
    return subprocess.run(
        command,
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=account.groups if account else None,
        # The caller's folder may be closed to the account, so nothing may depend on it.
        cwd="/",
        env=server_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        umask=0o077,
        timeout=limit_s,
        pass_fds=pass_fds,
        start_new_session=True,
        check=False,
    )


def can_enter(account: Account | None, folder: Path) -> bool:
    """Whether the account can reach that folder by its path (tried, not computed)."""
    if account is None:
        return True
    return run_as(account, ["/bin/sh", "-c", 'cd -- "$1"', "sh", folder]).returncode == 0


def server_environment() -> dict[str, str]:
    """The environment of the server: no PG*, no locale that may not be installed, no secrets."""
    kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return {"PATH": "/usr/bin:/bin", **environment, "LC_ALL": "C", "TZ": "UTC"}


def _allowed(account: Account) -> Account:
    """The account, once it is clear that this process may become it (a container may forbid it)."""
    try:
        run_as(account, ["/bin/sh", "-c", ":"])
    except OSError as error:
        raise EmbeddedError(
            f"PostgreSQL refuses to run as root, and this process may not become user "
            f"{account.name!r} ({error.strerror}); start as an ordinary user, or set DELAYQ_DSN"
        ) from error
    return account


def _owner(place: Path) -> os.stat_result | None:
    try:
        return place.lstat()
    except OSError:
        return None


def _by_number(uid: int, gid: int) -> Account:
    try:
        return _by_entry(pwd.getpwuid(uid))
    except KeyError:
        return Account(str(uid), uid, gid, ())


def _by_entry(entry: pwd.struct_passwd) -> Account:
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups)
