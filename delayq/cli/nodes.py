"""`nodes` and `drain`: who runs tasks; `pause` and `resume`: which kinds they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from delayq.cli.exits import Exit
from delayq.cli.figures import NodeFigures, node_of
from delayq.cli.options import Invocation, pass_invocation, shared_options
from delayq.cli.output import answer, write_line, write_table
from delayq.cli.place import reports
from delayq.cli.signals import run_until_signal
from delayq.cli.stats_json import node_document
from delayq.cli.text import clipped, instant, short
from delayq.cli.verbs import verbs_of

_NODES: Final = 1_000
_COLUMNS: Final = ("NODE", "NAME", "HOST", "PID", "VERSION", "STATE", "STARTED", "KINDS")


@click.command("nodes")
@shared_options
@pass_invocation
def nodes(invocation: Invocation) -> None:
    """List the nodes: who runs tasks, of which kinds, and whether they are alive."""
    found = run_until_signal(_nodes(invocation))
    document = {"nodes": [node_document(node) for node in found]}
    rows = [_row(node) for node in found]
    answer(invocation.json, document, lambda: write_table(_COLUMNS, rows, "no nodes"))


async def _nodes(invocation: Invocation) -> list[NodeFigures]:
    async with reports(invocation) as store:
        return [node_of(row) for row in await store.nodes(_NODES)]


def _row(node: NodeFigures) -> tuple[object, ...]:
    silent = not node.live and node.state != "dead"
    return (
        node.id,
        clipped(node.name, 30),
        clipped(node.host, 30),
        node.pid,
        clipped(node.version, 20),
        f"{node.state}, silent" if silent else node.state,
        short(instant(node.started_us)),
        clipped(", ".join(node.kinds), 60),
    )


@click.command("drain", context_settings={"ignore_unknown_options": True})
@click.argument("node")
@shared_options
@pass_invocation
def drain(invocation: Invocation, node: str) -> Exit:
    """Ask a node to drain: it fires no more, lets what runs end, hands over and leaves.

    NODE is its number, or its name if only one live node has it. Returns at once. Exit code 1:
    there is no such node, or it leaves already.
    """
    asked = run_until_signal(_drain(invocation, node))
    document = {"answer": "asked" if asked else "not_found", "node": asked and str(asked)}
    text = f"node {asked} was asked to drain" if asked else "no such node that could drain"
    answer(invocation.json, document, lambda: write_line(text))
    return Exit.OK if asked else Exit.NO


async def _drain(invocation: Invocation, node: str) -> int | None:
    """The id of the node that was asked, or None."""
    id = one_of(await _nodes(invocation), node)
    if id is None:
        return None
    async with verbs_of(invocation) as verbs:
        return id if await verbs.drain_node(id) else None


def one_of(found: Sequence[NodeFigures], wanted: str) -> int | None:
    """The id of the node with that number, or of the only live one with that name."""
    if any(str(node.id) == wanted for node in found):
        return int(wanted)
    named = [node.id for node in found if node.name == wanted and node.live]
    if len(named) > 1:
        raise click.UsageError(f"{len(named)} live nodes have this name; name one by its number")
    return named[0] if named else None


@click.command("pause")
@click.argument("kind")
@shared_options
@pass_invocation
def pause(invocation: Invocation, kind: str) -> None:
    """Pause a kind on all nodes: its tasks wait, also the due ones, until `resume`."""
    _set_paused(invocation, kind, paused=True)


@click.command("resume")
@click.argument("kind")
@shared_options
@pass_invocation
def resume(invocation: Invocation, kind: str) -> None:
    """Let nodes run a paused kind again."""
    _set_paused(invocation, kind, paused=False)


def _set_paused(invocation: Invocation, kind: str, *, paused: bool) -> None:
    run_until_signal(_pause_or_resume(invocation, kind, paused=paused))
    document = {"kind": kind, "paused": paused}
    text = f"kind {clipped(kind)} is {'paused' if paused else 'running'}"
    answer(invocation.json, document, lambda: write_line(text))


async def _pause_or_resume(invocation: Invocation, kind: str, *, paused: bool) -> None:
    async with verbs_of(invocation) as verbs:
        await (verbs.pause(kind) if paused else verbs.resume(kind))
