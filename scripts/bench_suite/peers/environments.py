"""An environment for each rival, made with venv and pip, and kept until its pins change."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..processes import BenchError

if TYPE_CHECKING:
    from .systems import System

CONSTRAINTS: Final = Path(__file__).with_name("constraints.txt")
_LOG_LINES: Final = 3
# A pyenv shim, say, is on the PATH whether or not the version behind it can be run.
_SUITS: Final = (
    "import ensurepip, sys, venv; sys.exit(sys.version_info < tuple(map(int, sys.argv[1:])))"
)


async def made(system: System, folder: Path, python: Path | None) -> Path:
    """The interpreter of the system's environment, which is made now unless it is there.

    `python` is tried first as its base. Raises BenchError that says why it cannot be made.
    """
    if not system.requirements:
        return Path(sys.executable)
    base = await _base(system, python)
    home = folder / system.name
    mark = _mark_of(system, base)
    stamp = home / "made-from"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != mark:
        await _make(system, base, home)
        # Written last: an interrupted attempt leaves no mark and is started over.
        stamp.write_text(mark, encoding="utf-8")
    return home / "bin" / "python"


async def _make(system: System, base: Path, home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    log = home.with_suffix(".log")
    log.unlink(missing_ok=True)
    install = (home / "bin" / "python", "-m", "pip", "install", "--quiet")
    await _step(log, base, "-m", "venv", home)
    await _step(log, *install, "--constraint", CONSTRAINTS, *system.requirements)


async def _step(log: Path, *command: str | Path) -> None:
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, env=_environment(), stdin=asyncio.subprocess.DEVNULL, stdout=output,
            stderr=output,
        )  # fmt: skip
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if status != 0:
        raise BenchError(f"its environment cannot be made: {_end_of(log)}")


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
    return " / ".join(lines)


async def _base(system: System, given: Path | None) -> Path:
    for candidate in _candidates(given):
        if await _suits(candidate, system.python):
            return candidate
    wanted = ".".join(map(str, system.python))
    raise BenchError(f"needs Python {wanted} with venv and ensurepip; name one with --python")


def _candidates(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
    yield Path(sys.executable)
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        if found := shutil.which(name):
            yield Path(found)
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed: list[Path] = []
    with suppress(OSError):  # another user's, whom the variable was inherited from
        installed = sorted(root.glob("versions/3.*/bin/python"))
    yield from installed


async def _suits(candidate: Path, oldest: tuple[int, int]) -> bool:
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(candidate), "-c", _SUITS, *map(str, oldest)),
            env=_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return False
    return await process.wait() == 0


def _mark_of(system: System, base: Path) -> str:
    parts = (str(base.resolve()), *system.requirements)
    pins = CONSTRAINTS.read_text(encoding="utf-8")
    return hashlib.sha256("\0".join((*parts, pins)).encode()).hexdigest()


def _environment() -> dict[str, str]:
    unwanted = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
