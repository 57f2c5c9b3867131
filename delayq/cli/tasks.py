"""The verbs about one task: schedule, cancel, reschedule, run-now; and show, list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict, TypeVar, Unpack

import click

from delayq.cli.exits import Exit
from delayq.cli.options import Invocation, limit_option, pass_invocation, shared_options
from delayq.cli.output import answer, write_fields, write_line, write_table
from delayq.cli.signals import run_until_signal
from delayq.cli.task_view import (
    TASK_COLUMNS,
    fields_of,
    page_document,
    row_of,
    scheduled_document,
    scheduled_text,
    task_document,
)
from delayq.cli.values import Duration, Instant, TaskId, headers_of, payload_text, when, word_of
from delayq.cli.verbs import verbs_of
from delayq.model import Cancel, OnConflict, Reschedule, ScheduledTask, Task, TaskRequest, TaskState
from delayq.request import build_request

F = TypeVar("F", bound=Callable[..., Any])


class Target(TypedDict):
    """Which task: by id, or by kind and key."""

    id: int | None
    kind: str | None
    key: str | None


class ScheduleOptions(TypedDict):
    """The options of `schedule` that go into the request as they are."""

    key: str | None
    on_conflict: OnConflict
    idempotency_key: str | None
    priority: int
    max_attempts: int | None
    timeout: timedelta | None
    misfire_grace: timedelta | None


def target_options(command: F) -> F:
    """ID, or `--kind` and `--key`."""
    command = click.option("--key", help="Name the live task by its key (with --kind).")(command)
    command = click.option("--kind", help="The kind that the key belongs to.")(command)
    return click.argument("id", type=TaskId(), required=False)(command)


def when_options(command: F) -> F:
    """`--in` and `--at`."""
    command = click.option(
        "--at", type=Instant(), help="At an instant with its offset, like 2026-05-01T09:00:00Z."
    )(command)
    return click.option(
        "--in", "delay", type=Duration(), help="After a delay, like 90s, 5m or 1h30m; 0s is now."
    )(command)


# --- schedule -----------------------------------------------------------------------------------


@click.command("schedule")
@click.argument("kind")
@click.argument("payload", required=False)
@when_options
@click.option("--key", help="A handle for the live task, unique within its kind.")
@click.option(
    "--on-conflict",
    type=click.Choice([choice.value for choice in OnConflict]),
    callback=word_of(OnConflict),
    default=OnConflict.KEEP.value,
    show_default=True,
    help="What to do if a live task holds the key.",
)
@click.option("--idempotency-key", help="Names this request: sending it again schedules nothing.")
@click.option("--priority", type=click.IntRange(-100, 100), default=0, show_default=True)
@click.option("--max-attempts", type=click.IntRange(1, 10_000), help="Default: the handler's.")
@click.option("--timeout", type=Duration(), help="Longest run. Default: the handler's.")
@click.option("--misfire-grace", type=Duration(), help="Fired later than this, it is missed.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Repeatable.")
@shared_options
@pass_invocation
def schedule(
    invocation: Invocation,
    kind: str,
    payload: str | None,
    delay: timedelta | None,
    at: datetime | None,
    headers: Sequence[str],
    **options: Unpack[ScheduleOptions],
) -> None:
    """Schedule a task of KIND. PAYLOAD is a JSON object by argument name; - reads it from stdin.

    What is typed here can be seen in the process list and the shell's history: give secrets
    through standard input.
    """
    delay_or_not, at_or_not = when(delay, at)
    request = build_request(
        kind,
        payload_text(payload, invocation.settings().payload_max_bytes),
        delay=delay_or_not,
        at=at_or_not,
        headers=headers_of(headers),
        **options,
    )
    task = run_until_signal(_schedule(invocation, request))
    answer(
        invocation.json,
        scheduled_document(task),
        lambda: write_line(scheduled_text(task)),
    )


async def _schedule(invocation: Invocation, request: TaskRequest) -> ScheduledTask:
    async with verbs_of(invocation) as verbs:
        return await verbs.schedule(request)


# --- the verbs with an answer -------------------------------------------------------------------


@click.command("cancel")
@target_options
@shared_options
@pass_invocation
def cancel(invocation: Invocation, **target: Unpack[Target]) -> Exit:
    """Cancel a task, by ID or by --kind and --key.

    Exit code 0: it will not run (cancelled), or it runs just now and was asked to end
    (cancel_requested). 1: already_finished or not_found.
    """
    check_target_given(target)
    said = run_until_signal(_cancel(invocation, target))
    no = said in (Cancel.ALREADY_FINISHED, Cancel.NOT_FOUND)
    return say(invocation, target, said, no=no)


async def _cancel(invocation: Invocation, target: Target) -> Cancel:
    async with verbs_of(invocation) as verbs:
        return await verbs.cancel(**target)


@click.command("reschedule")
@target_options
@when_options
@shared_options
@pass_invocation
def reschedule(
    invocation: Invocation,
    delay: timedelta | None,
    at: datetime | None,
    **target: Unpack[Target],
) -> Exit:
    """Move a pending task to another instant, by ID or by --kind and --key.

    Exit code 0: moved, or retry_moved (it had failed before; its attempts still count). 1:
    running, already_finished, dead or not_found.
    """
    check_target_given(target)
    return _moved(invocation, target, run_until_signal(_reschedule(invocation, target, delay, at)))


async def _reschedule(
    invocation: Invocation, target: Target, delay: timedelta | None, at: datetime | None
) -> Reschedule:
    delay_or_not, at_or_not = when(delay, at)
    async with verbs_of(invocation) as verbs:
        return await verbs.reschedule(**target, delay=delay_or_not, at=at_or_not)


@click.command("run-now")
@target_options
@shared_options
@pass_invocation
def run_now(invocation: Invocation, **target: Unpack[Target]) -> Exit:
    """Let a pending task fire at once, by ID or by --kind and --key. Answers like reschedule."""
    check_target_given(target)
    return _moved(invocation, target, run_until_signal(_run_now(invocation, target)))


async def _run_now(invocation: Invocation, target: Target) -> Reschedule:
    async with verbs_of(invocation) as verbs:
        return await verbs.run_now(**target)


def check_target_given(target: Target) -> None:
    """A usage error unless the task is named in one of the two ways."""
    by_id = target["id"] is not None
    by_key = target["kind"] is not None and target["key"] is not None
    half = (target["kind"] is None) != (target["key"] is None)
    if by_id == by_key or half:
        raise click.UsageError("name the task by its ID, or by --kind and --key")


def _moved(invocation: Invocation, target: Target, said: Reschedule) -> Exit:
    return say(invocation, target, said, no=not said)


def say(invocation: Invocation, target: Target, said: str, *, no: bool) -> Exit:
    """Give an enum as the answer, and the exit code that goes with it."""
    id = target["id"]
    document = {"answer": str(said), "id": None if id is None else str(id)}
    document |= {"kind": target["kind"], "key": target["key"]} if id is None else {}
    answer(invocation.json, document, lambda: write_line(str(said).replace("_", " ")))
    return Exit.NO if no else Exit.OK


# --- looking ------------------------------------------------------------------------------------


@click.command("show")
@click.argument("id", type=TaskId())
@shared_options
@pass_invocation
def show(invocation: Invocation, id: int) -> Exit:
    """Show one task with its payload and errors, wherever it is. Exit code 1: not found."""
    task = run_until_signal(_get(invocation, id))
    document = {"task": None if task is None else task_document(task)}
    answer(invocation.json, document, lambda: _show(task))
    return Exit.NO if task is None else Exit.OK


def _show(task: Task | None) -> None:
    if task is None:
        write_line("not found")
    else:
        write_fields(fields_of(task))


async def _get(invocation: Invocation, id: int) -> Task | None:
    async with verbs_of(invocation) as verbs:
        return await verbs.get(id)


class ListOptions(TypedDict):
    """What is listed."""

    state: TaskState | None
    kind: str | None
    key: str | None
    limit: int
    after_id: int | None


@click.command("list")
@click.option(
    "--state", type=click.Choice([state.value for state in TaskState]), callback=word_of(TaskState)
)
@click.option("--kind")
@click.option("--key")
@limit_option(50)
@click.option("--after", "after_id", type=TaskId(), help="Go on after this id (see `next`).")
@shared_options
@pass_invocation
def list_tasks(invocation: Invocation, **options: Unpack[ListOptions]) -> None:
    """List live tasks by id, or those of one --state (finished ones from the newest back).

    A page at a time: --after the last id shows the next. Payloads are shown by `show` alone.
    """
    show_page(invocation, options)


def show_page(invocation: Invocation, options: ListOptions) -> None:
    """Print one page of tasks."""
    tasks = run_until_signal(_list(invocation, options))
    document = page_document(tasks, options["limit"])
    answer(invocation.json, document, lambda: _show_page(tasks, options["limit"]))


async def _list(invocation: Invocation, options: ListOptions) -> list[Task]:
    async with verbs_of(invocation) as verbs:
        return await verbs.list(**options)


def _show_page(tasks: list[Task], limit: int) -> None:
    write_table(TASK_COLUMNS, [row_of(task) for task in tasks], "no such tasks")
    if len(tasks) == limit:
        write_line(f"… more may follow: --after {tasks[-1].id}")
