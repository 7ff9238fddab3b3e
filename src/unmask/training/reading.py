"""What the denoiser says of masked sequences: asked with the true tokens around, and only where they are masked."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unmask.decoding.confidence import confidence, features, log_probabilities
from unmask.models.frozen import FrozenDenoiser
from unmask.models.networks import Denoiser
from unmask.models.packing import Layout, places, scatter, stream_dtype
from unmask.tasks.task import Examples


def with_layout(examples: Examples, network: nn.Module) -> tuple[Examples, Layout]:
    """The examples on the device of a network, and their layout, without waiting for the device.

    No mask where nothing is padded, which lets attention take its fastest path.
    """
    weight, total = next(chain(network.parameters(), network.buffers())), int(examples.num_tokens.sum())
    examples = examples.to(weight.device)
    attention_mask = None if total == examples.tokens.numel() else examples.attention_mask
    return examples, Layout.of(examples.tokens, attention_mask, stream_dtype(weight), total)


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


def selector_features(logits: Tensor) -> Tensor:
    """[M, 3]: what the selector reads of the logits [M, V]."""
    return features(confidence(log_probabilities(logits)))
