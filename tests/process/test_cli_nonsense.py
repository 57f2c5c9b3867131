"""Command lines by the thousand: an answer, or one line that says what is wrong.

In this process, since the program around the commands is tested elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from delayq.cli.main import run
from tests.nonsense import SECRET, Fuzz

ANSWERS = (0, 1, 2)
"""Done, no, and wrong usage; 3 would blame the database, and 70 is a mistake of ours."""
MOVES = ["--in", "--at"]
TARGETS = ["--kind", "--key"]
OPTIONS = {
    "schedule": [*MOVES, "--key", "--on-conflict", "--idempotency-key", "--priority",
                 "--max-attempts", "--timeout", "--misfire-grace", "--header"],
    "cancel": TARGETS,
    "reschedule": [*MOVES, *TARGETS],
    "run-now": TARGETS,
    "show": [],
    "list": ["--state", "--limit", "--after"],
    "dead list": ["--limit", "--after"],
    "dead revive": ["--spread"],
    "dead discard": [],
    "nodes": [],
    "drain": [],
    "pause": [],
    "resume": [],
    "nonsense": [],
    "run": ["-w", "-i", "--kinds", "--name", "--max-workers"],
}  # fmt: skip
GOOD = ["1", "5m", "0s", "90s", "2030-01-01T00:00:00Z", "k", "{}", '{"a": 1}', "keep", "replace",
        "pending", "dead", "50", "-", "--", "--json", "a=b"]  # fmt: skip


@pytest.fixture(autouse=True)
def _on_database(dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DELAYQ_DSN", dsn)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("delayq.log.configure", lambda *_: None)
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        yield


def argument(fuzz: Fuzz) -> str:
    dice = fuzz.dice
    if dice.random() < 0.5:
        return dice.choice(GOOD)
    word = fuzz.text() if dice.random() < 0.5 else str(dice.getrandbits(70))
    return word.replace("\0", "0")[:2_000]  # no process can be given a NUL


def payload(fuzz: Fuzz) -> str:
    inside = fuzz.text().replace("\0", "")
    good, half = json.dumps({"token": SECRET, "n": inside}), f'{{"token": "{SECRET}", {inside}}}'
    return fuzz.dice.choice([good, half, f'["{SECRET}"]', SECRET, good[:-1]])


def command_line(fuzz: Fuzz) -> list[str]:
    dice = fuzz.dice
    command = dice.choice(sorted(OPTIONS))
    words = command.split()
    if command == "run":  # an application that is not there: a node would run on
        words.append(dice.choice(["nowhere:dq", "nowhere", ":", argument(fuzz)]))
    if command == "schedule":
        words += [argument(fuzz), payload(fuzz), *dice.choice([[], ["--in", "5m"]])]
    else:
        words += [argument(fuzz) for _ in range(dice.choice([0, 1, 1, 1, 2]))]
    for option in dice.sample(OPTIONS[command], min(len(OPTIONS[command]), dice.randrange(4))):
        words += [option, argument(fuzz)]
    return [*dice.choice([[], ["--json"]]), *words]


def said_well(code: int, out: str, err: str, words: list[str]) -> None:
    assert code in (*ANSWERS, 5 if "run" in words[:2] else 0), err
    assert "Traceback" not in out + err
    assert SECRET not in err
    if code == 2 and "--help" not in words:
        assert out == ""
        assert err.startswith(("delayq: ", "Usage: "))
        assert err.count("\n") == 1 or err.startswith("Usage: ")
    if code == 0 and words[0] == "--json" and "--help" not in words and out:
        assert isinstance(json.loads(out), dict)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", [300, pytest.param(3_000, marks=pytest.mark.more)])
def test_any_command_line_has_an_answer_or_one_line_that_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], rounds: int
) -> None:
    fuzz, done = Fuzz(), 0
    for _ in range(rounds):
        words = command_line(fuzz)
        try:
            code = run(words)
            done += code == 0
            said = capsys.readouterr()
            said_well(code, said.out, said.err, words)
        except Exception as failure:
            failure.add_note(f"seed {fuzz.seed}: {ascii(words)[:300]}")
            raise
    assert done > rounds / 50


@pytest.mark.parametrize("command", ["list --kind", "list --key", "dead list --kind"])
def test_a_filter_that_no_task_can_have_is_wrong_usage_or_finds_nothing(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code = run([*command.split(), "\udcff"])
    said = capsys.readouterr()
    said_well(code, said.out, said.err, command.split())


@pytest.mark.parametrize(
    "times",
    [["--in", "-5s"], ["--in", "5"], ["--in", "nan"], ["--in", "inf"], ["--in", "1e9s"],
     ["--in", "9" * 90 + "d"], ["--in", ""], ["--at", "2026-11-01T01:30:00"], ["--at", "now"],
     ["--at", "9999-12-31T23:59:00-05:00"], ["--at", "infinity"], ["--in", "5m", "--at", "x"],
     []],
    ids=str,
)  # fmt: skip
def test_no_time_that_is_none_schedules_or_moves_anything(
    capsys: pytest.CaptureFixture[str], times: list[str]
) -> None:
    """C010. C009."""
    assert run(["schedule", "k", "--key", "held", "--in", "1h", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    for command in (["schedule", "k"], ["reschedule", "--kind", "k", "--key", "held"]):
        assert run([*command, *times]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert run(["list", "--json"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (task["id"], task["execute_at"]) == (held["id"], held["execute_at"])
