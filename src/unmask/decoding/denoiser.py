"""What generation asks of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AnyDenoiser(Protocol):
    """Any model that generation can run.  `logits` gives the mask token no mass.

    Where it has a `vocab_size` too, ids that are neither below it nor below the mask's are refused before any pass.
    Rules such as `wino` need a `PlacingDenoiser`.
    """

    @property
    def mask_token_id(self) -> int: ...

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, L, D] from tokens [B, L] and attention_mask [B, L] bool (False on padding; None: no padding).

        Where it has a `block_size` above 0, it is block-causal, and gets a mask [B, L, L] of which positions each sees.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] from hidden states [M, D]."""


class PlacingDenoiser(AnyDenoiser, Protocol):
    """A denoiser that can also be told who sees whom, and where each token stands."""

    def hidden_with(self, tokens: Tensor, attend: Tensor, positions: Tensor) -> Tensor:
        """[B, L, D] from tokens [B, L] at `positions` [B, L], where i sees j if attend [B, L, L] bool holds at i, j.

        L may be larger than its context; positions are not, and several tokens may have the same.
        """


class FinishingDenoiser(AnyDenoiser, Protocol):
    """One whose last work is on each position alone, and can be left to those that are read.

    hidden(tokens, mask) = finish(hidden(tokens, mask, finish=False)),      and so for `cached`
    """

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None, finish: bool = True) -> Tensor: ...

    def finish(self, states: Tensor) -> Tensor:
        """Hidden states [..., D] from what is not finished [..., D]."""


class CachingDenoiser(AnyDenoiser, Protocol):
    """One whose keys and values can outlive a pass."""

    @property
    def can_cache(self) -> bool: ...

    def new_cache(self, rows: int, length: int) -> Tensor:
        """[layers, 2, rows, length, ...]: room for the keys and values of so many sequences."""

    def cached(self, tokens: Tensor, at: Tensor, sees: Tensor, cache: Tensor, rows: Tensor) -> Tensor:
        """Hidden states [r, W, D] of tokens [r, W] at the places `at` [r, W] of the sequences `rows` [r] of the cache.

        sees [r, W, L] bool: the places that each one looks at, whose keys and values are computed here, and kept, or
        were kept before.
        """
