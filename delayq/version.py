"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final


def _installed() -> str:
    try:
        return version("delayq")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"


VERSION: Final = _installed()
