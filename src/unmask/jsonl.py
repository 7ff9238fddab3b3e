"""Files of one JSON object a line, written so that a crash costs at most the line that was being written.

The last field of a line is the CRC-32 of the rest, `crc`: a damaged line is never taken for another.
"""

from __future__ import annotations

import json
import math
import re
import types
import zlib
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from unmask.errors import UserError
from unmask.files import ChecksumError, refuse_link

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
    """Like `json.loads`; what is nested too deeply is a ValueError like any other bad text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError("nested too deeply") from None


def append_jsonl(path: Path, items: Sequence[Any]) -> None:
    """Add a line for each item, a dataclass; what a crash left of an unfinished line is dropped first."""
    refuse_link(path)
    if path.exists():
        _mend_the_end(path)
    with path.open("a", encoding="utf-8") as file:
        for item in items:
            file.write(sealed(asdict(item)) + "\n")


def read_jsonl(path: Path, kind: type[Any]) -> list[dict[str, Any]]:
    """The fields of each line; those of `kind` with a default may be missing, as they are in files of older versions.

    A last line that a crash cut off is passed over; any other line that is no such object is an error.
    """
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    *lines, end = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate([*lines, end] if _whole(end) else lines, start=1):
        try:
            row = unsealed(line)
        except ChecksumError as error:
            raise ResultsError(f"{path}, line {number}: damaged ({error}); take the line out") from None
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
        wrong = [name for name, value in row.items() if not fits(value, hints[name])]
        if wrong:
            raise ResultsError(
                f"{path}, line {number}: {', '.join(wrong)} is not what this version writes; "
                "move the file away and evaluate again"
            )
        rows.append(row)
    return rows


def fits(value: Any, hint: Any) -> bool:
    """Whether a value that JSON gave is of the kind that a type hint says."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, get_args(hint)[1]) for item in value.values())
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return isinstance(value, dict) and all(
            name in hints and fits(item, hints[name]) for name, item in value.items()
        )
    if type(value) is int and not -(2**63) <= value < 2**63:  # may be more than a float can hold
        return False
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return hint is Any or type(value) is (type(None) if hint is None else hint)


def _whole(line: str) -> bool:
    """Whether the end of a file, which has no newline, is a line all the same."""
    try:
        return isinstance(parse_json(line), dict)
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
