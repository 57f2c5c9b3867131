"""How statements are planned: by settings of the session, never by chance statistics.

A queue runs empty and fills again within a second, long before anybody analyzes it, so what the
planner believes of its size is as good as random.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CUSTOM: Final[Mapping[str, str]] = {"plan_cache_mode": "force_custom_plan"}
"""Planned anew for the values at hand: a plan that was cached while the queue was empty would
serve it for minutes."""

BY_ID: Final[Mapping[str, str]] = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_nestloop": "off",
    "enable_mergejoin": "off",
}
"""For lease and settle, which find rows by their ids and by nothing else: planned once, for an
index scan and hash joins, which are right at any size. Planning anew was a fifth of the work of a
batch of 150 (in instructions)."""

IN_INDEX_ORDER: Final[Mapping[str, str]] = {
    "plan_cache_mode": "force_custom_plan",
    "enable_sort": "off",
    "enable_bitmapscan": "off",
}
"""For pages of the window: `limit` rows in index order. On a table that was never analyzed the
planner thinks that one row matches, and that to sort it is as good: then every page read all that
lies beyond it (before PostgreSQL 17, where `kind = any(…)` in the index condition loses the order;
20,588 buffers instead of 2,560 for 20,000 tasks)."""

KEPT: Final[Mapping[str, str]] = {"plan_cache_mode": "auto", "enable_seqscan": "off"}
"""For the client's own pool: its statements find rows by an index at any size of the table, so a
plan may be kept. Planning was half of what a single schedule cost the server."""
