"""Caches of tokens: rows of different lengths in one array, and folders that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from unmask import files
from unmask.errors import UserError


class Ragged:
    """Rows of different lengths in one array: row i is ids[offsets[i] : offsets[i + 1]].  Both may be mapped files."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray) -> None:
        self.ids, self.offsets = ids, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        return np.asarray(self.offsets[1:][rows] - self.offsets[:-1][rows])

    def first(self, rows: np.ndarray, width: int, fill: int) -> np.ndarray:
        """[B, width] int64: the first `width` ids of each row, with `fill` after them where there are fewer."""
        return self._gather(self.offsets[rows][:, None] + np.arange(width), rows, fill)

    def last(self, rows: np.ndarray, width: int, fill: int) -> np.ndarray:
        """[B, width] int64: the last `width` ids of each row, with `fill` before them where there are fewer."""
        return self._gather(self.offsets[rows + 1][:, None] - width + np.arange(width), rows, fill)

    def _gather(self, places: np.ndarray, rows: np.ndarray, fill: int) -> np.ndarray:
        inside = (places >= self.offsets[rows][:, None]) & (places < self.offsets[rows + 1][:, None])
        found = np.full(places.shape, fill, dtype=np.int64)
        found[inside] = self.ids[places[inside]]
        return found


def cache_folder(given: str, task: str) -> Path:
    """The folder that a task's option names, or else unmask/TASK in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "unmask" / task
    return (Path(given) if given else default).expanduser()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One process at a time: those that start together would write the same cache into each other's files."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.locked(folder, wait=True))
        except OSError as error:
            raise UserError(f"no cache can be made in {folder} ({error.strerror}): set cache to a folder") from None
        yield


@contextmanager
def written_whole(folder: Path, *names: str) -> Iterator[Path]:
    """A folder to write the files `names` into; it then takes the place of `folder`, with a manifest."""
    partial = folder.with_name(f"{folder.name}.partial")
    files.discard(partial, *names, files.MANIFEST)
    partial.mkdir(parents=True)
    yield partial
    files.list_files(partial, *names)
    files.discard(folder, *names, files.MANIFEST)
    partial.rename(folder)
    files.sync(folder.parent)
