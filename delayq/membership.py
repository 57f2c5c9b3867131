"""Being alive, and knowing who else is: the beat, the judge, and the watch over the loop.

The beat runs in a thread of its own with an event loop and a connection of its own, so that a
handler which blocks the node's loop neither loses its leases nor runs twice. (A C call that
holds the interpreter's lock stops this thread too.)

What the thread learns it hands to the node's loop; what must not wait for that loop it decides
itself: whether this node may still fire, whom to bury, and whether the node's loop stands still.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Final

from delayq.commons import Commons
from delayq.control import ControlConnection
from delayq.database import Database
from delayq.errors import DelayQError
from delayq.judge import Judge
from delayq.log import log
from delayq.model import NodeState
from delayq.policy import may_fire
from delayq.stalls import Stalls, Whose
from delayq.statements import statement

_MARGIN_SHARE: Final = 10
"""A tenth of the TTL is kept back: a node stops before its peers may think it dead."""
_STALL_EXIT: Final = 70  # EX_SOFTWARE
_RETRY_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class News:
    """What a beat brought back."""

    state: NodeState | None
    """this node's own state; None: it was buried"""
    active: Mapping[int, frozenset[str]]
    """active nodes and the kinds that each serves"""
    nodes: frozenset[int]
    """every node that is not dead"""
    dead: tuple[int, ...]
    paused: frozenset[str]
    latest_us: int
    """the latest instant that a row of a node names: the database's clock may have been there"""


@dataclass(slots=True)
class Witnesses:
    """Who is told what, on the node's own loop."""

    news: Callable[[News], None]
    buried: Callable[[], None]
    """this incarnation is over (it was buried, or nobody beats for it any more): cancel
    everything, come back as another"""
    fenced: Callable[[], None]
    """no beat got through for so long that peers may take this node for dead"""
    burials: Callable[[list[int]], None]
    """these peers were just buried by us: adopt what they ran"""
    whose: Whose
    """not told but asked, and from the beat thread: what an asyncio task of this node runs"""


