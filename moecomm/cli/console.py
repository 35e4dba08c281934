"""What the commands print with: tables, headings and progress; by `rich` on a terminal, aligned plain text otherwise.

`rich` is optional. It is used when it is installed *and* the stream is a terminal, so that output sent to a file or a
pipe is always plain text of a stable form.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TextIO, final

__all__ = ["Column", "Console", "Progress", "plain_table"]

# Plain progress prints at most one line in this many seconds.
PLAIN_PROGRESS_SECONDS = 10.0
# Text is wrapped at the terminal's width, and here at the latest; a column of it is never narrower than the other.
_MOST_COLUMNS = 100
_NARROWEST = 24


@dataclass(frozen=True)
class Column:
    """A table column.

    Attributes:
        name: its heading.
        align: the side its text keeps to.
        style: on a terminal (a rich style).
        wraps: a long text goes on in further lines; of at most one column, and the last one.
    """

    name: str
    align: Literal["left", "right"] = "left"
    style: str = ""
    wraps: bool = False


class Progress(Protocol):
    """What `Console.progress` yields."""

    def update(self, completed: float, description: str | None = None) -> None:
        """Show that `completed` of the total is done, and a new description if one is given."""


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Render a table as aligned plain text.

    Arguments:
        columns: headings and alignment, left to right.
        rows: one sequence of `len(columns)` texts per line; no cell may hold a line break.
        width: of the table at most, if its last column wraps; `None` = as wide as it comes.

    Returns:
        Lines joined by line breaks: heading, a line of dashes, the rows. No trailing blanks.

    Raises:
        ValueError: a row has another number of cells than there are columns.
    """
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {number} has {len(row)} cells, the table has {len(columns)} columns")
    if width is not None and columns[-1].wraps:
        rows = _with_last_wrapped(columns, rows, width)
    widths = [max([len(column.name)] + [len(row[i]) for row in rows]) for i, column in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column.align == "right" else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line([c.name for c in columns]), line(["-" * w for w in widths]), *(line(row) for row in rows)])


def _with_last_wrapped(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The rows of a table of at most so many columns of text: more of them, where a last cell is too long."""
    others = sum(2 + max([len(column.name)] + [len(row[i]) for row in rows]) for i, column in enumerate(columns[:-1]))
    wrapped = []
    for *cells, last in rows:
        first, *more = _wrapped(last, width - others)
        wrapped += [[*cells, first], *([*[""] * len(cells), line] for line in more)]
    return wrapped


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most so many columns, as far as words allow; those after the first begin two columns later."""
    indent = text[: len(text) - len(text.lstrip())] + "  "
    width = max(width, _NARROWEST)
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


@final
class Console:
    """Prints for one command.

    Arguments:
        stream: where to print; `None` = standard output.
        rich: `True` or `False` to force the choice, `None` = rich when it is installed and `stream` is a terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, rich: bool | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        if rich is None:
            rich = self._stream.isatty() and importlib.util.find_spec("rich") is not None
        self._rich: Any = None
        if rich:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self._stream, highlight=False)

    @property
    def is_rich(self) -> bool:
        """Whether output goes through `rich`."""
        return self._rich is not None

    @property
    def width(self) -> int:
        """Columns for text: those of the terminal, up to 100; 80 where there is none."""
        return min(shutil.get_terminal_size((80, 24)).columns, _MOST_COLUMNS)

    def line(self, text: str = "", *, style: str = "") -> None:
        """Print `text` and a line break; `style` is a rich style and means nothing in plain text."""
        if self._rich is not None:
            self._rich.print(text, style=style or None, markup=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def heading(self, text: str) -> None:
        """Print a blank line and `text` as the heading of what follows."""
        self.line()
        self.line(text, style="bold")

    def warning(self, text: str) -> None:
        """Print `text` as a warning."""
        self.line(f"warning: {text}", style="yellow")

    def error(self, text: str) -> None:
        """Print `text` as an error."""
        self.line(f"error: {text}", style="red")

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Print aligned `name  value` lines; a value may hold line breaks and is wrapped, and goes on indented."""
        width = max((len(name) for name, _ in pairs), default=0)
        for name, value in pairs:
            first, *others = (part for line in value.split("\n") for part in _wrapped(line, self.width - width - 4))
            if self._rich is not None:
                from rich.text import Text

                text = Text(f"  {name.ljust(width)}  ", style="cyan")
                self._rich.print(text.append(first, style="default"), soft_wrap=True)
            else:
                self.line(f"  {name.ljust(width)}  {first}".rstrip())
            for other in others:
                self.line(f"  {' ' * width}  {other}".rstrip())

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
        """Print a table; `rows` holds one text per column and line."""
        if self._rich is None:
            if title:
                self.heading(title)
            self.line(plain_table(columns, rows, width=self.width))
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        if title:
            self.heading(title)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column.name, justify=column.align, style=column.style or None, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._rich.print(table)

    @contextmanager
    def progress(self, description: str, total: float) -> Iterator[Progress]:
        """Show progress while the block runs: a bar by rich on a terminal, now and then a line otherwise.

        Arguments:
            description: what is being done.
            total: the value of `completed` at which it is done.
        """
        if self._rich is None:
            yield _PlainProgress(self, description, total)
            return
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._rich,
            transient=True,
        )
        with bar:
            yield _RichProgress(bar, bar.add_task(description, total=total))


@final
class _RichProgress:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def update(self, completed: float, description: str | None = None) -> None:
        self._bar.update(self._task, completed=completed, description=description)


@final
class _PlainProgress:
    def __init__(self, console: Console, description: str, total: float) -> None:
        self._console = console
        self._description = description
        self._total = total
        self._last = time.monotonic()

    def update(self, completed: float, description: str | None = None) -> None:
        if description is not None:
            self._description = description
        now = time.monotonic()
        if now - self._last >= PLAIN_PROGRESS_SECONDS:
            self._last = now
            self._console.line(f"{self._description}: {100.0 * completed / max(self._total, 1e-9):.0f} %")
