"""What the driver raises becomes one of delayq's errors, and quotes no value on the way."""

from __future__ import annotations

import asyncio
import traceback

import asyncpg
import pytest

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
from delayq.failures import (
    blames_the_row,
    is_transient,
    is_worth_splitting,
    sqlstate_of,
    stems_from_conflict,
    translate,
    translated,
)

MARKER = "planted-marker"


def _server_error(state: str, message: str = MARKER, **fields: str) -> asyncpg.PostgresError:
    error = asyncpg.PostgresError.new({"C": state, "M": message, **fields})
    assert isinstance(error, asyncpg.PostgresError)
    return error


@pytest.mark.parametrize(
    ("state", "kind", "transient"),
    [
        ("08006", DatabaseUnavailable, True),
        ("08P01", DatabaseUnavailable, True),
        ("22003", DatabaseError, False),
        ("23505", DatabaseError, False),
        ("23514", DatabaseError, False),
        ("25006", DatabaseUnavailable, True),
        ("25P02", DatabaseError, False),
        ("25P03", DatabaseUnavailable, True),
        ("28000", AuthenticationFailed, False),
        ("28P01", AuthenticationFailed, False),
        ("3D000", DatabaseError, False),
        ("40001", TransactionConflict, True),
        ("40003", DatabaseTimeout, True),
        ("40P01", TransactionConflict, True),
        ("42501", PrivilegeMissing, False),
        ("42601", DatabaseError, False),
        ("53100", DatabaseUnavailable, True),
        ("53300", DatabaseUnavailable, True),
        ("55P03", DatabaseTimeout, True),
        ("57014", DatabaseTimeout, True),
        ("57P01", DatabaseUnavailable, True),
        ("57P03", DatabaseUnavailable, True),
        ("57P04", DatabaseError, False),
        ("58030", DatabaseUnavailable, True),
        ("P0001", DatabaseError, False),
        ("XX000", DatabaseError, False),
    ],
)
def test_each_code_of_the_server_has_its_class_and_may_or_may_not_be_tried_again(
    state: str, kind: type[DelayQError], transient: bool
) -> None:
    error = _server_error(state)
    assert type(translate(error)) is kind
    assert is_transient(error) is transient
    assert is_transient(translate(error)) is transient


@pytest.mark.parametrize(
    ("error", "splits", "blames"),
    [
        (_server_error("22003"), True, True),
        (_server_error("22P05"), True, True),
        (asyncpg.DataError("the driver's own refusal"), True, True),
        (_server_error("23514", n="payload_is_bounded"), True, True),
        (_server_error("23502", c="payload"), True, True),
        (_server_error("23514"), True, False),  # no partition of history takes the row
        (_server_error("P0001"), True, False),
        (_server_error("42P01", 'relation "theirs" does not exist'), True, False),
        (_server_error("54000"), True, False),
        (_server_error("XX001"), True, False),
        (_server_error("28P01"), False, False),
        (_server_error("3D000"), False, False),
        (_server_error("40P01"), False, False),
        (_server_error("42501"), False, False),
        (_server_error("42P01", 'relation "delayq.tasks" does not exist'), False, False),
        (_server_error("53100"), False, False),
        (_server_error("57014"), False, False),
        (_server_error("57P04"), False, False),
        (TimeoutError(), False, False),
        (asyncpg.InterfaceError("misused"), False, False),
        (DatabaseError("the session settings do not take"), False, False),
        (InvalidArgument("dsn", "no"), False, False),
        (ValueError("22003"), False, False),
    ],
    ids=repr,
)
def test_only_data_that_are_refused_are_a_rows_own_fault(
    error: Exception, splits: bool, blames: bool
) -> None:
    assert (is_worth_splitting(error), blames_the_row(error)) == (splits, blames)
    if not isinstance(error, ValueError):  # else it is no error of the database at all
        told = translate(error)
        assert (is_worth_splitting(told), blames_the_row(told)) == (splits, blames)


def _after(first: Exception, **how: Exception) -> Exception:
    """An error that was raised from, or while handling, another one."""
    error = ValueError()
    error.__cause__, error.__context__ = how.get("cause"), first
    return error


def test_a_conflict_is_found_behind_what_was_raised_because_of_it() -> None:
    conflict = TransactionConflict("deadlock")
    assert stems_from_conflict(conflict)
    assert stems_from_conflict(_after(KeyError(), cause=conflict))
    assert stems_from_conflict(_after(_after(conflict)))
    assert stems_from_conflict(BaseExceptionGroup("", [ValueError(), conflict]))
    assert not stems_from_conflict(None)
    assert not stems_from_conflict(_after(KeyError()))
    assert not stems_from_conflict(BaseExceptionGroup("", [ValueError(), KeyError()]))
    circle = ValueError()
    circle.__cause__ = circle
    assert not stems_from_conflict(circle)


