"""Texts of your own, from files that may be larger than memory: all of a text is generated, nothing is checked."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from unmask.errors import UserError
from unmask.files import write_text
from unmask.progress import progress
from unmask.rng import signed
from unmask.tasks.task import LONGEST, Examples, check_range
from unmask.tasks.text.shards import (
    ShardError,
    TokenCache,
    Visits,
    alone_in,
    fingerprint,
    hash_shards,
    read_hashes,
    read_texts,
    write_cache,
)


@dataclass(frozen=True)
class Text:
    """Sequences of at most `length` tokens; a longer text is cut into several.  Every `test_every`th is held out."""

    files: str = ""  # a path, in which * and ** may stand for many; .jsonl: an object a line, else a text a line
    field: str = "text"  # the key of the text in an object
    tokenizer: str = ""  # a tokenizer.json; "": one token a byte
    length: int = 128
    test_every: int = 100
    window: int = 65536  # of the shuffle
    bucket: int = 64  # so many sequences that follow one another are of about the same length; 0: of any
    cache: str = ""  # a folder for the tokens; "": unmask/text in the user's cache

    name = "text"
    unconditional = True
    min_steps = None
    entropy = None

    def __post_init__(self) -> None:
        check_range(self, "length", 1, LONGEST)
        check_range(self, "test_every", 2, 1_000_000)
        check_range(self, "window", 1, 2**31)
        check_range(self, "bucket", 0, 1_000_000)

    @cached_property
    def shards(self) -> list[Path]:
        found = [Path(path) for path in sorted(glob.glob(os.path.expanduser(self.files), recursive=True))]
        if not found:
            raise UserError(f"task text: no file is called {self.files!r}: set files to the path of your texts")
        return found

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        if self._tokenizer is None:
            return tuple(f"<{byte:02X}>" for byte in range(256))
        return tuple(word for word, _ in sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1]))

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(self.length)),)

    @property
    def test_examples(self) -> int:
        return len(self._cached("test"))

    def order(self, seed: int, stage: int, positions: Tensor) -> Tensor:
        """The ids of the training examples at these positions [B] of a stage: every text once an epoch."""
        visits = self._visits.setdefault((seed, stage), self._new_visits(seed, stage))
        return torch.from_numpy(visits.at(positions.numpy())[1])

    def examples(self, ids: Tensor, split: str) -> Examples:
        if split not in ("train", "test"):
            raise UserError(f"unknown split {split!r}: use train or test")
        cached = self._cached(split)
        tokens, real = cached.padded(ids.numpy() % len(cached), self.length)
        attention_mask = torch.from_numpy(real)
        return Examples(torch.from_numpy(tokens), response=attention_mask, attention_mask=attention_mask.clone())

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        """Whether the very text was written: there is no other check of a text."""
        return ((tokens == examples.tokens) | ~examples.attention_mask).all(-1)

    def log_likelihood(self, tokens: Tensor, examples: Examples) -> None:
        return None

    def padding_share(self, batch: int, batches: int = 100) -> float:
        """The share of padding in batches of so many sequences, each as long as its longest."""
        visits = self._new_visits(0, 0)
        rows = visits.at(np.arange(min(batch * batches, visits.rows) // batch * batch))[1].reshape(-1, batch)
        lengths = visits.lengths(rows)
        return 1 - float(lengths.sum() / (lengths.max(-1) * batch).sum())

    @cached_property
    def _visits(self) -> dict[tuple[int, int], Visits]:
        return {}

    def _new_visits(self, seed: int, stage: int) -> Visits:
        cached = self._cached("train")
        return Visits(len(cached), self.window, signed(seed * 7919 + stage), cached.lengths, self.bucket)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if not self.tokenizer:
            return None
        try:
            return Tokenizer.from_file(os.path.expanduser(self.tokenizer))
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"task text: {self.tokenizer} is no tokenizer.json ({error})") from None

    def _cached(self, split: str) -> TokenCache:
        return self._caches[split]

    @cached_property
    def _caches(self) -> dict[str, TokenCache]:
        """Both splits from the cache, which is made where it is not there yet, or no longer whole."""
        root = Path(self.cache).expanduser() if self.cache else _default_cache()
        stored = read_hashes(root / "hashes.json")
        hashes, known = hash_shards(self.shards, stored)
        rules = "bytes" if self._tokenizer is None else self._tokenizer.to_str()
        name = fingerprint(hashes, self.shards, rules, self.field, self.length, self.test_every)
        folders = {split: root / f"{name}-{split}" for split in ("train", "test")}
        try:
            found = {split: TokenCache(folder, known) for split, folder in folders.items()}
        except ShardError:
            with alone_in(root):
                found = {split: self._made(folder, split) for split, folder in folders.items()}
        known = {**known, **found["train"].known, **found["test"].known}
        if known != stored:
            with suppress(OSError, ShardError), alone_in(root):  # a cache that is only read is hashed at every start
                known = {**read_hashes(root / "hashes.json"), **known}
                write_text(root / "hashes.json", json.dumps(known, indent=0))
        for split, cached in found.items():
            if not len(cached):
                raise UserError(f"task text: {self.files!r} has too few texts, none is left for the {split} split")
        return found

    def _made(self, folder: Path, split: str) -> TokenCache:
        """Unless another process has made it in the meantime."""
        try:
            return TokenCache(folder)
        except ShardError:
            about = {"files": [path.name for path in self.shards], "split": split}
            write_cache(folder, self._sequences(split), len(self.vocabulary), about)
        return TokenCache(folder)

    def _sequences(self, split: str) -> Iterator[Sequence[int]]:
        sizes = [path.stat().st_size for path in self.shards]
        texts = read_texts(self.shards, self.field)
        reached = 0
        with progress(f"tokens of the {split} split, bytes", sum(sizes), transient=True) as advance:
            for number, (text, place) in enumerate(texts):
                if number % 1000 == 0:
                    before, reached = reached, sum(sizes[: place.shard]) + place.byte
                    advance(reached - before)
                if (number % self.test_every == self.test_every - 1) == (split == "test"):
                    tokens = list(text.encode()) if self._tokenizer is None else self._tokenizer.encode(text).ids
                    for first in range(0, len(tokens), self.length):
                        yield tokens[first : first + self.length]


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unmask" / "text"
