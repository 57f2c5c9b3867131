"""What is told of broken builds: the list of them, and the table of who caught which."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from tests.broken.build import Build
from tests.broken.trial import Verdict

_WIDTH = 96


def listing(builds: Iterable[Build]) -> list[str]:
    """Every build with its sentence and its tests."""
    lines: list[str] = []
    for build in builds:
        lines += [build.name, *textwrap.wrap(build.breaks, _WIDTH, initial_indent="    ",
                                             subsequent_indent="    ")]  # fmt: skip
        lines += [f"    {test}" for test in build.caught_by]
    return lines


def progress(verdict: Verdict) -> str:
    """One line, as soon as it is known."""
    how = "NOT CAUGHT" if verdict.why_not else "caught"
    return f"{verdict.build.name}: {how} ({verdict.seconds:.1f} s)"


def conclusion(verdicts: Sequence[Verdict]) -> list[str]:
    """The table, then what is wrong."""
    lines = [*table(verdicts), ""]
    for verdict in verdicts:
        if verdict.why_not:
            lines += [f"{verdict.build.name} was not caught: {verdict.why_not}", ""]
    return lines


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """A line a build and test that caught it."""
    width = max(len(verdict.build.name) for verdict in verdicts)
    head = f"{'broken build':{width}} | seconds | caught by"
    lines = [head, f"{'-' * width}-+---------+-{'-' * 60}"]
    for verdict in verdicts:
        first, *others = [*verdict.caught, *(["NOT CAUGHT"] if verdict.why_not else [])]
        lines.append(f"{verdict.build.name:{width}} | {verdict.seconds:7.1f} | {first}")
        lines += [f"{'':{width}} | {'':7} | {other}" for other in others]
    return lines
