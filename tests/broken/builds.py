"""Reads the list of broken builds: `builds/*.toml`, where each is told with its edits.

`includes` names builds whose edits go along.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from tests.broken.build import Build, Edit

FOLDER: Final = Path(__file__).with_name("builds")
FIRST: Final = (
    "fence-removed",
    "adopter-does-not-judge-again",
    "understudy-off",
    "reconnect-without-rescan",
)
"""These are tried before all others."""


def read_builds() -> list[Build]:
    """All of them, in the order in which they are tried. Raises for what is no such list."""
    told: dict[str, dict[str, Any]] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["build"]:
            if told.setdefault(entry["name"], entry) is not entry:
                raise ValueError(f"two builds are called {entry['name']}")
    builds = [_build(name, told) for name in told]
    return sorted(builds, key=lambda b: FIRST.index(b.name) if b.name in FIRST else len(FIRST))


def _build(name: str, told: dict[str, dict[str, Any]]) -> Build:
    entry = told[name]
    unknown = set(entry) - {"name", "breaks", "includes", "caught_by", "edit"}
    if unknown:
        raise ValueError(f"{name} has {unknown}")
    return Build(name, entry["breaks"], tuple(_edits(name, told)), tuple(entry["caught_by"]))


def _edits(name: str, told: dict[str, dict[str, Any]]) -> dict[Edit, None]:
    """In order, and each once."""
    edits: dict[Edit, None] = {}
    for other in told[name].get("includes", []):
        edits |= _edits(other, told)
    return edits | dict.fromkeys(Edit(**edit) for edit in told[name].get("edit", []))
