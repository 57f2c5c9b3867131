"""The answer of a verb about many tasks: how many of each kind, and which were not as hoped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from delayq.cli.exits import Exit
from delayq.cli.options import Invocation
from delayq.cli.output import answer, write_line

_IDS_SHOWN: Final = 20


@dataclass(slots=True)
class Tally:
    """What became of many tasks: ids by answer, and those whose row the database refused."""

    answers: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, answers: Mapping[int, StrEnum]) -> None:
        """Count more answers."""
        for id, said in answers.items():
            self.answers[str(said)].append(id)

    def all_are(self, good: Collection[str]) -> bool:
        """True if no task had another answer."""
        return not self.failed and not self.answers.keys() - {*good}

    def document(self, good: Collection[str]) -> dict[str, object]:
        """For JSON: how many of each answer, and which tasks had another one than a good one."""
        return {
            "answers": {said: len(ids) for said, ids in self.answers.items()},
            "others": [
                {"id": str(id), "answer": said}
                for said, ids in self.answers.items()
                if said not in good
                for id in ids
            ],
            "refused": [{"id": str(id), "error": error} for id, error in self.failed.items()],
        }


def report(invocation: Invocation, tally: Tally, good: Collection[str], nothing: str) -> None:
    """Give the answer; `nothing` is said to people if there were no tasks."""
    answer(invocation.json, tally.document(good), lambda: _show(tally, good, nothing))


def exit_of(tally: Tally, good: Collection[str]) -> Exit:
    """0 if all answers were good, else 1."""
    return Exit.OK if tally.all_are(good) else Exit.NO


def _show(tally: Tally, good: Collection[str], nothing: str) -> None:
    for said, ids in tally.answers.items():
        which = "" if said in good else f": {_ids(ids)}"
        write_line(f"{len(ids)} {said.replace('_', ' ')}{which}")
    for id, error in tally.failed.items():
        write_line(f"task {id} was refused: {error}")
    if not tally.answers and not tally.failed:
        write_line(nothing)


def _ids(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
    return ", ".join(map(str, ids[:_IDS_SHOWN])) + more
