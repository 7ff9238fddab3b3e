"""SMILES: their tokens, and files of them."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from unmask.errors import UserError, require

# An atom in brackets, an atom of two letters, a ring bond of two digits; any other atom, bond, branch or ring bond.
TOKEN = re.compile(r"\[[^\[\]]+\]|Br|Cl|%[0-9]{2}|[BCNOPSFIbcnops*0-9().=#$:/\\~-]")
_PARTS = re.compile(f"{TOKEN.pattern}|.", re.DOTALL)

_SPLITS = {"train": "train", "test": "test", "test_scaffolds": "scaffolds"}  # as the column SPLIT of MOSES has them
_DEV, _TEST = 1, 10  # percent: of what may be trained on, and of a file that has no splits


class Molecule(NamedTuple):
    smiles: str
    split: str
    position: int  # bytes of the file that are read


def parts_of(smiles: str) -> list[str]:
    """The tokens; a character that is none is a part of its own, so that the parts joined are the SMILES again."""
    return _PARTS.findall(smiles)


def moses_files() -> list[Path]:
    """MOSES (Polykovskiy et al. 2020), a file for each split, from the package molsets, which is not imported."""
    spec = find_spec("moses")
    folder = Path(str(spec.origin)).parent / "dataset" / "data" if spec else Path()
    found = [folder / f"{split}.csv.gz" for split in _SPLITS]
    missing = "MOSES comes inside a Python package: pip install --no-deps molsets==0.3.1, or set file to your own"
    require(spec is not None and all(path.is_file() for path in found), missing)
    return found


def read_molecules(path: Path, split: str = "") -> Iterator[Molecule]:
    """The molecules of a file, which may end in .gz: .csv or .tsv with a column SMILES, or the first word of each line.

    `split`: that of all its molecules; "": the column SPLIT says it, or else it follows from a hash of the SMILES.
    """
    try:
        with path.open("rb") as raw:
            data = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            lines = io.TextIOWrapper(cast(IO[bytes], data), encoding="utf-8-sig", errors="replace", newline="")
            is_table = Path(path.name.removesuffix(".gz")).suffix in (".csv", ".tsv")
            rows = _rows_of_table(lines, path) if is_table else ((line, None) for line in lines)
            for smiles, said in rows:
                if words := smiles.split(maxsplit=1):
                    yield Molecule(words[0], _split(words[0], split or said), raw.tell())
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}): correct file") from None


def _rows_of_table(lines: io.TextIOWrapper, path: Path) -> Iterator[tuple[str, str | None]]:
    """Columns are separated by what separates most of the first line: comma, semicolon or tab."""
    first = next(lines, "")
    rows: csv.DictReader[Any] = csv.DictReader(chain([first], lines), delimiter=max(",;\t", key=first.count))
    headings = {heading.strip().lower(): heading for heading in rows.fieldnames or ()}
    there = ", ".join(rows.fieldnames or ()) or "none"
    require("smiles" in headings, f"{path} has no column SMILES, only {there}: name the column so in its first line")
    smiles, split = headings["smiles"], headings.get("split")
    for row in rows:
        said = (row[split] or "").strip() if split else None
        if said is not None and said not in _SPLITS:
            raise UserError(f"{path}, line {rows.line_num}: unknown SPLIT {said!r}: use {', '.join(_SPLITS)}")
        yield row[smiles] or "", said


def _split(smiles: str, said: str | None) -> str:
    percent = zlib.crc32(smiles.encode()) % 100
    if said not in (None, "train"):
        return _SPLITS[said]
    if percent < _DEV:
        return "dev"
    return "test" if said is None and percent < _DEV + _TEST else "train"
