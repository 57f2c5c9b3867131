"""How long a node takes to read the timers of its window, whatever else the table holds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from delayq.database import Database, parse_dsn
from delayq.ranks import BUCKETS
from delayq.settings import Settings
from delayq.store import Store
from delayq.window import Watermarks

from .numbers import median
from .raw import WINDOW_PASSES

if TYPE_CHECKING:
    from .server import Place

_NOBODY: Final = 1
"""an incarnation that is no node's"""
_PAGE_ROWS: Final = 2_000
_KINDS: Final = ["compute", "noop", "wait"]


async def window_ms(place: Place, from_us: int, until_us: int) -> tuple[float, int]:
    """Milliseconds to read all buckets by the node's own statement and pages, and the rows.

    The median of some passes; nothing is put into heaps.
    """
    store = Store(Database(parse_dsn(place.dsn), Settings.model_construct()), _NOBODY)
    took_ms, rows = [], 0
    try:
        for _ in range(WINDOW_PASSES):
            began = time.perf_counter()
            rows = await _pass(store, from_us, until_us)
            took_ms.append((time.perf_counter() - began) * 1000)
    finally:
        await store.aclose()
    return median(took_ms), rows


async def _pass(store: Store, from_us: int, until_us: int) -> int:
    marks, rows = Watermarks(), 0
    marks.watch(range(BUCKETS), (), lambda _: from_us)
    while (cursors := marks.cursors(until_us)).buckets:
        limit = max(8, _PAGE_ROWS // len(cursors.buckets))
        page = await store.window(cursors, _KINDS, limit, None)
        marks.note(cursors, page, limit)
        rows += len(page.rows)
    return rows
