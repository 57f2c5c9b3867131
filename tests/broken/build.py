"""A broken build: delayq with a mechanism taken out, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class StaleEditError(Exception):
    """The text to be replaced is not there, or not as often as the edit says."""


@dataclass(frozen=True, slots=True)
class Edit:
    """In `file`, `old` stands `times` times and becomes `new`."""

    file: str
    old: str
    new: str
    times: int = 1

    def applied_to(self, text: str) -> str:
        """The edited text. Raises StaleEditError if there is not exactly that to edit."""
        found = text.count(self.old)
        if found != self.times:
            raise StaleEditError(f"{self.file}: found {found} times, not {self.times}: {self.old}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Build:
    """`breaks` is a sentence: what it does, and so which promise it does not keep.

    Each test of `caught_by` (as pytest names it, below `tests/`; without parameters it stands for
    all of its own) must fail on this build by an assertion.
    """

    name: str
    breaks: str
    edits: tuple[Edit, ...]
    caught_by: tuple[str, ...]


def edited(build: Build, root: Path) -> dict[str, str]:
    """The files that the build changes, as they read in it. Raises StaleEditError."""
    texts: dict[str, str] = {}
    for edit in build.edits:
        if edit.file not in texts:
            texts[edit.file] = (root / edit.file).read_text(encoding="utf-8")
        texts[edit.file] = edit.applied_to(texts[edit.file])
    return texts
