"""The timers of a node: what is due next, in memory, bounded.

A cache of the table and nothing more: losing an entry costs lateness, never a task. Each entry
is one packed integer, about 150 bytes with everything around it.

    instant | inverted priority (16 bits) | id (63 bits) | kind (16 bits)

The order of these integers is the order of firing: by instant, then higher priority first, then
by id. An entry that was moved or discarded stays in the heap as a stale one until it surfaces,
or until stale ones are half as many as live ones.
"""

from __future__ import annotations

from collections.abc import KeysView
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from delayq.errors import InvalidArgument

_KIND_BITS: Final = 16
_ID_BITS: Final = 63
_PRIORITY_BITS: Final = 16
_ID_SHIFT: Final = _KIND_BITS
_PRIORITY_SHIFT: Final = _ID_SHIFT + _ID_BITS
_AT_SHIFT: Final = _PRIORITY_SHIFT + _PRIORITY_BITS
_KIND_MASK: Final = (1 << _KIND_BITS) - 1
_ID_MASK: Final = (1 << _ID_BITS) - 1
_PRIORITY_MASK: Final = (1 << _PRIORITY_BITS) - 1
_HIGHEST_PRIORITY: Final = (1 << (_PRIORITY_BITS - 1)) - 1
_LOWEST_PRIORITY: Final = -_HIGHEST_PRIORITY - 1

_FEWEST_STALE: Final = 64
_SAMPLED: Final = 1_024
_SLAB: Final = 16


class Timer(NamedTuple):
    """One entry: task `id` of `kind` fires at `at_us` by the database's clock."""

    id: int
    at_us: int
    kind: str
    priority: int


