"""Texts larger than memory: read as a stream, tokenized once into mapped files, visited in a shuffled order.

A cache is a folder named by what is in it: a hash of the texts, of the tokenizer and of the settings.  Another text,
another tokenizer or another setting is another folder, so a stale cache is never read.

    tokens.bin     every token, one sequence after another
    offsets.bin    int64 [rows + 1]: where each sequence begins
    cache.json     what it was made of
    manifest.json  size and SHA-256 of the three

The hashes of the texts and of the caches are kept in hashes.json, so that a terabyte is not read at every start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unmask import files
from unmask.errors import UserError, require
from unmask.jsonl import parse_json
from unmask.rng import Purpose, uniforms
from unmask.tasks.cache import Ragged, alone_in, written_whole

FORMAT_VERSION = 1
DATASET = "state.json"  # is in every folder that the package datasets saved
CACHE_FILES = ("tokens.bin", "offsets.bin", "cache.json")


def parts_of(shard: Path) -> list[Path]:
    """The files that a shard is made of: itself, or those of a folder that the package datasets saved."""
    return [*sorted(shard.glob("*.arrow")), shard / DATASET] if shard.is_dir() else [shard]


def read_texts(shards: Sequence[Path], fields: Sequence[str]) -> Iterator[tuple[list[str], int]]:
    """The texts of each line with the number of bytes read so far, one line in memory at a time.

    A shard whose name ends in .jsonl has one object per line, whose `fields` are the texts, and a folder of the package
    datasets has them in its rows; any other has one text per line.  Empty lines are skipped.  Of several fields, the
    last is a response, and must not be empty.
    """
    position = 0
    for path in shards:
        if path.is_dir():
            rows, size = _rows(path, fields), sum(part.stat().st_size for part in parts_of(path))
            for number, row in enumerate(rows, start=1):
                yield _texts(row, f"{path}, row {number}", fields), position + size * number // len(rows)
            position += size
            continue
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                position += len(raw)
                if raw.strip():
                    yield _texts_of_line(raw, path, line, fields), position


def _texts_of_line(raw: bytes, path: Path, line: int, fields: Sequence[str]) -> list[str]:
    try:
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip("\r\n")  # Windows begins files with a mark
    except UnicodeDecodeError:
        raise UserError(f"{path}, line {line}: not UTF-8") from None
    if path.suffix != ".jsonl":
        return [text]
    try:
        values = parse_json(text)
    except ValueError:
        values = None
    return _texts(values, f"{path}, line {line}", fields)


def _texts(values: Any, where: str, fields: Sequence[str]) -> list[str]:
    found: list[Any] = [values.get(field) if isinstance(values, dict) else None for field in fields]
    for field, text in zip(fields, found, strict=True):
        if not isinstance(text, str):
            keys = f" (its keys: {', '.join(list(values)[:10])})" if isinstance(values, dict) else ""
            mend = "name the right key in [task], or mend the line"
            raise UserError(f"{where}: not an object with a text {field!r}{keys}: {mend}")
    if len(fields) > 1 and not found[-1].strip():
        raise UserError(f"{where}: the response {fields[-1]!r} is empty: give it a text, or drop the line")
    return found


def _rows(folder: Path, fields: Sequence[str]) -> Any:
    """The rows of a folder that the package datasets saved, with these columns."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{folder} is read by the package datasets: pip install 'unmask[datasets]'") from None
    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged file makes it raise
        raise UserError(f"datasets cannot read {folder}: {' '.join(str(error).split())}") from None
    for field in fields:
        has = f"{folder} has no column {field!r}: it has {', '.join(rows.column_names)}"
        require(field in rows.column_names, has)
    return rows.select_columns(list(fields))


