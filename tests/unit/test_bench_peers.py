"""The comparison of `scripts/bench peers`: what its table says, and what starts come to."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.bench_suite.peers.contract import Due
from scripts.bench_suite.peers.drained import drained_of
from scripts.bench_suite.peers.environments import CONSTRAINTS, made
from scripts.bench_suite.peers.measures import Outcome, measures_of
from scripts.bench_suite.peers.options import NAMES, UNASKED, Sizes, read_options
from scripts.bench_suite.peers.systems import SYSTEMS
from scripts.bench_suite.peers.table import Failed, Report, shown_as
from scripts.bench_suite.processes import BenchError

MEASURES = measures_of(Sizes())
PEERS = Path(CONSTRAINTS).parent


def described(name: str, **more: Any) -> dict[str, Any]:
    return {
        "versions": {name: "1.2.3", "driver": "4.5"}, "python": "3.12.1", "settings": "limit=7",
        "documented": "guide, Tuning", "cannot": {}, "remarks": {}, **more,
    }  # fmt: skip


@pytest.fixture
def report() -> Report:
    return Report(
        facts={"postgresql": "18.6"},
        systems=[SYSTEMS["delayq"], SYSTEMS["oban"], SYSTEMS["raw"]],
        described={
            "delayq": described("delayq"),
            "raw": described("asyncpg", cannot={"crash": "has no leases"}),
        },
        absent={"oban": "not run: needs Python 3.12"},
        measures=[MEASURES["throughput"], MEASURES["crash"]],
    )


def rows(report: Report) -> dict[str, list[str]]:
    lines = [line for line in report.as_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def footnotes(report: Report) -> dict[str, str]:
    found = re.findall(r"^(\[\d+\]) (.*)$", report.as_text(), re.MULTILINE)
    return dict(found)


THROUGHPUT = MEASURES["throughput"].figures[0].title
CRASH = MEASURES["crash"].figures[0].title


# --- the table --------------------------------------------------------------------------------


def test_a_figure_is_the_median_of_its_runs(report: Report) -> None:
    for per_s in (40_000.0, 10_000.0, 30_000.0):
        report.add("throughput", "delayq", Outcome({"per_s": per_s}))
    assert rows(report)[THROUGHPUT][0] == "30,000"


def test_a_system_that_is_not_here_has_a_dash_and_the_reason_in_a_footnote(
    report: Report,
) -> None:
    dash, number = rows(report)[THROUGHPUT][1].split()
    assert dash == "—"
    assert footnotes(report)[number] == "oban: not run: needs Python 3.12"


def test_what_a_system_cannot_do_is_said_in_a_footnote(report: Report) -> None:
    dash, number = rows(report)[CRASH][2].split()
    assert dash == "—"
    assert footnotes(report)[number] == "raw asyncpg: has no leases"


def test_no_cell_is_empty_without_a_reason(report: Report) -> None:
    for cells in list(rows(report).values())[1:]:
        assert all("—" not in cell or re.search(r"\[\d+\]$", cell) for cell in cells), cells


def test_a_run_that_failed_is_named_beside_the_median_of_the_others(report: Report) -> None:
    report.add("throughput", "delayq", Outcome({"per_s": 500.0}))
    report.add("throughput", "delayq", Failed("failed: its worker ended with 1"))
    value, number = rows(report)[THROUGHPUT][0].split()
    assert value == "500"
    assert footnotes(report)[number] == "delayq: failed: its worker ended with 1"
    assert not report.complete


def test_a_note_of_every_run_is_told_once(report: Report) -> None:
    for _ in range(3):
        report.add("throughput", "delayq", Outcome({"per_s": 9.0}, {"per_s": ("cut off",)}))
    assert list(footnotes(report).values()).count("delayq: cut off") == 1
    assert report.complete


def test_a_note_on_one_figure_is_not_put_on_its_neighbour(report: Report) -> None:
    outcome = Outcome({"p50": 1.0, "p99": 2.0, "per_s": 3.0}, {"per_s": ("cut off",)})
    report.add("backlog", "delayq", outcome)
    late, _, rate = MEASURES["backlog"].figures
    assert report.cell(MEASURES["backlog"], late, "delayq").note == ""
    assert report.cell(MEASURES["backlog"], rate, "delayq").note == "cut off"


def test_a_remark_of_an_adapter_stands_beside_its_figure(report: Report) -> None:
    remarks = {"throughput": "keeps no history"}
    facts = {**report.described, "delayq": described("delayq", remarks=remarks)}
    report = replace(report, described=facts)
    report.add("throughput", "delayq", Outcome({"per_s": 9.0}))
    value, number = rows(report)[THROUGHPUT][0].split()
    assert (value, footnotes(report)[number]) == ("9", "delayq: keeps no history")


def test_versions_settings_and_their_source_are_printed(report: Report) -> None:
    text = report.as_text()
    assert (
        "delayq (1.2.3, driver 4.5, Python 3.12.1): limit=7. Documented in: guide, Tuning" in text
    )
    assert "postgresql: 18.6" in text


def test_json_has_every_run_and_null_where_there_is_no_figure(report: Report) -> None:
    report.add("throughput", "delayq", Outcome({"per_s": 1.0}))
    report.add("throughput", "delayq", Outcome({"per_s": 3.0}))
    document = json.loads(report.as_json())
    figure = next(one for one in document["figures"] if one["measure"] == "throughput")
    assert figure["medians"] == {"delayq": 2.0, "oban": None, "raw": None}
    assert figure["runs"]["delayq"] == [1.0, 3.0]
    assert figure["notes"]["raw"] == "not run"
    assert document["systems"]["oban"]["absent"] == "not run: needs Python 3.12"
    assert document["systems"]["delayq"]["versions"]["driver"] == "4.5"


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (43_946.4, "/s", "43,946"), (70.52, "/s", "70.5"), (0.8241, "ms", "0.824 ms"),
        (14_826.76, "ms", "14,827 ms"), (99.97, "s", "100 s"),
    ],
)  # fmt: skip
def test_numbers_are_rounded_to_what_they_are_worth(value: float, unit: str, shown: str) -> None:
    assert shown_as(value, unit) == shown


# --- what starts come to ----------------------------------------------------------------------


def test_the_rate_counts_from_the_first_start_until_all_is_settled() -> None:
    starts = [(n, 1_000_000_000 + n * 1_000_000) for n in range(1_000)]
    drained = drained_of(starts, 1_000, 3_000_000_000, None)
    assert drained.per_s == pytest.approx(500.0)
    assert drained.notes == ()


def test_a_second_start_of_a_task_and_tasks_of_others_do_not_count() -> None:
    starts = [(-1, 5), (0, 10), (1, 20), (0, 30), (2, 40)]
    drained = drained_of(starts, 2, 1_000_000_010, None)
    assert drained.starts_ns == [10, 20]


def test_a_worker_that_was_cut_off_is_judged_by_what_it_started_before() -> None:
    starts = [(n, n * 1_000_000_000) for n in range(10)]
    drained = drained_of(starts, 100, 4_500_000_000, 4.5)
    assert len(drained.starts_ns) == 5
    assert drained.notes == ("cut off after 4.5 s",)


def test_tasks_that_never_started_are_told() -> None:
    drained = drained_of([(0, 10), (2, 20)], 3, 1_000, None)
    assert drained.notes == ("1 of 3 never started",)


def test_a_worker_that_started_nothing_is_a_failure() -> None:
    with pytest.raises(BenchError, match="started nothing"):
        drained_of([(-1, 10)], 3, 1_000, None)


def test_a_queue_that_gets_slower_shows_in_its_last_quarter() -> None:
    fast = [(n, n * 1_000_000) for n in range(50)]
    slow = [(50 + n, 50_000_000 + n * 4_000_000) for n in range(50)]
    drained = drained_of(fast + slow, 100, 1_000_000_000, None)
    assert drained.quarter_per_s(0) == pytest.approx(1_000.0)
    assert drained.quarter_per_s(3) == pytest.approx(250.0)


def test_a_handful_of_starts_has_no_quarters() -> None:
    drained = drained_of([(n, n) for n in range(7)], 7, 1_000, None)
    with pytest.raises(BenchError, match="only 7 started"):
        drained.quarter_per_s(0)


# --- options, systems, environments --------------------------------------------------------------


def test_everything_is_measured_on_every_system_but_what_takes_long() -> None:
    options = read_options([])
    assert set(options.only) == set(NAMES) - set(UNASKED)
    assert options.systems == tuple(SYSTEMS)
    assert tuple(MEASURES) == NAMES


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--only=throughputt", "no 'throughputt'; of throughput, lateness"),
        ("--systems=celery", "no 'celery'; of delayq, procrastinate"),
        ("--reps=0", "must be at least 1"),
        ("--lateness-rate=0", "must be above zero"),
        ("--lead-seconds=nan", "must be above zero"),
    ],
)
def test_nonsense_is_refused_in_words(
    argument: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_options([argument])
    assert said in capsys.readouterr().err


def test_an_instant_is_handed_over_to_the_microsecond() -> None:
    due = Due(7, 1_767_225_600_123_457)
    assert due.at.isoformat() == "2026-01-01T00:00:00.123457+00:00"


def test_every_rival_is_pinned_and_has_an_adapter() -> None:
    pins = set(re.findall(r"^([\w-]+)==\d", CONSTRAINTS.read_text("utf-8"), re.MULTILINE))
    for system in SYSTEMS.values():
        assert (PEERS / "adapters" / f"{system.name}.py").is_file()
        assert {name.partition("[")[0] for name in system.requirements} <= pins


# A Python that makes environments at once: of itself, with a pip that obeys the file `pip`.
FAKE = """#!/bin/sh
echo "$@" >>"{folder}/calls"
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") cat "{folder}/pip" && exit 1 ;;
esac
exit 0
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    python = tmp_path / "python"
    python.write_text(FAKE.format(folder=tmp_path))
    python.chmod(0o755)
    return python


