"""`python -m tests.chaos`: hurts a cluster for a while, and says whether a promise was broken.

Exit status: 0 if every promise was kept and every fault met a running task, 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.play import Outcome, Plan, run
from tests.chaos.report import summary, table


def main() -> int:
    """Parse, run, report."""
    options = _options()
    seed = options.seed if options.seed is not None else random.randrange(1_000_000)
    plan = Plan(
        seed=seed, seconds=options.minutes * 60, faults=options.faults, each=not options.mix,
        settings=options.settings, load=options.load, pg_bin=options.pg_bin, keep=options.keep,
    )  # fmt: skip
    say(f"seed {seed}, settings {plan.settings}, {len(plan.faults)} faults")
    outcome = asyncio.run(run(plan, say))
    for line in conclusion(outcome):
        say(line)
    return 0 if outcome.good else 1


def conclusion(outcome: Outcome) -> list[str]:
    """Everything that is said at the end."""
    evidence, violations = outcome.evidence, outcome.violations
    lines = ["", table(evidence, violations), "", summary(evidence, violations)]
    lines += [f"callers got errors: {outcome.errors}", f"nodes ended unasked: {outcome.exits}"]
    lines += [f"ABSENT {what}: {name} was not applied" for name, what in outcome.absent.items()]
    lines += [f"NOT COUNTED {name}: it met no running task" for name in outcome.uncounted]
    verdict = "every promise was kept" if outcome.good else "FAILED"
    return [*lines, f"{verdict}: {len(violations)} violations, {len(evidence.spans)} faults"]


def say(text: str) -> None:
    """One line for whoever watches."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n" if text else "\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of faults (default 2)")
    parser.add_argument("--seed", type=int, help="of all random choices (default: another one)")
    parser.add_argument("--faults", type=_faults, default=[*FAULTS], metavar="A,B",
                        help=f"some of: {', '.join(FAULTS)}")  # fmt: skip
    parser.add_argument("--settings", choices=["short", "default"], default="short",
                        help="intervals of the nodes: TTL 3 s, or the defaults")  # fmt: skip
    parser.add_argument("--mix", action="store_true", help="mix at once, none alone first")
    parser.add_argument("--load", type=float, default=1.0, help="1 is some 220 tasks a second")
    parser.add_argument("--pg-bin", type=Path, help="folder of initdb and postgres")
    parser.add_argument("--keep", action="store_true", help="leave ledger, logs and data behind")
    return parser.parse_args()


def _faults(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FAULTS:
            raise argparse.ArgumentTypeError(f"no such fault: {name!r}")
    return names


if __name__ == "__main__":
    sys.exit(main())
