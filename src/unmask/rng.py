"""Counter-based randomness: a uniform number is a pure function of the words that name it.

A draw is addressed by words such as (seed, purpose, step, example id, trajectory, position).  Nothing is consumed from
a hidden state, so a result does not depend on batch composition, on the order of the draws, or on the number of
processes, and a resumed run draws what the uninterrupted one would have drawn.

    h_0 = mix(seed),   h_j = mix(h_{j-1} XOR mix(word_j + j * GOLDEN)),   u = max(1, top bits of h) * 2^-bits  in (0, 1)

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64 bits in which every input bit
flips every output bit with probability close to one half.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """The first word of every stream: two purposes never share a draw, even where all their other words agree."""

    DATA = 1  # what a generated example contains
    TIME = 2  # the times t of a batch
    MASKING = 3  # which positions the plain denoising objective masks
    TRAJECTORY = 4  # reveals under the posterior Q
    REVEAL = 5  # reveals at generation
    TOKEN = 6  # tokens at generation
    EXAMPLE = 7  # which example a batch slot holds
    BUDGET = 8  # the most steps of a sequence, where training varies it
    STATE = 9  # which state of a trajectory the denoiser learns from
    BLOCK = 10  # of a block-causal model: how many masks a block has, and in which block an order is learned


_GOLDEN = 0x9E3779B97F4A7C15

Word = int | Tensor  # 64 bits, signed; an integer does not travel to the device


def signed(word: int) -> int:
    """The 64 bits of `word` as the signed integer that torch.int64 holds."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def _shift_right(h: Word, bits: int) -> Word:
    """Logical shift: `>>` copies the sign bit, which would correlate the high bits."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def _times(h: Word, factor: int) -> Word:
    """The low 64 bits of the product, which is what torch keeps."""
    product = h * signed(factor)
    return signed(product) if isinstance(product, int) else product


def _mix(h: Word) -> Word:
    h = _times(h ^ _shift_right(h, 30), 0xBF58476D1CE4E5B9)
    h = _times(h ^ _shift_right(h, 27), 0x94D049BB133111EB)
    return h ^ _shift_right(h, 31)


def _plus(word: Word, shift: int) -> Word:
    """The sum with all the 64 bits that `_mix` needs: in fewer it would overflow to zero without an error."""
    if not isinstance(word, Tensor):
        return signed(int(word) + shift)
    if word.is_floating_point():
        raise TypeError(f"the words that name a draw must be integers, got a tensor of {word.dtype}")
    return word.long() + signed(shift)


def _top_bits(bits: int, seed: Word, *words: Word) -> Tensor:
    """The top bits of h of the formula above, in the broadcast shape of the words."""
    h = _mix(_plus(seed, 0))
    for j, word in enumerate(words, start=1):
        h = _mix(h ^ _mix(_plus(word, j * _GOLDEN)))
    return torch.as_tensor(_shift_right(h, 64 - bits))


def uniforms(seed: int | Tensor, *words: int | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in (0, 1), one for each element of the broadcast shape of `words` (integers, or tensors of them).

    A dtype gets as many of the top bits of the hash as its significand has (float32 24, float64 53): all dtypes see the
    same draws up to rounding, and u < q is certain where q = 1 (the arg-max of Q) and impossible where q = 0.
    """
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return _top_bits(bits, seed, *words).clamp(min=1).to(dtype) * 2.0**-bits


def integers(seed: int, *words: int | Tensor) -> Tensor:
    """Integers in [0, 2^62), as `uniforms`."""
    return _top_bits(62, seed, *words)


def stratified(seed: int, *words: int, slots: Tensor, total: int) -> Tensor:
    """Uniforms u_i = frac(u + i / total) for the batch slots i of a global batch of size `total` (systematic sampling).

    Each u_i is uniform on [0, 1) by itself, and together they fill every interval [j/total, (j+1)/total) exactly once.
    """
    offset = uniforms(seed, *words, dtype=torch.float64)
    return (offset + slots.to(torch.float64) / total) % 1.0