def installs(fake: Path) -> int:
    return fake.with_name("calls").read_text().count("-m pip install")


def no_pin_is_missing(fake: Path) -> bool:
    return f"--constraint {CONSTRAINTS}" in fake.with_name("calls").read_text()


async def test_delayq_and_raw_run_where_the_benchmark_runs(fake: Path) -> None:
    for name in ("delayq", "raw"):
        assert await made(SYSTEMS[name], fake.parent, fake) == Path(sys.executable)
    assert not fake.with_name("calls").exists()


async def test_a_rival_that_no_python_here_suits_says_which_it_needs(tmp_path: Path) -> None:
    system = replace(SYSTEMS["oban"], python=(3, 99))
    with pytest.raises(BenchError, match=r"needs Python 3\.99 .* --python"):
        await made(system, tmp_path, tmp_path / "no-such-python")


async def test_pythons_that_only_another_user_may_see_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, _pattern: str) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "glob", refused)
    system = replace(SYSTEMS["oban"], python=(3, 99))
    with pytest.raises(BenchError, match=r"needs Python 3\.99"):
        await made(system, tmp_path, tmp_path / "no-such-python")


async def test_an_environment_is_made_once_from_the_pins_and_kept(fake: Path) -> None:
    for _ in range(2):
        python = await made(SYSTEMS["pgqueuer"], fake.parent / "envs", fake)
        assert python == fake.parent / "envs" / "pgqueuer" / "bin" / "python"
    assert installs(fake) == 1
    assert no_pin_is_missing(fake)


async def test_an_environment_is_made_anew_when_its_rival_needs_something_else(
    fake: Path,
) -> None:
    system = SYSTEMS["pgqueuer"]
    await made(system, fake.parent / "envs", fake)
    await made(replace(system, requirements=("pgqueuer",)), fake.parent / "envs", fake)
    assert installs(fake) == 2


async def test_an_environment_that_cannot_be_made_says_why_and_is_tried_again(
    fake: Path,
) -> None:
    refusal = fake.with_name("pip")
    refusal.write_text("no room\nno such thing as pgqueuer\n")
    for _ in range(2):
        with pytest.raises(BenchError, match=r"cannot be made: no room / no such thing as pgq"):
            await made(SYSTEMS["pgqueuer"], fake.parent / "envs", fake)
    assert installs(fake) == 2
