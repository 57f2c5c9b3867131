"""LISTEN on a connection of its own: hints, never the truth.

It pings itself through the server (a frozen or half-open peer raises nothing), reconnects with
back-off, LISTENs first and only then lets the caller read everything again: in that order nothing
falls between. Where a pooler swallows notifications the pings do not come back; everything still
works, later by at most one sweep.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from delayq.control import set_instant_codec
from delayq.database import DRIVER_ERRORS, Connection, Database, close, translate
from delayq.errors import DelayQError
from delayq.log import log
from delayq.statements import statement
from delayq.timer_heap import Timer

CHANNEL: Final = "delayq"
_PING_S: Final = 20.0
_PONG_S: Final = 5.0
_RETRY_FIRST_S: Final = 0.1
_RETRY_LONGEST_S: Final = 5.0
_MOST_LINES: Final = 200


@dataclass(slots=True)
class Hearers:
    """Who is told what."""

    due: Callable[[list[Timer]], None]
    scan: Callable[[int], None]
    garbled: Callable[[], None]
    """a `due` hint could not be read as a whole: something may be due that it does not name"""
    cancel: Callable[[int], None]
    membership: Callable[[str, int], None]
    """(join | leave | drain, incarnation)"""
    kind: Callable[[], None]
    listening: Callable[[], None]
    """LISTEN is active (again): read everything that may have been missed"""


@dataclass(slots=True)
class _Link:
    conn: Connection
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    pong: asyncio.Event = field(default_factory=asyncio.Event)


class Listener:
    """The subscription of one incarnation. `run` is its loop."""

    def __init__(self, database: Database, incarnation: int, hearers: Hearers) -> None:
        self._database = database
        self._incarnation = incarnation
        self._hearers = hearers
        self._ping_sql = statement("ping")
        self._deaf = False

    async def run(self) -> None:
        """Listen until cancelled."""
        wait_s = 0.0
        while True:
            await asyncio.sleep(wait_s * (0.5 + random.random()))
            # the first try again comes at once; later ones back off until a connection has lasted
            wait_s = min(_RETRY_LONGEST_S, max(_RETRY_FIRST_S, 2 * wait_s))
            try:
                link = await self._connect()
            except DelayQError as error:
                log.bind(error=str(error)).warning("listen.retry")
                continue
            since_s = monotonic()
            try:
                self._hearers.listening()
                await self._stay(link)
            finally:
                await close(link.conn)
            if monotonic() - since_s > _RETRY_LONGEST_S:
                wait_s = 0.0

    async def _connect(self) -> _Link:
        conn = await self._database.connect_control(self._incarnation, "listen")
        await set_instant_codec(conn)
        link = _Link(conn)
        conn.add_termination_listener(lambda _conn: link.lost.set())
        try:
            await conn.add_listener(CHANNEL, lambda _c, _p, _ch, text: self._hear(link, text))
        except DRIVER_ERRORS as error:
            conn.terminate()
            raise translate(error, at="listen") from None
        return link

    async def _stay(self, link: _Link) -> None:
        """Return when the connection is lost."""
        while await self._ping(link):
            try:
                async with asyncio.timeout(_PING_S):
                    await link.lost.wait()
            except TimeoutError:
                continue
            return

    async def _ping(self, link: _Link) -> bool:
        link.pong.clear()
        try:
            async with asyncio.timeout(_PONG_S):
                await link.conn.execute(self._ping_sql, str(self._incarnation))
        except DRIVER_ERRORS as error:
            log.bind(error=str(translate(error))).warning("listen.lost")
            return False
        try:
            async with asyncio.timeout(_PONG_S):
                await link.pong.wait()
        except TimeoutError:
            self._note_deaf()  # the server answers; it is the notifications that do not come
        else:
            self._deaf = False
        return True

    def _note_deaf(self) -> None:
        if not self._deaf:
            self._deaf = True
            log.warning("listen.deaf")  # once: a pooler in transaction mode, most likely

    # --- what was heard ----------------------------------------------------------------------

    def _hear(self, link: _Link, text: object) -> None:
        """Strangers may say anything on this channel; only what parses is passed on."""
        message = str(text)
        if message.startswith("due\n"):
            self._hear_due(message.removeprefix("due\n"))
            return
        verb, _, rest = message.partition(" ")
        if verb == "kind":
            self._hearers.kind()
        elif (number := _number(rest)) is not None:
            self._hear_number(link, verb, number)

    def _hear_due(self, lines: str) -> None:
        timers, whole = parse_due(lines)
        if timers:
            self._hearers.due(timers)
        if not whole:
            self._hearers.garbled()

    def _hear_number(self, link: _Link, verb: str, number: int) -> None:
        hearers = self._hearers
        match verb:
            case "ping" if number == self._incarnation:
                link.pong.set()
            case "scan":
                hearers.scan(number)
            case "cancel":
                hearers.cancel(number)
            case "join" | "leave" | "drain":
                hearers.membership(verb, number)


def parse_due(text: str) -> tuple[list[Timer], bool]:
    """The timers of a `due` hint, and whether every line could be read."""
    timers: list[Timer] = []
    lines = text.split("\n")
    for line in lines[:_MOST_LINES]:
        parts = line.split(":", 3)
        numbers = [_number(part) for part in parts[:3]]
        if len(parts) == 4 and None not in numbers and parts[3]:
            task_id, at_us, priority = (int(part) for part in parts[:3])
            timers.append(Timer(task_id, at_us, parts[3], priority))
    return timers, len(timers) == len(lines)


def _number(text: str) -> int | None:
    if len(text) > 20:
        return None
    try:
        return int(text)
    except ValueError:
        return None
