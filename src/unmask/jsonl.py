"""Files of one JSON object a line, written so that a crash costs at most the line that was being written.

The last field of a line is the CRC-32 of the rest, `crc`: a damaged line is never taken for another.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from unmask.errors import UserError
from unmask.fields import build
from unmask.files import ChecksumError, refuse_link

T = TypeVar("T")

_CRC = re.compile(r', "crc": "([0-9a-f]{8})"\}\s*$')


class ResultsError(UserError):
    """A results file that cannot be read; the message says which line."""


def sealed(values: dict[str, Any]) -> str:
    """One line of JSON with its checksum."""
    text = json.dumps(values)
    return f'{text[:-1]}, "crc": "{_crc(text)}"}}'


def unsealed(line: str) -> Any:
    """What a line says, without its checksum; ChecksumError where that does not fit.  Older lines have none."""
    if found := _CRC.search(line):
        line = line[: found.start()] + "}"
        if found[1] != _crc(line):
            raise ChecksumError("it is not what was written")
    return parse_json(line)


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def parse_json(text: str | bytes) -> Any:
    """Like `json.loads`, with a UserError where that fails."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError("nested too deeply") from None
    except ValueError as error:
        raise UserError(f"no JSON: {error}") from None


def append_jsonl(path: Path, items: Sequence[Any]) -> None:
    """Add a line for each item, a dataclass; what a crash left of an unfinished line is dropped first."""
    refuse_link(path)
    if path.exists():
        _mend_the_end(path)
    with path.open("a", encoding="utf-8") as file:
        for item in items:
            file.write(sealed(asdict(item)) + "\n")


def read_jsonl(path: Path, kind: type[T]) -> list[T]:
    """A dataclass for each line.  A last line that a crash cut off is passed over; any other wrong line is an error."""
    *lines, end = path.read_text(encoding="utf-8", errors="replace").split("\n")
    items = []
    for number, line in enumerate([*lines, end] if _whole(end) else lines, start=1):
        try:
            values = unsealed(line)
        except ChecksumError as error:
            raise ResultsError(f"{path}, line {number}: damaged ({error}); take the line out") from None
        except ValueError:
            raise ResultsError(f"{path}, line {number}: not a JSON object; take the line out") from None
        try:
            items.append(build(kind, values))
        except UserError as error:
            wrong = f"{path}, line {number}: not what this version writes ({error})"
            raise ResultsError(f"{wrong}; move the file away and evaluate again") from None
    return items


def read_sealed(path: Path, kind: type[T], command: str) -> T | None:
    """The dataclass in a file of one line, or None where there is no file; `command` writes it."""
    if not path.exists():
        return None
    try:
        return build(kind, unsealed(path.read_text(encoding="utf-8")))
    except ValueError:
        raise ResultsError(f"{path} is damaged or from another version: run `{command}` again") from None


def _whole(line: str) -> bool:
    """Whether the end of a file, which has no newline, is a line all the same."""
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _mend_the_end(path: Path) -> None:
    """After this the file is empty or ends with a newline."""
    with path.open("rb+") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        if file.read() in (b"", b"\n"):
            return
        file.seek(0)
        text = file.read()
        start = text.rfind(b"\n") + 1
        if _whole(text[start:].decode(errors="replace")):
            file.write(b"\n")
        else:
            file.truncate(start)
