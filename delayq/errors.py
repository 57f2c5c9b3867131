"""Every error that delayq raises, in one tree. Each class says what it means and what to do.

Messages name the field and the remedy and never hold a payload, a DSN or a password.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayq.model import Cancel, Reschedule, ScheduledTask


class DelayQError(Exception):
    """The root: catch it to catch everything that delayq raises on purpose."""


# --- the caller's input ---------------------------------------------------------------------


class InvalidArgument(DelayQError, ValueError):
    """An argument was refused before anything was written. Correct the named field.

    `field` is the argument's name, for programs that show errors beside a form.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class InvalidSettings(DelayQError, ValueError):
    """A setting is malformed or contradicts another one. Correct the named `DELAYQ_…` variable."""


class RegistrationError(DelayQError):
    """A handler cannot be registered: its kind is taken, or its signature cannot be called."""


class UnknownKind(DelayQError, LookupError):
    """This process has no handler of that kind. Import its module, or use `send`."""


class ApplicationNotFound(DelayQError):
    """`MODULE:APP` does not import or is no DelayQ. Correct the module path or the import error."""


# --- answers that are errors on request ---------------------------------------------------------


class KeyTaken(DelayQError):
    """`on_conflict="error"` and a live task (`task_id`) holds the key. Nothing was written."""

    def __init__(self, kind: str, task_id: int) -> None:
        super().__init__(
            f"key: a live task of kind {kind!r} already holds this key (task {task_id}); "
            "use on_conflict='keep' or 'replace', or cancel that task first"
        )
        self.kind = kind
        self.task_id = task_id


class TransactionConflict(DelayQError):
    """The caller's transaction conflicts with another one (isolation level, or deadlock).

    Nothing was decided. Roll back and run the transaction again.
    """


class BulkStopped(DelayQError):
    """A bulk verb stopped half-way; what its earlier statements did is committed and stays.

    `__cause__` is what stopped it. Doing the same again goes on where it stopped: cancels and
    moves always, schedules of requests that have an `idempotency_key` (or a `key`, as long as
    its task lives), unless the cause is one that stays.
    """

    done: int
    """how many were stored, or answered"""
    tasks: list[ScheduledTask | None]
    """schedule_many: in the order of the requests that were taken. None: not stored, or in doubt"""
    answers: dict[int, Cancel] | dict[int, Reschedule]
    """cancel_many, reschedule_many: by id"""

    def __init__(self, done: int, cause: BaseException) -> None:
        super().__init__(f"stopped after {done}, which stay done: {cause}")
        self.done = done
        self.tasks = []
        self.answers = {}

    @property
    def in_doubt(self) -> bool:
        """True if the statement that failed may have been carried out all the same."""
        return getattr(self.__cause__, "in_doubt", False)


# --- the database -----------------------------------------------------------------------------


class DatabaseError(DelayQError):
    """The database refused or failed a statement for a reason that has no class of its own."""

    sqlstate: str = ""
    """the server's five-character code, if it was the server that refused"""
    constraint: str = ""
    """the constraint or column that was broken, if it was one"""
    in_doubt: bool = False
    """no answer came, so it may have been done all the same; the message says what is safe"""


class DatabaseUnavailable(DatabaseError):
    """The database cannot be reached, or is going away. Try again; see `delayq doctor`."""


class DatabaseTimeout(DatabaseError):
    """A statement, a lock or a connection took longer than its limit. The outcome is unknown."""


class AuthenticationFailed(DatabaseError):
    """Client or server are not who they should be: the password is wrong, the role may not
    connect, or a certificate is not trusted. The message says which; correct the DSN, the role
    or the certificate."""


class PrivilegeMissing(DatabaseError):
    """The role lacks a privilege. Grant it `delayq_app` (schedules) or `delayq_node` (runs)."""


class SchemaMissing(DatabaseError):
    """The database has no delayq schema. Run `delayq migrate`."""


class SchemaTooOld(DatabaseError):
    """The schema is older than this program. Run `delayq migrate` with this version."""


class SchemaTooNew(DatabaseError):
    """The schema is newer than this program. Upgrade delayq; nothing was touched."""


class MigrationError(DatabaseError):
    """A migration was edited after it was applied, is missing, or failed; the message says."""


class EmbeddedError(DelayQError):
    """The embedded PostgreSQL cannot be found or started. The message names the ways out."""


# --- execution ----------------------------------------------------------------------------------


class LeaseLost(DelayQError):
    """This node no longer owns the task: another one runs it, or it was cancelled.

    Raised inside `ctx.effect()`; everything in the block was rolled back. Do nothing.
    """


class ArgumentsRefused(DelayQError):
    """The stored arguments do not fit the handler's signature (an older or newer one wrote them).

    Names fields and error types, never values. The task is released with back-off, since a
    newer node may understand it.
    """


class EffectInterrupted(DelayQError):
    """The node's event loop ended or did not answer while a plain handler was in its effect.

    The block is rolled back, unless its commit was already under way: the lease tells.
    """


class EffectMisused(DelayQError):
    """`ctx.effect()` was entered twice in one attempt, or outside its attempt. One effect each."""


class EffectAlreadyApplied(BaseException):
    """The effect of this idempotency key was committed before: the rest of the handler is skipped.

    Raised by entering `ctx.effect()` and counted as success. It is a BaseException so that a
    handler's own `except Exception` does not swallow it. Let it pass.
    """


class HandlerOutcome(Exception):
    """What a handler may raise (or return) to choose how its attempt ends."""


class Retry(HandlerOutcome):
    """Run again after `after` (default: the back-off of the handler); counts as an attempt."""

    def __init__(self, after: timedelta | float | None = None) -> None:
        super().__init__("retry")
        self.after = after


class Snooze(HandlerOutcome):
    """Not yet: run again after `after`; the attempt is given back."""

    def __init__(self, after: timedelta | float) -> None:
        super().__init__("snooze")
        self.after = after


class Dead(HandlerOutcome):
    """Never again: the task goes to the dead tasks with this reason."""

    def __init__(self, reason: str = "the handler gave up") -> None:
        super().__init__(reason)
        self.reason = reason
