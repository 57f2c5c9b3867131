"""One run: load, one fault after another, the end of all, and the verdict."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos import ledger
from tests.chaos.auditor import audit
from tests.chaos.book import Violation
from tests.chaos.cluster import Cluster, State, cluster
from tests.chaos.evidence import Evidence, Span
from tests.chaos.fault import Fault
from tests.chaos.faults import FAULTS, mix
from tests.chaos.gather import errors_of, gather
from tests.chaos.ledger import now_us
from tests.chaos.server import NOT_READY

if TYPE_CHECKING:
    from delayq.database import Connection

ENOUGH_RUNNING, ENOUGH_SOON = 50, 175
"""Tasks that run when a fault hits; those due in the next second, an eighth of whom is still to be
scheduled then."""
WARM_S = 40.0
DRAIN_S = 120.0
CALM_S = 0.7
SLOW_S = 10.0
"""A recovery that takes longer tells what it waited for last."""
MEETS_S = 5.0
"""How long a fault waits for something to run where it is to hit."""
RECOVERY_TTLS, RECOVERY_S = 5, 30


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done. `each`: every fault alone once, before they are mixed."""

    seed: int
    seconds: float
    faults: list[str]
    each: bool = True
    settings: str = "short"
    load: float = 1.0
    pg_bin: Path | None = None
    keep: bool = False


@dataclass
class Outcome:
    """What was seen."""

    evidence: Evidence
    violations: list[Violation]
    absent: dict[str, str]
    uncounted: list[str]
    exits: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """True if every promise was kept, and every fault that counts met something."""
        return not self.violations and not self.uncounted


