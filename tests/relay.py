"""A wire between a client and PostgreSQL that tests can cut, stop up, or put a pooler on.

`Relay.dsn` leads through it. `cut` ends every connection and refuses new ones, `deafen` keeps
them open and passes nothing on (what a frozen peer or a lost route looks like), `resume` heals.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import quote

from delayq.dsn import Dsn, parse_dsn

# Takes the parameters of a start-up packet; returns those to pass on, or a refusal.
StartUp = Callable[[dict[str, str]], dict[str, str] | str]


class Relay:
    """Passes bytes both ways until told otherwise. Made by `relay`."""

    def __init__(self, upstream: Dsn, start_up: StartUp | None) -> None:
        self.upstream = upstream
        self.connections = 0
        self._start_up = start_up
        self._hears = asyncio.Event()
        self._hears.set()
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def dsn(self) -> str:
        """The DSN of the same database, through this wire."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        user = quote(self.upstream.user or "", safe="")
        database = quote(self.upstream.database or "", safe="")
        return f"postgresql://{user}@127.0.0.1:{port}/{database}?sslmode=disable"

    def cut(self) -> None:
        """End every connection at once and refuse new ones."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def deafen(self) -> None:
        """Keep the connections and pass nothing on, in either direction."""
        self._hears.clear()

    def resume(self) -> None:
        """Work again: for new connections, and for those that were only deaf."""
        self._is_cut = False
        self._hears.set()

    async def start(self) -> None:
        """Listen on a port of its own."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        """End every connection and stop listening."""
        self.resume()
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(OSError, EOFError):
            first = await self._first_packet(reader, writer)
            if first is not None:
                await self._pass_on(first, reader, writer)
        writer.transport.abort()
        self._writers.discard(writer)

    async def _first_packet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes | None:
        (length,) = struct.unpack("!i", await reader.readexactly(4))
        body = await reader.readexactly(length - 4)
        if self._start_up is None or body[:4] != struct.pack("!i", 196_608):
            return struct.pack("!i", length) + body
        words = body[4:].decode().split("\0")
        answer = self._start_up(dict(zip(words[:-2:2], words[1:-2:2], strict=True)))
        if isinstance(answer, str):
            writer.write(_error(answer))
            await writer.drain()
            return None
        return _start_up_packet(answer)

    async def _pass_on(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        up_reader, up_writer = await self._connect()
        self._writers.add(up_writer)
        up_writer.write(first)
        ways = {
            asyncio.ensure_future(self._pump(reader, up_writer)),
            asyncio.ensure_future(self._pump(up_reader, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            up_writer.transport.abort()
            self._writers.discard(up_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._hears.wait()
            writer.write(data)
            await writer.drain()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.upstream.hosts[0]
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port or 5432}")
        return await asyncio.open_connection(host, port or 5432)


@asynccontextmanager
async def relay(dsn: str, start_up: StartUp | None = None) -> AsyncIterator[Relay]:
    """A wire to the database of `dsn`; `start_up` plays a pooler that looks at first packets."""
    wire = Relay(parse_dsn(dsn), start_up)
    await wire.start()
    try:
        yield wire
    finally:
        await wire.stop()


def _start_up_packet(parameters: dict[str, str]) -> bytes:
    words = b"".join(f"{name}\0{value}\0".encode() for name, value in parameters.items())
    body = struct.pack("!i", 196_608) + words + b"\0"
    return struct.pack("!i", len(body) + 4) + body


def _error(message: str) -> bytes:
    body = f"SFATAL\0VFATAL\0C08P01\0M{message}\0\0".encode()
    return b"E" + struct.pack("!i", len(body) + 4) + body
