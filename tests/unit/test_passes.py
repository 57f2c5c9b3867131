"""Many items in bounded batches: what is locked comes last, what stops it takes nothing back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

import pytest

from delayq import passes
from delayq.errors import BulkStopped, DatabaseError
from delayq.lanes import LockHeld
from delayq.passes import Answers, Passes


class Table:
    """Does items by doubling them, unless they are locked."""

    def __init__(self, locked: Iterable[int] = ()) -> None:
        self.locked = set(locked)
        self.batches: list[list[int]] = []
        self.waited: list[int] = []
        self.progress: list[int] = []
        self.unlocks: dict[int, set[int]] = {}
        """what is let go together with an item that was waited for"""
        self.passes = Passes(self.send, self.wait, self.progress.append)

    async def send(self, batch: Sequence[int], answers: Answers[int]) -> None:
        self.batches.append(list(batch))
        for place, item in enumerate(batch):
            if item not in self.locked:
                answers[place] = 2 * item

    async def wait(self, item: int) -> int | None:
        self.waited.append(item)
        if item not in self.unlocks:
            raise LockHeld("in vain")
        self.locked -= {item} | self.unlocks[item]
        return 2 * item


async def in_batches(*batches: list[int]) -> AsyncIterator[list[int]]:
    for batch in batches:
        yield batch


async def test_everything_is_answered_in_order_and_told_of() -> None:
    table = Table()
    await table.passes.run(in_batches([1, 2, 3], [4, 5], [6]))
    assert table.passes.answers == [2, 4, 6, 8, 10, 12]
    assert table.batches == [[1, 2, 3], [4, 5], [6]]
    assert table.progress == [3, 5, 6]
    empty = Table()
    await empty.passes.run(in_batches())
    assert (empty.passes.answers, empty.progress) == ([], [])


async def test_what_is_locked_is_waited_for_at_the_end_and_what_went_with_it_follows() -> None:
    table = Table(locked=[2, 3, 5])
    table.unlocks = {2: {5}, 3: set()}
    await table.passes.run(in_batches([1, 2, 3], [4, 5, 6]))
    assert table.passes.answers == [2, 4, 6, 8, 10, 12]
    assert table.batches == [[1, 2, 3], [4, 5, 6], [3, 5]]
    assert table.waited == [2, 3]
    assert table.progress == [1, 3, 4, 5, 6]


async def test_locked_items_are_tried_again_in_bounded_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "BATCH_ROWS", 3)
    table = Table(locked=range(8))
    table.unlocks = {0: set(range(8))}
    await table.passes.run(in_batches([0, 1, 2], [3, 4, 5], [6, 7]))
    assert table.batches[3:] == [[1, 2, 3], [4, 5, 6], [7]]
    assert table.passes.answers == [2 * n for n in range(8)]


async def test_the_first_wait_in_vain_is_the_last_and_the_others_are_tried_once_more() -> None:
    table = Table(locked=[2, 3])
    table.unlocks = {}
    with pytest.raises(BulkStopped, match=r"stopped after 2, .*locks on 2 of the tasks") as stopped:
        await table.passes.run(in_batches([1, 2, 3, 4]))
    assert isinstance(stopped.value.__cause__, LockHeld)
    assert table.waited == [2]
    assert table.batches == [[1, 2, 3, 4], [3]]
    assert table.passes.answers == [2, None, None, 8]


async def test_a_lock_that_goes_while_another_is_waited_for_in_vain_is_no_loss() -> None:
    table = Table(locked=[2, 3])

    async def wait(item: int) -> None:
        table.locked.discard(3)

    held = Passes(table.send, wait, None)
    with pytest.raises(BulkStopped, match="locks on 1 of the tasks"):
        await held.run(in_batches([1, 2, 3]))
    assert held.answers == [2, None, 6]


async def test_an_error_is_itself_while_nothing_is_done_and_then_says_what_is() -> None:
    table = Table()

    async def send(batch: Sequence[int], answers: Answers[int]) -> None:
        if 0 in batch:
            answers[0] = 7  # done before the other one failed
            raise DatabaseError("refused")
        await table.send(batch, answers)

    async def refuse(batch: Sequence[int], answers: Answers[int]) -> None:
        raise DatabaseError("refused")

    nothing = Passes(refuse, table.wait, None)
    with pytest.raises(DatabaseError, match=r"^refused$"):
        await nothing.run(in_batches([0, 1]))
    some = Passes(send, table.wait, None)
    with pytest.raises(BulkStopped, match="stopped after 3") as stopped:
        await some.run(in_batches([1, 2], [3, 0], [4]))
    assert stopped.value.done == 3
    assert some.answers == [2, 4, 7, None]


async def test_the_next_batch_gathers_while_one_is_on_its_way() -> None:
    table = Table()
    gathered = asyncio.Event()

    async def send(batch: Sequence[int], answers: Answers[int]) -> None:
        await asyncio.wait_for(gathered.wait(), 5)
        await table.send(batch, answers)

    async def source() -> AsyncIterator[list[int]]:
        yield [1]
        await asyncio.sleep(0)
        gathered.set()
        yield [2]

    await Passes(send, table.wait, None).run(source())
    assert table.batches == [[1], [2]]


async def test_a_source_that_fails_lets_the_batch_on_its_way_arrive() -> None:
    table = Table()

    async def source() -> AsyncIterator[list[int]]:
        yield [1, 2]
        raise ValueError("no more")

    with pytest.raises(BulkStopped, match="no more") as stopped:
        await table.passes.run(source())
    assert isinstance(stopped.value.__cause__, ValueError)
    assert table.passes.answers == [2, 4]
    assert table.progress == [2]


@pytest.mark.parametrize("where", ["send", "gather"])
async def test_a_cancel_ends_what_is_on_its_way_at_once(where: str) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def send(batch: Sequence[int], answers: Answers[int]) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def source() -> AsyncIterator[list[int]]:
        yield [1]
        if where == "gather":
            await asyncio.Event().wait()

    work = asyncio.create_task(Passes(send, Table().wait, None).run(source()))
    await started.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 5)
    assert ended.is_set()
