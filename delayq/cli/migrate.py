"""`delayq migrate`: brings the schema to the version of this program, or says that it is not."""

from __future__ import annotations

import click

from delayq.cli.exits import Exit
from delayq.cli.options import Invocation, pass_invocation, shared_options
from delayq.cli.output import answer, write_line
from delayq.cli.place import connection
from delayq.cli.signals import run_until_signal
from delayq.migrate import check_schema, schema_version
from delayq.migrate import migrate as apply_migrations
from delayq.place import open_database


@click.command("migrate")
@click.option("--check", is_flag=True, help="Change nothing; exit code 4 unless it is current.")
@shared_options
@pass_invocation
def migrate(invocation: Invocation, check: bool) -> Exit:
    """Create or upgrade the schema `delayq` in the database. Safe to run from several places.

    Each migration is one transaction: interrupted, nothing of it stays. Needs a role that may
    create the schema, or owns it.
    """
    version, applied = run_until_signal(_migrate(invocation, check=check))
    document = {"version": version, "applied": applied}
    answer(invocation.json, document, lambda: _show(version, applied))
    return Exit.OK


async def _migrate(invocation: Invocation, *, check: bool) -> tuple[int | None, list[str]]:
    async with open_database(invocation.settings()) as place, connection(place) as conn:
        if check:
            await check_schema(conn)
            return await schema_version(conn), []
        applied = await apply_migrations(conn)
        return await schema_version(conn), [f"{step.version:04}_{step.name}" for step in applied]


def _show(version: int | None, applied: list[str]) -> None:
    for name in applied:
        write_line(f"applied {name}")
    write_line(f"the schema has version {version}" + ("" if applied else ": nothing to do"))
