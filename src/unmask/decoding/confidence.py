"""What the denoiser says about a position, as numbers: the tokens' log-probabilities and three confidences.

top probability  c = max_v p(v)          margin  p(1st) - p(2nd)          entropy  H = -sum_v p(v) log p(v)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Confidence(NamedTuple):
    """Of any common shape [...]; from the denoiser's own distribution, before temperature."""

    log_top: Tensor  # log c: rules rank by the log, which keeps apart what 1 - 1e-8 would round together
    margin: Tensor
    entropy: Tensor  # nats

    def features(self) -> Tensor:
        """[..., 3]: top probability, margin, entropy: what the selector reads."""
        return torch.stack([self.log_top.exp(), self.margin, self.entropy], dim=-1)


def log_probabilities(logits: Tensor) -> Tensor:
    """[..., V] in float32 at least, whatever the model computes in."""
    return logits.log_softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


def spread(values: Tensor, at: Tensor) -> Tensor:
    """Values [M, ...] put back to the M True places of `at`, 0 elsewhere; differentiable."""
    where = at.view(*at.shape, *(1 for _ in values.shape[1:]))
    canvas = torch.zeros((*at.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return canvas.masked_scatter(where, values)


def confidence(log_p: Tensor) -> Confidence:
    """The three confidences [...] of log-probabilities [..., V]."""
    p = log_p.exp()
    top, index = p.topk(min(2, p.shape[-1]), dim=-1)
    second = top[..., 1] if top.shape[-1] > 1 else torch.zeros_like(top[..., 0])
    # log c = -log(1 + sum_{v not top} p(v) / c): a plain log_softmax rounds 1 + 1e-8 to 1 before it takes the log.
    others = p.scatter(-1, index[..., :1], 0.0).sum(-1)
    return Confidence(
        log_top=-torch.log1p(others / top[..., 0]),
        margin=top[..., 0] - second,
        # p log p, not entr(p): at p = 0 the gradient of entr is infinite, and times 0 that is NaN.
        entropy=-(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1),
    )