@pytest.mark.parametrize("state", ["22003", "22P02", "23514", "42601", "40001", "P0001", "XX000"])
def test_a_message_that_may_hold_data_is_not_repeated(state: str) -> None:
    error = _server_error(state, D=f"Failing row contains ({MARKER})", H=MARKER, W=MARKER)
    assert MARKER not in str(translate(error))


def test_a_broken_constraint_is_named() -> None:
    error = _server_error("23514", n="tasks_payload_size")
    assert str(translate(error)) == (
        "the row breaks the constraint tasks_payload_size (SQLSTATE 23514)"
    )


def test_a_message_about_roles_and_tables_is_repeated() -> None:
    error = _server_error("42501", "permission denied for table tasks")
    assert "permission denied for table tasks" in str(translate(error))


@pytest.mark.parametrize(
    ("state", "message", "kind"),
    [
        ("42P01", 'relation "delayq.tasks" does not exist', SchemaMissing),
        ("42883", "function delayq.schedule_one(text) does not exist", SchemaMissing),
        ("3F000", 'schema "delayq" does not exist', SchemaMissing),
        ("42P01", 'relation "orders" does not exist', DatabaseError),
    ],
)
def test_a_missing_name_of_ours_means_that_the_schema_is_missing(
    state: str, message: str, kind: type[DelayQError]
) -> None:
    assert type(translate(_server_error(state, message))) is kind


def test_what_our_own_functions_say_is_repeated_and_what_others_say_is_not() -> None:
    ours = "PL/pgSQL function delayq.reschedule(bigint) line 9 at RAISE\nSQL statement"
    theirs = "PL/pgSQL function public.audit() line 1 at RAISE"
    assert str(translate(_server_error("22023", "give delay or at", W=ours))) == "give delay or at"
    assert MARKER not in str(translate(_server_error("22023", MARKER, W=theirs)))


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (TimeoutError(), DatabaseTimeout, "no answer in time"),
        (TimeoutError(110, "Connection timed out"), DatabaseUnavailable, "Connection timed out"),
        (ConnectionRefusedError(111, "Connection refused"), DatabaseUnavailable, "refused"),
        (OSError("Multiple exceptions: [Errno 111]"), DatabaseUnavailable, "Errno 111"),
        (asyncpg.InterfaceError("connection is closed"), DatabaseUnavailable, "is closed"),
        (asyncpg.InterfaceError("pool is closing"), DatabaseUnavailable, "is closed"),
        (
            asyncpg.InterfaceError("connection has been released back to the pool"),
            DatabaseUnavailable,
            "is closed",
        ),
        (asyncpg.InterfaceError("another operation is in progress"), DatabaseError, "misused"),
        (
            asyncpg.InternalClientError(
                "cannot switch to state 11; another operation (2) is in progress"
            ),
            DatabaseUnavailable,
            "is broken",
        ),
        (asyncpg.InternalClientError("no decoder for OID 1"), DatabaseError, "InternalClientError"),
        (asyncpg.TargetServerAttributeNotMatched("x"), DatabaseUnavailable, "accepts writes"),
        (asyncpg.ClientConfigurationError(MARKER), DatabaseError, "refused a value"),
        (asyncpg.DataError(f"invalid input for query argument $2: {MARKER}"), DatabaseError, "$2"),
        (ValueError(MARKER), DatabaseError, "unexpected ValueError"),
    ],
)
def test_what_comes_from_the_driver_and_the_network_has_its_class_too(
    error: BaseException, kind: type[DelayQError], text: str
) -> None:
    translation = translate(error)
    assert type(translation) is kind
    assert text in str(translation)
    assert MARKER not in str(translation)


def test_the_place_stands_in_front() -> None:
    assert str(translate(TimeoutError(), at="h:5432/db")) == "h:5432/db: no answer in time"


def test_an_error_of_delayq_stays_itself() -> None:
    error = InvalidArgument("kind", "is empty")
    assert translate(error, at="h:5432/db") is error
    assert not is_transient(error)


@pytest.mark.parametrize("error", [ValueError(), asyncio.CancelledError(), KeyboardInterrupt()])
def test_what_is_not_of_the_database_is_never_transient(error: BaseException) -> None:
    assert not is_transient(error)


def test_the_original_is_not_printed_beside_its_translation() -> None:
    with pytest.raises(DatabaseError) as raised, translated("h:5432/db"):
        raise _server_error("22P02")
    assert MARKER not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), LookupError("x"), SystemExit(3)])
def test_everything_else_passes_through_untouched(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, translated():
        raise error
    assert raised.value is error


def test_the_code_of_the_server_is_text_or_nothing() -> None:
    assert sqlstate_of(_server_error("40001")) == "40001"
    assert sqlstate_of(OSError()) == ""
