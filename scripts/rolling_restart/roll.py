"""The restart itself: wait until all is well, replace one node, and again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from .interruption import Interruption
from .nodes import Node, Watch
from .places import Place
from .programs import start
from .words import Failed, several, shown

T = TypeVar("T")

PATIENCE_S = 8.0
"""Whoever waits for longer says for what. A beat of every node takes 4 s."""


class Roll:
    """One rolling restart. `done`, `at_hand` and `left` tell how far it got."""

    def __init__(
        self,
        watch: Watch,
        places: Sequence[Place],
        limit_s: float,
        interruption: Interruption,
        say: Callable[[str], None],
    ) -> None:
        self.done: list[Place] = []
        self.at_hand: Place | None = None
        self.left = [*places]
        self._count = len(places)
        self._watch = watch
        self._limit_s = limit_s
        self._interruption = interruption
        self._say = say
        self._awaited = ""
        self._before = 0

    def run(self) -> None:
        """Do it. Raises Failed at the first node that fails, and Interrupted."""
        begun = time.monotonic()
        self._until_all_is_well(self.left)
        self._before = len(self._watch.active)
        self._say(f"{self._count} of {self._before} active nodes, one after the other")
        while self.left:
            if self.done:
                self._until_all_is_well(self.left[:1])
            self._restart_next()
        self._until_all_is_well(())
        active, took_s = len(self._watch.active), time.monotonic() - begun
        self._say(f"restarted {self._count} in {took_s:.1f} s; {active} nodes are active")

    def _until(self, look: Callable[[], T | None]) -> T:
        """Look at the nodes until there is what is wanted. Raises Failed if the time is up."""
        begun, told = time.monotonic(), False
        for _ in self._watch.looks(self._limit_s):
            if (found := look()) is not None:
                return found
            if not told and time.monotonic() - begun > PATIENCE_S:
                self._say(f"waiting: {self._awaited}")
                told = True
        raise Failed(f"after {self._limit_s:g} s {self._watch.trouble or self._awaited}")

    # --- before each, and after the last ---------------------------------------------------------

    def _until_all_is_well(self, wanted: Sequence[Place]) -> None:
        """Return when everybody has been heard from now on, and the wanted ones are active."""
        since = time.monotonic()

        def look() -> bool | None:
            self._awaited = self._missing(wanted, since)
            return None if self._awaited else True

        self._until(look)

    def _missing(self, wanted: Iterable[Place], since: float) -> str:
        """What is not as it should be; nothing if all is well."""
        watch = self._watch
        mute = [node.name for node in watch.live if not watch.is_heard(node, since)]
        if mute:
            return f"{several(mute)} has not been heard"
        for place in wanted:
            found = place.among(watch.live)
            if len(found) != 1:
                return f"{len(found) or 'no'} live nodes have {place.mark()}"
            if not found[0].active:
                return f"{shown(place.name)} is {found[0].state}"
        active = len(watch.active)
        if active < self._before:
            return f"{active} nodes are active, {self._before} were at first"
        return ""

    # --- one node --------------------------------------------------------------------------------

    def _restart_next(self) -> None:
        place = self.left[0]
        (old,) = place.among(self._watch.live)
        self._warn_of_kinds(place, old)
        with self._interruption.put_off(f"finishing {shown(place.name)}"):
            self.at_hand = self.left.pop(0)
            self._restart(place, old)
            self.done.append(place)
            self.at_hand = None

    def _warn_of_kinds(self, place: Place, old: Node) -> None:
        others = (node.kinds for node in self._watch.active if node.id != old.id)
        alone = sorted(old.kinds.difference(*others))
        if alone:
            self._say(f"while {shown(place.name)} restarts, the tasks of {several(alone)} wait")

    def _restart(self, place: Place, old: Node) -> None:
        known = frozenset(self._watch.nodes)
        begun = time.monotonic()
        command = start(place.command(old))
        self._until(lambda: self._has_left(place, old, known, command))
        left_s = time.monotonic() - begun
        new = self._until(lambda: self._successor(place, known, command))
        active_s = time.monotonic() - begun
        self._say(
            f"{len(self.done) + 1}/{self._count}  {shown(place.name)}  pid {old.pid} → {new.pid}"
            f"  left after {left_s:.1f} s  active after {active_s:.1f} s"
        )

    def _has_left(
        self, place: Place, old: Node, known: frozenset[str], command: subprocess.Popen[bytes]
    ) -> bool | None:
        """True once the node has handed over and left."""
        _check(command)
        row = self._watch.nodes.get(old.id)
        if row is None:
            if self._watch.was_buried(old.id):
                raise Failed(f"node {old.id} ended without leaving, and was declared dead")
            return True
        if row.state == "dead":
            raise Failed(f"node {old.id} is dead: it did not hand over all that it ran")
        if self._comers(place, known):
            raise Failed(f"node {old.id} ended without leaving: was it killed during its drain?")
        self._awaited = f"node {old.id} is still {row.state}"
        return None

    def _successor(
        self, place: Place, known: frozenset[str], command: subprocess.Popen[bytes]
    ) -> Node | None:
        """The successor, once it takes its share and the command is done."""
        _check(command)
        comers = self._comers(place, known)
        ready = [node for node in comers if node.active]
        if ready and command.poll() == 0:
            return ready[0]
        self._awaited = self._seen_of(comers, ready, known)
        # between the two halves of a restart the unit is inactive, and that is no failure
        over = command.poll() is not None
        if over and not comers and (hopeless := place.hopeless()):
            raise Failed(f"{self._awaited}: {hopeless}")
        return None

    def _comers(self, place: Place, known: frozenset[str]) -> list[Node]:
        return [node for node in place.among(self._watch.live) if node.id not in known]

    def _seen_of(self, comers: list[Node], ready: list[Node], known: frozenset[str]) -> str:
        if ready:
            return "the successor is active, but the command has not ended"
        if comers:
            return f"the successor is {comers[0].state}"
        strangers = [node.name for node in self._watch.active if node.id not in known]
        named = f", but {several(strangers)}: is that its name now?" if strangers else ""
        return f"no successor has come{named}"


def _check(command: subprocess.Popen[bytes]) -> None:
    status = command.poll()
    if status:
        raise Failed(f"the command that restarts it ended with status {status}")
