"""`python -m tests.broken`: breaks delayq in every way it knows, and sees who notices.

Each build is a copy of this repository from which one mechanism was taken out. The tests that are
named for it must all pass on an unbroken copy, and each fail by an assertion on the broken one.

Exit status: 0 if every build was caught, 1 if not.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.broken.build import Build
from tests.broken.builds import read_builds
from tests.broken.report import conclusion, listing, progress
from tests.broken.trial import Verdict, copy_tree, try_broken, try_sound


def main() -> int:
    """Parse, run, report."""
    options = _options()
    if options.list:
        say(*listing(options.builds))
        return 0
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    began = time.monotonic()
    with _folder(options.keep) as folder:
        verdicts = run(folder, options.builds, options.keep)
    say("", *conclusion(verdicts))
    caught = sum(not verdict.why_not for verdict in verdicts)
    say(f"{caught} of {len(verdicts)} were caught, in {time.monotonic() - began:.0f} s")
    return 0 if caught == len(verdicts) else 1


def run(folder: Path, builds: Sequence[Build], keep: bool) -> list[Verdict]:
    """Try the tests on what is sound, then every build."""
    sound = folder / "sound"
    copy_tree(sound)
    tested, wrong = try_sound(sound, builds)
    say(f"unbroken: {len(tested.notes)} tests in {tested.seconds:.0f} s")
    if wrong:
        say(tested.said)
    verdicts = []
    for build in builds:
        why = [f"{test}: {wrong[test]}" for test in build.caught_by if test in wrong]
        if why:
            verdict = Verdict(build, [], "\n".join(["on the unbroken build", *why]), 0.0)
        else:
            verdict = try_broken(sound, folder / build.name, build)
        say(progress(verdict))
        verdicts.append(verdict)
        if not keep:
            shutil.rmtree(folder / build.name, ignore_errors=True)
    return verdicts


@contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="delayq-broken-"))
    try:
        yield folder
    finally:
        if keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def say(*lines: str) -> None:
    """So many lines for whoever watches."""
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/broken-builds", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="BUILD", help="just these (default: all)")
    parser.add_argument("--list", action="store_true", help="say what they are, and run nothing")
    parser.add_argument("--keep", action="store_true", help="leave the copies behind")
    options = parser.parse_args()
    builds = read_builds()
    for name in options.names:
        if name not in {build.name for build in builds}:
            parser.error(f"no such build: {name}; --list names them all")
    options.builds = [build for build in builds if build.name in options.names or not options.names]
    return options


if __name__ == "__main__":
    sys.exit(main())
