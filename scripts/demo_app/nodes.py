"""The `delayq run` processes, and what one of them holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import asyncpg

from delayq.ranks import Role, ranks

APPLICATION = "demo_app.orders:dq"
KIND = "expire_order"
_LOOK_S = 0.02
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

    async def active(self, conn: asyncpg.Connection) -> int:
        """Its incarnation, once it takes its share."""
        sql = "select id from delayq.nodes where name = $1 and state = 'active'"
        try:
            async with asyncio.timeout(_START_S):
                while (incarnation := await conn.fetchval(sql, self.name)) is None:
                    if self.status is not None:
                        break
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            incarnation = None
        if incarnation is None:
            raise NodeFailedError(f"{self.name} did not start:\n{self.log.read_text()[-3000:]}")
        return int(incarnation)

    async def left(self) -> int:
        """Its exit status, once it has drained."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                while self.status is None:
                    await asyncio.sleep(_LOOK_S)
        if self.status is None:
            raise NodeFailedError(f"{self.name} does not leave:\n{self.log.read_text()[-3000:]}")
        return self.status

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
    """The task ids that a node runs, and the pending ones that are its to fire."""

    node: int
    running: frozenset[int]
    pending: frozenset[int]


async def held_by(conn: asyncpg.Connection, node: int) -> Held:
    nodes = await conn.fetch("select id, kinds from delayq.nodes where state = 'active'")
    shares = ranks({row["id"]: frozenset(row["kinds"]) for row in nodes}, [KIND], node)
    tasks = await conn.fetch("select id, bucket, state, lease_owner from delayq.tasks")
    return Held(
        node,
        frozenset(row["id"] for row in tasks if row["lease_owner"] == node),
        frozenset(
            row["id"]
            for row in tasks
            if row["state"] == "pending" and shares.role(KIND, row["bucket"]) is Role.OWNER
        ),
    )


async def caught(
    conn: asyncpg.Connection, node: int, enough: Callable[[Held], bool]
) -> Held:
    """What the node holds, at a moment when that is enough."""
    while not enough(held := await held_by(conn, node)):
        await asyncio.sleep(_LOOK_S)
    return held
