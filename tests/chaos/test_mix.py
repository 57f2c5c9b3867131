"""A cluster under load and under faults, and the auditor's verdict on it.

A minute of mixed faults always; each fault alone with `--all`. CHAOS_SEED=… repeats a run, and
CHAOS_SECONDS=… makes it longer; `scripts/soak` does more.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.chaos.__main__ import conclusion
from tests.chaos.faults import FAULTS, mix
from tests.chaos.play import Outcome, Plan, run
from tests.helpers import absent

SEED = 4
SECONDS = 60.0
ALONE_SECONDS = 12.0


async def _play(plan: Plan, capsys: pytest.CaptureFixture[str]) -> Outcome:
    said: list[str] = [f"seed {plan.seed}"]
    outcome = await run(plan, said.append)
    said += conclusion(outcome)
    with capsys.disabled():
        print("\n" + "\n".join(said))  # noqa: T201 - the table is what this is run for
    for what in outcome.absent.values():
        if len(plan.faults) == 1:
            absent(what)
    assert outcome.violations == []
    assert outcome.evidence.spans
    return outcome


@pytest.mark.timeout(300)
async def test_no_promise_is_broken_by_a_mix_of_faults(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("CHAOS_SEED", SEED))
    seconds = float(os.environ.get("CHAOS_SECONDS", SECONDS))
    # half the load of a soak: other tests run beside this one
    await _play(Plan(seed, seconds, [*FAULTS], each=False, load=0.5), capsys)


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
async def test_no_promise_is_broken_by(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("CHAOS_SEED", SEED))
    outcome = await _play(Plan(seed, ALONE_SECONDS, [fault], load=0.5), capsys)
    assert not outcome.uncounted


def test_faults_that_disturb_each_other_are_never_mixed() -> None:
    dice = random.Random(1)
    seen: set[str] = set()
    for _ in range(500):
        chosen = mix([*FAULTS], dice)
        touched = [what for name in chosen for what in FAULTS[name].touches]
        assert len(touched) == len(set(touched))
        assert 1 <= len(chosen) <= 3
        seen.update(chosen)
    assert seen == {*FAULTS}
