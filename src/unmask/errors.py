"""Errors that a user can mend, and the stop that a user asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake that the user can mend.  Its message is one line that says how; any other exception is a bug."""


class Stopped(Exception):
    """SIGTERM came, and the run is saved; the message says how to resume."""


def require(condition: bool, message: str) -> None:
    """UserError unless the condition holds."""
    if not condition:
        raise UserError(message)


def did_you_mean(wrong: str, right: Iterable[str]) -> str:
    """`did you mean 'x'? ` with a space behind it, or nothing where no right name is near."""
    nearest = difflib.get_close_matches(wrong, list(right), n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}? " if nearest else ""


@contextmanager
def prefixed(where: str) -> Iterator[None]:
    """A UserError of the block with `where` before its message."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
