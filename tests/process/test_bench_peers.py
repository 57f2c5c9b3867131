"""`scripts/bench peers` measures, at tiny sizes, on a server and processes of its own."""

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
    "--reps=1 --throughput-tasks=300 --limit-seconds=20 --lateness-rate=50 --lateness-seconds=0.4"
    " --burst-tasks=50 --lead-seconds=3 --backlog-tasks=200 --deep-tasks=300"
    " --transaction-tasks=300 --held-tasks=2 --crash-seconds=60 --schedule-seconds=0.1"
    " --bulk-tasks=100"
)


async def peers(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench_suite.peers", *TINY.split(), "--json", *arguments),
        env={**os.environ, "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    document: dict[str, Any] = json.loads(output)
    return document, errors.decode()


@pytest.mark.timeout(180)
async def test_delayq_and_raw_do_the_same_work(tmp_path: Path) -> None:
    document, told = await peers(tmp_path, "--systems=delayq,raw", "--only=throughput,schedule")
    for figure in document["figures"]:
        assert figure["medians"]["delayq"] > 0, told
        assert figure["medians"]["raw"] > 0, told
    assert {figure["measure"] for figure in document["figures"]} == {"throughput", "schedule"}


# It installs four rivals, and waits until each has found out that its worker is dead.
@pytest.mark.more
@pytest.mark.timeout(1800)
async def test_every_rival_does_all_that_it_says_it_can(tmp_path: Path) -> None:
    document, told = await peers(
        tmp_path, "--only=throughput,lateness,burst,backlog,deep,transaction,crash,schedule"
    )
    runnable = {name for name, facts in document["systems"].items() if not facts["absent"]}
    # oban alone needs a newer Python than delayq; everything else is there or it is a fault
    assert set(document["systems"]) - runnable <= {"oban"}, told
    for name in set(document["systems"]) - runnable:
        assert "needs Python 3.12" in document["systems"][name]["absent"]
    slow = {("oban", "again"), ("chancy", "again")}
    for figure in document["figures"]:
        for name in runnable:
            able = figure["measure"] not in document["systems"][name]["cannot"]
            value = figure["medians"][name]
            if (name, figure["figure"]) in slow and value is None:
                assert "0 ran again within 60 s" in figure["notes"][name]
            elif able:
                assert value is not None, (name, figure["title"], figure["notes"])
                assert value > 0, (name, figure["title"])
            else:
                assert value is None, (name, figure["title"])