class Hashes:
    """The SHA-256 of files; those of files that were not touched since are kept in `path`.

    Whatever changes a file changes its ctime, which cannot be set.  Changes within a tick of the clock may share one,
    so a file that has only just been changed is hashed again next time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = self._stored()

    def of(self, path: Path) -> str:
        status, settled = path.stat(), time.time_ns() - 2 * 10**9
        key = f"{path.absolute()} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        if key in self.known:
            return str(self.known[key])
        found: str = files.fingerprint(path)["sha256"]
        if status.st_ctime_ns < settled and path.stat().st_ctime_ns == status.st_ctime_ns:
            self.known[key] = found
        return found

    def save(self) -> None:
        """Add what is known to what other processes have saved; a folder that cannot be written stays as it is."""
        if self.known != self._stored():
            with suppress(OSError, UserError), alone_in(self.path.parent):
                files.write_text(self.path, json.dumps(self._stored() | self.known, indent=0))

    def _stored(self) -> dict[str, str]:
        try:
            found = parse_json(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def read_cache(folder: Path, hash_of: Callable[[Path], str]) -> Ragged | None:
    """The sequences that `write_cache` wrote, mapped, or None where they are not there or not whole."""
    try:
        listed = files.read_manifest(folder)["files"]
        if any(hash_of(folder / name) != listed[name]["sha256"] for name in CACHE_FILES):
            return None
        dtype = parse_json((folder / "cache.json").read_text(encoding="utf-8"))["dtype"]
        path = folder / "tokens.bin"  # an empty file cannot be mapped
        tokens = np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
        return Ragged(tokens, np.memmap(folder / "offsets.bin", np.int64, "r"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_cache(folder: Path, sequences: Iterable[Sequence[int]], vocab_size: int, about: dict[str, Any]) -> None:
    """Write a cache whole or not at all, with no more than a buffer in memory."""
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    rows = position = 0
    with written_whole(folder, *CACHE_FILES) as partial:
        with (partial / "tokens.bin").open("wb") as tokens, (partial / "offsets.bin").open("wb") as offsets:
            offsets.write(np.int64(0).tobytes())
            for sequence in sequences:
                tokens.write(np.asarray(sequence, dtype).tobytes())
                rows, position = rows + 1, position + len(sequence)
                offsets.write(np.int64(position).tobytes())
        about = {**about, "dtype": dtype.name, "rows": rows, "tokens": position}
        (partial / "cache.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


class Visits:
    """In which order the rows are visited: every row once per epoch, shuffled with a bounded buffer.

    The rows are cut into windows.  Every epoch shuffles the windows, and the rows inside each window: one seek per
    window, and no more than two windows of row numbers in memory.  Which row comes at a position is a function of
    (seed, position) alone, so a run can resume anywhere.

    bucket > 0: the rows of a bucket are of about the same length.  Buckets begin at multiples of their size, so that a
    batch of that size is one; sixteen at a time are sorted by length, cut, and put in a random order.
    """

    def __init__(self, rows: int, window: int, seed: int, lengths: Callable[[np.ndarray], np.ndarray], bucket: int = 0):
        self.rows, self.window, self.seed, self.lengths, self.bucket = rows, min(window, rows), seed, lengths, bucket
        self._windows = lru_cache(2)(self._draw_windows)
        self._inside = lru_cache(2)(self._draw_inside)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The row of each position."""
        epochs, places = positions // self.rows, positions % self.rows
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            order, starts = self._windows(epoch)
            windows = np.where(epochs == epoch, np.searchsorted(starts, places, side="right") - 1, -1)
            for number in np.unique(windows[epochs == epoch]).tolist():
                here, start = windows == number, int(starts[number])
                rows[here] = self._inside(epoch, int(order[number]), start)[places[here] - start]
        return rows

    def _draw_windows(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The windows in the order of this epoch, and the place at which each begins: the last one may be short."""
        count = -(-self.rows // self.window)
        order = self._permutation(count, epoch, -1)
        sizes = np.minimum(self.window, self.rows - order * self.window)
        return order, np.concatenate([[0], np.cumsum(sizes)[:-1]])

    def _draw_inside(self, epoch: int, window: int, start: int) -> np.ndarray:
        """The rows of a window in the order of this epoch; it begins at the place `start` of the epoch."""
        first = window * self.window
        rows = first + self._permutation(min(self.window, self.rows - first), epoch, window)
        if not self.bucket:
            return rows
        lead, size = -(epoch * self.rows + start) % self.bucket, 16 * self.bucket  # up to the first multiple
        pools = [self._by_length(rows[i : i + size], epoch) for i in range(lead, len(rows), size)]
        return np.concatenate([rows[:lead], *pools])

    def _by_length(self, rows: np.ndarray, epoch: int) -> np.ndarray:
        ordered = rows[np.argsort(self.lengths(rows), kind="stable")]
        whole = len(rows) // self.bucket  # what is left over is the end of a window, and stays there
        order = self._permutation(whole, epoch, int(rows.min()), 1)
        buckets = ordered[: whole * self.bucket].reshape(whole, self.bucket)[order]
        return np.concatenate([buckets.reshape(-1), ordered[whole * self.bucket :]])

    def _permutation(self, count: int, *words: int) -> np.ndarray:
        draws = uniforms(self.seed, Purpose.EXAMPLE, *words, torch.arange(count), dtype=torch.float64)
        return draws.argsort(stable=True).numpy()
