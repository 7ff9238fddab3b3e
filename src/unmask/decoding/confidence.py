"""What the denoiser says about a position, as numbers.

top probability  c = max_v p(v)          margin  p(1st) - p(2nd)          entropy  H = -sum_v p(v) log p(v)
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor


class Confidence(TypedDict, total=False):
    """Of any common shape [...]; from the denoiser's own distribution p.  It holds what was asked for, no more."""

    log_top: Tensor  # log c: rules rank by the log, which keeps apart what 1 - 1e-8 would round together
    margin: Tensor
    entropy: Tensor  # nats
    log_proposal: Tensor  # log p(x) of the token proposed here
    log_current: Tensor  # log p of the token that stands here
    change: Tensor  # KL(p now || p at the previous pass), nats


FEATURES = frozenset({"log_top", "margin", "entropy"})  # what the selector reads


def features(said: Confidence) -> Tensor:
    """[..., 3]: top probability, margin, entropy."""
    return torch.stack([said["log_top"].exp(), said["margin"], said["entropy"]], dim=-1)


def log_probabilities(logits: Tensor) -> Tensor:
    """[..., V] in float32 at least, whatever the model computes in."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def spread(values: Tensor, at: Tensor) -> Tensor:
    """Values [M, ...] put back to the M True places of `at`, 0 elsewhere; differentiable."""
    where = at.view(*at.shape, *(1 for _ in values.shape[1:]))
    canvas = torch.zeros((*at.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return canvas.masked_scatter(where, values)


def confidence(
    logits: Tensor,  # [..., V], or log-probabilities: a constant makes no difference
    wanted: frozenset[str] = FEATURES,  # keys of Confidence
    highest: tuple[Tensor, Tensor] | None = None,  # the largest logit and its token, [..., 1] each, where known
    proposal: Tensor | None = None,  # [...]
    current: Tensor | None = None,  # [...]
    previous: Tensor | None = None,  # [..., V] log-probabilities
) -> Confidence:
    """All that is wanted, from one softmax.  With x_v the logits, x_1 the largest and w_v = exp(x_v - x_1):

    others = sum_{v not 1} w_v     log c = -log(1 + others)     margin = (1 - max_{v not 1} w_v) / (1 + others)
    H = log(1 + others) - sum_v w_v (x_v - x_1) / (1 + others)

    The arg-max is left out of the sum: 1 + 1e-8 rounds to 1 before a plain log_softmax takes its log.
    """
    said: Confidence = {}
    if not wanted:
        return said
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top, best = logits.max(-1, keepdim=True) if highest is None else highest
    gap = logits - top  # <= 0
    weight = gap.exp().scatter(-1, best, 0.0)
    others = weight.sum(-1)
    log_total = torch.log1p(others)
    if "log_top" in wanted:
        said["log_top"] = -log_total
    if "margin" in wanted:
        said["margin"] = (1 - weight.amax(-1)) / (1 + others)
    if "entropy" in wanted:  # at p = 0 the gap is -inf, and -inf * 0 is NaN
        lowest = torch.finfo(gap.dtype).min
        said["entropy"] = log_total - (weight * gap.clamp(min=lowest)).sum(-1) / (1 + others)
    if proposal is not None and "log_proposal" in wanted:
        said["log_proposal"] = gap.gather(-1, proposal[..., None])[..., 0] - log_total
    if current is not None and "log_current" in wanted:
        said["log_current"] = gap.gather(-1, current[..., None])[..., 0] - log_total
    if previous is not None and "change" in wanted:
        log_p = gap - log_total[..., None]
        p = log_p.exp()
        said["change"] = torch.where(p > 0, p * (log_p - previous), 0.0).sum(-1)
    return said
