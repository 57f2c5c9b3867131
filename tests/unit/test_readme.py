"""README.md says what is: its settings, its examples, its tests."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import click
import pytest

from delayq.settings import PREFIX, Settings
from tests.helpers import connected

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ORDERS = "create table orders (id bigint primary key, state text not null)"
TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


FIRST, *LATER = blocks("python")


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found is not None, f"README.md has no section {title!r}"
    return found[1]


# --- settings ---------------------------------------------------------------------------------


def settings_table() -> str:
    rows = [_row(name, field) for name, field in Settings.model_fields.items()]
    return "\n".join(["| variable | default | what it is |", "|---|---|---|", *rows])


def _row(name: str, field: FieldInfo) -> str:
    default = "unset" if _is_unset(field) else f"`{field.default}`"
    return f"| `{PREFIX}{name.upper()}` | {default} | {field.description} |"


def _is_unset(field: FieldInfo) -> bool:
    return field.default is None or field.default_factory is not None


def test_every_setting_is_documented_with_its_default() -> None:
    found = re.search(r"^\| variable .*?(?=^$)", section("Settings"), re.MULTILINE | re.DOTALL)
    assert found is not None
    wanted = settings_table()
    assert found[0].strip() == wanted, f"the table should be:\n\n{wanted}\n"


def test_no_variable_is_named_that_does_not_exist() -> None:
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    assert set(re.findall(rf"\b{PREFIX}\w+", README)) <= known


# --- promises ---------------------------------------------------------------------------------


def test_every_promise_is_kept_by_a_test_that_exists() -> None:
    rows = re.findall(r"^\| \d \|.*\| (.*) \|$", section("What it promises"), re.MULTILINE)
    promised = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(promised) == 9
    assert all(promised)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/test_*.py"))
    there = set(re.findall(r"^ *(?:async )?def (test_\w+)", sources, re.MULTILINE))
    assert {name for names in promised for name in names} - there == set()


# --- what it refers to -------------------------------------------------------------------------


def test_every_script_that_is_named_is_there() -> None:
    for name in set(re.findall(r"\bscripts/[\w./@-]*\w", README)):
        assert (ROOT / name).exists(), name


def test_every_command_that_is_named_is_there() -> None:
    from delayq.cli.main import cli  # noqa: PLC0415 - the other tests can do without it

    shown = set(re.findall(r"(?:^\$ |`)delayq ([a-z][a-z-]*)", README, re.MULTILINE))
    assert shown - set(cli.list_commands(click.Context(cli))) == set()


# --- examples ---------------------------------------------------------------------------------


def test_the_first_example_is_short() -> None:
    assert len([line for line in FIRST.splitlines() if line.strip()]) < 20


def test_the_first_example_runs(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "tea.py").write_text(FIRST)
    done = subprocess.run(
        [sys.executable, "tea.py"],
        cwd=tmp_path,
        env={**os.environ, "DELAYQ_DSN": dsn, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "Ada, your tea is ready\n"), done.stderr


async def test_the_other_examples_run_one_after_another(
    dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DELAYQ_DSN", dsn)
    async with connected(dsn) as conn, asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
        await conn.execute(ORDERS)
        names: dict[str, object] = {"pool": pool}
        exec(_without_its_end(FIRST), names)  # noqa: S102 -- our own text
        for text in LATER:
            running = eval(compile(text, "README.md", "exec", TOP_LEVEL_AWAIT), names)  # noqa: S307 - our own text
            if inspect.isawaitable(running):
                await running
        assert await conn.fetchval("select state from orders") == "paid"
        assert await conn.fetchval("select state from delayq.task_history") == "cancelled"
    assert capsys.readouterr().out.endswith(" True\n")


def _without_its_end(text: str) -> str:
    head, end, rest = text.partition("asyncio.run(main())\n")
    assert (bool(end), rest) == (True, "")
    return head


async def test_the_sql_examples_run(dsn: str) -> None:
    async with connected(dsn) as conn:
        for text in blocks("sql"):
            await conn.execute(text)
        counted = await conn.fetch("select state, count(*) from delayq.tasks group by state")
        assert [tuple(row) for row in counted] == [("pending", 1)]
        ended = "select state from delayq.task_history"
        assert await conn.fetchval(ended) == "cancelled"
