"""The nearest right name, for the errors that users see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(wrong: str, right: Iterable[str]) -> str:
    """`did you mean 'x'? ` with a space behind it, or nothing where no right name is near."""
    nearest = difflib.get_close_matches(wrong, list(right), n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}? " if nearest else ""
