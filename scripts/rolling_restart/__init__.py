"""`scripts/rolling-restart`: one node at a time. Stands on Python and two programs alone.

`delayq nodes --json` says who is there, `systemctl` (or a command of the operator's) restarts.
"""