class Membership:
    """The beat thread of one incarnation."""

    def __init__(self, commons: Commons, database: Database, witnesses: Witnesses) -> None:
        settings = commons.settings
        self._database = database
        self._incarnation = commons.node
        self._clock = clock = commons.clock
        self._database_clock = commons.database_clock
        self._counters = commons.counters
        self._witnesses = witnesses
        self._beat_us = round(settings.beat_interval_s * 1e6)
        self._ttl_us = round(settings.lease_ttl_s * 1e6)
        self._margin_us = self._ttl_us // _MARGIN_SHARE
        self._stall_us = round(settings.loop_stall_limit_s * 1e6)
        self._stalls = Stalls(clock, self._incarnation, self._stall_us, witnesses.whose)
        self._judge = Judge(self._ttl_us)
        self._home = asyncio.get_running_loop()
        self._thread: Thread | None = None
        self._up = Event()  # the thread can be spoken to
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._soon: asyncio.Event | None = None
        self._sent_us = clock.boottime_us()
        self._over = False
        self._leaving = False
        self._fenced = False
        self._sql = {name: statement(name) for name in ("beat", "bury", "end_sessions")}

    def may_fire(self) -> bool:
        """False once peers may take this node for dead, or it was buried. From any thread."""
        return not self._over and may_fire(
            self._clock.boottime_us(), self._sent_us, self._ttl_us, self._margin_us
        )

    def registered(self, sent_us: int) -> None:
        """The row was written by a statement sent at this instant (boottime): trust counts on."""
        self._sent_us = sent_us

    @property
    def started(self) -> bool:
        """True once there is a row to beat for."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; the first beat goes out at once."""
        self._thread = Thread(target=self._run, name="delayq-beat", daemon=True)
        self._thread.start()

    def beat_soon(self) -> None:
        """Look at the node table now: a hint says that it changed. From the node's loop."""
        if self._loop is not None and self._soon is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._soon.set)

    async def stop(self) -> None:
        """End the thread and its connection. Cancelled, it still ends, but is not waited for."""
        self._leaving = True
        if self._thread is not None:
            self._ask_to_stop()
            await asyncio.to_thread(self._end, self._thread)

    def _ask_to_stop(self) -> None:
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)

    def _end(self, thread: Thread) -> None:
        self._up.wait()
        self._ask_to_stop()
        thread.join()

    # --- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - nobody else would notice
            log.bind(node=self._incarnation, error=_name(error)).critical("beat.ended")
        finally:
            self._up.set()
            if not self._leaving:
                # a node that nobody beats for is soon taken for dead
                self._over = True
                self._tell(self._witnesses.buried)

    async def _main(self) -> None:
        self._stop, self._soon = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._up.set()
        if self._leaving:
            return
        connection = ControlConnection(self._database, self._incarnation, "beat")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._watch()),
                    group.create_task(self._beats(connection)),
                ]
                await self._stop.wait()
                for task in tasks:
                    task.cancel()
        finally:
            await connection.aclose()

    async def _beats(self, connection: ControlConnection) -> None:
        while not self._over:
            wait_s = self._beat_us / 1e6
            try:
                async with asyncio.timeout(self._ttl_us / 3e6):
                    await self._beat(connection)
            except Exception as error:  # noqa: BLE001 - whatever it was, it was no beat
                self._judge.observe(self._clock.boottime_us(), beat_ok=False, peers={})
                known = isinstance(error, DelayQError | TimeoutError)
                what = str(error) if known else type(error).__name__
                log.bind(error=what, node=self._incarnation).warning("beat.failed")
                wait_s = min(wait_s, _RETRY_S)
            await self._pause(wait_s)

    async def _beat(self, connection: ControlConnection) -> None:
        sent_boot_us = self._clock.boottime_us()
        sent_us = self._clock.monotonic_us()
        rows = await connection.fetch(
            self._sql["beat"],
            self._incarnation,
            self._ttl_us // 1000,
            json.dumps(self._counters.snapshot()),
            self._database_clock.latest_us,
        )
        received_us = self._clock.monotonic_us()
        state, database_us, nodes_json, paused = rows[0]
        self._database_clock.observe(database_us, sent_us, received_us)
        nodes: list[dict[str, Any]] = json.loads(nodes_json)
        news = _news(state, nodes, frozenset(paused))
        if state is None:
            self._over = True
            self._tell(self._witnesses.buried)
            return
        self._sent_us = sent_boot_us
        self._fenced = False
        peers = {
            node["id"]: node["expires_at_us"]
            for node in nodes
            if node["id"] != self._incarnation and node["state"] != NodeState.DEAD
        }
        ttls_us = {node["id"]: node["ttl_ms"] * 1000 for node in nodes}
        self._judge.observe(self._clock.boottime_us(), True, peers, ttls_us)
        self._tell(self._witnesses.news, news)
        await self._bury(connection, peers)

    async def _bury(self, connection: ControlConnection, peers: dict[int, int]) -> None:
        buried = []
        for peer in self._judge.to_bury(self._clock.boottime_us()):
            if await connection.fetch(self._sql["bury"], peer, peers[peer]):
                log.bind(node=peer, by=self._incarnation).warning("node.buried")
                buried.append(peer)
                try:
                    await connection.fetch(self._sql["end_sessions"], peer)
                except DelayQError as error:
                    log.bind(node=peer, error=str(error)).warning("node.sessions_not_ended")
        if buried:
            self._tell(self._witnesses.burials, buried)

    async def _pause(self, wait_s: float) -> None:
        """Until the next beat: its interval, a peer's time, or a hint."""
        assert self._soon is not None  # noqa: S101 - set before this loop began
        look_us = self._judge.next_look_us()
        if look_us is not None:
            wait_s = min(wait_s, max(0.05, (look_us - self._clock.boottime_us()) / 1e6))
        try:
            async with asyncio.timeout(wait_s):
                await self._soon.wait()
            # many nodes hint at once when one leaves: one look for all of them
            await asyncio.sleep(0.005)
        except TimeoutError:
            pass
        self._soon.clear()

    async def _watch(self) -> None:
        """Fence this node when its beats fail, and end the process if its loop stands still."""
        look_s = min(0.5, self._margin_us / 2e6)
        looked_us = self._clock.boottime_us()
        while True:
            await asyncio.sleep(look_s)
            late_us = self._clock.boottime_us() - looked_us
            looked_us += late_us
            if late_us > 2e6 * look_s + self._stall_us // 2:
                self._stalls.forgive()
            if not self._fenced and not self._over and not self.may_fire():
                self._fenced = True
                log.bind(node=self._incarnation).error("node.fenced")
                self._tell(self._witnesses.fenced)
            self._stalls.asks()
            self._tell(self._stalls.turned)
            if self._stalls.look(late_us - round(look_s * 1e6)):
                os._exit(_STALL_EXIT)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._home.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._over = True  # the node's loop is closed: nobody to beat for
            if self._stop is not None:
                self._stop.set()


def _news(state: str | None, nodes: list[dict[str, Any]], paused: frozenset[str]) -> News:
    return News(
        state=None if state is None else NodeState(state),
        active={
            node["id"]: frozenset(node["kinds"])
            for node in nodes
            if node["state"] == NodeState.ACTIVE
        },
        nodes=frozenset(node["id"] for node in nodes if node["state"] != NodeState.DEAD),
        dead=tuple(node["id"] for node in nodes if node["state"] == NodeState.DEAD),
        paused=paused,
        latest_us=max((max(n["expires_at_us"], n["latest_at_us"]) for n in nodes), default=0),
    )


def _name(error: BaseException) -> str:
    """The class, and of a group those in it; never the text, which may quote anything."""
    if isinstance(error, BaseExceptionGroup):
        return ", ".join(sorted({_name(inner) for inner in error.exceptions}))
    return type(error).__name__
