"""Files of one JSON object a line, written so that a crash costs at most the line that was being written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any


class ResultsError(ValueError):
    """A results file that cannot be read; the message says which line."""


def append_jsonl(path: Path, items: Sequence[Any]) -> None:
    """Add a line for each item, a dataclass; what a crash left of an unfinished line is dropped first."""
    if path.exists():
        _mend_the_end(path)
    with path.open("a") as file:
        for item in items:
            file.write(json.dumps(asdict(item)) + "\n")


def read_jsonl(path: Path, kind: type[Any]) -> list[dict[str, Any]]:
    """The fields of each line; those of `kind` with a default may be missing, as they are in files of older versions.

    A last line that a crash cut off is passed over; any other line that is no such object is an error.
    """
    known = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    *lines, end = path.read_text(errors="replace").split("\n")
    rows = []
    for number, line in enumerate([*lines, end] if _whole(end) else lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            raise ResultsError(f"{path}, line {number}: not a JSON object; take the line out") from None
        if not isinstance(row, dict) or not needed <= set(row) <= known:
            odd = "not an object"
            if isinstance(row, dict):
                odd = ", ".join(sorted((needed - set(row)) | (set(row) - known)))
            raise ResultsError(
                f"{path}, line {number}: other fields than this version writes ({odd}); "
                "move the file away and evaluate again"
            )
        rows.append(row)
    return rows


def _whole(line: str) -> bool:
    """Whether the end of a file, which has no newline, is a line all the same."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _mend_the_end(path: Path) -> None:
    """After this the file is empty or ends with a newline."""
    with path.open("rb+") as file:
        if file.seek(0, 2) == 0:
            return
        file.seek(-1, 2)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        text = file.read()
        start = text.rfind(b"\n") + 1
        if _whole(text[start:].decode(errors="replace")):
            file.write(b"\n")
        else:
            file.truncate(start)
