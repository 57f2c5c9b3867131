"""What goes into one statement is bounded, in order, and does not stop the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq import batches
from delayq.batches import BATCH_BYTES, BATCH_ROWS, gathered, pages, pieces, sliced
from delayq.errors import InvalidArgument
from delayq.model import TaskRequest

T = TypeVar("T")


def of(*sizes: int) -> list[TaskRequest]:
    return [TaskRequest("k", "x" * (size - 2), delay_us=n) for n, size in enumerate(sizes)]


async def everything(source: AsyncIterator[Sequence[T]]) -> list[list[T]]:
    return [list(batch) async for batch in source]


async def test_requests_come_in_batches_of_so_many_rows() -> None:
    wanted = of(*[10] * (2 * BATCH_ROWS + 1))
    got = await everything(gathered(iter(wanted)))
    assert [len(batch) for batch in got] == [BATCH_ROWS, BATCH_ROWS, 1]
    assert [request for batch in got for request in batch] == wanted
    assert await everything(gathered([])) == []


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ([BATCH_BYTES // 2, BATCH_BYTES // 2, 2], [2, 1]),
        ([BATCH_BYTES, 2, BATCH_BYTES], [1, 1, 1]),
        ([BATCH_BYTES + 1], [1]),
        ([2, BATCH_BYTES + 1, 2], [1, 1, 1]),
    ],
)
async def test_and_of_so_many_bytes_unless_one_alone_is_larger(
    sizes: list[int], cut: list[int]
) -> None:
    got = await everything(gathered(of(*sizes)))
    assert [len(batch) for batch in got] == cut


async def test_the_event_loop_turns_while_requests_are_made() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    seen: list[int] = []

    def made() -> Iterator[TaskRequest]:
        for request in of(*[2] * 500):
            seen.append(turns)
            yield request

    other = asyncio.create_task(others())
    await everything(gathered(made()))
    other.cancel()
    assert seen[50] < seen[150] < seen[250] < seen[350] < seen[450]


async def test_what_is_no_request_is_refused_by_name() -> None:
    wanted: list[Any] = [*of(2, 2), "task"]
    with pytest.raises(InvalidArgument) as refused:
        await everything(gathered(wanted))
    assert refused.value.field == "requests"


async def test_items_are_sliced_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_ROWS", 3)
    assert await everything(sliced(range(7))) == [[0, 1, 2], [3, 4, 5], [6]]
    assert await everything(sliced([])) == []


@pytest.mark.parametrize(("count", "reads"), [(0, 1), (2, 1), (3, 2), (7, 3)])
async def test_pages_go_on_beyond_the_last_key_until_one_is_not_full(
    monkeypatch: pytest.MonkeyPatch, count: int, reads: int
) -> None:
    monkeypatch.setattr(batches, "BATCH_ROWS", 3)
    keys = [f"k{n}" for n in range(count)]
    asked: list[str] = []

    async def read(beyond: str, limit: int) -> list[str]:
        asked.append(beyond)
        return [key for key in keys if key > beyond][:limit]

    got = await everything(pages(read))
    assert [key for page in got for key in page] == keys
    assert all(got)
    assert len(asked) == reads


@given(start=st.integers(0, 50), length=st.integers(1, 3_000), count=st.integers(1, 20))
def test_pieces_are_few_of_one_size_and_leave_nothing_out(
    start: int, length: int, count: int
) -> None:
    whole = range(start, start + length)
    cut = pieces(whole, count)
    assert [n for piece in cut for n in piece] == list(whole)
    assert len(cut) <= count
    assert all(0 < len(piece) <= -(-length // count) for piece in cut)
    if length > 1 < count:
        assert len(cut) > 1  # or cutting would never end
