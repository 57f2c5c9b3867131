"""The schema folder is read as it is written, and mistakes in its names are told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from delayq import statements
from delayq.errors import MigrationError


@pytest.fixture
def schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A schema folder of this test's own."""
    (tmp_path / "migrations").mkdir()
    (tmp_path / "statements").mkdir()
    monkeypatch.setattr(statements, "schema_folder", lambda: tmp_path)
    # Fresh caches: what was read before belongs to another folder.
    for name in ("statement", "statement_names"):
        original: Callable[..., object] = getattr(statements, name).__wrapped__
        monkeypatch.setattr(statements, name, original)
    return tmp_path


def test_the_migrations_of_this_program_are_numbered_from_one_without_gaps() -> None:
    found = statements.migrations()
    assert [migration.version for migration in found] == list(range(1, len(found) + 1))
    assert found


def test_a_statement_is_the_text_of_its_file_with_its_comment(schema: Path) -> None:
    (schema / "statements" / "lease.sql").write_text("-- lease: why\nselect 1\n")
    assert statements.statement("lease") == "-- lease: why\nselect 1\n"
    assert statements.statement_names() == ("lease",)


@pytest.mark.parametrize("name", ["nonesuch", "../migrations/0001_x", "", "Lease", "a/b"])
def test_a_statement_without_a_file_is_a_lookup_error(schema: Path, name: str) -> None:
    (schema / "migrations" / "0001_x.sql").write_text("select 1")
    with pytest.raises(LookupError, match="there is no statement"):
        statements.statement(name)


def test_migrations_come_in_the_order_of_their_numbers(schema: Path) -> None:
    for name in ("0002_b", "0001_a", "0003_c"):
        (schema / "migrations" / f"{name}.sql").write_text(name)
    assert [(m.version, m.name, m.sql) for m in statements.migrations()] == [
        (1, "a", "0001_a"),
        (2, "b", "0002_b"),
        (3, "c", "0003_c"),
    ]


def test_the_checksum_is_of_the_text_whatever_the_line_ends(schema: Path) -> None:
    (schema / "migrations" / "0001_a.sql").write_bytes(b"select 1;\r\nselect 2;\r\n")
    (migration,) = statements.migrations()
    assert migration.checksum == hashlib.sha256(b"select 1;\nselect 2;\n").hexdigest()


@pytest.mark.parametrize(
    "names",
    [["0002_a"], ["0001_a", "0003_c"], ["0001_a", "0001_b"], ["0000_a"], ["1_a"], ["0001-a"]],
)
def test_wrong_names_and_numbers_of_migrations_are_refused(schema: Path, names: list[str]) -> None:
    for name in names:
        (schema / "migrations" / f"{name}.sql").write_text("select 1")
    with pytest.raises(MigrationError, match=r"numbered without gaps|must be called"):
        statements.migrations()


def test_no_migration_ends_the_transaction_that_the_runner_holds() -> None:
    for migration in statements.migrations():
        words = {line.strip().lower() for line in migration.sql.splitlines()}
        assert not words & {"begin;", "commit;", "rollback;", "start transaction;"}
