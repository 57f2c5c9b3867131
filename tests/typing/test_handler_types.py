from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_type_checker_refuses_wrong_arguments_and_accepts_right_ones() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", str(HERE / "handler_types.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
