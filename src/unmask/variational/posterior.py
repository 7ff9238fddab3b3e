"""The variational posterior Q over orders: log q, trajectories, and log Q.

Legend: B sequences, k trajectories of each, N positions, S steps; `masked` is True where x_{t+1} holds the mask token.
Every tensor of positions may run over a whole canvas [.., L]: prompt and padding are simply never masked.

    alpha = scores(x_0) in [0, 1]                                              a function of the clean sequence
    q^{t,n} = exp((alpha_n - max_{m masked} alpha_m) / tau)                    where n is masked, else 0
    log Q(x_{>=t+1} | x_0) = sum_{s=t+1}^{T-1} sum_{n masked at s} log Bern(r_s^n; q^{s,n})

The arg-max of the masked scores has q = 1 exactly, so every step reveals at least one position.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

STEPS_AT_ONCE = 16  # of log Q: the steps that the graph holds; the usual budgets need no more
_NEVER = -1  # reveal time of a position that is still masked when its trajectory ends


def log_reveal(scores: Tensor, masked: Tensor, tau: float) -> Tensor:
    """log q [..., N] at the masked positions; 0 elsewhere, where it means nothing and must be masked out by the caller.

    log q_n = (alpha_n - max_{m masked} alpha_m) / tau.

    The gradient flows through the maximum: scores that shift together leave q unchanged, so over the masked positions
    the gradient sums to zero.  Scores that tie all have q = 1; so do scores within a few roundings of the maximum,
    where log(1 - q) would be noise and its gradient 1 / gap.  The q of a tie has no gradient, and elsewhere
    |d log(1 - q_n) / d alpha_n| <= 1 / (8 eps): a million in float32.
    """
    scores = full_precision(scores)
    # Mask before the maximum and before any exp: the score of a prompt may exceed every masked one.
    lowest = torch.finfo(scores.dtype).min
    highest = scores.masked_fill(~masked, lowest).amax(-1, keepdim=True)
    gap = torch.where(masked, scores - highest, 0.0)
    tie_width = 8 * torch.finfo(gap.dtype).eps * max(1.0, tau)
    return torch.where(gap > -tie_width, 0.0, gap / tau)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, accurate at both ends (Maechler 2012); 0 with no gradient where x = 0.

    x = 0 is q = 1: there 1 - q only ever multiplies or gates this value, and 0 keeps infinities out of the graph.
    """
    certain = x == 0
    x = torch.where(certain, -1.0, x)
    small = x > -0.6931471805599453
    # Both branches see an argument that is safe for their gradient, whichever of them is taken.
    near = torch.log(-torch.expm1(torch.where(small, x, -0.5)))
    far = torch.log1p(-torch.exp(torch.where(small, -1.0, x)))
    return torch.where(certain, 0.0, torch.where(small, near, far))


class Trajectories(NamedTuple):
    """What was revealed when, down to the time t of each sequence.

    `reveal_time` [B, k, N] is the step s (T-1 first, 1 last) that revealed a position, and -1 where x_{t+1} still holds
    the mask or the position is not part of the response.
    """

    reveal_time: Tensor
    masked: Tensor  # [B, k, N] bool: the masks of x_{t+1}


def sample_trajectories(
    scores: Tensor, response: Tensor, t: Tensor, budget: int, tau: float, uniforms: Tensor
) -> Trajectories:
    """Draw x_{t+1} ~ Q(. | x_0), k trajectories a sequence, each row down to its own t, in one pass of T-1 light steps.

    scores [B, N]; response [B, N] bool; t [B] in 0..T-1; uniforms [T-1, B, k, N], where row s-1 serves step s.
    Nothing here is differentiated: `log_prob` below is the differentiable log Q of what was drawn.
    """
    scores = full_precision(scores).detach()[:, None]  # [B, 1, N]
    masked = response[:, None].expand(uniforms.shape[1:]).clone()  # [B, k, N]: x_T
    reveal_time = torch.full(masked.shape, _NEVER, device=masked.device)
    for s in range(budget - 1, 0, -1):
        active = (s > t)[:, None, None]  # a row whose t is s or later has already stopped
        q = log_reveal(scores, masked, tau).exp()
        reveal = masked & active & (uniforms[s - 1] < q)
        reveal_time.masked_fill_(reveal, s)
        masked = masked & ~reveal
    return Trajectories(reveal_time, masked)


def log_prob(
    scores: Tensor, response: Tensor, t: Tensor, budget: int, tau: float, trajectories: Trajectories
) -> Tensor:
    """log Q(x_{>=t+1} | x_0) [B, k], differentiable in the scores.

    At most STEPS_AT_ONCE steps at once.  A larger budget is summed over chunks, which the backward pass computes again,
    so that no more than one chunk is in memory: about 800 bytes for each trajectory and position, whatever T.
    A compiled program fuses all steps instead, and needs about 10 bytes for each step, trajectory and position.
    """
    steps = torch.arange(budget - 1, 0, -1, device=scores.device)  # [S]: s = T-1, ..., 1
    if len(steps) <= STEPS_AT_ONCE or torch.compiler.is_compiling():
        return _log_prob_of_steps(steps, scores, response, t, tau, trajectories.reveal_time)
    run = partial(checkpoint, _log_prob_of_steps, use_reentrant=False, preserve_rng_state=False)
    chunks = (steps[i : i + STEPS_AT_ONCE] for i in range(0, len(steps), STEPS_AT_ONCE))
    return torch.stack([run(chunk, scores, response, t, tau, trajectories.reveal_time) for chunk in chunks]).sum(0)


def _log_prob_of_steps(
    steps: Tensor, scores: Tensor, response: Tensor, t: Tensor, tau: float, reveal_time: Tensor
) -> Tensor:
    """The share of the steps [S] in log Q [B, k]; about 50 bytes for each step, trajectory and position with the graph.

    All at once: position n enters step s masked if it was revealed at s or later in the process, or never.
    """
    s = steps[:, None, None, None]
    active = (s > t[:, None, None]) & response[:, None]  # [S, B, 1, N]
    masked = (reveal_time <= s) & active  # [S, B, k, N]
    revealed = reveal_time == s
    log_q = log_reveal(scores[:, None], masked, tau)
    terms = torch.where(revealed, log_q, log1mexp(log_q))
    return torch.where(masked, terms, 0.0).sum(dim=(0, -1))


def sample_times(uniforms: Tensor, budget: int) -> Tensor:
    """t uniform on {0, ..., T-1} from uniforms in [0, 1); stratified where the uniforms are (`streams.stratified`)."""
    return (uniforms * budget).floor().long().clamp_(max=budget - 1)


def full_precision(x: Tensor) -> Tensor:
    """The bound is computed in float32 at least, whatever autocast does around it."""
    return x if x.dtype == torch.float64 else x.float()
