"""Reads `schema/`: one statement per file, and the numbered migrations.

The folder lies beside the package in a source tree and inside it in an installed wheel.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from delayq.errors import MigrationError

_STATEMENT_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MIGRATION_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step of the schema. `checksum` is the SHA-256 of its text."""

    version: int
    name: str
    sql: str = field(repr=False)
    checksum: str = field(repr=False)


@cache
def schema_folder() -> Path:
    """The folder that holds `migrations/` and `statements/`."""
    package = Path(__file__).resolve().parent
    for folder in (package / "schema", package.parent / "schema"):
        if (folder / "migrations").is_dir():
            return folder
    raise MigrationError("this installation of delayq lacks its schema folder; install it again")


@cache
def statement(name: str) -> str:
    """The SQL text of `schema/statements/<name>.sql`, read once.

    The leading comment stays in: it says in the server's log which statement that is. Raises
    `LookupError` for a name that has no file.
    """
    path = schema_folder() / "statements" / f"{name}.sql"
    if not _STATEMENT_NAME.fullmatch(name) or not path.is_file():
        raise LookupError(f"there is no statement {name!r} in schema/statements")
    return path.read_text(encoding="utf-8")


@cache
def statement_names() -> tuple[str, ...]:
    """The names of all statements, sorted."""
    return tuple(sorted(path.stem for path in (schema_folder() / "statements").glob("*.sql")))


def migrations() -> list[Migration]:
    """All migrations in order, numbered from 1 without a gap.

    Raises `MigrationError` for a file whose name is not `NNNN_name.sql` or whose number is
    taken or leaves a gap.
    """
    return list(_migrations_in(schema_folder() / "migrations"))


@cache
def _migrations_in(folder: Path) -> tuple[Migration, ...]:
    found = tuple(sorted((_read(path) for path in folder.glob("*.sql")), key=lambda m: m.version))
    for expected, migration in enumerate(found, start=1):
        if migration.version != expected:
            raise MigrationError(
                f"migrations must be numbered without gaps: expected number {expected}, "
                f"found {migration.version:04}_{migration.name}"
            )
    return found


def _read(path: Path) -> Migration:
    match = _MIGRATION_NAME.fullmatch(path.name)
    if match is None:
        raise MigrationError(f"a migration must be called NNNN_name.sql, not {path.name}")
    # Universal newlines: a checkout that turned line ends is not an edited file.
    sql = path.read_text(encoding="utf-8")
    checksum = hashlib.sha256(sql.encode()).hexdigest()
    return Migration(int(match[1]), match[2], sql, checksum)