class TimerHeap:
    """Timers by instant, at most `limit` of them, each task once. For one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[int] = []
        # An entry of the heap that is not the one here is stale.
        self._live: dict[int, int] = {}
        self._stale = 0
        self._kinds: list[str] = []
        self._indexes: dict[str, int] = {}
        self._not_later_than = 0
        self._cut_us: int | None = None

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._live

    def ids(self) -> KeysView[int]:
        """The ids that are held: a live view, do not change the heap while iterating it."""
        return self._live.keys()

    def at_of(self, task_id: int) -> int | None:
        """The instant at which `task_id` is armed, or None."""
        packed = self._live.get(task_id)
        return None if packed is None else packed >> _AT_SHIFT

    def get(self, task_id: int) -> Timer | None:
        """The timer that is held for a task, or None."""
        packed = self._live.get(task_id)
        if packed is None:
            return None
        return Timer(
            task_id,
            packed >> _AT_SHIFT,
            self._kinds[packed & _KIND_MASK],
            _HIGHEST_PRIORITY - (packed >> _PRIORITY_SHIFT & _PRIORITY_MASK),
        )

    def push(
        self, task_id: int, at_us: int, kind: str, priority: int = 0, *, make_room: bool = False
    ) -> bool:
        """Hold a timer, or move the one that is held for the task. False if it was refused.

        A full heap refuses unknown ids, unless `make_room` is set and the timer is earlier
        than the latest: then the latest sixteenth is dropped. What was refused or dropped is
        remembered, see `take_cut_us`. Raises `InvalidArgument` for an id or a priority that
        no row can have.
        """
        if task_id >> _ID_BITS or not _LOWEST_PRIORITY <= priority <= _HIGHEST_PRIORITY:
            raise InvalidArgument("task_id", "id or priority out of range")
        index = self._indexes.get(kind)
        if index is None:
            index = self._intern(kind)
        packed = (
            at_us << _AT_SHIFT
            | (_HIGHEST_PRIORITY - priority) << _PRIORITY_SHIFT
            | task_id << _ID_SHIFT
            | index
        )
        live = self._live
        held = live.get(task_id)
        if held is not None:
            return held == packed or self._move(task_id, packed)
        if len(live) >= self._limit and not (make_room and self._make_room(packed)):
            self._cut(at_us)
            return False
        live[task_id] = packed
        heappush(self._heap, packed)
        if packed > self._not_later_than:  # noqa: PLR1730 - max() doubles the price, on a hot path
            self._not_later_than = packed
        return True

    def discard(self, task_id: int) -> bool:
        """Forget the timer of a task. False if none was held."""
        if self._live.pop(task_id, None) is None:
            return False
        self._gone_stale(1)
        return True

    def pop_due(self, now_us: int, limit: int) -> list[Timer]:
        """Take out the timers due at `now_us`, at most `limit`, in the order of firing."""
        bound = (now_us + 1) << _AT_SHIFT
        heap, live, kinds = self._heap, self._live, self._kinds
        new = tuple.__new__
        due: list[Timer] = []
        while heap and heap[0] < bound and len(due) < limit:
            packed = heappop(heap)
            task_id = packed >> _ID_SHIFT & _ID_MASK
            if live.get(task_id) != packed:
                self._stale -= 1
                continue
            del live[task_id]
            priority = _HIGHEST_PRIORITY - (packed >> _PRIORITY_SHIFT & _PRIORITY_MASK)
            # Straight to tuple: half the price of Timer(…), on the path of every task.
            due.append(
                new(Timer, (task_id, packed >> _AT_SHIFT, kinds[packed & _KIND_MASK], priority))
            )
        return due

    def next_at_us(self) -> int | None:
        """The instant of the earliest timer, or None."""
        heap, live = self._heap, self._live
        while heap:
            packed = heap[0]
            if live.get(packed >> _ID_SHIFT & _ID_MASK) == packed:
                return packed >> _AT_SHIFT
            heappop(heap)
            self._stale -= 1
        return None

    def latest_at_us(self) -> int | None:
        """The instant of the latest timer, or None. Looks at all of them (1 ms for 100,000)."""
        if not self._live:
            return None
        self._not_later_than = max(self._live.values())
        return self._not_later_than >> _AT_SHIFT

    @property
    def cut_us(self) -> int | None:
        """What `take_cut_us` would return."""
        return self._cut_us

    def take_cut_us(self) -> int | None:
        """The earliest instant refused or dropped by `push` since last asked, or None.

        From there on the heap has holes: whoever loads it loads again from this instant.
        """
        cut_us, self._cut_us = self._cut_us, None
        return cut_us

    def _move(self, task_id: int, packed: int) -> bool:
        self._live[task_id] = packed
        heappush(self._heap, packed)
        self._not_later_than = max(self._not_later_than, packed)
        self._gone_stale(1)
        return True

    def _make_room(self, packed: int) -> bool:
        if packed >= self._not_later_than:
            return False
        latest = self._latest(self._limit // _SLAB + 1)
        if packed >= latest[-1]:
            self._not_later_than = latest[-1]
            return False
        self._cut(self._drop(latest))
        return True

    def _latest(self, count: int) -> list[int]:
        """The `count` latest entries in order. A sample spares sorting all (4 ms, not 30)."""
        entries = list(self._live.values())
        sample = sorted(entries[:: len(entries) // _SAMPLED + 1])
        # Aim a little low; if the sample misleads, everything is sorted.
        share = min(1.0, 1.1 * count / len(entries) + 0.02)
        floor = sample[int((len(sample) - 1) * (1 - share))]
        upper = [packed for packed in entries if packed >= floor]
        if len(upper) < count:
            upper = entries
        upper.sort()
        return upper[-count:]

    def _drop(self, latest: list[int]) -> int:
        for packed in latest:
            del self._live[packed >> _ID_SHIFT & _ID_MASK]
        self._gone_stale(len(latest))
        return latest[0] >> _AT_SHIFT

    def _cut(self, at_us: int) -> None:
        if self._cut_us is None or at_us < self._cut_us:
            self._cut_us = at_us

    def _gone_stale(self, count: int) -> None:
        self._stale += count
        if self._stale > _FEWEST_STALE and self._stale > len(self._live) // 2:
            self._heap = list(self._live.values())
            heapify(self._heap)
            self._stale = 0

    def _intern(self, kind: str) -> int:
        index = len(self._kinds)
        if index > _KIND_MASK:
            raise InvalidArgument("kind", "more than 65,536 kinds in one heap")
        self._kinds.append(kind)
        self._indexes[kind] = index
        return index
