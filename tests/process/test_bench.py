"""`scripts/bench` measures: every scenario at a tiny size, on a server and processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TINY = (
    "--reps=1 --throughput-tasks=300 --lateness-rate=50 --lateness-seconds=0.4 --burst-tasks=50"
    " --lone-tasks=3 --lone-spacing-seconds=0.05 --lead-seconds=1 --schedule-seconds=0.1"
    " --cancel-tasks=20 --callers=5 --idle-nodes=1 --idle-pending=100 --idle-seconds=1"
)


async def bench(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench_suite", *TINY.split(), *arguments),
        env={**os.environ, "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_each_task_is_started_once_and_each_figure_stands_beside_a_raw_one(
    tmp_path: Path,
) -> None:
    status, output, errors = await bench(tmp_path, "--only=throughput,lone", "--json")
    assert status == 0, errors
    report: dict[str, Any] = json.loads(output)
    assert report["faults"] == []
    assert set(report["runs"]) == {"throughput", "lone"}
    for figure in report["figures"]:
        assert figure["delayq"] > 0, figure
        assert figure["raw"] > 0, figure
    assert {figure["passed"] for figure in report["figures"] if figure["target"]} <= {True, False}


@pytest.mark.more
@pytest.mark.timeout(300)
async def test_all_scenarios_end_in_a_table_with_their_targets(tmp_path: Path) -> None:
    status, output, errors = await bench(tmp_path)
    assert status == 0, errors
    assert "FAULT" not in output
    assert "default settings and logging" in output
    assert output.count(" pass (") + output.count(" FAIL (") == 5


async def test_a_scenario_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    status, _, errors = await bench(tmp_path, "--only=througput")
    assert status == 2
    assert "no scenario 'througput'; of throughput, lateness" in errors
