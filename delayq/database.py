"""Connections to PostgreSQL, set up so that the protocol holds on them.

Control connections (lease, settle, sweep, look, upkeep, beat, listen) are dedicated: a pool's
reset undoes what was SET and costs four statements. What they need travels in the start-up
packet. Where a pooler stands in between and refuses or drops those settings, they are SET
afterwards, and whether they took is read back either way.
"""

from __future__ import annotations

import asyncio
import configparser
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import asyncpg

from delayq.dsn import Dsn, parse_dsn
from delayq.errors import DatabaseError, DatabaseUnavailable, InvalidArgument
from delayq.failures import (
    DRIVER_ERRORS,
    is_transient,
    sqlstate_of,
    translate,
    translated,
)
from delayq.plans import CUSTOM, KEPT
from delayq.tls import CUT_OFF, explain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayq.settings import Settings

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
    Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
    PooledConnection: TypeAlias = asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
else:
    Connection = asyncpg.Connection
    Pool = asyncpg.Pool
    PooledConnection = asyncpg.pool.PoolConnectionProxy

__all__ = [
    "DRIVER_ERRORS",
    "Connection",
    "Database",
    "Dsn",
    "Pool",
    "PooledConnection",
    "close",
    "is_transient",
    "parse_dsn",
    "sqlstate_of",
    "translate",
    "translated",
]

# The server's own limit goes first: its error says what happened, ours only that nobody answered.
_GRACE_S: Final = 5.0
_CLOSE_S: Final = 2.0
_NONE: Final[Mapping[str, str]] = {}
# The node's role has rights that whoever may create a function in `public` has not: a function
# there that suits the arguments better than PostgreSQL's own is called in its place.
_OWN_NAMES: Final = {"search_path": "pg_catalog, pg_temp"}
_READ_BACK: Final = """
    -- database: read back the session's settings
    select name, setting, pg_catalog.pg_backend_pid() as pid
      from pg_catalog.pg_settings where name = any($1::text[])
"""
# A pooler took the statement to another backend than the one that had prepared it.
_LOST_STATEMENT: Final = ("26000", "42P05")
_ROUNDS: Final = 3
_SET: Final = """
    -- database: set the session's settings that a pooler did not pass on
    select pg_catalog.set_config(name, value, false)
      from unnest($1::text[], $2::text[]) as wanted(name, value)
"""


class Database:
    """One PostgreSQL database: opens connections to it, and holds none itself.

    `behind_pooler` turns true once a connection shows that somebody else answers than the server
    itself. From then on settings are SET, and prepared statements are not kept.

    Making one raises `InvalidArgument` if a file that the DSN names cannot be used.
    """

    def __init__(self, dsn: Dsn, settings: Settings) -> None:
        dsn.check_files()
        self.dsn = dsn
        self.behind_pooler = False
        self._worked = False
        self._statement_timeout_s = settings.statement_timeout_s
        self._connect_timeout_s = dsn.connect_timeout_s or settings.connect_timeout_s
        self._session = _session_settings(settings)
        self._control = self._session | {"TimeZone": "UTC"}

    def __repr__(self) -> str:
        return f"Database({self.dsn.describe()})"

    async def connect_control(
        self, incarnation: int, purpose: str, plans: Mapping[str, str] = CUSTOM
    ) -> Connection:
        """A dedicated connection of the node `incarnation`, its settings made sure of.

        `purpose` is a word for error texts (lease, beat, listen …). `plans` say how its
        statements are planned (see `plans`). The caller owns the connection and ends it with
        `close`. Raises `DatabaseUnavailable`, `DatabaseTimeout`,
        `AuthenticationFailed`, `InvalidArgument` for a DSN that the driver refuses, or
        `DatabaseError` if the settings cannot be had.
        """
        name = {"application_name": f"delayq/{incarnation}"}
        wanted = self._control | dict(plans)
        with translated(f"{purpose} connection to {self.dsn.describe()}"):
            conn = await self._open(self.dsn.server_settings | wanted | name, wanted, _OWN_NAMES)
            try:
                await self._make_sure(conn, wanted)
            except BaseException:
                conn.terminate()
                raise
        return conn

    async def create_pool(
        self, min_size: int, max_size: int, application_name: str, *, shared: bool = True
    ) -> Pool:
        """A pool for clients or effects, with `min_size` connections opened at once.

        The application's own statements run on it too, so it keeps the role's time zone, and
        the `options` of the DSN go before delayq's settings. Not `shared`: delayq's statements
        alone run on it. They leave nothing behind, and the reset at each release would cost a
        round trip; and their plans may be kept. Failing to connect comes out of
        `acquire` as `connect_control` says. The caller closes the pool.
        """
        chosen = self.dsn.server_settings
        session = self._session if shared else self._session | dict(KEPT)
        wanted = session | {"application_name": application_name} | chosen
        vital = {name: session[name] for name in session.keys() - chosen.keys()}

        async def connect(*_: object, **__: object) -> Connection:
            with translated(f"{application_name} connection to {self.dsn.describe()}"):
                return await self._open(wanted, vital)

        async def set_up(conn: PooledConnection) -> None:
            if self.behind_pooler:  # the reset at the last release took them away
                await _set(conn, wanted)

        pool = asyncpg.create_pool(
            min_size=min_size,
            max_size=max_size,
            connect=connect,
            setup=set_up,
            reset=None if shared else _leave_as_it_is,
        )
        return await pool

    async def read_back(self, conn: Connection) -> dict[str, str]:
        """The control settings and the application name as the session has them.

        Time limits are in milliseconds.
        """
        with translated():
            return await _read(conn, [*self._control, "application_name"])

    async def check_control(self, conn: Connection) -> None:
        """Make sure that the session has the control settings, by SET if need be.

        Raises `DatabaseError` that names those which did not take.
        """
        await self._make_sure(conn, self._control)

    async def _make_sure(self, conn: Connection, wanted: dict[str, str]) -> None:
        with translated():
            differing = await _differing(conn, wanted)
            # Several rounds: a pooler may have SET on one backend and have read from another.
            for _ in range(_ROUNDS):
                if not differing:
                    return
                await _set(conn, wanted)
                differing = await _differing(conn, wanted)
        if differing:
            raise DatabaseError(
                f"the session settings {', '.join(differing)} do not take: a pooler in between "
                "drops them; connect to PostgreSQL directly, or use ALTER ROLE … SET"
            )

    async def _open(
        self, wanted: dict[str, str], vital: dict[str, str], packet_only: Mapping[str, str] = _NONE
    ) -> Connection:
        """Connect with `wanted` in the start-up packet; `vital` are those that must arrive.

        `packet_only` go along, and are not SET where a pooler shares its sessions with others.
        """
        if not self.behind_pooler:
            conn = await self._connect_unless_refused({**wanted, **packet_only})
            if conn is not None:
                if await _is_direct(conn, vital):
                    return conn
                await close(conn)
            self.behind_pooler = True
        return await self._open_and_set(wanted)

    async def _connect_unless_refused(self, wanted: dict[str, str]) -> Connection | None:
        try:
            return await self._connect(wanted)
        except asyncpg.PostgresError as error:
            if not _refuses_settings(error):
                raise
            return None

    async def _open_and_set(self, wanted: dict[str, str]) -> Connection:
        # A pooler may hand each transaction to another backend: no prepared statement lasts.
        name = {"application_name": wanted["application_name"]}
        conn = await self._connect(name, statement_cache_size=0)
        try:
            await _set(conn, wanted)
        except BaseException:
            conn.terminate()
            raise
        return conn

    async def _connect(self, server_settings: dict[str, str], **options: Any) -> Connection:
        try:
            conn = await self._ask_driver(server_settings, options)
        except InvalidArgument as refusal:
            if not self._worked:
                raise
            # a certificate is being replaced, say: no mistake of whoever wrote the DSN
            raise DatabaseUnavailable(str(refusal)) from None
        self._worked = True
        return conn

    async def _ask_driver(
        self, server_settings: dict[str, str], options: dict[str, Any]
    ) -> Connection:
        try:
            return await asyncpg.connect(
                timeout=self._connect_timeout_s,
                command_timeout=self._statement_timeout_s + _GRACE_S,
                server_settings=server_settings,
                **self.dsn.connect_arguments(),
                **options,
            )
        except configparser.Error:  # its text quotes lines of the file
            refusal = "the connection service file cannot be read"
        except OSError:
            self.dsn.check_files()  # the driver does not say which file it cannot use
            raise
        except asyncpg.ConnectionDoesNotExistError as error:
            # what the server said of our certificate may be lost with the connection
            if explain(error) is not None or not self.dsn.shows_certificate():
                raise
            raise DatabaseUnavailable(f"{self.dsn.describe()}: {CUT_OFF}") from None
        except ValueError as error:
            refusal = str(error).partition("\n")[0]
        raise InvalidArgument("dsn", refusal)


