"""LO-ARM's posterior over orders (Wang et al. 2025): one position per step, Plackett-Luce in the scores of x_0.

    Q(z_i = n | z_<i, x_0) = softmax over the masked n of alpha_n / tau              z_i the position of step t = T-1-i
    log P(x_0) >= E_Q [ sum_i log P(z_i | x_{t+1}) + log mu^{z_i}(x_{t+1})[x_0] - log Q(z_i | z_<i, x_0) ]

The bound is that of `elbo.py` with this Q, and P the selector in the form `OneByOne`: one time t per sequence, the sum
over z_i exact, leave-one-out for z_<i.  With fewer steps than positions, t = 0 reveals the rest.

Legend: B sequences, k trajectories of each, N positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.variational.posterior import Trajectories, full_precision


def log_next(scores: Tensor, masked: Tensor, tau: float) -> Tensor:
    """log Q(z_i = n) [..., N] at the masked positions; very negative elsewhere."""
    return _logits(scores, masked, tau).log_softmax(-1)


def sample_orders(
    scores: Tensor, response: Tensor, t: Tensor, budget: int, tau: float, uniforms: Tensor
) -> Trajectories:
    """Draw x_{t+1} ~ Q(. | x_0), each row down to its own t [B]: scores + Gumbel noise, sorted, is the whole order.

    scores [B, N]; response [B, N] bool; uniforms [B, k, N].
    """
    noise = -torch.log(-torch.log(uniforms.double()))
    keys = torch.where(response[:, None], scores.detach().double()[:, None] / tau + noise, -torch.inf)
    rank = keys.argsort(dim=-1, descending=True).argsort(dim=-1)  # [B, k, N]: i
    step = budget - 1 - rank
    reveal_time = torch.where(response[:, None] & (step > t[:, None, None]), step, -1)
    return Trajectories(reveal_time, (reveal_time == -1) & response[:, None])


def log_prob_orders(scores: Tensor, response: Tensor, tau: float, drawn: Trajectories) -> Tensor:
    """log Q(z_<i | x_0) [B, k] = sum over the revealed of logit - log sum exp over what was masked then."""
    when = torch.where(response[:, None], drawn.reveal_time, -2)  # the prompt comes last
    order = when.argsort(dim=-1, descending=True)  # [B, k, N]
    logits = _logits(scores, response, tau)[:, None].expand(when.shape).gather(-1, order)
    left = logits.flip(-1).logcumsumexp(-1).flip(-1)  # from each position of the order to its end
    return torch.where(when.gather(-1, order) > 0, logits - left, 0.0).sum(-1)


def _logits(scores: Tensor, masked: Tensor, tau: float) -> Tensor:
    return torch.where(masked, full_precision(scores) / tau, -1e30)  # finite: its gradient stays a number
