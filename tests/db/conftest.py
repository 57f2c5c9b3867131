"""What several tests with a database ask for: a stranger, and what clients send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from delayq import task_store
from delayq.statements import statement
from tests.helpers import connected

if TYPE_CHECKING:
    from delayq.database import Connection


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the statements that clients send."""
    names: list[str] = []

    def note(name: str) -> str:
        names.append(name)
        return statement(name)

    monkeypatch.setattr(task_store, "statement", note)
    return names


@pytest.fixture
async def stranger(dsn: str) -> AsyncIterator[Connection]:
    """Somebody else's connection to the same database, for a transaction of his own."""
    async with connected(dsn) as conn:
        yield conn