async def run(plan: Plan, say: Callable[[str], None]) -> Outcome:
    """Do it. What it makes on disk is removed, unless `keep`."""
    folder, papers = await asyncio.to_thread(_folders)
    ledger.open_in(papers)
    try:
        return await _Play(plan, say).perform(folder, papers)
    finally:
        if plan.keep:
            say(f"everything is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _folders() -> tuple[Path, Path]:
    folder = Path(tempfile.mkdtemp(prefix="delayq-chaos-"))
    folder.chmod(0o755)  # the server runs as somebody else
    papers = folder / "ledger"
    papers.mkdir()
    return folder, papers


class _Play:
    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._dice = random.Random(plan.seed)
        self._spans: list[Span] = []
        self._absent: dict[str, str] = {}
        self._waited_for: State | None = None

    async def perform(self, folder: Path, papers: Path) -> Outcome:
        plan = self._plan
        async with cluster(
            folder, settings=plan.settings, seed=plan.seed, load=plan.load, pg_bin=plan.pg_bin
        ) as them:
            async with _kept_alive(them):
                them.send_customers()
                await self._busy(them)
                await self._hurt(them)
                await them.dismiss_customers()
                await self._run_out(them)
            await them.dismiss_nodes()
            lines = ledger.read(papers)
            evidence: Evidence = await them.ask(lambda c: gather(c, lines, self._spans))
            exits = {f"{node.name}: {status}": count for node in them.nodes
                     for status, count in node.exits.items()}  # fmt: skip
        counted = {span.fault for span in self._spans if span.under_way}
        uncounted = sorted({span.fault for span in self._spans} - counted)
        self._say(f"the auditor reads {len(lines)} lines and {len(evidence.rows)} tasks")
        return Outcome(evidence, audit(evidence), self._absent, uncounted, exits, errors_of(lines))

    async def _busy(self, them: Cluster) -> None:
        """Wait until as much runs as faults are to meet."""
        deadline = time.monotonic() + WARM_S
        while not self._is_busy(state := await them.state()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the load does not get going: {state}")
            await asyncio.sleep(0.1)

    def _is_busy(self, state: State) -> bool:
        load = self._plan.load
        return state.running >= ENOUGH_RUNNING * load and state.soon >= ENOUGH_SOON * load

    # --- faults -----------------------------------------------------------------------------------

    async def _hurt(self, them: Cluster) -> None:
        until = time.monotonic() + self._plan.seconds
        for names in self._episodes(them):
            if time.monotonic() > until:
                return
            faults = [FAULTS[name](them, self._dice) for name in names]
            for fault in faults:
                await fault.prepare()
            await self._busy(them)
            self._spans += await self._episode(them, faults)
            await asyncio.sleep(CALM_S)

    def _episodes(self, them: Cluster) -> Iterator[list[str]]:
        names = []
        for name in self._plan.faults:
            missing = FAULTS[name](them, random.Random(0)).absent()
            if missing is None:
                names.append(name)
            else:
                self._absent[name] = missing
        if self._plan.each:
            yield from ([name] for name in self._dice.sample(names, len(names)))
        while names:
            yield mix(names, self._dice)

    async def _episode(self, them: Cluster, faults: list[Fault]) -> list[Span]:
        """Let these happen at nearly the same time, and wait until all is well again."""
        offsets = [0.0, *(self._dice.uniform(0, 0.8) for _ in faults[1:])]
        pairs = zip(faults, offsets, strict=True)
        async with asyncio.TaskGroup() as group:
            began = [group.create_task(_happen(them, fault, wait_s)) for fault, wait_s in pairs]
        error = await self._recovered(them)
        recovered_us = now_us()
        spans = [replace(one.result(), recovered_us=recovered_us, error=error) for one in began]
        what = " + ".join(span.fault for span in spans)
        took_s = (recovered_us - max(span.healed_us for span in spans)) / 1e6
        met = ", ".join(str(span.under_way) for span in spans)
        why = f" ({self._waited_for})" if took_s > SLOW_S else ""
        self._say(f"{what}: met {met} running, recovered after {took_s:.1f} s{why}")
        if error is not None:
            self._say(f"NOT RECOVERED: {error}")
        return spans

    async def _recovered(self, them: Cluster) -> str | None:
        """Wait until nothing is overdue, nothing is orphaned and all nodes are there."""
        limit_s = RECOVERY_TTLS * them.ttl_s + RECOVERY_S
        deadline = time.monotonic() + limit_s
        while True:
            state = await them.state()
            if not state.overdue and not state.orphans and state.active == len(them.nodes):
                return None
            self._waited_for = state
            if time.monotonic() > deadline:
                return f"after {limit_s:.0f} s there is {state}"
            await asyncio.sleep(0.1)

    # --- the end ----------------------------------------------------------------------------------

    async def _run_out(self, them: Cluster) -> None:
        """Let everything that is still to come happen."""
        first = them.nodes[0]
        first.version = "both"
        first.wanted = False
        await first.end(signal.SIGTERM)
        first.launch()
        left, first_us, last_us = 1, 0, 0
        deadline = time.monotonic() + DRAIN_S
        while left and time.monotonic() < deadline:
            left, first_us, last_us = await them.ask(_what_is_left)
            # what was scheduled while the clock was ahead is due when it is ahead again
            if left and last_us - first_us > 600_000_000 and them.shift_us == 0:
                await them.step_clock(3_600_000_000)
            await asyncio.sleep(0.3)


async def _happen(them: Cluster, fault: Fault, wait_s: float) -> Span:
    """One fault from its beginning to its end; nobody has recovered from it yet."""
    await asyncio.sleep(wait_s)
    running = await them.running_by_node()
    deadline = time.monotonic() + MEETS_S
    while not fault.concerns(running) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        running = await them.running_by_node()
    applied_us = now_us()
    await fault.apply()
    await asyncio.sleep(fault.hold_s)
    healing_us = now_us()
    await fault.heal()
    return Span(
        fault.name, applied_us, healing_us, healing_us, fault.concerns(running),
        sum(running.values()),
    )  # fmt: skip


async def _what_is_left(conn: Connection) -> tuple[int, int, int]:
    row = await conn.fetchrow(
        "select count(*), delayq.micros(delayq.clock()),"
        "       coalesce(delayq.micros(max(execute_at)), 0) from delayq.tasks"
    )
    assert row is not None
    return row[0], row[1], row[2]


@asynccontextmanager
async def _kept_alive(them: Cluster) -> AsyncIterator[None]:
    """Nodes that end are started again; an error of the supervision ends the block."""
    watching = asyncio.create_task(them.supervise())
    me = asyncio.current_task()
    assert me is not None

    def tell(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            me.cancel()

    watching.add_done_callback(tell)
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError, *NOT_READY):
            await watching
