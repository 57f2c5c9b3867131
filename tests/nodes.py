"""Nodes inside a test: handlers to register, tasks to schedule, and how each of them ended.

Tasks are scheduled through the SQL interface, so that these tests stand on the node alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from delayq.database import Database, parse_dsn
from delayq.handler_policy import PolicyDefaults
from delayq.handlers import Registry, Scheduler, TaskDecorator, make_task_decorator
from delayq.node import Node
from tests.helpers import PATIENCE_S

if TYPE_CHECKING:
    from delayq.clock import Clock
    from delayq.database import Connection
    from delayq.incarnation import Incarnation
    from delayq.settings import Settings

_ENDED = """
    select id, state, attempt, interruptions, errors::text as errors, node, lease_token,
           delayq.micros(execute_at) as execute_us, delayq.micros(started_at) as started_us,
           delayq.micros(finished_at) as finished_us, lateness_us
      from delayq.task_history where id = $1
    union all
    select id, 'dead', attempt, interruptions, errors::text, node, lease_token,
           delayq.micros(execute_at), delayq.micros(started_at), delayq.micros(finished_at),
           lateness_us
      from delayq.dead_tasks where id = $1
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a task ended, as history (or the dead tasks) tells it. Instants by the database."""

    id: int
    state: str
    attempt: int
    interruptions: int
    errors: list[dict[str, Any]]
    node: int | None
    lease_token: int
    execute_us: int
    started_us: int | None
    finished_us: int
    lateness_us: int | None


class Application:
    """The handlers of one test, with quick retries. `task` decorates; `node` makes a node."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.registry = Registry()
        self.task: TaskDecorator = make_task_decorator(
            self.registry,
            cast(Scheduler, None),
            PolicyDefaults(max_attempts=3, backoff_base_us=20_000, backoff_max_us=40_000),
        )

    def node(self, dsn: str | None = None, *, clock: Clock | None = None, **changes: Any) -> Node:
        """A node of these handlers, with other settings or over another wire if wanted."""
        settings = self.settings.model_copy(update=changes)
        assert settings.dsn is not None
        database = Database(parse_dsn(dsn or settings.dsn.get_secret_value()), settings)
        return Node(database, self.registry, settings, clock=clock)


def life(node: Node) -> Incarnation:
    """The inside of a node that was started."""
    assert node._life is not None
    return node._life


@asynccontextmanager
async def stopped_at_once(node: Node) -> AsyncIterator[Node]:
    """Start a node, and leave without waiting for what runs."""
    await node.start()
    try:
        yield node
    finally:
        node.request_stop()
        await node.wait()


async def schedule(
    conn: Connection, kind: str, payload: dict[str, Any] | None = None, **options: Any
) -> int:
    """Schedule a task by the SQL interface (delay=timedelta(…), key=, timeout= …); its id."""
    given = {"kind": kind, "payload": json.dumps(payload or {}), **options}
    arguments = ", ".join(f"{name} => ${nr}" for nr, name in enumerate(given, start=1))
    return int(await conn.fetchval(f"select id from delayq.schedule({arguments})", *given.values()))


async def ended(conn: Connection, task_id: int, limit_s: float = PATIENCE_S) -> Ended:
    """Wait until a task is over, and say how."""

    async def look() -> Ended | None:
        row = await conn.fetchrow(_ENDED, task_id)
        if row is None:
            return None
        fields = dict(row)
        return Ended(**fields | {"errors": json.loads(fields["errors"])})

    end: Ended = await eventually(look, f"task {task_id} is over", limit_s)
    return end


async def all_ended(
    conn: Connection, ids: Iterable[int], limit_s: float = PATIENCE_S
) -> dict[int, Ended]:
    """Wait until all of them are over."""
    return {task_id: await ended(conn, task_id, limit_s) for task_id in ids}


async def no_live_tasks(conn: Connection, limit_s: float = PATIENCE_S) -> None:
    """Wait until nothing is pending or running."""

    async def none_left() -> bool:
        return not await conn.fetchval("select exists (select from delayq.tasks)")

    await eventually(none_left, "no live tasks", limit_s, every_s=0.05)


async def row_of(conn: Connection, task_id: int) -> dict[str, Any] | None:
    """The live row of a task."""
    row = await conn.fetchrow(
        "select id, state, attempt, interruptions, lease_owner, lease_token, cancel_requested,"
        " errors::text as errors, delayq.micros(execute_at) as execute_us"
        " from delayq.tasks where id = $1",
        task_id,
    )
    return None if row is None else dict(row)


async def eventually(
    look: Callable[[], Awaitable[Any]],
    what: str,
    limit_s: float = PATIENCE_S,
    *,
    every_s: float = 0.01,
) -> Any:
    """Ask again and again until the answer is true, and return it; fail after a while."""
    deadline = time.monotonic() + limit_s
    while not (answer := await look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        await asyncio.sleep(every_s)
    return answer
