"""A wire between one node and the database: cut, deaf in one direction or both, slow.

`deaf` keeps what is sent until the wire is healed, as a network does that loses packets for a
while; `listen_deaf` swallows what the server says to the connection that listens, as a gateway
does that has forgotten it, and that connection is ended when the wire is healed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import Flag, auto

CHUNK = 65_536


class Way(Flag):
    """The direction of bytes, as the node sees it."""

    OUT = auto()
    IN = auto()


class _Link:
    """One connection through the wire."""

    def __init__(self, down: asyncio.StreamWriter, up: asyncio.StreamWriter) -> None:
        self.down = down
        self.up = up
        self.listens = False
        self.swallowed = False

    def abort(self) -> None:
        self.down.transport.abort()
        self.up.transport.abort()


class Wire:
    """Passes bytes on to `port()` until told otherwise. Made by `wire`."""

    def __init__(self, port: Callable[[], int]) -> None:
        self._upstream = port
        self._open = {way: asyncio.Event() for way in Way}
        self._cut = False
        self._swallow = False
        self._delay_s = 0.0
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        for gate in self._open.values():
            gate.set()

    @property
    def port(self) -> int:
        """Where the node connects."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """End every connection, and refuse new ones."""
        self._cut = True
        for link in set(self._links):
            link.abort()

    def cut_listeners(self) -> None:
        """End those connections that listen; new ones are welcome."""
        for link in set(self._links):
            if link.listens:
                link.abort()

    def deafen(self, ways: Way) -> None:
        """Keep the connections, and pass nothing on in these directions."""
        for way in ways:
            self._open[way].clear()

    def deafen_listeners(self) -> None:
        """Swallow whatever the server says to those that listen."""
        self._swallow = True

    def slow(self, delay_s: float) -> None:
        """Every piece takes this long, each way."""
        self._delay_s = delay_s

    def heal(self) -> None:
        """Work again."""
        self._cut = self._swallow = False
        self._delay_s = 0.0
        for gate in self._open.values():
            gate.set()
        for link in set(self._links):
            if link.swallowed:
                link.abort()  # its bytes no longer make sense

    async def start(self) -> None:
        """Listen on a port of its own."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        """End every connection and stop listening."""
        self.cut()
        for gate in self._open.values():
            gate.set()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream())
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, up_writer)
        self._links.add(link)
        ways = {
            asyncio.ensure_future(self._pump(link, reader, up_writer, Way.OUT)),
            asyncio.ensure_future(self._pump(link, up_reader, writer, Way.IN)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            link.abort()
            self._links.discard(link)

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                if way is Way.OUT and b"LISTEN " in data:
                    link.listens = True
                await self._open[way].wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if way is Way.IN and link.listens and self._swallow:
                    link.swallowed = True
                    continue
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def wire(port: Callable[[], int]) -> AsyncIterator[Wire]:
    """A wire to whatever listens on `port()` when a connection is made."""
    it = Wire(port)
    await it.start()
    try:
        yield it
    finally:
        await it.stop()
