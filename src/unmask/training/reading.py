"""What the denoiser says of masked sequences: asked with the true tokens around, and only where they are masked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unmask.decoding.blocks import block_causal, block_numbers
from unmask.decoding.confidence import DRAWN, FEATURES, confidence, features, log_probabilities
from unmask.models.frozen import FrozenDenoiser
from unmask.models.networks import Denoiser
from unmask.models.packing import Layout, places, scatter, stream_dtype
from unmask.rng import Purpose, uniforms
from unmask.tasks.task import Examples, to_device


def with_layout(examples: Examples, network: nn.Module, *, any_number: bool = False) -> tuple[Examples, Layout]:
    """The examples on the device of a network, and their layout, without waiting for the device.

    No mask where nothing is padded, which lets attention take its fastest path.  A block-causal network always has one.
    any_number: the next call may have another number of sequences.  A GPU then packs them into a row even without
    padding: rows have few different lengths (`packed_length`), so products are planned and passes recorded once.
    """
    weight, total = next(chain(network.parameters(), network.buffers())), int(examples.num_tokens.sum())
    examples = examples.to(weight.device)
    if size := getattr(network, "block_size", 0):
        block = block_numbers(examples.response, size) if examples.block is None else examples.block
        sees = block_causal(block, examples.attention_mask)
        return examples, Layout.of(examples.tokens, sees, stream_dtype(weight))
    dtype = stream_dtype(weight)
    packs = any_number and weight.is_cuda and dtype.itemsize == 2  # elsewhere a mask would take its place
    attention_mask = None if total == examples.tokens.numel() and not packs else examples.attention_mask
    return examples, Layout.of(examples.tokens, attention_mask, dtype, total)


def one_block(examples: Examples, u: Tensor, size: int, seed: int) -> Examples:
    """Each sequence with one block as its response, drawn with probability N_b / N; blocks before it are given.

    Then E[bound_b / N_b] = sum_b bound_b / N, what a token of the whole response has.  Later blocks are there, and
    nothing of the response sees them.  The draw is a hash of u [B].
    """
    drawn = uniforms(seed, Purpose.BLOCK, as_word(u.cpu()), -1, dtype=torch.float64)
    return only_block(examples, (drawn * examples.num_response).long() // size, size)


def each_block(examples: Examples, size: int) -> Iterator[tuple[Tensor, Examples]]:
    """The sequences that have a first block, a second and so on: their places [R], and cut down to this block."""
    blocks = -(-examples.num_response // size)
    for b in range(int(blocks.max())):
        rows = (blocks > b).nonzero()[:, 0]
        yield rows, only_block(examples.rows(rows), torch.full_like(rows, b), size)


def only_block(examples: Examples, chosen: Tensor, size: int) -> Examples:
    """With the block `chosen` [B] of each, counted from 0, as the response; on the CPU, as all lengths."""
    block, N = block_numbers(examples.response, size), examples.num_response
    at = to_device(chosen, examples.tokens.device)[:, None]
    cut = Examples(examples.tokens, block == 1 + at, examples.attention_mask, block)
    lengths = {"num_tokens": examples.num_tokens, "num_response": (N - size * chosen).clamp(max=size)}
    vars(cut).update(lengths, first=examples.first)
    return cut


def as_word(u: Tensor) -> Tensor:
    """Uniforms as whole numbers, which can name a draw."""
    return (u.double() * 2**53).long()


def log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p [M] of the tokens [M] under logits [M, V]."""
    return -cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens, reduction="none")


class Reading(NamedTuple):
    """What the denoiser says of the masked positions of R sequences, M of them."""

    hidden: Tensor  # [R, L, D]
    at: Tensor  # [M]: the masked places of the flattened [R, L]
    truth: Tensor  # [M]: the true tokens there
    logits: Tensor  # [M, V]

    @property
    def log_mu(self) -> Tensor:
        """[R, L]: log-probability of the true token where masked, else 0."""
        return self.spread(log_likelihood(self.logits, self.truth))

    def spread(self, values: Tensor) -> Tensor:
        """[R, L, ...] from values [M, ...], 0 where nothing is masked."""
        return scatter(values, self.at, self.hidden.shape[:2])


def read_denoiser(
    denoiser: Denoiser | FrozenDenoiser,
    tokens: Tensor,
    masked: Tensor,
    attention_mask: Tensor | Layout | None,
    num_masked: int | None = None,
) -> Reading:
    """Mask the clean tokens [R, L] where `masked` [R, L] and ask for them back; logits only where masked.

    num_masked: M, where known.
    """
    hidden = denoiser.hidden(torch.where(masked, denoiser.mask_token_id, tokens), attention_mask)
    at = places(masked, num_masked)
    return Reading(hidden, at, tokens.flatten()[at], denoiser.logits(hidden.flatten(0, 1)[at]))


def selector_features(logits: Tensor, drawn: Tensor | None = None) -> Tensor:
    """[M, 3]: what the selector reads of the logits [M, V].  [M, 4]: and of the tokens drawn [M]."""
    wanted = FEATURES if drawn is None else FEATURES | DRAWN
    return features(confidence(log_probabilities(logits), wanted, proposal=drawn))
