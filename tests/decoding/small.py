"""Small models for generation: a random float64 transformer with a random selector, and lookup tables."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser, Selector, SelectorConfig
from unmask.variational.selection import NonEmpty, Selection

V = 11
MASK = V


def small_denoiser(seed: int = 0) -> Denoiser:
    """Far from uniform, so that rules have something to choose by, and float64, so that batches cannot round apart."""
    torch.manual_seed(seed)
    config = BackboneConfig(width=16, layers=1, heads=2, intermediate=24, max_length=64, absolute_positions=True)
    denoiser = Denoiser(config, V).double().requires_grad_(False)
    for parameter in denoiser.parameters():
        parameter.normal_(std=0.4)
    return denoiser


def small_selector(budgets: tuple[int, ...], selection: Selection | None = None, seed: int = 1) -> Selector:
    """Every weight is random, the last layer's too: at zero it would be the IID rule whatever it reads."""
    torch.manual_seed(seed)
    config = SelectorConfig(width=8, layers=1, heads=2, budgets=budgets)
    selector = Selector(config, denoiser_width=16, selection=selection).double()
    for parameter in selector.requires_grad_(False).parameters():
        parameter.normal_(std=0.6)
    return selector


@dataclass
class Recorded:
    """A denoiser that keeps the canvas of every pass."""

    denoiser: Denoiser
    passes: list[Tensor] = field(default_factory=list)

    @property
    def mask_token_id(self) -> int:
        return self.denoiser.mask_token_id

    def hidden(self, tokens: Tensor, attention: Tensor | None = None) -> Tensor:
        self.passes.append(tokens.clone())
        return self.denoiser.hidden(tokens, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.denoiser.logits(hidden)


@dataclass(frozen=True)
class TabularDenoiser:
    """theta [(V+1)^N, N, V]: logits for every position of every partly written sequence, as in `variational.tiny`.

    A hidden state is the pair (row of the table, position), so that `logits` can look up what it is asked for.
    """

    theta: Tensor

    @property
    def mask_token_id(self) -> int:
        return self.theta.shape[-1]

    def hidden(self, tokens: Tensor, attention: Tensor | None = None) -> Tensor:
        N = tokens.shape[1]
        row = (tokens * (self.mask_token_id + 1) ** torch.arange(N)).sum(-1, keepdim=True).expand(-1, N)
        return torch.stack([row, torch.arange(N).expand_as(row)], dim=-1).double()

    def logits(self, hidden: Tensor) -> Tensor:
        row, position = hidden.long().unbind(-1)
        return self.theta[row, position]


@dataclass(frozen=True)
class TabularSelector:
    """psi [T, (V+1)^N, N]: a logit for every time, partly written sequence and position."""

    psi: Tensor
    selection: Selection = field(default_factory=NonEmpty)

    @property
    def budgets(self) -> tuple[int, ...]:
        return (len(self.psi),)

    def __call__(
        self, hidden: Tensor, confidences: Tensor, masked: Tensor, t: Tensor, budget: int, attention: Tensor | None
    ) -> Tensor:
        return self.psi[t, hidden[:, 0, 0].long()]
