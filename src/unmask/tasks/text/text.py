"""Texts of your own, from files that may be larger than memory: all of a text is generated, nothing is checked."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from unmask.errors import UserError, require
from unmask.models.importers.vocabulary import vocabulary_of
from unmask.progress import progress
from unmask.rng import signed
from unmask.tasks.cache import Ragged, alone_in, cache_folder
from unmask.tasks.task import LONGEST, Examples, Task, check_range, check_split
from unmask.tasks.text.shards import FORMAT_VERSION, Hashes, Visits, read_cache, read_texts, write_cache


@dataclass(frozen=True)
class Text(Task):
    """Sequences of at most `length` tokens; a longer text is cut into several.  Every `test_every`th is held out."""

    files: str = ""  # a path, * and ** allowed; .jsonl: one object per line, other files: one text per line
    field: str = "text"  # the key of the text in an object
    tokenizer: str = ""  # a tokenizer.json; "": one token per byte
    length: int = 128
    test_every: int = 100
    window: int = 65536  # of the shuffle
    bucket: int = 64  # so many consecutive sequences have about the same length; 0: any length
    cache: str = ""  # a folder for the tokens; "": unmask/text in the user's cache

    name = "text"
    unconditional = True
    has_checker = False

    def __post_init__(self) -> None:
        check_range(self, "length", 1, LONGEST)
        check_range(self, "test_every", 2, 1_000_000)
        check_range(self, "window", 1, 2**31)
        check_range(self, "bucket", 0, 1_000_000)

    @cached_property
    def shards(self) -> list[Path]:
        found = [Path(path) for path in sorted(glob.glob(os.path.expanduser(self.files), recursive=True))]
        require(bool(found), f"task text: no file is called {self.files!r}: set files to the path of your texts")
        return found

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        if self._tokenizer is None:
            return tuple(f"<{byte:02X}>" for byte in range(256))
        return vocabulary_of(self._tokenizer)

    @property
    def test_examples(self) -> int:
        return len(self._splits["test"])

    def order(self, seed: int, stage: int, positions: Tensor) -> Tensor:
        """Every text once per epoch, shuffled."""
        return torch.from_numpy(self._visits(seed, stage).at(positions.numpy()))

    def examples(self, ids: Tensor, split: str) -> Examples:
        check_split(split)
        cached = self._splits[split]
        rows = ids.numpy() % len(cached)
        tokens = torch.from_numpy(cached.first(rows, self.length, 0))
        real = torch.arange(self.length) < torch.from_numpy(cached.lengths(rows))[:, None]
        return Examples(tokens, response=real, attention_mask=real.clone())

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        """Whether exactly the held-out text was generated: there is no other check of a text."""
        return ((tokens == examples.tokens) | ~examples.attention_mask).all(-1)

    @cached_property
    def _visits(self) -> Callable[[int, int], Visits]:
        rows = self._splits["train"]
        return cache(
            lambda seed, stage: Visits(len(rows), self.window, signed(seed * 7919 + stage), rows.lengths, self.bucket)
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if not self.tokenizer:
            return None
        try:
            return Tokenizer.from_file(os.path.expanduser(self.tokenizer))
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"task text: {self.tokenizer} is no tokenizer.json ({error})") from None

    @cached_property
    def _splits(self) -> dict[str, Ragged]:
        """The sequences of both splits from the cache, which is made where it is missing or not whole."""
        root = cache_folder(self.cache, self.name)
        hashes = Hashes(root / "hashes.json")
        rules = "bytes" if self._tokenizer is None else self._tokenizer.to_str()
        facts = [
            FORMAT_VERSION,
            [hashes.of(path) for path in self.shards],
            [path.suffix == ".jsonl" for path in self.shards],  # what a line means
            *(rules, self.field, self.length, self.test_every),
        ]
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        found = {}
        for split in ("train", "test"):
            folder = root / f"{name}-{split}"
            if (cached := read_cache(folder, hashes.of)) is None:
                with alone_in(root):
                    if read_cache(folder, hashes.of) is None:  # no other process has made it in the meantime
                        about = {"files": [path.name for path in self.shards], "split": split}
                        write_cache(folder, self._sequences(split), len(self.vocabulary), about)
                cached = read_cache(folder, hashes.of)
                assert cached is not None
            too_few = f"task text: {self.files!r} has too few texts, none is left for the {split} split"
            require(len(cached) > 0, too_few)
            found[split] = cached
        hashes.save()
        return found

    def _sequences(self, split: str) -> Iterator[Sequence[int]]:
        size, reached = sum(path.stat().st_size for path in self.shards), 0
        with progress(f"tokens of the {split} split, bytes", size, transient=True) as advance:
            for number, (text, position) in enumerate(read_texts(self.shards, self.field)):
                if number % 1000 == 0:
                    advance(position - reached)
                    reached = position
                if (number % self.test_every == self.test_every - 1) == (split == "test"):
                    tokens = list(text.encode()) if self._tokenizer is None else self._tokenizer.encode(text).ids
                    for first in range(0, len(tokens), self.length):
                        yield tokens[first : first + self.length]
