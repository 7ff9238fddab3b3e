"""The selector as its own posterior, Q = P: it orders the true tokens itself, so every order learned can be followed.

    log P(x_0) >= J = E_{r ~ P} [ sum_t g_t ],     g_t = sum_{n in r_t} log mu^n(x_{t+1})[x_0^n]        t = T-1, ..., 0

The order KL is zero and there is no scorer.  t = 0 reveals whatever is left, with probability one.  A price lambda >= 0
in nats per step gives

    J_lambda = J - lambda E[steps],      G_t = sum_{s <= t} (g_s - lambda [x_{s+1} holds a mask])
    grad_psi J_lambda = E[ sum_{t >= 1} grad E[g_t | x_{t+1}] + (G_{t-1} - b_t) grad log P(r_t | x_{t+1}) ]

What a step itself earns has an expectation in closed form, E[g_t | x_{t+1}] = sum_n P(r_n = 1) log mu^n(x_{t+1})[x_0^n]
over the masks n, and its price is paid whatever it reveals: only what is earned afterwards, G_{t-1}, is left to the
score function.  b_t is the mean G_{t-1} of those of the other k - 1 trajectories of the same x_0 that hold a mask at
the same t, or 0 without one: what has ended has nothing left to earn.  theta gets the plain gradient of g.

With tokens that the model writes itself and a reward for the whole sequence in the place of the likelihood,
G_t = reward - lambda (steps left), and b_t is the mean over all the other trajectories, ended or not.

The expected number of valid and different answers among B, per answer, is

    S = 1/B sum_x (1 - (1 - p(x))^B)     over the valid x,      grad S = E[ (1 - p(x))^(B - 1) grad log p(x) ]

so the reward 1[valid and written by none of the other B - 1 sequences] has its gradient.

A reference rule P_ref with a weight w keeps the order near a rule (UPO, Hong et al. 2025):

    J_lambda - w KL(P || P_ref),    KL = E_P[ sum_t d_t ],    d_t = log P(r_t | x_{t+1}) - log P_ref(r_t | x_{t+1})

has the same gradient with G_{t-1} - w sum_{s <= t} d_s in the place of G_{t-1}: grad d_t has mean zero, so d carries no
graph.

Legend: T steps, indexed by t; B sequences; k trajectories of each.  `holds_mask[t]`: x_{t+1} holds a mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class SelfEstimate(NamedTuple):
    """[B] each, in nats."""

    value: Tensor  # unbiased estimate of J_lambda, or of reward - lambda steps; carries no gradient
    loss: Tensor  # minimise its mean; its gradient is minus an unbiased one of J_lambda; its value means nothing


def returns(gain: Tensor, holds_mask: Tensor, price: Tensor, reward: Tensor | None = None) -> Tensor:
    """G_t [T, B, k] from g [T, B, k], holds_mask [T, B, k] bool, price [B] and, where there is one, a reward [B, k]."""
    earned = torch.where(holds_mask, gain - price[:, None], 0.0).cumsum(0)
    return earned if reward is None else earned + reward


def baseline(after: Tensor, counted: Tensor) -> Tensor:
    """b_t [T, B, k]: the mean of the other trajectories' G_{t-1} [T, B, k] among those `counted` [T, B, k], else 0."""
    after, number = torch.where(counted, after, 0.0), counted.to(after)
    return (after.sum(-1, keepdim=True) - after) / (number.sum(-1, keepdim=True) - number).clamp(min=1)


def distinct_reward(valid: Tensor, answers: Tensor) -> Tensor:
    """1[valid] times the part of the j for which no other sequence's trajectory j wrote the same: [B, k].

    From valid [B, k] bool and answers [B, k, L].  Trajectories of one sequence share their draws: only its j-th counts.
    """
    B, k = valid.shape
    _, which = torch.unique(answers.flatten(0, 1), dim=0, return_inverse=True)
    answer = which.view(B, k)  # its number
    column = answer.T.contiguous()  # [k, B]: what trajectory j of each sequence wrote
    number = valid.new_zeros(k, int(which.max()) + 1, dtype=torch.long).scatter_add_(1, column, torch.ones_like(column))
    alike = number[:, answer] - (column[..., None] == answer).long()  # [k, B, k]: in column j, without its own sequence
    return torch.where(valid, (alike == 0).double().mean(0), 0.0)


def estimate_self(
    gain: Tensor,
    expected: Tensor,
    log_p: Tensor,
    holds_mask: Tensor,
    price: Tensor,
    reward: Tensor | None = None,
    *,
    penalty: Tensor | None = None,
) -> SelfEstimate:
    """The estimate and its surrogate loss from g, E[g_t | x_{t+1}] and log P(r_t | x_{t+1}), [T, B, k] each.

    g has theta's graph, the other two have psi's; they are 0 where nothing is decided: at t = 0 and without a mask.
    penalty: w d [T, B, k], without a graph; the value is then that of J_lambda - w KL.
    """
    if (k := gain.shape[-1]) < 2:
        raise ValueError(f"the selector as its own posterior needs k >= 2 trajectories per sequence, got k = {k}")
    penalty = torch.zeros_like(gain) if penalty is None else penalty
    G = returns(gain.detach() - penalty, holds_mask, price, reward)
    after = torch.zeros_like(G[:1]) if reward is None else reward.expand_as(G[:1])  # G_{-1}
    after = torch.cat([after, G[:-1]]) - penalty
    counted = holds_mask if reward is None else torch.ones_like(holds_mask)
    advantage = torch.where(holds_mask, after - baseline(after, counted), 0.0)
    surrogate = torch.where(holds_mask, gain, 0.0) + expected + advantage * log_p
    return SelfEstimate(value=G[-1].mean(-1), loss=-surrogate.sum(0).mean(-1))


def many_sample_bound(log_likelihood: Tensor) -> Tensor:
    """log mean_i exp(sum_t g_t^i) [B] from sum_t g_t [B, k]: a lower bound of log P(x_0) that grows with k to it."""
    return torch.logsumexp(log_likelihood, -1) - math.log(log_likelihood.shape[-1])
