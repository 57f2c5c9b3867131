"""Loads the application that `delayq run MODULE:APP` names."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from delayq.cli.early import Signalled
from delayq.errors import ApplicationNotFound, DelayQError

if TYPE_CHECKING:
    from delayq.app import DelayQ

_NAME: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
# What these say names names and places, and no values.
_TELLING: Final = (ImportError, SyntaxError, NameError, AttributeError)


def load_application(reference: str) -> DelayQ:
    """The DelayQ that `MODULE:APP` names, imported from the current folder or the path.

    Raises `ApplicationNotFound` with what to correct; errors that delayq raises while the module
    is imported (a setting, a registration) pass through.
    """
    module_name, _, path = reference.partition(":")
    if not _NAME.fullmatch(module_name) or not _NAME.fullmatch(path):
        raise ApplicationNotFound(
            "name the application as MODULE:APP, for example shop.tasks:dq for `dq = DelayQ()` "
            "in shop/tasks.py"
        )
    return _application(_imported(module_name), path)


def _imported(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (DelayQError, Signalled):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the module raises
        raise ApplicationNotFound(_why(name, error)) from None


def _why(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and _is_part(error.name, name):
        return (
            f"there is no module {error.name!r} in {Path.cwd()} or on the path; start delayq in "
            "the folder of the application, or set PYTHONPATH"
        )
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    said = f": {error}" if isinstance(error, _TELLING) else ""
    return f"importing {name} failed with {type(error).__name__}{said}{where}"


def _is_part(missing: str, name: str) -> bool:
    return name == missing or name.startswith(f"{missing}.")


def _application(module: ModuleType, path: str) -> DelayQ:
    from delayq.app import DelayQ  # noqa: PLC0415 - the module imported it, or it is none

    found: object = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if isinstance(found, DelayQ):
        return found
    names = sorted(name for name, value in vars(module).items() if isinstance(value, DelayQ))
    hint = f"it has {', '.join(names)}" if names else "it has none: write `dq = DelayQ()`"
    what = "has no" if found is None else f"has a {type(found).__name__} as"
    raise ApplicationNotFound(f"{module.__name__} {what} {path}, and it must be a DelayQ; {hint}")
