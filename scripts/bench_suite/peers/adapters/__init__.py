"""One file for each system; each but this one is imported only where its system is installed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ..contract import Adapter


def load(name: str) -> Adapter:
    """The adapter of this name, which imports the system itself."""
    return cast("Adapter", importlib.import_module(f"{__name__}.{name}"))
