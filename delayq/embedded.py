"""The embedded PostgreSQL: a server that delayq starts by itself, in a folder of the project.

For trying delayq out, for development and for tests. Everyone who names the same folder shares one
server; the last one out stops it, and so does the kernel's word that the last one was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from delayq.log import log
from delayq.postgres.binaries import find_binaries
from delayq.postgres.server import PrivateServer

__all__ = ["Embedded", "PrivateServer", "embedded_server", "find_binaries"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Embedded:
    """A running embedded server."""

    dsn: str
    """Its superuser's DSN: a Unix socket, no password. Only the folder's owner can reach it."""
    folder: Path
    """Where it keeps everything; delete the folder to start over."""


@asynccontextmanager
async def embedded_server(
    folder: Path, *, pg_bin: Path | None = None, allow_system: bool = False
) -> AsyncIterator[Embedded]:
    """Use the server in `folder` (made at the first start, 1 s; later starts take 0.1 s).

    Raises `EmbeddedError` that names the ways out if there are no binaries or it cannot start.
    """
    server = await _to_the_end(
        lambda: PrivateServer(folder, pg_bin=pg_bin, allow_system=allow_system)
    )
    try:
        await _to_the_end(server.start)
        _warn(server)
        yield Embedded(server.dsn, server.folder)
    finally:
        await _to_the_end(server.stop)


async def _to_the_end(step: Callable[[], T]) -> T:
    """Run a blocking step in a thread. A cancellation waits for it, since it cannot be stopped."""
    thread = asyncio.ensure_future(asyncio.to_thread(step))
    cancelled = False
    while not thread.done():
        try:
            await asyncio.wait([thread])
        except asyncio.CancelledError:
            cancelled = True
    result = thread.result()
    if cancelled:
        raise asyncio.CancelledError
    return result


def _warn(server: PrivateServer) -> None:
    folder = str(server.folder)
    log.warning("embedded PostgreSQL in {folder}: to try things out, not to rely on", folder=folder)
    if server.other_majors:
        log.warning(
            "tasks kept by other versions of PostgreSQL are not seen: {majors} in {folder}",
            majors=", ".join(server.other_majors),
            folder=folder,
        )
