"""The systemd unit: what it promises, and whether systemd understands it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from delayq.cli.exits import Exit
from delayq.settings import load_settings
from tests.helpers import absent

UNIT = Path(__file__).resolve().parents[2] / "scripts" / "deploy" / "delayq@.service"
LEAVING_S = 45
"""What the bounded steps of leaving may take after the drain."""
EXPOSURE_LIMIT = "20"  # of 100, as systemd-analyze counts


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def value(name: str) -> str:
    (found,) = values(name)
    return found


def test_the_service_waits_longer_for_its_end_than_a_drain_takes() -> None:
    drain_s = load_settings(dsn="postgresql:///x").drain_timeout_s
    assert float(value("TimeoutStopSec")) >= drain_s + LEAVING_S
    assert (value("KillSignal"), value("KillMode")) == ("SIGTERM", "mixed")


def test_the_service_is_started_again_unless_trying_again_is_useless() -> None:
    assert value("Restart") == "on-failure"
    hopeless = {Exit.USAGE, Exit.SCHEMA, Exit.APPLICATION}
    assert {int(code) for code in value("RestartPreventExitStatus").split()} == hopeless
    assert int(value("StartLimitBurst")) > 0
    assert int(value("StartLimitIntervalSec")) > int(value("StartLimitBurst"))


def test_the_service_runs_the_documented_command_on_a_database_of_the_administrators() -> None:
    assert value("ExecStart").endswith("/delayq run %i")
    assert "DELAYQ_EMBEDDED=0" in value("Environment")


def installed(folder: Path) -> Path:
    """The unit with a program that exists here, under the name of an instance."""
    if shutil.which("systemd-analyze") is None:
        absent("systemd-analyze")
    text = re.sub(
        r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.MULTILINE
    )
    (folder / UNIT.name).write_text(text)
    return folder / UNIT.name.replace("@", "@shop.tasks")


@pytest.mark.more
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no"]
    done = subprocess.run(
        [*command, installed(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    told = [line for line in done.stderr.splitlines() if UNIT.name.partition("@")[0] in line]
    assert (done.returncode, told) == (0, [])


@pytest.mark.more
def test_systemd_finds_little_that_the_service_could_harm(tmp_path: Path) -> None:
    installed(tmp_path)
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager"]
    done = subprocess.run(
        [*command, f"--threshold={EXPOSURE_LIMIT}", tmp_path / UNIT.name],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
