"""The client's verbs, on the database that the command is about."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from delayq.cli.options import Invocation
from delayq.client import Client
from delayq.database import Database
from delayq.place import open_database
from delayq.settings import Settings


@asynccontextmanager
async def client(place: Database, settings: Settings) -> AsyncIterator[Client]:
    """The verbs, on a database whose schema was checked."""
    verbs = Client(place, settings)
    await verbs.open()
    try:
        yield verbs
    finally:
        await verbs.close()


@asynccontextmanager
async def verbs_of(invocation: Invocation) -> AsyncIterator[Client]:
    """The verbs on the database that the command is about."""
    settings = invocation.settings()
    async with open_database(settings) as place, client(place, settings) as verbs:
        yield verbs
