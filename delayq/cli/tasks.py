"""The verbs that change tasks: schedule, cancel, reschedule, run-now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict, TypeVar, Unpack

import click

from delayq.cli.bulk import check_prefix_given, prefix_option, say_all
from delayq.cli.exits import Exit
from delayq.cli.options import Invocation, pass_invocation, shared_options
from delayq.cli.output import answer, write_line
from delayq.cli.signals import run_until_signal
from delayq.cli.task_view import scheduled_document, scheduled_text
from delayq.cli.values import Duration, Instant, TaskId, headers_of, payload_text, when, word_of
from delayq.cli.verbs import verbs_of
from delayq.model import Cancel, OnConflict, Reschedule, ScheduledTask, TaskRequest
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
@prefix_option
@shared_options
@pass_invocation
def cancel(invocation: Invocation, key_prefix: str | None, **target: Unpack[Target]) -> Exit:
    """Cancel a task, by ID or by --kind and --key, or many by --kind and --key-prefix.

    Exit code 0: it will not run (cancelled), or it runs just now and was asked to end
    (cancel_requested). 1: already_finished or not_found; of many: there was none.
    """
    if key_prefix is not None:
        kind = check_prefix_given(**target)
        answers = run_until_signal(_cancel_many(invocation, kind, key_prefix))
        return say_all(invocation, answers, (Cancel.CANCELLED, Cancel.CANCEL_REQUESTED))
    check_target_given(target)
    said = run_until_signal(_cancel(invocation, target))
    no = said in (Cancel.ALREADY_FINISHED, Cancel.NOT_FOUND)
    return say(invocation, target, said, no=no)


async def _cancel(invocation: Invocation, target: Target) -> Cancel:
    async with verbs_of(invocation) as verbs:
        return await verbs.cancel(**target)


async def _cancel_many(invocation: Invocation, kind: str, key_prefix: str) -> Mapping[int, Cancel]:
    async with verbs_of(invocation) as verbs:
        return await verbs.cancel_many(kind=kind, key_prefix=key_prefix)


@click.command("reschedule")
@target_options
@prefix_option
@when_options
@shared_options
@pass_invocation
def reschedule(
    invocation: Invocation,
    delay: timedelta | None,
    at: datetime | None,
    key_prefix: str | None,
    **target: Unpack[Target],
) -> Exit:
    """Move a pending task to another instant, by ID or by --kind and --key, or many by --kind
    and --key-prefix.

    Exit code 0: moved, or retry_moved (it had failed before; its attempts still count). 1:
    running, already_finished, dead or not_found; of many: one was running, or there was none.
    """
    if key_prefix is not None:
        kind = check_prefix_given(**target)
        answers = run_until_signal(_reschedule_many(invocation, (kind, key_prefix), delay, at))
        return say_all(invocation, answers, (Reschedule.MOVED, Reschedule.RETRY_MOVED))
    check_target_given(target)
    return _moved(invocation, target, run_until_signal(_reschedule(invocation, target, delay, at)))


async def _reschedule(
    invocation: Invocation, target: Target, delay: timedelta | None, at: datetime | None
) -> Reschedule:
    delay_or_not, at_or_not = when(delay, at)
    async with verbs_of(invocation) as verbs:
        return await verbs.reschedule(**target, delay=delay_or_not, at=at_or_not)


async def _reschedule_many(
    invocation: Invocation, which: tuple[str, str], delay: timedelta | None, at: datetime | None
) -> Mapping[int, Reschedule]:
    kind, key_prefix = which
    delay_or_not, at_or_not = when(delay, at)
    async with verbs_of(invocation) as verbs:
        return await verbs.reschedule_many(
            kind=kind, key_prefix=key_prefix, delay=delay_or_not, at=at_or_not
        )


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
