"""How it goes wrong, and how names that others chose are shown."""

from __future__ import annotations


class Failed(Exception):
    """It cannot go on: the text says what was seen."""


class Interrupted(Exception):
    """The operator has had enough; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def shown(text: str) -> str:
    """A name for the terminal: whoever writes a row must not move anybody's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def several(names: list[str], most: int = 8) -> str:
    """Some names for one line."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more
