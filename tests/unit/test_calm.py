"""A promise in milliseconds is asked of a calm machine, and never of a slower bound."""

from __future__ import annotations

import pytest

from tests.conftest import FIGURES
from tests.process.calm import RUNS, Run, keeps


async def judge(*shown: tuple[int, int]) -> list[str]:
    """What was told when the runs were so late, and the machine so late meanwhile."""
    told: list[str] = []
    runs = enumerate(shown)

    def tell(name: str, text: object) -> None:
        assert name == FIGURES
        told.append(str(text))

    async def run() -> Run:
        number, (late_us, machine_us) = next(runs)
        return Run(late_us, machine_us, f"run {number}")

    await keeps(run, within_us=100, calm_us=10, tell=tell)
    return told


async def test_a_run_that_keeps_its_promise_is_enough_whatever_the_machine_did() -> None:
    assert await judge((99, 50)) == ["run 0"]


async def test_a_run_that_is_late_on_a_calm_machine_fails_at_once() -> None:
    with pytest.raises(AssertionError, match="on a calm machine: run 0"):
        await judge((100, 10), (0, 0))


async def test_a_run_that_is_late_on_a_late_machine_is_done_again() -> None:
    assert await judge((100, 11), (5_000, 11), (99, 11)) == ["run 0", "run 1", "run 2"]


async def test_a_machine_that_is_never_calm_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="none of them on a calm machine"):
        await judge(*[(100, 11)] * (RUNS + 1))
