"""The process that stands between the users of a private server and the server itself.

Run as a script, with the interpreter's own library only. It starts `postgres` and then waits for
two things: for the server to end, and for the exclusive lock on the file that every user of the
server holds a shared lock on. The kernel drops a lock with its process, however that process
died, so the exclusive lock is granted exactly when the last user is gone; the keeper then stops
the server and ends. For as long as the server lives the keeper holds the `server` lock: whoever
finds that lock free knows that no kept server runs. No pid is read from a file anywhere here: the
server is the keeper's own child.

The starter sends one JSON object on standard input (see `Order` in `launch.py`).
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import json
import os
import signal
import sys
import time

FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT
FAST_LIMIT_S = 30.0


def main() -> None:
    """Start the server in the background; returns (exits 0) in the starter's child at once."""
    order = json.load(sys.stdin)
    for lock in (order["users_fd"], order["server_fd"]):
        os.set_inheritable(lock, False)
    os.chdir("/")
    _become(order["account"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    # The starter reaps this process; the keeper itself must be nobody's child, or it would stay
    # behind as a zombie of the starter.
    if os.fork():
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    server = _start(order["command"], order["environment"])
    _keep(server, order["users_fd"], order["scratch"])


def _become(account: list[int] | None) -> None:
    if account is not None:
        uid, gid, *groups = account
        os.setgroups(groups)
        os.setgid(gid)
        os.setuid(uid)


def _start(command: list[str], environment: dict[str, str]) -> int:
    server = os.fork()
    if server:
        return server
    try:
        os.setsid()
        os.umask(0o077)
        os.execve(command[0], command, environment)  # noqa: S606 -- no shell is wanted
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error}\n".encode())
    os._exit(127)


def _keep(server: int, users_fd: int, scratch: str | None) -> None:
    # A service manager signals every process of the application; this one leaves last.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    _thread.start_new_thread(_stop_when_unused, (server, users_fd))
    os.waitpid(server, 0)
    if scratch is not None:
        _remove(scratch)
    os._exit(0)


def _stop_when_unused(server: int, users_fd: int) -> None:
    # Kept until this process ends: nobody can become a user of a server that is being stopped.
    fcntl.flock(users_fd, fcntl.LOCK_EX)
    os.kill(server, FAST)
    time.sleep(FAST_LIMIT_S)
    os.kill(server, IMMEDIATE)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 -- pathlib would double the start-up time
            os.unlink(os.path.join(folder, name))  # noqa: PTH108, PTH118 - without pathlib it starts sooner
        os.rmdir(folder)  # noqa: PTH106 - the same


if __name__ == "__main__":
    main()
