"""A byte-level BPE tokenizer for word problems: single digits, the marks of GSM8K as tokens, every text comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from unmask.progress import watched
from unmask.tasks.cache import Ragged

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


def encode(tokenizer: Tokenizer, texts: Sequence[str], at_once: int = 4096) -> Ragged:
    """The tokens of each text, in the smallest type that holds them."""
    dtype = np.min_scalar_type(tokenizer.get_vocab_size() - 1)
    parts, lengths = [np.zeros(0, dtype=dtype)], [0]
    for first in watched(range(0, len(texts), at_once), "tokens"):
        for encoding in tokenizer.encode_batch_fast(list(texts[first : first + at_once])):
            parts.append(np.asarray(encoding.ids, dtype=dtype))
            lengths.append(len(encoding.ids))
    return Ragged(np.concatenate(parts), np.cumsum(lengths, dtype=np.int64))
