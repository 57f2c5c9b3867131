"""Many tasks pending far ahead: lateness, the load of the window, and memory beside few of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cluster import warm
from ..scenario import Figure, Measure, Sample, Scenario, Target
from ..window import window_ms
from .timed import evenly, run_timed

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

_MOST = 1.5
_BEYOND_US = 5_000_000


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run: from the fewest tasks to the most, each on the database of that size."""
    ours: dict[str, float] = {}
    raw: dict[str, float] = {}
    faults: dict[str, int] = {}
    notes: dict[str, float | str] = {}
    for count in sizes.deep_pending:
        found, bare, wrong, rows = await _at(ground, sizes, count)
        ours |= {f"{key}_{count}": value for key, value in found.items()}
        raw |= {f"{key}_{count}": value for key, value in bare.items()}
        faults |= {f"{what}, {count:,} pending": number for what, number in wrong.items()}
        notes[f"rows of the window, {count:,} pending:"] = str(rows)
    return Sample(ours, raw, faults, notes)


async def _at(
    ground: Ground, sizes: Sizes, count: int
) -> tuple[dict[str, float], dict[str, float], dict[str, int], int]:
    """What was found, raw, what went wrong, and the rows of the window."""
    place = await ground.filled(count)
    plan = evenly(sizes, sizes.lateness_rate, sizes.lateness_seconds)
    load: list[tuple[float, int]] = []

    async def read_window(first_us: int) -> None:
        # what the node has read already, as it would be read at a start just now
        until_us = first_us + plan.count * plan.step_us + _BEYOND_US
        load.append(await window_ms(place, first_us, until_us))

    async with warm(ground, place=place) as cluster:
        timed = await run_timed(cluster, plan, read_window)
    ((took_ms, rows),) = load
    async with ground.raw() as (process, dsn):
        answer = await process.ask("window", dsn=dsn, rows=rows)
    ours = timed.spread | {"window": took_ms, "rss": timed.rss_mb}
    return ours, timed.bare | {"window": answer["ms"]}, timed.faults, rows


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    fewest = sizes.deep_pending[0]

    def target(key: str, count: int) -> Target | None:
        if count == fewest:
            return None
        return Target(Measure.RATIO, most=_MOST, of=f"{key}_{fewest}")

    lines: list[Figure] = []
    for count in sizes.deep_pending:
        about = f"{count:,} pending"
        lines += (
            Figure(f"p50_{count}", f"lateness, {about}, p50", "ms", target("p50", count)),
            Figure(f"p99_{count}", f"lateness, {about}, p99", "ms", target("p99", count)),
            Figure(f"max_{count}", f"lateness, {about}, max", "ms"),
            Figure(f"window_{count}", f"window load, {about}", "ms", target("window", count)),
            Figure(f"rss_{count}", f"memory of a node, {about}", "MB", alone=True),
        )
    return tuple(lines)


SCENARIO = Scenario(
    "deep",
    "as lateness, on a database with so many tasks pending a month ahead; the load of the window"
    " reads what is due there by the node's own statement, page by page, the median of some"
    " passes; memory is what is resident after the run",
    "bare timers as in lateness; as many due rows read from a table without others, by its index",
    _figures,
    run,
)
