"""`delayq dead`: the tasks that gave up. People revive or discard them; nothing else does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Final, TypeAlias

import click

from delayq.cli.exits import Exit
from delayq.cli.lists import ListOptions, show_page
from delayq.cli.options import Invocation, limit_option, pass_invocation, shared_options
from delayq.cli.place import connection
from delayq.cli.signals import run_until_signal
from delayq.cli.tally import Tally, exit_of, report
from delayq.cli.text import one_line
from delayq.cli.values import Duration, TaskId
from delayq.cli.verbs import client
from delayq.client import Client
from delayq.database import Database
from delayq.errors import DatabaseError, DatabaseTimeout, DatabaseUnavailable, SchemaMissing
from delayq.model import Discard, Revive, TaskState
from delayq.place import open_database
from delayq.report_store import ReportStore

_BATCH: Final = 500

Act: TypeAlias = Callable[[Client, Sequence[int]], Awaitable[Mapping[int, StrEnum]]]
Chosen: TypeAlias = tuple[int, ...] | str  # ids, or all of a kind


@click.group("dead")
def dead() -> None:
    """List, revive or discard dead tasks: those that ran out of attempts or gave up."""


@dead.command("list")
@click.option("--kind")
@click.option("--key")
@limit_option(50)
@click.option("--after", "after_id", type=TaskId(), help="Go on after this id (see `next`).")
@shared_options
@pass_invocation
def list_dead(
    invocation: Invocation, kind: str | None, key: str | None, limit: int, after_id: int | None
) -> None:
    """List dead tasks with their last error, a page at a time."""
    options = ListOptions(state=TaskState.DEAD, kind=kind, key=key, limit=limit, after_id=after_id)
    show_page(invocation, options)


@dead.command("revive")
@click.argument("ids", type=TaskId(), nargs=-1)
@click.option("--kind", help="With --all: every dead task of this kind.")
@click.option("--all", "every", is_flag=True, help="All of --kind.")
@click.option("--spread", type=Duration(), help="Let them fire spread over this time from now.")
@shared_options
@pass_invocation
def revive(
    invocation: Invocation,
    ids: tuple[int, ...],
    kind: str | None,
    every: bool,
    spread: timedelta | None,
) -> Exit:
    """Bring dead tasks back to pending, with all their attempts: some IDS, or --kind K --all.

    Exit code 1 if one could not be: its key is taken, it is not dead, or its row is refused.
    """
    chosen = _chosen(ids, kind, every)

    async def act(verbs: Client, batch: Sequence[int]) -> Mapping[int, StrEnum]:
        return await verbs.revive_many(batch, spread=spread or timedelta())

    return _report(
        invocation, run_until_signal(_go_through(invocation, chosen, act)), Revive.REVIVED
    )


@dead.command("discard")
@click.argument("ids", type=TaskId(), nargs=-1)
@click.option("--kind", help="With --all: every dead task of this kind.")
@click.option("--all", "every", is_flag=True, help="All of --kind.")
@shared_options
@pass_invocation
def discard(invocation: Invocation, ids: tuple[int, ...], kind: str | None, every: bool) -> Exit:
    """Remove dead tasks for good: some IDS, or --kind K --all. There is no way back.

    Exit code 1 if one could not be: it is not dead.
    """
    chosen = _chosen(ids, kind, every)

    async def act(verbs: Client, batch: Sequence[int]) -> Mapping[int, StrEnum]:
        return await verbs.discard_many(batch)

    return _report(
        invocation, run_until_signal(_go_through(invocation, chosen, act)), Discard.DISCARDED
    )


def _chosen(ids: tuple[int, ...], kind: str | None, every: bool) -> Chosen:
    if ids and not (kind or every):
        return ids
    if kind and every and not ids:
        return kind
    raise click.UsageError("give the ids of the tasks, or --kind with --all")


async def _go_through(invocation: Invocation, chosen: Chosen, act: Act) -> Tally:
    tally = Tally()
    settings = invocation.settings()
    async with open_database(settings) as place, client(place, settings) as verbs:
        async for batch in _batches(place, chosen):
            await _act(verbs, batch, act, tally)
    return tally


async def _batches(place: Database, chosen: Chosen) -> AsyncIterator[Sequence[int]]:
    """The ids in bounded batches; those of a kind are read as they are needed."""
    if not isinstance(chosen, str):
        for start in range(0, len(chosen), _BATCH):
            yield chosen[start : start + _BATCH]
        return
    async with connection(place) as conn:
        after = 0
        while ids := await ReportStore(conn).dead_ids(chosen, after, _BATCH):
            yield ids
            after = ids[-1]


async def _act(verbs: Client, batch: Sequence[int], act: Act, tally: Tally) -> None:
    """Act on a batch; on its halves if the database refuses it: one odd row fails alone."""
    try:
        answers = await act(verbs, batch)
    except (DatabaseUnavailable, DatabaseTimeout, SchemaMissing):
        raise
    except DatabaseError as error:
        if len(batch) == 1:
            tally.failed[batch[0]] = one_line(error)
            return
        half = len(batch) // 2
        await _act(verbs, batch[:half], act, tally)
        await _act(verbs, batch[half:], act, tally)
    else:
        tally.add(answers)


def _report(invocation: Invocation, tally: Tally, good: StrEnum) -> Exit:
    report(invocation, tally, {good}, "no dead tasks")
    return exit_of(tally, {good})
