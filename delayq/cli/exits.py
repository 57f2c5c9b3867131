"""The exit codes, and which error means which. They are stable: scripts rely on them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from delayq import errors


class Exit(IntEnum):
    """What the process says when it leaves; 128 + n means that signal n ended it."""

    OK = 0
    NO = 1
    USAGE = 2
    DATABASE = 3
    SCHEMA = 4
    APPLICATION = 5
    INTERNAL = 70


EXIT_CODES: Final = """\
\b
Exit codes:
  0    done; the answer is yes
  1    the answer is no: there was nothing to cancel or to move, the key is
       taken, or doctor found a failure
  2    wrong usage, input or settings
  3    the database is unreachable or refused the work
  4    the schema is missing, too old or too new: see `delayq migrate`
  5    the application MODULE:APP cannot be loaded
  70   a mistake in delayq itself
  130  ended by SIGINT      143  ended by SIGTERM
"""

# The first that fits, so the narrow ones go first.
_BY_ERROR: Final[tuple[tuple[type[BaseException], Exit], ...]] = (
    (errors.ApplicationNotFound, Exit.APPLICATION),
    (errors.RegistrationError, Exit.APPLICATION),
    (errors.KeyTaken, Exit.NO),
    (errors.InvalidArgument, Exit.USAGE),
    (errors.InvalidSettings, Exit.USAGE),
    (errors.UnknownKind, Exit.USAGE),
    (errors.SchemaMissing, Exit.SCHEMA),
    (errors.SchemaTooOld, Exit.SCHEMA),
    (errors.SchemaTooNew, Exit.SCHEMA),
    (errors.MigrationError, Exit.SCHEMA),
    (errors.DatabaseError, Exit.DATABASE),
    (errors.TransactionConflict, Exit.DATABASE),
    (errors.EmbeddedError, Exit.DATABASE),
)


def exit_for(error: BaseException) -> Exit:
    """The exit code of an error; a stranger is a mistake of ours."""
    if isinstance(error, errors.BulkStopped) and error.__cause__ is not None:
        error = error.__cause__
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), Exit.INTERNAL)
