"""Turns what the driver, the server and the network raise into delayq's own errors.

The driver's errors quote argument values and whole rows, and would carry payloads and passwords
into logs. What is said here comes from the SQLSTATE, from names of constraints, tables and
roles, and from those server messages that cannot contain data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

import asyncpg

from delayq import tls
from delayq.errors import (
    AuthenticationFailed,
    DatabaseError,
    DatabaseTimeout,
    DatabaseUnavailable,
    DelayQError,
    InvalidArgument,
    PrivilegeMissing,
    SchemaMissing,
    TransactionConflict,
)

# What may be raised by using the driver: the errors that `translated` takes over.
DRIVER_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,  # TimeoutError is one of them
)

_Described: TypeAlias = tuple[type[DelayQError], str]

_LINE_END: Final = "\n"
_CHAIN_MOST: Final = 20
_TRANSIENT: Final = (DatabaseUnavailable, DatabaseTimeout, TransactionConflict)

_UNAVAILABLE: Final = "the database cannot be reached or is going away"
_NO_ROOM: Final = "the database has no room left (connections, memory or disk)"
# How the driver answers a statement that meets the server's farewell on an idle connection.
_LOST_TRACK: Final = re.compile("cannot switch to|cannot process message|not connected")
_BY_SQLSTATE: Final[dict[str, _Described]] = {
    "08": (DatabaseUnavailable, _UNAVAILABLE),
    "25006": (DatabaseUnavailable, "the database is read-only (a standby, or a failover)"),
    "25P03": (DatabaseUnavailable, "the server ended a transaction that was idle too long"),
    "28": (AuthenticationFailed, "user or password are wrong, or the role may not connect"),
    "3D000": (DatabaseError, "there is no such database"),
    "40001": (TransactionConflict, "another transaction was in the way; run it again"),
    "40003": (DatabaseTimeout, "the outcome of the statement is unknown"),
    "40P01": (TransactionConflict, "the transaction was part of a deadlock; run it again"),
    "42501": (PrivilegeMissing, "the role lacks a privilege"),
    "53": (DatabaseUnavailable, _NO_ROOM),
    "55P03": (DatabaseTimeout, "a lock was not given in time"),
    "57014": (DatabaseTimeout, "the statement was cancelled: it took too long"),
    "57P": (DatabaseUnavailable, _UNAVAILABLE),
    "57P04": (DatabaseError, "the database was dropped"),
    "58": (DatabaseUnavailable, "the server failed to read or write its files"),
}
# These server messages name roles, tables, functions and databases, and never a value.
_SAFE_MESSAGES: Final = ("08", "25006", "28", "3D000", "42501", "53", "57P")
_FIELDS: Final = {
    "payload_is_bounded": "payload",
    "headers_are_bounded": "headers",
    "next_is_bounded": "payload",
}
# Not about a statement: there is no such database, or it was dropped.
_OF_THE_DATABASE: Final = ("3D000", "57P04")
# A name that the schema should have and has not.
_MISSING_NAMES: Final = frozenset({"3F000", "42P01", "42883", "42703"})


def translate(error: BaseException, *, at: str | None = None) -> DelayQError:
    """The error as one of delayq's, with `at` (which database) in its text; its own come back.

    Nothing of a parameter or a row is in the text. Raise it `from None`, or the traceback will
    print the original beside it.
    """
    if isinstance(error, DelayQError):
        return error
    kind, text = tls.explain(error) or _described(error)
    told = kind(f"{at}: {text}" if at else text)
    if isinstance(told, DatabaseError):
        told.sqlstate = sqlstate_of(error)
        told.constraint = _constraint_name(error)
    return told


@contextmanager
def translated(at: str | None = None) -> Iterator[None]:
    """Every error of the driver, the server and the network leaves the block translated.

    Anything else, cancellation first of all, passes through untouched.
    """
    try:
        yield
    except DRIVER_ERRORS as error:
        raise translate(error, at=at) from None


def is_transient(error: BaseException) -> bool:
    """True if the same call may succeed later: the outage, the failover, the lock, the deadlock."""
    if not isinstance(error, (DelayQError, *DRIVER_ERRORS)):
        return False
    return isinstance(translate(error), _TRANSIENT)


def by_field(error: DelayQError) -> DelayQError:
    """InvalidArgument if what the caller gave broke a bound that only the database knows.

    (JSON of 1 MiB may take six times as much as jsonb.)
    """
    field = _FIELDS.get(getattr(error, "constraint", ""))
    if field is None:
        return error
    return InvalidArgument(field, "is larger in the database than it may be; make it smaller")


def met_a_lock(error: BaseException) -> bool:
    """True if a statement gave up since somebody holds a lock: it wrote nothing, and the session
    is as good as before."""
    return getattr(error, "sqlstate", None) == "55P03"


def is_worth_splitting(error: BaseException) -> bool:
    """True if one row of a batch may be what the server refused: then the others need not wait.

    The role, the password, the schema and the connection concern every row alike.
    """
    return _refused(error) is not None


def blames_the_row(error: BaseException) -> bool:
    """True if the row's own data were refused: only then may a task end as dead for it.

    A broken constraint has a name; history without a partition for the row has none.
    """
    told = _refused(error)
    if told is None:
        return False
    return told.sqlstate[:2] == "22" or (told.sqlstate[:2] == "23" and bool(told.constraint))


def _refused(error: BaseException) -> DatabaseError | None:
    """The error, translated, if the server refused a statement that it understood."""
    if not isinstance(error, (DatabaseError, *DRIVER_ERRORS)):
        return None
    told = translate(error)
    if type(told) is not DatabaseError or not told.sqlstate:
        return None
    return None if told.sqlstate.startswith(_OF_THE_DATABASE) else told


def stems_from_conflict(error: BaseException | None) -> bool:
    """True for a TransactionConflict, and for what was raised because of one."""
    for _ in range(_CHAIN_MOST):
        if isinstance(error, TransactionConflict):
            return True
        if isinstance(error, BaseExceptionGroup):
            return any(stems_from_conflict(part) for part in error.exceptions)
        if error is None:
            return False
        error = error.__cause__ or error.__context__
    return False


def sqlstate_of(error: BaseException) -> str:
    """The five-character code that the server gave, or an empty string."""
    return str(getattr(error, "sqlstate", None) or "")


def _described(error: BaseException) -> _Described:
    if isinstance(error, asyncpg.PostgresError):
        return _from_server(error)
    if isinstance(error, asyncpg.InterfaceError):
        return _from_driver(error)
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return DatabaseUnavailable, "none of the hosts accepts writes"
    if isinstance(error, asyncpg.InternalClientError) and _LOST_TRACK.match(str(error)):
        return DatabaseUnavailable, "the connection is broken"
    if isinstance(error, OSError):
        return _from_network(error)
    return DatabaseError, f"unexpected {type(error).__name__}"


def _from_server(error: asyncpg.PostgresError) -> _Described:
    state = sqlstate_of(error)
    if state in _MISSING_NAMES and "delayq" in _message(error):
        return SchemaMissing, "the delayq schema is missing or too old; run `delayq migrate`"
    for length in (5, 3, 2):
        if known := _BY_SQLSTATE.get(state[:length]):
            kind, text = known
            safe = state.startswith(_SAFE_MESSAGES)
            return kind, f"{text}: {_message(error)}" if safe else text
    return DatabaseError, _refusal(error, state)


def _refusal(error: asyncpg.PostgresError, state: str) -> str:
    if state.startswith("23"):
        return f"the row breaks {_constraint(error)} (SQLSTATE {state})"
    if _raised_by_delayq(error):
        return _message(error)
    # The driver's own refusals quote the value; only the number of the argument is taken.
    if found := re.search(r"query argument \$\d+", str(error)):
        return f"a value does not fit its type ({found[0]})"
    return f"the database refused the statement: {_words(error)} (SQLSTATE {state or 'unknown'})"


def _from_driver(error: asyncpg.InterfaceError) -> _Described:
    text = str(error)
    if "clos" in text or "terminat" in text or "released back" in text:
        return DatabaseUnavailable, "the connection is closed"
    if isinstance(error, ValueError):  # about a value, so it may quote one
        return DatabaseError, "the driver refused a value"
    return DatabaseError, f"the connection was misused: {text.partition(_LINE_END)[0]}"


def _from_network(error: OSError) -> _Described:
    if isinstance(error, TimeoutError) and error.errno is None:
        return DatabaseTimeout, "no answer in time"
    reason = error.strerror or str(error) or type(error).__name__
    return DatabaseUnavailable, f"{_UNAVAILABLE}: {reason}"


def _message(error: asyncpg.PostgresError) -> str:
    return (getattr(error, "message", None) or str(error)).partition(_LINE_END)[0]


def _constraint_name(error: BaseException) -> str:
    name = getattr(error, "constraint_name", None) or getattr(error, "column_name", None)
    return str(name or "")


def _constraint(error: asyncpg.PostgresError) -> str:
    name = _constraint_name(error)
    return f"the constraint {name}" if name else "a constraint"


def _raised_by_delayq(error: asyncpg.PostgresError) -> bool:
    """True for texts that our own SQL functions raise: constants, written by us."""
    context = str(getattr(error, "context", None) or "").partition(_LINE_END)[0]
    return context.startswith("PL/pgSQL function delayq.") and context.endswith("at RAISE")


def _words(error: BaseException) -> str:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__.removesuffix("Error"))
    return spaced.lower()
