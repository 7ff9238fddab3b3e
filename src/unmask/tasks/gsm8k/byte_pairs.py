"""A byte-level BPE tokenizer for word problems: single digits, the marks of GSM8K as tokens, every text comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<eos>"
MARKS = (EOS, "<<", ">>", "=", "####", ">> <<", ">> #### ")  # the first ids; the longest one that fits is taken
SMALLEST = len(MARKS) + 256  # every byte is a token


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens; few texts have fewer pairs to merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text before the first EOS."""
    ids = list(ids)
    eos = MARKS.index(EOS)
    return tokenizer.decode(ids[: ids.index(eos)] if eos in ids else ids, skip_special_tokens=False)


class Ragged:
    """Rows of different lengths in one array: row i is ids[ends[i - 1] : ends[i]]."""

    def __init__(self, ids: np.ndarray, ends: np.ndarray) -> None:
        self.ids, self.ends = ids, ends
        self.starts = np.concatenate([np.zeros(1, dtype=np.int64), ends])[:-1]
        self.lengths = ends - self.starts

    def __len__(self) -> int:
        return len(self.ends)

    @classmethod
    def encode(
        cls,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        at_once: int = 4096,
        watched: Callable[[range], Iterable[int]] = iter,
    ) -> Ragged:
        dtype = np.min_scalar_type(tokenizer.get_vocab_size() - 1)  # uint16 for most: half of what there is to keep
        parts, lengths = [np.zeros(0, dtype=dtype)], []
        for first in watched(range(0, len(texts), at_once)):
            for encoding in tokenizer.encode_batch_fast(list(texts[first : first + at_once])):
                parts.append(np.asarray(encoding.ids, dtype=dtype))
                lengths.append(len(encoding.ids))
        ids = np.concatenate(parts)
        return cls(ids, np.cumsum(lengths, dtype=np.int64))

    def last(self, rows: np.ndarray, width: int, fill: int) -> np.ndarray:
        """[B, width]: the last `width` ids of each row, with `fill` before them where there are fewer."""
        return self._gather(self.ends[rows][:, None] - width + np.arange(width), rows, fill)

    def first(self, rows: np.ndarray, width: int, fill: int) -> np.ndarray:
        """[B, width]: the first `width` ids of each row, with `fill` behind them where there are fewer."""
        return self._gather(self.starts[rows][:, None] + np.arange(width), rows, fill)

    def _gather(self, places: np.ndarray, rows: np.ndarray, fill: int) -> np.ndarray:
        inside = (places >= self.starts[rows][:, None]) & (places < self.ends[rows][:, None])
        if not len(self.ids):
            return np.full(places.shape, fill, dtype=np.int64)
        return np.where(inside, self.ids[places.clip(0, len(self.ids) - 1)], fill).astype(np.int64)
