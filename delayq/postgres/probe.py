"""Whether a server answers on a socket: asked with a real start-up packet, never by a pid."""

from __future__ import annotations

import enum
import os
import socket
import struct
from pathlib import Path

SOCKET_PATH_LIMIT = 100
"""The system's limit is 103 to 107 bytes; nothing of ours listens at a longer path."""

PROTOCOL_3_0 = 196608
CANNOT_CONNECT_NOW = b"C57P03\0"


class Answer(enum.Enum):
    """What the socket said."""

    READY = "ready"
    """A server takes connections there."""
    BUSY = "busy"
    """Something is there, but it starts, stops, recovers, or says nothing."""
    GONE = "gone"
    """Nobody listens there."""


def probe(socket_file: Path, limit_s: float = 1.0) -> Answer:
    """Open one connection, see how far the start-up gets, and close it politely."""
    if len(os.fsencode(socket_file)) > SOCKET_PATH_LIMIT:
        return Answer.GONE
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(limit_s)
        try:
            connection.connect(str(socket_file))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            return Answer.GONE
        except (TimeoutError, BlockingIOError):
            return Answer.BUSY
        try:
            connection.sendall(_startup_packet())
            return _verdict(connection)
        except OSError:
            return Answer.BUSY


def _verdict(connection: socket.socket) -> Answer:
    while True:
        kind, body = _message(connection)
        if kind == b"Z":
            connection.sendall(b"X" + struct.pack("!I", 4))
            return Answer.READY
        if kind == b"E":
            # Any other refusal (too many clients, say) comes from a server that is at work.
            return Answer.BUSY if CANNOT_CONNECT_NOW in body else Answer.READY


def _message(connection: socket.socket) -> tuple[bytes, bytes]:
    head = _exactly(connection, 5)
    (length,) = struct.unpack("!I", head[1:])
    return head[:1], _exactly(connection, length - 4)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def _startup_packet() -> bytes:
    body = struct.pack("!I", PROTOCOL_3_0) + b"user\0postgres\0database\0postgres\0\0"
    return struct.pack("!I", len(body) + 4) + body
