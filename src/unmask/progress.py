"""One line that tells how far a long loop is: redrawn on a terminal, and now and then a new one in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from unmask.display import say

EVERY = 30.0  # seconds between two lines of a log

T = TypeVar("T")


class Advance(Protocol):
    def __call__(self, count: int = 1, note: str = "") -> None:
        """So many more are done; `note` ends the line."""


@contextmanager
def progress(
    name: str, total: int, done: int = 0, *, transient: bool = False, visible: bool = True
) -> Iterator[Advance]:
    """A line on stderr with what is done of `total`, the speed and the time left.

    transient: it is gone at the end, and a loop of a few seconds leaves nothing in a log.
    """
    console = Console(stderr=True)
    drawn, logged = visible and console.is_interactive, visible and not console.is_interactive
    with Progress(_Line(), console=console, transient=transient, disable=not drawn, refresh_per_second=4) as bar:
        bar.add_task(name, total=total, completed=done, note="")
        (task,) = bar.tasks
        told, last = time.monotonic() if transient else -math.inf, -1.0

        def tell(least: float) -> None:
            """Log a line if the last one is so many seconds old."""
            nonlocal told, last
            now = time.monotonic()
            if logged and now - told >= least:
                say(line(task), err=True)
                told, last = now, task.completed

        def advance(count: int = 1, note: str = "") -> None:
            bar.update(task.id, advance=count, note=note)
            tell(EVERY)

        tell(EVERY)
        yield advance
        if not transient and last != task.completed:
            tell(0)


def watched(items: Sequence[T], name: str) -> Iterable[T]:
    """The items, with a transient line."""
    with progress(name, len(items), transient=True) as advance:
        for item in items:
            yield item
            advance()


def line(task: Task) -> str:
    """denoise 1200/3000 24/s 1:15 left bound -1.093"""
    parts = [task.description, f"{task.completed:.0f}/{task.total:.0f}"]
    if task.speed:
        parts.append(f"{task.speed:.{0 if task.speed >= 10 else 1}f}/s")
    if task.time_remaining:
        minutes, seconds = divmod(int(task.time_remaining), 60)
        parts.append(f"{minutes // 60}h{minutes % 60:02} left" if minutes >= 60 else f"{minutes}:{seconds:02} left")
    return " ".join([*parts, task.fields["note"]]).rstrip()


class _Line(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(line(task), no_wrap=True, overflow="ellipsis")
