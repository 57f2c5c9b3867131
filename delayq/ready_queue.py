"""Due timers on their way to a lease, and the one admission step before it.

Timers that have just come due go ahead of backlog, but backlog keeps at least a quarter of what
is taken. Within each: priority, then instant. Kinds that are at their limit wait aside without
holding up the others, and by priority and instant themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

from delayq.timer_heap import Timer

FRESH_US: Final = 1_000_000
"""Later than this when it is offered, or leased, a task counts as backlog."""
_BACKLOG_SHARE: Final = 4
_MOST_ASIDE: Final = 400
"""How many of one kind wait in memory for its limit."""


class Lane:
    """Timers by priority (higher first), then in the order in which they came."""

    def __init__(self) -> None:
        self._by_priority: dict[int, deque[Timer]] = {}
        self._order: list[deque[Timer]] = []

    def __len__(self) -> int:
        return sum(map(len, self._order))

    def queue(self, priority: int) -> deque[Timer]:
        """The timers of one priority: add to either end."""
        queue = self._by_priority.get(priority)
        if queue is None:
            queue = self._by_priority[priority] = deque()
            self._order = [self._by_priority[p] for p in sorted(self._by_priority, reverse=True)]
        return queue

    def pop(self, count: int) -> list[Timer]:
        """Take at most so many, the highest priority first."""
        taken: list[Timer] = []
        for queue in self._order:
            take = min(len(queue), count - len(taken))
            taken += [queue.popleft() for _ in range(take)]
        return taken


class Admission:
    """Which kinds may start another task on this node: limits and pauses.

    `limits` maps kinds to a group name and a limit shared by the group (all plain functions
    share the threads). A kind without an entry is unlimited.
    """

    def __init__(self, limits: dict[str, tuple[tuple[str, int], ...]]) -> None:
        self._limits = limits
        self._used: dict[str, int] = {}
        self.limited = bool(limits)

    def admit(self, kind: str) -> bool:
        """Count one more task of the kind, unless a limit stands against it."""
        groups = self._limits.get(kind)
        if groups is None:
            return True
        if any(self._used.get(group, 0) >= limit for group, limit in groups):
            return False
        self.count(kind)
        return True

    def count(self, kind: str) -> None:
        """Count one more task of the kind that is there already, whatever the limit."""
        for group, _ in self._limits.get(kind, ()):
            self._used[group] = self._used.get(group, 0) + 1

    def done(self, kind: str) -> bool:
        """A task that was admitted is over. True if somebody may have waited for its place."""
        groups = self._limits.get(kind)
        if groups is None:
            return False
        for group, _ in groups:
            self._used[group] -= 1
        return True


class ReadyQueue:
    """What is due and not yet leased."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._fresh = Lane()
        self._backlog = Lane()
        self._aside: dict[str, list[tuple[int, int, int]]] = {}  # heaps of (-priority, at_us, id)
        self._owed = 0  # what backlog is owed of the takes so far, in quarters
        self.full_kinds: set[str] = set()
        """kinds with a long line at their limit: no more of them is to be read"""
        self.dropped: list[Timer] = []
        """let go since somebody last looked"""
        self.reopened = False
        """a line has grown short: what was let go may be read again"""

    @property
    def takeable(self) -> int:
        """How many are not set aside for their kind's limit."""
        return len(self._fresh) + len(self._backlog)

    def push(self, timers: Iterable[Timer], now_us: int) -> None:
        """Add due timers."""
        edge_us = now_us - FRESH_US
        fresh, backlog = self._fresh.queue, self._backlog.queue
        for timer in timers:
            (fresh if timer[1] >= edge_us else backlog)(timer[3]).append(timer)  # at_us, priority

    def take(self, count: int) -> list[Timer]:
        """At most `count` admitted timers; those of a kind at its limit are set aside."""
        share = self._share_of_backlog(count)
        taken = self._take_from(self._fresh, count - share)
        taken += self._take_from(self._backlog, count - len(taken))
        if len(taken) < count:
            taken += self._take_from(self._fresh, count - len(taken))
        return taken

    def _share_of_backlog(self, count: int) -> int:
        """A quarter, over many takes: if they take one each, every fourth is backlog's."""
        if not self._backlog or not self._fresh:
            self._owed = 0
            return len(self._backlog)
        self._owed += count
        share, self._owed = divmod(self._owed, _BACKLOG_SHARE)
        return min(share, len(self._backlog))

    def _take_from(self, lane: Lane, count: int) -> list[Timer]:
        if not self._admission.limited:
            return lane.pop(count)
        taken: list[Timer] = []
        while len(taken) < count and (popped := lane.pop(count - len(taken))):
            for timer in popped:
                if self._admission.admit(timer.kind):
                    taken.append(timer)
                else:
                    self._set_aside(timer)
        return taken

    def _set_aside(self, timer: Timer) -> None:
        heap = self._aside.setdefault(timer.kind, [])
        if len(heap) >= _MOST_ASIDE:
            # let go of it; it is read again when the line has grown short
            self.full_kinds.add(timer.kind)
            self.dropped.append(timer)
            return
        heappush(heap, (-timer.priority, timer.at_us, timer.id))

    def release(self, kind: str, now_us: int) -> None:
        """A task of a limited kind is over: the first of each kind that waits may try again."""
        if not self._admission.done(kind):
            return
        for waiting, heap in self._aside.items():
            if heap:
                timer = _timer(waiting, heappop(heap))
                fresh = timer.at_us >= now_us - FRESH_US
                lane = self._fresh if fresh else self._backlog
                lane.queue(timer.priority).appendleft(timer)  # it has waited before
            if waiting in self.full_kinds and len(heap) < _MOST_ASIDE // 4:
                self.full_kinds.discard(waiting)
                self.reopened = True


def _timer(kind: str, entry: tuple[int, int, int]) -> Timer:
    lowered, at_us, task_id = entry
    return Timer(task_id, at_us, kind, -lowered)