async def close(conn: Connection) -> None:
    """End a connection politely if the server answers within two seconds, else at once."""
    try:
        await conn.close(timeout=_CLOSE_S)
    except DRIVER_ERRORS:
        conn.terminate()
    except asyncio.CancelledError:
        conn.terminate()
        raise


async def _leave_as_it_is(_conn: Connection) -> None:
    """An open transaction is ended by the driver all the same."""


def _session_settings(settings: Settings) -> dict[str, str]:
    """What every session of delayq needs, and why.

    Custom plans (see `plans`). No JIT, since custom plans are what tempts it. Read committed,
    since the answers of cancel and the like are true at that level only. And no wait without a
    limit.
    """
    return {
        **CUSTOM,
        "jit": "off",
        "default_transaction_isolation": "read committed",
        "statement_timeout": _milliseconds(settings.statement_timeout_s),
        "lock_timeout": _milliseconds(settings.lock_timeout_s),
        "idle_in_transaction_session_timeout": _milliseconds(
            settings.idle_in_transaction_timeout_s
        ),
    }


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


def _refuses_settings(error: asyncpg.PostgresError) -> bool:
    """True for what poolers say to a start-up packet with settings that they do not track."""
    text = str(error)
    return sqlstate_of(error) in ("08P01", "0A000") and ("parameter" in text or "option" in text)


async def _is_direct(conn: Connection, vital: dict[str, str]) -> bool:
    """True if the backend that answers is the one that greeted us, and has our settings.

    A pooler greets by itself. What it drops may be there all the same, left by an earlier SET
    on the backend that happens to answer, so the settings alone prove nothing.
    """
    try:
        rows = await conn.fetch(_READ_BACK, [*vital, "application_name"])
    except BaseException as error:
        if sqlstate_of(error) in _LOST_STATEMENT:
            return False
        conn.terminate()
        raise
    found = {row["name"]: row["setting"] for row in rows}
    return rows[0]["pid"] == conn.get_server_pid() and vital.items() <= found.items()


async def _differing(conn: Connection, wanted: dict[str, str]) -> list[str]:
    found = await _read(conn, list(wanted))
    return sorted(name for name, value in wanted.items() if found.get(name) != value)


async def _read(conn: Connection, names: list[str]) -> dict[str, str]:
    return {row["name"]: row["setting"] for row in await conn.fetch(_READ_BACK, names)}


async def _set(conn: Connection | PooledConnection, wanted: dict[str, str]) -> None:
    await conn.execute(_SET, list(wanted), list(wanted.values()))
