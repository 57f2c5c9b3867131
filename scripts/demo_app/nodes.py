"""The `delayq run` processes, and what one of them holds."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from delayq.bridge import AnyConnection
from delayq.ranks import Role, ranks

from . import ledger
from .waiting import until

APPLICATION = "demo_app.orders:dq"
KIND = "expire_order"
_START_S = 15.0
_LEAVE_S = 15.0


class NodeFailedError(Exception):
    """A node did not start, or did not leave as it should."""


class NodeProcess:
    """One `delayq run` with a name of its own; its log goes to a file."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then ends its nodes.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "delayq", "run", APPLICATION],
                env={**os.environ, "DELAYQ_NODE_NAME": name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)

    async def active(self, conn: AnyConnection) -> int:
        """Its incarnation, once it takes its share."""
        sql = "select id from delayq.nodes where name = $1 and state = 'active'"

        async def look() -> int | None:
            incarnation: int | None = await conn.fetchval(sql, self.name)
            if self.status is not None:
                raise self._failure(f"ended with status {self.status}")
            return incarnation

        try:
            async with asyncio.timeout(_START_S):
                return await until(look)
        except TimeoutError:
            raise self._failure("does not start") from None

    async def left(self) -> int:
        """Its exit status, once it has drained."""

        async def look() -> int | None:
            return self.status

        try:
            async with asyncio.timeout(_LEAVE_S):
                return await until(look)
        except TimeoutError:
            raise self._failure("does not leave") from None

    def _failure(self, what: str) -> NodeFailedError:
        return NodeFailedError(f"{self.name} {what}; the end of its log:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def end(self) -> None:
        """Whatever happened: it does not run afterwards."""
        self.terminate()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Fleet:
    """All nodes that were started; none of them outlives the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nodes: list[NodeProcess] = []

    def start(self, name: str) -> NodeProcess:
        node = NodeProcess(name, self._folder)
        self.nodes.append(node)
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            node.end()


@dataclass(frozen=True, slots=True)
class Held:
    """The task ids whose handlers a node has started, and the pending ones that are its to fire.

    A task may be leased a moment before its instant; a node that is told to leave then gives it
    back, and another fires it.
    """

    node: int
    running: frozenset[int]
    pending: frozenset[int]


async def held_by(conn: AnyConnection, node: int, ledger_path: Path) -> Held:
    nodes = await conn.fetch("select id, kinds from delayq.nodes where state = 'active'")
    shares = ranks({row["id"]: frozenset(row["kinds"]) for row in nodes}, [KIND], node)
    tasks = await conn.fetch(
        "select id, delayq.bucket(id) as bucket, state, attempt, lease_owner from delayq.tasks"
    )
    # Read after the tasks: a handler that had started by then is in it.
    entries = ledger.read(ledger_path)
    started = {(entry.task, entry.attempt) for entry in entries if entry.what == ledger.STARTED}
    return Held(
        node,
        frozenset(
            row["id"]
            for row in tasks
            if row["lease_owner"] == node and (row["id"], row["attempt"]) in started
        ),
        frozenset(
            row["id"]
            for row in tasks
            if row["state"] == "pending" and shares.role(KIND, row["bucket"]) is Role.OWNER
        ),
    )


async def first_busy(
    conn: AnyConnection,
    incarnations: Iterable[int],
    ledger_path: Path,
    is_busy: Callable[[Held], bool],
) -> Held:
    """What the first node holds that is found busy."""

    async def look() -> Held | None:
        for incarnation in incarnations:
            held = await held_by(conn, incarnation, ledger_path)
            if is_busy(held):
                return held
        return None

    return await until(look)
