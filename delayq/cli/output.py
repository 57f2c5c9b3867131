"""How answers leave: one JSON document, or text for people.

Tables are drawn on a terminal and are plain aligned columns in a pipe. JSON is pure ASCII, so it
is as harmless on a terminal as it is valid for a program.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, Literal, TypeAlias

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from delayq.cli.text import iso, neutral

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
Align: TypeAlias = Literal["left", "right"]

_GAP: Final = "  "
_INF: Final = "Infinity"


def write_json(document: object) -> None:
    """Print one JSON document: indented on a terminal, one line in a pipe."""
    indent = 2 if sys.stdout.isatty() else None
    click.echo(json.dumps(sound(document), ensure_ascii=True, allow_nan=False, indent=indent))


def sound(value: object) -> Json:
    """The value with nothing in it that JSON cannot say: such things become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _unbounded(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, Mapping):
        return {str(name): sound(member) for name, member in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [sound(member) for member in value]
    return str(value)


def _unbounded(value: float) -> str:
    return "NaN" if math.isnan(value) else _INF if value > 0 else f"-{_INF}"


def write_line(text: str) -> None:
    """Print one line for people. What comes from others must be neutral already."""
    click.echo(text)


def write_table(columns: Sequence[str], rows: Sequence[Sequence[object]], nothing: str) -> None:
    """Print a table; `nothing` is said when it has no rows. A column of numbers stands right."""
    if not rows:
        write_line(nothing)
        return
    cells = [["" if cell is None else neutral(cell) for cell in row] for row in rows]
    aligns = [_align([row[at] for row in rows]) for at in range(len(columns))]
    if sys.stdout.isatty():
        _draw(columns, cells, aligns)
    else:
        for line in aligned(columns, cells, aligns):
            write_line(line)


def write_fields(fields: Sequence[tuple[str, object]]) -> None:
    """Print name and value, line by line; those without a value are left out."""
    shown = [(name, neutral(value)) for name, value in fields if value not in (None, "")]
    widest = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        write_line(f"{name:<{widest}}{_GAP}{value}")


def aligned(
    columns: Sequence[str], cells: Sequence[Sequence[str]], aligns: Sequence[Align]
) -> list[str]:
    """The lines of a plain table, headings first."""
    lines = [columns, *cells]
    widths = [max(cell_len(line[at]) for line in lines) for at in range(len(columns))]
    return [
        _GAP.join(
            _padded(cell, width, align)
            for cell, width, align in zip(line, widths, aligns, strict=True)
        ).rstrip()
        for line in lines
    ]


def _padded(cell: str, width: int, align: Align) -> str:
    blanks = " " * (width - cell_len(cell))
    return blanks + cell if align == "right" else cell + blanks


def _align(values: Sequence[object]) -> Align:
    numbers = all(value is None or isinstance(value, int | float) for value in values)
    return "right" if numbers else "left"


def _draw(columns: Sequence[str], cells: list[list[str]], aligns: Sequence[Align]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name, align in zip(columns, aligns, strict=True):
        table.add_column(Text(name), justify=align, overflow="fold")
    for row in cells:
        # Text, not str: what a stranger wrote is no markup.
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False, markup=False, emoji=False).print(table)


def answer(as_json: bool, document: object, human: Callable[[], None]) -> None:
    """Give one answer in the form that was asked for."""
    if as_json:
        write_json(document)
    else:
        human()
