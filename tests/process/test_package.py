"""What is built is what was meant: the schema inside the wheel, a source archive that can test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import importlib.metadata, pathlib, sys
import delayq, delayq.cli
from delayq import statements
folder = statements.schema_folder()
assert folder == pathlib.Path(delayq.__file__).resolve().parent / "schema", folder
assert pathlib.Path(sys.argv[1]).resolve() in folder.parents, folder
print(len(statements.migrations()), len(statements.statement_names()))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return archive, wheel


def _sources(*folders: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _look(python: str | Path, home: Path, cwd: Path) -> str:
    command = [str(python), "-c", LOOK, str(home)]
    environment = {**os.environ, "PYTHONPATH": str(home) if python == sys.executable else ""}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _counted() -> str:
    migrations, statements = (
        len(list((ROOT / "schema" / kind).glob("*.sql"))) for kind in ("migrations", "statements")
    )
    return f"{migrations} {statements}"


def test_the_wheel_holds_the_package_and_the_schema_and_nothing_else(
    built: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    schema = {f"delayq/{name}" for name in _sources("schema")}
    assert names == _sources("delayq") | schema
    assert "delayq/py.typed" in names


def test_the_source_archive_can_run_the_tests(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    expected = _sources("delayq", "schema", "tests", "scripts", ".ci")
    expected |= {".gitignore", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO"}
    assert set(members) == expected
    for program in ("scripts/test", ".ci/run"):
        assert members[program].mode & 0o111, program


def test_the_metadata_says_what_people_look_for(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(name).decode())
    assert (metadata["Name"], metadata["License-Expression"]) == ("delayq", "MIT")
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {"embedded", "fast", "test"}
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).startswith("# delayq")


def test_the_schema_is_found_inside_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.unpack_archive(built[1], home, "zip")
    assert _look(sys.executable, home, tmp_path) == _counted()


@pytest.mark.more
@pytest.mark.timeout(300)
def test_the_wheel_alone_works_in_a_fresh_environment(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    home = tmp_path / "fresh environment"
    venv.create(home, with_pip=True)
    constraints = ROOT / "scripts" / "constraints.txt"
    install = ["-m", "pip", "install", "--quiet", "--constraint", str(constraints), str(built[1])]
    subprocess.run([home / "bin" / "python", *install], check=True, timeout=240)
    assert _look(home / "bin" / "python", home, tmp_path) == _counted()
    help_text = subprocess.run(
        [home / "bin" / "python", "-m", "delayq", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "Usage" in help_text.stdout
