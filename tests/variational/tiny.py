"""Tabular float64 models, asymmetric on purpose: every context has its own row in every table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from unmask.variational.enumeration import TinyModel
from unmask.variational.selection import Selection


@dataclass
class Tables:
    """The parameters theta, psi and phi of a tiny model, and the model."""

    theta: Tensor  # [(V+1)^N, N, V] denoiser logits
    psi: Tensor  # [T, (V+1)^N, N] selector logits
    phi: Tensor  # [(V+1)^N, N] scorer logits
    model: TinyModel

    def parameters(self) -> list[Tensor]:
        return [self.theta, self.psi, self.phi]


def tiny(
    selection: Selection, *, length: int = 3, vocab_size: int = 2, budget: int = 3, tau: float = 0.4, seed: int = 0
) -> Tables:
    generator = torch.Generator().manual_seed(seed)

    def table(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    states = (vocab_size + 1) ** length
    theta, psi, phi = table(states, length, vocab_size), table(budget, states, length), table(states, length)
    radix = (vocab_size + 1) ** torch.arange(length)

    def row(x: Tensor) -> Tensor:
        return (x * radix).sum(-1)

    model = TinyModel(
        denoiser=lambda x: theta[row(x)].log_softmax(-1),
        selector=lambda x, t: psi[t][row(x)],
        scorer=lambda x: phi[row(x)].sigmoid(),
        selection=selection,
        vocab_size=vocab_size,
        tau=tau,
    )
    return Tables(theta, psi, phi, model)


def sequences(length: int, vocab_size: int) -> Tensor:
    return torch.tensor(list(product(range(vocab_size), repeat=length)))
