"""What PostgreSQL cannot keep is refused where it is given, and costs the caller nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from delayq import DelayQ, InvalidArgument
from tests.helpers import connected

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings

NUL = "a\0b"


@pytest.fixture
def dq(settings: Settings) -> DelayQ:
    return DelayQ(settings=settings)


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ({"payload": {"text": NUL}}, "text"),
        ({"payload": {"order": {"lines": [{"note": NUL}]}}}, "at lines.0.note"),
        ({"payload": {"order": {NUL: 1}}}, "order: a key"),
        ({"key": NUL}, "key"),
        ({"idempotency_key": NUL}, "idempotency_key"),
        ({"kind": NUL}, "kind"),
        ({"headers": {"trace": NUL}}, "headers: at trace"),
    ],
    ids=str,
)
async def test_a_nul_is_refused_by_its_place_and_the_callers_transaction_goes_on(
    dq: DelayQ, conn: Connection, dsn: str, call: dict[str, Any], place: str
) -> None:
    """C067."""
    await conn.execute("create table orders (id int)")
    given: dict[str, Any] = {"kind": "k", "payload": {}, "delay": 5, **call}
    async with dq, connected(dsn) as mine, mine.transaction():
        await mine.execute("insert into orders values (1)")
        with pytest.raises(InvalidArgument, match="NUL") as refused:
            await dq.send(**given, conn=mine)
        assert place in str(refused.value)
        assert "a" + chr(0) not in str(refused.value)
        await mine.execute("insert into orders values (2)")
    assert await conn.fetchval("select count(*) from orders") == 2
    assert await conn.fetchval("select count(*) from delayq.tasks") == 0


async def test_six_letters_that_look_like_a_nul_are_kept_as_they_are(
    dq: DelayQ, conn: Connection
) -> None:
    """C067. A backslash, and then u0000; also twice escaped, and as a name."""
    payload = {"text": "\\u0000", "twice": "\\\\u0000", "u0000": ["\\\\\\u0000"]}
    async with dq:
        task = await dq.send("k", payload, delay=5, key="\\u0000")
        found = await dq.get(task.id)
        assert found is not None
        assert (found.payload, found.key) == (payload, "\\u0000")
