"""`python -m delayq` is the `delayq` program."""

from __future__ import annotations

from delayq.cli import main

if __name__ == "__main__":
    main()
