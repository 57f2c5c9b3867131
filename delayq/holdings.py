"""The tasks that a node has in hand, by id: from the moment they are due until they are over.

What is in hand is neither armed nor offered a second time. What was in hand a moment ago may still
look pending in a page of the table that was being read meanwhile, so the ids of leases that ended
are remembered until the next page begins.

Every task passes through here: changes come in batches, and single ids are looked up by the sets'
own membership tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from delayq.timer_heap import Timer

_MOST_ENDED: Final = 100_000


class Holdings:
    """What one incarnation has in hand. For one event loop."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._ended: set[int] = set()
        # these sets are changed in place and never replaced, or the tests would ask the old ones
        self.holds: Final[Callable[[int], bool]] = self._held.__contains__
        """whether a task is in hand"""
        self.has_ended: Final[Callable[[int], bool]] = self._ended.__contains__
        """whether a lease of the task ended since the last page of the table began to be read"""

    def ids(self) -> list[int]:
        """The tasks in hand."""
        return list(self._held)

    def take(self, timers: Iterable[Timer]) -> list[Timer]:
        """Take due tasks in hand; returns those that were not yet."""
        held = self._held
        fresh = [timer for timer in timers if timer[0] not in held]
        held.update([timer[0] for timer in fresh])
        return fresh

    def let_go(self, task_ids: Iterable[int]) -> None:
        """Not ours to fire just now; whoever reads that they are pending may arm them again."""
        self._held.difference_update(task_ids)

    def end(self, task_ids: Collection[int]) -> None:
        """Their leases are over: settled or lost."""
        self._held.difference_update(task_ids)
        if len(self._ended) > _MOST_ENDED:  # nobody has read a page for long
            self._ended.clear()
        self._ended.update(task_ids)

    def page_begins(self) -> None:
        """A page of the table is about to be read: what ended before it will not be in it."""
        self._ended.clear()
