"""What the denoiser says about a position, as numbers.

top probability  c = max_v p(v)          margin  p(1st) - p(2nd)          entropy  H = -sum_v p(v) log p(v)
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor


class Confidence(TypedDict, total=False):
    """Of any common shape [...]; from the denoiser's own distribution p.  It holds what was asked for, no more."""

    log_top: Tensor  # log c
    margin: Tensor
    gap: Tensor  # log p(1st) - log p(2nd): that of the logits
    entropy: Tensor  # nats
    log_proposal: Tensor  # log p(x) of the token proposed here
    log_current: Tensor  # log p of the token that stands here
    change: Tensor  # KL(p now || p at the previous pass), nats; inf at a sequence's first pass


FEATURES = frozenset({"log_top", "margin", "entropy"})  # what the selector reads
DRAWN = frozenset({"log_proposal"})  # and what else, if it looks at the token that was drawn
LEAST_LOG_P = -16.0  # of a drawn token, for the selector


def features(stats: Confidence) -> Tensor:
    """[..., 3]: top probability, margin, entropy.  [..., 4]: and log p of the token that was drawn, if it is given."""
    told = [stats["log_top"].exp(), stats["margin"], stats["entropy"]]
    if "log_proposal" in stats:
        told.append(stats["log_proposal"].clamp(min=LEAST_LOG_P))
    return torch.stack(told, dim=-1)


def largest(logits: Tensor, size: int = 256) -> tuple[Tensor, Tensor]:
    """`logits.max(-1)` of [m, V].  On a CPU torch is five times as fast without the place: so first by pieces."""
    if logits.shape[-1] < 16 * size or logits.device.type != "cpu" or torch.compiler.is_compiling():
        return logits.max(-1)
    m, V = logits.shape
    whole, rest = logits[:, : V - V % size].view(m, V // size, size), logits[:, None, -size:]  # which may overlap
    peaks = torch.cat([whole.amax(-1), rest.amax(-1)], dim=-1)
    start = (peaks.argmax(-1, keepdim=True) * size).clamp(max=V - size)  # of the leftmost piece that holds it
    peak, place = logits.gather(-1, start + torch.arange(size, device=start.device)).max(-1)
    return peak, start[:, 0] + place


def log_probabilities(logits: Tensor) -> Tensor:
    """[..., V] in float32 at least, whatever the model computes in."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def confidence(
    log_p: Tensor,  # [..., V]: log-probabilities
    wanted: frozenset[str] = FEATURES,  # keys of Confidence
    best: Tensor | None = None,  # [...]: the most probable token, where known
    proposal: Tensor | None = None,  # [...]
    current: Tensor | None = None,  # [...]
    previous: Tensor | None = None,  # [..., V]: log-probabilities at the pass before
) -> Confidence:
    """All that is wanted about the distributions log_p."""
    stats: Confidence = {}
    best = log_p.argmax(-1) if best is None else best
    log_top = log_p.gather(-1, best[..., None])[..., 0]
    if "log_top" in wanted:
        stats["log_top"] = log_top
    if wanted & {"margin", "gap"}:
        second = log_p.scatter(-1, best[..., None], -torch.inf).amax(-1)
        if "margin" in wanted:
            stats["margin"] = log_top.exp() - second.exp()
        if "gap" in wanted:
            stats["gap"] = log_top - second
    if wanted & {"entropy", "change"}:
        p = log_p.exp()
        finite = log_p.clamp(min=torch.finfo(log_p.dtype).min)  # at p = 0, 0 * -inf is NaN
        if "entropy" in wanted:
            stats["entropy"] = -(p * finite).sum(-1)
        if "change" in wanted and previous is not None:
            stats["change"] = torch.where(p > 0, p * (finite - previous), 0.0).sum(-1)
    if "log_proposal" in wanted and proposal is not None:
        stats["log_proposal"] = log_p.gather(-1, proposal[..., None])[..., 0]
    if "log_current" in wanted and current is not None:
        stats["log_current"] = log_p.gather(-1, current[..., None])[..., 0]
    return stats
