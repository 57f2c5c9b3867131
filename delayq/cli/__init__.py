"""The command line. `main` is the entry point of the `delayq` program.

Nothing heavy is imported here: a signal that comes while the rest is loading must find its
handler, above all as PID 1, where the kernel drops a signal that nobody handles.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from delayq.cli.early import listen

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command in `sys.argv` and leave with its exit status (see `delayq --help`)."""
    listen()
    from delayq.cli.main import run  # noqa: PLC0415 - after the handlers, see above

    sys.exit(run(sys.argv[1:]))
