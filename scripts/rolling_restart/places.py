"""Where a node runs: what the operator names, and what stays when the process in it is another."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from .nodes import Node
from .programs import answer
from .words import Failed, several, shown

FIELDS = ("name", "id", "pid", "host")
_FIELD = re.compile(rf"\{{({'|'.join(FIELDS)})\}}")
_PATTERN = frozenset("*?[")


# Names and hosts are what a row says, whoever may write one may write anything there, and no quotes
# help within those that the operator wrote.
_HARMLESS = re.compile(r"[\w.:@%+][\w.:@%+-]*")


class Place(Protocol):
    """One of them."""

    @property
    def name(self) -> str:
        """What the operator calls it."""

    @property
    def advice(self) -> str:
        """Where to look when it fails."""

    def among(self, nodes: Iterable[Node]) -> list[Node]:
        """Its nodes: one, unless something is amiss or just changing."""

    def mark(self) -> str:
        """By what its node is known."""

    def command(self, node: Node) -> str:
        """What restarts this node, for the shell."""

    def hopeless(self) -> str | None:
        """Why no successor will come, if that is known."""


@dataclass(frozen=True, slots=True)
class Named:
    """A node that is known by its name, and a command that the operator wrote."""

    name: str
    template: str

    @property
    def advice(self) -> str:
        return "look at what the command and the node said"

    def among(self, nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if node.name == self.name]

    def mark(self) -> str:
        return f"the name {shown(self.name)}"

    def command(self, node: Node) -> str:
        values = {field: f"{getattr(node, field)}" for field in FIELDS}
        return _FIELD.sub(lambda found: values[found[1]], self.template)

    def hopeless(self) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class Unit:
    """A systemd unit. Its node is the one with its main process, on this computer."""

    name: str
    systemctl: Sequence[str]

    @property
    def advice(self) -> str:
        return f"see `journalctl -u {shown(self.name)}`"

    def among(self, nodes: Iterable[Node]) -> list[Node]:
        pid, host = self._main_pid(), socket.gethostname()
        return [node for node in nodes if node.host == host and node.pid == pid]

    def mark(self) -> str:
        return (
            f"host {socket.gethostname()} and pid {self._main_pid()}, "
            f"the main process of {shown(self.name)}"
        )

    def command(self, _node: Node) -> str:
        return shlex.join([*self.systemctl, "restart", self.name])

    def hopeless(self) -> str | None:
        state = self._show()["ActiveState"]
        return f"the unit is {state}" if state in ("failed", "inactive") else None

    def check(self) -> None:
        """Raises Failed if it does not run."""
        shows = self._show()
        if shows["LoadState"] != "loaded":
            raise Failed(f"there is no unit {shown(self.name)}: {shows['LoadState']}")
        if shows["MainPID"] == "0":
            raise Failed(f"{shown(self.name)} does not run: {shows['ActiveState']}")

    def _main_pid(self) -> int:
        return int(self._show()["MainPID"])

    def _show(self) -> dict[str, str]:
        command = [*self.systemctl, "show", "-p", "LoadState,ActiveState,MainPID", self.name]
        lines = answer(command).splitlines()
        shows = dict(line.split("=", 1) for line in lines if "=" in line)
        if not {"LoadState", "ActiveState", "MainPID"} <= shows.keys():
            raise Failed(f"systemctl does not show what {shown(self.name)} does")
        return shows


def units(wanted: Iterable[str], systemctl: Sequence[str]) -> list[Place]:
    """The units that the arguments name. Raises Failed if one of them does not run."""
    found: dict[str, Unit] = {}
    for text in wanted:
        for name in _matching_units(text, systemctl) if _PATTERN & {*text} else [text]:
            found[name] = Unit(name, systemctl)
    for unit in found.values():
        unit.check()
    return [*found.values()]


def _matching_units(pattern: str, systemctl: Sequence[str]) -> list[str]:
    command = [*systemctl, "list-units", "--type=service", "--plain", "--no-legend", "--no-pager"]
    names = [line.split()[0] for line in answer([*command, pattern]).splitlines() if line.split()]
    if not names:
        raise Failed(f"no unit matches {shown(pattern)}")
    return sorted(names)


def named(wanted: Iterable[str], template: str, nodes: Iterable[Node]) -> list[Place]:
    """The nodes that the arguments name. Raises Failed if there is none of a name."""
    live = [node for node in nodes if node.state != "dead"]
    there = sorted({node.name for node in live})
    found: dict[str, Named] = {}
    for text in wanted:
        names = [name for name in there if name == text or fnmatchcase(name, text)]
        if not names:
            raise Failed(f"no node is called {shown(text)}; there are {several(there) or 'none'}")
        found |= {name: Named(name, template) for name in names}
    for node in live:
        if node.name in found:
            _check_for_shell(node, template)
    if len(found) > 1 and not any(f"{{{field}}}" in template for field in FIELDS):
        raise Failed("the command is the same for all nodes; put {name}, {id} or the like into it")
    return [*found.values()]


def _check_for_shell(node: Node, template: str) -> None:
    for field, value in (("name", node.name), ("host", node.host)):
        if f"{{{field}}}" in template and not _HARMLESS.fullmatch(value):
            raise Failed(
                f"the {field} {shown(value)} must not stand in a command: only letters, digits and "
                "._:@%+- may, and no - at its beginning"
            )
