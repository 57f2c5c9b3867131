"""The verbs that look and change nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, TypeAlias

from delayq.errors import InvalidArgument
from delayq.model import NodeInfo, Task, TaskState
from delayq.request import check_id, check_name, check_target

if TYPE_CHECKING:
    from delayq.task_store import AnyConnection
    from delayq.transport import Transport

# `list` is a verb, so inside the class the type has other names.
Tasks: TypeAlias = list[Task]
Nodes: TypeAlias = list[NodeInfo]

MAX_LISTED: Final = 1_000


class Looking(ABC):
    """Verbs on tasks and nodes as they stand."""

    @property
    @abstractmethod
    def transport(self) -> Transport:
        """What the verbs go through; DelayQError unless it is open."""

    async def get(
        self,
        id: int | None = None,
        *,
        kind: str | None = None,
        key: str | None = None,
        conn: AnyConnection | None = None,
    ) -> Task | None:
        """The task as it stands, by id wherever it is now, or by the kind and key of a live one.

        None: there is no such task, or history has forgotten it.
        """
        target, store = check_target(id, kind, key), self.transport.store

        async def look(c: AnyConnection) -> Task | None:
            found = target if isinstance(target, int) else await store.key_holder(c, *target)
            return None if found is None else await store.get(c, found)

        return await self.transport.look(look, conn)

    async def list(
        self,
        *,
        state: TaskState | str | None = None,
        kind: str | None = None,
        key: str | None = None,
        limit: int = 50,
        after_id: int | None = None,
        conn: AnyConnection | None = None,
    ) -> Tasks:
        """A page of at most `limit` tasks; the next page is `after_id` the last one's id.

        Live tasks (pending and running, unless `state` says otherwise) and dead ones come with
        the lowest ids first, finished ones with the highest. A filter that few tasks of many
        pass may take long: DatabaseTimeout.
        """
        wanted = None if state is None else _state(state)
        if limit not in range(1, MAX_LISTED + 1):
            raise InvalidArgument("limit", f"must be a whole number from 1 to {MAX_LISTED}")
        beyond = None if after_id is None else check_id(after_id)
        kind = None if kind is None else check_name(kind, "kind")
        key = None if key is None else check_name(key, "key")
        store, look = self.transport.store, self.transport.look
        if wanted is None or wanted.live:
            return await look(
                lambda c: store.list_live(c, (kind, wanted, key), beyond, limit), conn
            )
        if wanted is TaskState.DEAD:
            return await look(lambda c: store.list_dead(c, (kind, key), beyond, limit), conn)
        return await look(lambda c: store.list_history(c, (kind, wanted, key), beyond, limit), conn)

    async def nodes(self) -> Nodes:
        """Every node that has a row, also dead ones of which tasks remain; oldest first."""
        return await self.transport.look(self.transport.store.nodes)


def _state(state: TaskState | str) -> TaskState:
    for known in TaskState:
        if state == known:
            return known
    raise InvalidArgument("state", f"must be one of {', '.join(TaskState)}")
