"""What strangers say on the channel: only what parses is passed on, and nothing raises."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from delayq.database import Database
from delayq.listener import Hearers, Listener, parse_due
from delayq.timer_heap import Timer

ME = 4_711


@dataclass
class Heard:
    """Everything that was passed on."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    pongs: int = 0

    def hearers(self) -> Hearers:
        def note(name: str) -> Any:
            return lambda *args: self.calls.append((name, *args))

        return Hearers(
            note("due"), note("scan"), note("garbled"), note("cancel"), note("membership"),
            note("kind"), note("listening"),
        )  # fmt: skip


def hear(text: object) -> Heard:
    heard = Heard()
    listener = Listener(cast(Database, None), ME, heard.hearers())

    def pong() -> None:
        heard.pongs += 1

    link = cast(Any, SimpleNamespace(pong=SimpleNamespace(set=pong)))
    listener._hear(link, text)
    return heard


# --- what the schema sends --------------------------------------------------------------------


def test_a_due_hint_names_its_tasks() -> None:
    heard = hear("due\n7:1790000000000000:0:mail\n8:1790000000000001:-5:a:kind:with:colons")
    timers = [
        Timer(7, 1_790_000_000_000_000, "mail", 0),
        Timer(8, 1_790_000_000_000_001, "a:kind:with:colons", -5),
    ]
    assert heard.calls == [("due", timers)]


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("scan 1790000000000000", ("scan", 1_790_000_000_000_000)),
        ("join 5", ("membership", "join", 5)),
        ("leave 5", ("membership", "leave", 5)),
        (f"drain {ME}", ("membership", "drain", ME)),
        ("cancel 12", ("cancel", 12)),
        ("kind mail", ("kind",)),
        ("kind a kind with spaces", ("kind",)),
    ],
)
def test_each_message_of_the_schema_reaches_its_hearer(text: str, call: tuple[Any, ...]) -> None:
    assert hear(text).calls == [call]


def test_only_the_own_ping_is_a_pong() -> None:
    assert hear(f"ping {ME}").pongs == 1
    assert hear("ping 1").pongs == 0
    assert hear(f"ping {ME}").calls == []


# --- what strangers send ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "\n", "due", "due ", "scan", "scan ", "scan x", "scan 1 2", "cancel", "cancel -",
        "join", "join x", "ping", "ping x", "DUE\n1:2:3:a", "scan 123456789012345678901", "kinds",
        "scan 1e9", "scan ∞", "scan nan", "\0", "drain\n5",
    ],
)  # fmt: skip
def test_nonsense_is_passed_over(text: str) -> None:
    assert hear(text).calls == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "x",
        "1:2:3",
        "1:2:3:",
        "x:2:3:a",
        "1:x:3:a",
        "1:2:x:a",
        ":::",
        "1:2::a",
        f"{'9' * 21}:1:1:a",
    ],
)
def test_a_line_that_cannot_be_read_is_told_and_the_others_still_count(line: str) -> None:
    good = "7:1790000000000000:0:mail"
    heard = hear(f"due\n{line}\n{good}")
    assert heard.calls == [("due", [Timer(7, 1_790_000_000_000_000, "mail", 0)]), ("garbled",)]
    assert hear(f"due\n{line}").calls == [("garbled",)]


def test_a_line_break_in_a_kind_is_told_as_a_line_that_cannot_be_read() -> None:
    heard = hear("due\n7:1790000000000000:0:two\nlines")
    assert heard.calls[-1] == ("garbled",)


def test_a_message_of_more_lines_than_the_schema_sends_is_cut_and_told() -> None:
    heard = hear("due\n" + "\n".join(f"{nr}:1790000000000000:0:a" for nr in range(1_000)))
    (_, timers), doubt = heard.calls
    assert len(timers) == 200
    assert doubt == ("garbled",)


@hypothesis_settings(max_examples=500, deadline=None)
@given(st.text(max_size=200))
@example("due\n" + "9" * 20 + ":0:0:a")
@example("due\n-1:-1:-99999:a")
@example("due\n1_0: 2 :٣:a")
def test_no_text_whatever_makes_the_listener_raise(text: str) -> None:
    for verb in ("", "due\n", "scan ", "cancel ", "join ", "ping ", "kind "):
        hear(verb + text)
    hear(None)
    hear(text.encode())


NUMBERS = st.integers(-(10**18), 10**18)
LINES = st.lists(
    st.builds(
        Timer,
        id=NUMBERS,
        at_us=NUMBERS,
        kind=st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), min_size=1),
        priority=st.integers(-100, 100),
    ),
    min_size=1,
    max_size=20,
)


@hypothesis_settings(max_examples=200, deadline=None)
@given(LINES)
def test_what_is_written_as_the_schema_writes_it_comes_back(timers: list[Timer]) -> None:
    lines = "\n".join(f"{t.id}:{t.at_us}:{t.priority}:{t.kind}" for t in timers)
    assert parse_due(lines) == (timers, True)
