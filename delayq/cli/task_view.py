"""Tasks as JSON and as text. Ids are text in JSON: 63 bits do not fit a reader's double."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Final

from delayq.cli.output import sound
from delayq.cli.text import clipped, iso, neutral, short, span
from delayq.model import ScheduledTask, Task

TASK_COLUMNS: Final = ("ID", "KIND", "STATE", "EXECUTE AT", "ATTEMPT", "KEY", "LAST ERROR")
_IDS: Final = frozenset({"id", "node", "follow_up"})
_TEXTS: Final = frozenset({"payload", "headers", "errors"})


def _id(value: int | None) -> str | None:
    return None if value is None else str(value)


def scheduled_document(task: ScheduledTask) -> dict[str, object]:
    """The answer to `schedule` as JSON."""
    return {
        "id": _id(task.id),
        "kind": task.kind,
        "created": task.created,
        "state": task.state,
        "execute_at": iso(task.execute_at),
        "follow_up": _id(task.follow_up),
    }


def scheduled_text(task: ScheduledTask) -> str:
    """The answer to `schedule` as a line."""
    fires = f", fires at {short(task.execute_at)}" if task.execute_at else ""
    if task.follow_up is not None:
        return f"task {task.id} runs just now; task {task.follow_up} follows it"
    if task.created:
        return f"task {task.id}: {clipped(task.kind)}{fires}"
    return f"task {task.id} was there already: {task.state or 'forgotten'}{fires}"


def task_document(task: Task, *, payload: bool = True) -> dict[str, object]:
    """A task as JSON, with or without its payload."""
    document: dict[str, object] = {}
    for field in fields(task):
        value = getattr(task, field.name)
        document[field.name] = _id(value) if field.name in _IDS else value
    if not payload:
        del document["payload"]
    return document


def page_document(tasks: list[Task], limit: int) -> dict[str, object]:
    """A page of tasks as JSON; `next` is where the following one begins, if there may be one."""
    return {
        "tasks": [task_document(task, payload=False) for task in tasks],
        "next": _id(tasks[-1].id) if len(tasks) == limit else None,
    }


def fields_of(task: Task) -> list[tuple[str, object]]:
    """A task as name and value, for people."""
    shown: list[tuple[str, object]] = []
    for field in fields(task):
        value = getattr(task, field.name)
        if field.name == "errors":
            shown += [(f"error {_attempt(error)}", _error(error)) for error in value]
        elif value or field.name in ("attempt", "payload"):
            shown.append((field.name.replace("_", " "), _shown(field.name, value)))
    return shown


def _shown(name: str, value: object) -> object:
    if name in _TEXTS:
        return json.dumps(sound(value), ensure_ascii=True)
    if name.endswith("_at"):
        return iso(value)  # type: ignore[arg-type]  # by the name
    if name == "lateness_us" and isinstance(value, int):
        return span(value)
    if name.endswith("_ms") and isinstance(value, int):
        return span(value * 1_000)
    return value


def row_of(task: Task) -> tuple[object, ...]:
    """A task as a row of `list`."""
    return (
        task.id,
        clipped(task.kind, 40),
        f"{task.state}, cancel requested" if task.cancel_requested else task.state,
        short(task.execute_at),
        task.attempt,
        None if task.key is None else clipped(task.key, 40),
        clipped(_error(task.errors[-1]), 60) if task.errors else None,
    )


def _attempt(error: object) -> str:
    return neutral(error.get("attempt", "")) if isinstance(error, dict) else ""


def _error(error: object) -> str:
    """One stored error on a line, whatever was stored."""
    if not isinstance(error, dict):
        return neutral(error)
    return neutral(": ".join(str(error[part]) for part in ("error", "message") if error.get(part)))
