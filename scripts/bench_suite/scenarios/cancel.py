"""How many pending tasks a second an application cancels: by single calls, and in bulk."""

from __future__ import annotations

from ..raw_calls import BULK
from .calls import POOL, scenario_of_changes

SCENARIO = scenario_of_changes(
    "cancel",
    "not cancelled",
    "dq.cancel by id of tasks an hour ahead, a node up: one call after another, then many callers,"
    " then cancel_many in one call",
    f"one DELETE by id a call (no history, no answer), the same callers on a pool of {POOL}; in"
    f" bulk, DELETE of {BULK:,} ids a statement; before and after",
)
