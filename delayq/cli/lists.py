"""The verbs that look at tasks: show, list."""

from __future__ import annotations

from typing import TypedDict, Unpack

import click

from delayq.cli.exits import Exit
from delayq.cli.options import Invocation, limit_option, pass_invocation, shared_options
from delayq.cli.output import answer, write_fields, write_line, write_table
from delayq.cli.signals import run_until_signal
from delayq.cli.task_view import TASK_COLUMNS, fields_of, page_document, row_of, task_document
from delayq.cli.values import TaskId, word_of
from delayq.cli.verbs import verbs_of
from delayq.model import Task, TaskState


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
