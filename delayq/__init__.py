"""delayq: do X in 5 minutes. A delayed-task scheduler that needs nothing but PostgreSQL."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "ApplicationNotFound",
    "ArgumentsRefused",
    "AuthenticationFailed",
    "BulkStopped",
    "Cancel",
    "Context",
    "DatabaseError",
    "DatabaseTimeout",
    "DatabaseUnavailable",
    "Dead",
    "DelayQ",
    "DelayQError",
    "Discard",
    "EffectAlreadyApplied",
    "EffectInterrupted",
    "EffectMisused",
    "EmbeddedError",
    "InvalidArgument",
    "InvalidSettings",
    "KeyTaken",
    "LeaseLost",
    "MigrationError",
    "NodeInfo",
    "NodeState",
    "OnConflict",
    "PrivilegeMissing",
    "RegistrationError",
    "Reschedule",
    "Retry",
    "Revive",
    "ScheduledTask",
    "SchemaMissing",
    "SchemaTooNew",
    "SchemaTooOld",
    "Settings",
    "Snooze",
    "Task",
    "TaskRequest",
    "TaskState",
    "TransactionConflict",
    "UnknownKind",
    "__version__",
    "load_settings",
]

if TYPE_CHECKING:
    from delayq.app import DelayQ
    from delayq.context import Context
    from delayq.errors import (
        ApplicationNotFound,
        ArgumentsRefused,
        AuthenticationFailed,
        BulkStopped,
        DatabaseError,
        DatabaseTimeout,
        DatabaseUnavailable,
        Dead,
        DelayQError,
        EffectAlreadyApplied,
        EffectInterrupted,
        EffectMisused,
        EmbeddedError,
        InvalidArgument,
        InvalidSettings,
        KeyTaken,
        LeaseLost,
        MigrationError,
        PrivilegeMissing,
        RegistrationError,
        Retry,
        SchemaMissing,
        SchemaTooNew,
        SchemaTooOld,
        Snooze,
        TransactionConflict,
        UnknownKind,
    )
    from delayq.model import (
        Cancel,
        Discard,
        NodeInfo,
        NodeState,
        OnConflict,
        Reschedule,
        Revive,
        ScheduledTask,
        Task,
        TaskRequest,
        TaskState,
    )
    from delayq.settings import Settings, load_settings

    __version__: str
else:

    def __getattr__(name: str) -> object:
        """Import a name's room when it is first used: signals must find their handler before."""
        if name == "__version__":
            return import_module("delayq.version").VERSION
        for room in ("errors", "model", "context", "settings", "app") if name in __all__ else ():
            module = import_module(f"delayq.{room}")
            if hasattr(module, name):
                return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module 'delayq' has no attribute {name!r}")
