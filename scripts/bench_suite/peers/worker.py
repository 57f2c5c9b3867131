"""One worker of a system, in a process of its own: `python -m bench_suite.peers.worker NAME`."""

from __future__ import annotations

import os
import sys

from .adapters import load

if __name__ == "__main__":
    load(sys.argv[1]).serve(os.environ["BENCH_DSN"])
