"""The words of delayq as types: states, answers, and the task as its callers see it.

Nothing here does anything. Instants are aware datetimes in UTC on the public types and
integer microseconds since 1970 (fields that end in `_us`) inside; both are readings of the
database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple


class TaskState(StrEnum):
    """Where a task is. Pending and running are live; the others are final."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    MISSED = "missed"
    DEAD = "dead"

    @property
    def live(self) -> bool:
        """True while the task may still fire."""
        return self in (TaskState.PENDING, TaskState.RUNNING)


class NodeState(StrEnum):
    """Where a node is in its life. Only an active node is given tasks of its own."""

    JOINING = "joining"
    ACTIVE = "active"
    DRAINING = "draining"
    DEAD = "dead"


class OnConflict(StrEnum):
    """What to do when a live task of the same kind already holds the key."""

    KEEP = "keep"
    REPLACE = "replace"
    ERROR = "error"


class Cancel(StrEnum):
    """The answer to `cancel`. True as a boolean only if the task will certainly not run."""

    CANCELLED = "cancelled"
    CANCEL_REQUESTED = "cancel_requested"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"

    def __bool__(self) -> bool:
        return self is Cancel.CANCELLED


class Reschedule(StrEnum):
    """The answer to `reschedule` and `run_now`. True as a boolean if the task was moved.

    `RETRY_MOVED` says that the task had failed before and was waiting for a retry: its
    attempts still count.
    """

    MOVED = "moved"
    RETRY_MOVED = "retry_moved"
    RUNNING = "running"
    ALREADY_FINISHED = "already_finished"
    DEAD = "dead"
    NOT_FOUND = "not_found"

    def __bool__(self) -> bool:
        return self in (Reschedule.MOVED, Reschedule.RETRY_MOVED)


class Revive(StrEnum):
    """The answer to `revive`. True as a boolean if the dead task is pending again."""

    REVIVED = "revived"
    KEY_TAKEN = "key_taken"
    LIVE = "live"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"

    def __bool__(self) -> bool:
        return self is Revive.REVIVED


class Discard(StrEnum):
    """The answer to `discard`. True as a boolean if a dead task was removed for good."""

    DISCARDED = "discarded"
    LIVE = "live"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"

    def __bool__(self) -> bool:
        return self is Discard.DISCARDED


class TaskRequest(NamedTuple):
    """One validated and encoded wish to schedule, independent of how it travels.

    Exactly one of `delay_us` (counted from the database's clock when the row is written) and
    `execute_at_us` is set. `payload` and `headers` are JSON text. (A tuple because it is made in a
    third of the time of a frozen dataclass, which counts where very many are scheduled.)
    """

    kind: str
    payload: str = "{}"
    delay_us: int | None = None
    execute_at_us: int | None = None
    key: str | None = None
    on_conflict: OnConflict = OnConflict.KEEP
    idempotency_key: str | None = None
    priority: int = 0
    max_attempts: int | None = None
    timeout_ms: int | None = None
    misfire_grace_ms: int | None = None
    headers: str = "{}"

    @property
    def alone(self) -> bool:
        """True if the request may have to wait for a stranger, so must not share a statement."""
        return self.key is not None or self.idempotency_key is not None


@dataclass(frozen=True, slots=True)
class ScheduledTask:
    """What `schedule` answers: the surviving task.

    `created` is False if a live task with the key, or an earlier request with the idempotency
    key, was found instead; `state` is then that task's. `follow_up` is the id of the successor
    that waits for a running task to end (`on_conflict="replace"`).
    """

    id: int
    kind: str
    created: bool
    state: TaskState | None
    execute_at: datetime | None
    follow_up: int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One task as it stands, read from wherever it lives now.

    `payload` is None if history no longer keeps it (payloads above 4 KiB). Instants are aware
    datetimes in UTC by the database's clock. `node` is the incarnation that runs or ran it.
    """

    id: int
    kind: str
    state: TaskState
    payload: Any
    headers: dict[str, Any]
    key: str | None
    idempotency_key: str | None
    priority: int
    due_at: datetime
    execute_at: datetime
    created_at: datetime
    attempt: int
    max_attempts: int | None
    timeout_ms: int | None
    misfire_grace_ms: int | None
    interruptions: int
    errors: list[dict[str, Any]] = field(default_factory=list)
    cancel_requested: bool = False
    node: int | None = None
    leased_at: datetime | None = None
    deadline_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    lateness_us: int | None = None
    follow_up: int | None = None


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One row of the node table, with what the node said of itself at its last beat."""

    id: int
    name: str
    host: str
    pid: int
    version: str
    kinds: list[str]
    state: NodeState
    started_at: datetime
    expires_at: datetime
    counters: dict[str, int]
