"""`scripts/bench` measures: every scenario at a tiny size, on a server and processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from scripts.bench_suite.numbers import lateness
from scripts.bench_suite.options import read_options
from scripts.bench_suite.recorder import AT_ONCE, EVENTS, Recorder
from scripts.bench_suite.report import Report
from scripts.bench_suite.scenario import NAN, Figure, Measure, Sample, Scenario, Target
from scripts.bench_suite.scenarios import SCENARIOS

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TINY = (
    "--reps=1 --throughput-tasks=300 --nodes=1,2 --nodes-tasks=300 --miss-rate=50"
    " --miss-seconds=0.4 --lateness-rate=50 --lateness-fast-rate=100 --lateness-cpu-rate=20"
    " --lateness-seconds=0.4 --burst-tasks=50 --burst-large-tasks=100 --lone-tasks=3"
    " --lone-spacing-seconds=0.05 --lead-seconds=1 --sustained-rate=50 --sustained-seconds=0.4"
    " --schedule-seconds=0.1 --cancel-tasks=20 --callers=5 --bulk-tasks=100 --idle-nodes=1"
    " --idle-pending=100 --idle-seconds=3 --deep-pending=0,1000 --backlog-tasks=2000"
    " --snapshot-tasks=300 --memory-timers=2000 --leave-nodes=2 --leave-rate=50"
    " --leave-seconds=1 --crash-wait-seconds=0 --scale-nodes=2 --scale-rate=50 --scale-seconds=1"
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"}


async def bench(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench_suite", *TINY.split(), *arguments),
        env=ENVIRONMENT,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:  # the test is given up: it stops what it has started
            process.send_signal(signal.SIGINT)
            await process.wait()
    return process.returncode, output.decode(), errors.decode()


@pytest.mark.timeout(180)
async def test_each_task_is_started_once_and_each_figure_stands_beside_a_raw_one(
    tmp_path: Path,
) -> None:
    names = ["throughput", "lateness-wait", "memory"]
    status, output, errors = await bench(tmp_path, f"--only={','.join(names)}", "--json")
    assert status == 0, errors
    report: dict[str, Any] = json.loads(output)
    assert report["faults"] == []
    assert list(report["runs"]) == names
    for figure in report["figures"]:
        assert figure["delayq"] > 0, figure
        assert figure["raw"] > 0, figure
    assert {figure["passed"] for figure in report["figures"] if figure["target"]} <= {True, False}


@pytest.mark.more
@pytest.mark.timeout(900)
async def test_all_scenarios_end_in_a_table_with_their_targets(tmp_path: Path) -> None:
    status, output, errors = await bench(tmp_path, "--full")
    assert status == 0, errors
    assert "FAULT" not in output
    assert "default settings and logging" in output
    sizes = read_options([*TINY.split(), "--full"]).sizes
    figures = [figure for one in SCENARIOS.values() for figure in one.figures_at(sizes)]
    for figure in figures:
        assert f"\n{figure.title}  " in output
    verdicts = output.count(" pass (") + output.count(" FAIL (")
    assert verdicts == sum(figure.target is not None for figure in figures)


async def test_a_scenario_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    status, _, errors = await bench(tmp_path, "--only=througput")
    assert status == 2
    assert "no scenario 'througput'; of throughput, nodes, scale, lateness" in errors


# --- options ----------------------------------------------------------------------------------


def test_without_options_what_says_little_at_small_sizes_is_left_out() -> None:
    brief, full = read_options([]), read_options(["--full"])
    assert full.only == tuple(SCENARIOS)
    assert set(full.only) - set(brief.only) == {
        "scale",
        "lateness-compute",
        "sustained",
        "snapshot",
    }
    assert read_options(["--only=snapshot"]).only == ("snapshot",)


def test_full_sizes_are_those_of_the_targets_unless_they_are_given() -> None:
    assert read_options([]).sizes.deep_pending == (0, 100_000)
    sizes = read_options(["--full", "--deep-pending=0,5", "--idle-seconds=2.5"]).sizes
    assert sizes.deep_pending == (0, 5)
    assert sizes.idle_seconds == 2.5
    assert (sizes.backlog_tasks, sizes.snapshot_tasks) == (1_000_000, 1_000_000)
    assert (sizes.burst_tasks, sizes.burst_large_tasks) == (5_000, 50_000)
    assert read_options(["--full"]).sizes.deep_pending[-1] == 10_000_000


@pytest.mark.parametrize("counts", ["5,1", "-1,2", "1,1", "x"])
def test_numbers_that_do_not_grow_are_refused(counts: str) -> None:
    with pytest.raises(SystemExit):
        read_options([f"--nodes={counts}"])


# --- what comes out ---------------------------------------------------------------------------


async def never(*_: object) -> Sample:
    raise AssertionError("nothing is run here")


def report_of(figures: tuple[Figure, ...], *samples: Sample) -> Report:
    scenario = Scenario("some", "about", "raw about", figures, never)
    return Report({}, {"some": scenario}, {"some": figures}, {"some": list(samples)})


def test_a_target_may_be_a_ratio_of_another_figure_of_the_same_run() -> None:
    one = Figure("one", "with one", "/s")
    four = Figure("four", "with four", "/s", Target(Measure.RATIO, least=0.8, of="one"))
    runs = [Sample({"one": one, "four": four}, {"one": 1, "four": 9})
            for one, four in ((100, 90), (200, 150), (100, 10))]  # fmt: skip
    report = report_of((one, four), *runs)
    _, (_, line) = report.lines
    assert line.passed is False  # the median of 0.9, 0.75 and 0.1, not 90 of 100
    assert "of one >= 0.8" in report.as_text()
    assert report_of((one, four), runs[0]).passed


def test_what_could_not_be_measured_is_null_and_does_not_pass() -> None:
    figure = Figure("cpu", "processor", "%", Target(Measure.VALUE, most=0.5))
    report = report_of((figure,), Sample({"cpu": NAN}, {"cpu": 0.1}))
    assert not report.passed
    document = json.loads(report.as_json())
    assert document["figures"][0]["delayq"] is None
    assert document["runs"]["some"][0]["ours"] == {"cpu": None}


def test_a_figure_with_nothing_raw_beside_it_has_an_empty_place() -> None:
    figure = Figure("rss", "memory", "MB", alone=True)
    report = report_of((figure,), Sample({"rss": 12.5}))
    assert "\nmemory  MB    12.50\n" in report.as_text()
    assert json.loads(report.as_json())["figures"][0]["raw"] is None


def test_a_figure_that_a_run_forgot_is_an_error() -> None:
    with pytest.raises(KeyError):
        report_of((Figure("p50", "median", "ms"),), Sample({"p50": 1.0}, {})).as_text()


def test_a_fault_of_one_run_is_told_and_fails_the_report() -> None:
    figure = Figure("per_s", "rate", "/s")
    good, bad = (Sample({"per_s": 1}, {"per_s": 1}, {"early": early}) for early in (0, 2))
    report = report_of((figure,), good, bad)
    assert report.faults == ["some, run 2: early 2"]
    assert not report.passed


def test_a_run_that_could_not_be_made_leaves_the_others_their_table() -> None:
    figure = Figure("per_s", "rate", "/s")
    scenario = Scenario("some", "about", "raw about", (figure,), never)
    samples = {"some": [Sample({"per_s": 1}, {"per_s": 1})], "other": []}
    report = Report({}, dict.fromkeys(samples, scenario), dict.fromkeys(samples, (figure,)),
                    samples, ["other, run 1: no room"])  # fmt: skip
    assert not report.passed
    assert report.as_text().endswith("FAILED other, run 1: no room")
    assert [line["scenario"] for line in json.loads(report.as_json())["figures"]] == ["some"]


def test_lateness_counts_what_is_lost_twice_or_early() -> None:
    starts = [(0, 1_002_000), (1, 999_000), (0, 1_001_000), (-3, 5), (7, 5)]
    late_ms, faults = lateness(starts, 3, lambda _: 1_000.0)
    assert sorted(late_ms) == pytest.approx([-0.001, 0.001])
    assert faults == {"lost": 1, "twice": 1, "early": 1}


# --- what handlers write down -----------------------------------------------------------------


def read(path: Path) -> list[int]:
    found = array("q")
    found.frombytes(path.read_bytes())
    return list(found[::2])


async def test_starts_are_written_in_their_order_while_others_come(tmp_path: Path) -> None:
    path = tmp_path / "events"
    recorder = Recorder(path)
    for number in range(1_000):
        recorder(number)
        if number % 100 == 0:
            await asyncio.sleep(0.06)  # across the instants at which they are handed over
    recorder.end()
    assert read(path) == list(range(1_000))


@pytest.mark.parametrize("how", ["ends", "is killed"])
async def test_no_start_is_lost_when_a_node_ends_or_is_killed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "events"
    program = (
        "import asyncio\n"
        "from bench_suite.recorder import chosen\n"
        "async def main():\n"
        "    note = chosen()\n"
        "    for number in range(5): note(number)\n"
        "    print('noted', flush=True)\n"
        + ("    await asyncio.sleep(60)\n" if how == "is killed" else "")
        + "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        env=ENVIRONMENT | {EVENTS: str(path)} | ({AT_ONCE: "1"} if how == "is killed" else {}),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"noted\n"
    if how == "is killed":
        process.send_signal(signal.SIGKILL)
    await process.wait()
    assert read(path) == list(range(5))
