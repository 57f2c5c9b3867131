"""How many pending tasks a second an application moves: by single calls, and in bulk."""

from __future__ import annotations

from ..raw_calls import BULK
from .calls import POOL, scenario_of_changes

SCENARIO = scenario_of_changes(
    "reschedule",
    "not moved",
    "dq.reschedule by id of tasks an hour ahead to two hours ahead, a node up: one call after"
    " another, then many callers, then reschedule_many in one call",
    f"one UPDATE by id a call, the same callers on a pool of {POOL}; in bulk, UPDATE of {BULK:,}"
    " ids a statement; before and after",
)
