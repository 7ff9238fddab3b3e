"""Exact answers for tiny models, by enumeration: the truth that estimators, samplers and variants are tested against.

Under Q the state at time t is the set of masked positions (2^N states for one x_0); under P it is the whole partly
written sequence ((V+1)^N states).  A step is a transition matrix, so a distribution over states is a vector and every
quantity below is a product of matrices, differentiable in whatever the callables depend on.  Use float64.

    Q_t[A, A'] = prod_{n in A} Bern(n not in A'; q^{t,n}(A))                          A' subset of A
    P_t[x, x'] = P(r | x) prod_{n: r_n = 1} mu^n(x)[x'_n]                             r = where x is mask and x' is not
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.variational.elbo import bound_terms
from unmask.variational.posterior import Trajectories, log1mexp, log_reveal
from unmask.variational.selection import Selection


class TinyModel(NamedTuple):
    """Three functions of sequences x [M, N] that may hold the mask token, whose id is `vocab_size`."""

    denoiser: Callable[[Tensor], Tensor]  # x -> log mu [M, N, V]
    selector: Callable[[Tensor, int], Tensor]  # x, t -> logits s [M, N]
    scorer: Callable[[Tensor], Tensor]  # clean x [M, N] -> alpha [M, N]
    selection: Selection
    vocab_size: int
    tau: float

    @property
    def mask(self) -> int:
        return self.vocab_size


class Chain(NamedTuple):
    """A distribution over M states at every time: `probabilities` [T+1, M], row t the law of x_t."""

    probabilities: Tensor
    masked: Tensor  # [M, N] bool: which positions each state leaves masked

    def expected_steps(self) -> Tensor:
        """The mean number of steps that start with a mask: sum over t of P(x_{t+1} holds a mask)."""
        return (self.probabilities[1:] * self.masked.any(-1)).sum()

    def reveal_step_distribution(self) -> Tensor:
        """[T, N]: the probability that position n is revealed by step t; sums to one over t for response positions."""
        still_masked = self.probabilities @ self.masked.to(self.probabilities.dtype)  # [T+1, N]
        return still_masked[1:] - still_masked[:-1]


def posterior_chain(model: TinyModel, x0: Tensor, budget: int, response: Tensor | None = None) -> Chain:
    """The exact law of the masks under Q(. | x_0) for one clean sequence x0 [N]."""
    masked = _subsets(_response(x0, response))  # [M, N], the full set last
    scores = model.scorer(x0[None])[0]
    log_q = log_reveal(scores, masked, model.tau)  # [M, N]
    keep = masked[None]  # [1, M', N]
    start = masked[:, None]  # [M, 1, N]
    log_step = torch.where(keep, log1mexp(log_q)[:, None], log_q[:, None])  # [M, M', N]
    impossible = (keep & (~start | (log_q == 0)[:, None])).any(-1)  # grows the masks, or keeps one that q = 1 reveals
    step = torch.where(impossible, 0.0, torch.where(start, log_step, 0.0).sum(-1).exp())  # [M, M']
    empty = (~masked).all(-1).to(step.dtype)  # t = 0 reveals everything
    rows = [torch.zeros_like(empty).index_fill(0, torch.tensor(len(masked) - 1), 1.0)]
    for t in range(budget - 1, -1, -1):
        rows.append(rows[-1] @ step if t > 0 else empty)
    return Chain(torch.stack(rows[::-1]), masked)


def exact_bound(model: TinyModel, x0: Tensor, budget: int, response: Tensor | None = None) -> Tensor:
    """The bound's terms E_Q[F_t] for one x0 [N]: a [T] tensor whose sum is the bound, with its graph."""
    chain = posterior_chain(model, x0, budget, response)
    masked = chain.masked  # [M, N]
    x = torch.where(masked, model.mask, x0)
    log_mu = model.denoiser(x).gather(-1, x0.expand_as(x)[..., None])[..., 0]  # [M, N]
    scores = model.scorer(x0[None]).expand(len(x), -1)
    terms = []
    for t in range(budget):
        times = torch.full((len(x),), t)
        values = bound_terms(
            scores, masked[:, None], times, model.tau, log_mu[:, None], model.selector(x, t)[:, None], model.selection
        )
        terms.append(chain.probabilities[t + 1] @ values.elbo[:, 0])
    return torch.stack(terms)


class SelfBound(NamedTuple):
    """The selector as its own posterior on one clean sequence, exactly, with its graph."""

    chain: Chain  # the law of the masks under P
    gain: Tensor  # [T]: E_P[g_t]; its sum is J


def exact_self_bound(model: TinyModel, x0: Tensor, budget: int, response: Tensor | None = None) -> SelfBound:
    """J, and the law of the masks, where the selector orders the true tokens of one x0 [N] itself.

    E[g_t] = sum_{A, A'} P(x_{t+1} = A) P_t[A, A'] sum_{n in A, not in A'} log mu^n(A)[x_0^n]
    """
    masked = _subsets(_response(x0, response))  # [M, N], the full set last
    x = torch.where(masked, model.mask, x0)
    log_mu = model.denoiser(x).gather(-1, x0.expand_as(x)[..., None])[..., 0]  # [M, N]
    start, reveal = masked[:, None], masked[:, None] & ~masked[None]  # [M, 1, N], [M, M', N]
    possible = (start | ~masked[None]).all(-1)  # [M, M']: no mask is put back
    log_mu_revealed = torch.where(reveal, log_mu[:, None], 0.0).sum(-1)  # [M, M']
    empty = (~masked).all(-1).to(log_mu.dtype)
    rows, gain = [torch.zeros_like(empty).index_fill(0, torch.tensor(len(masked) - 1), 1.0)], []
    for t in range(budget - 1, -1, -1):
        if t > 0:
            log_step = model.selection.log_prob(reveal, model.selector(x, t)[:, None], start.expand_as(reveal))
            step = torch.where(possible & torch.isfinite(log_step), log_step, -torch.inf).exp()  # [M, M']
        else:
            step = empty.expand(len(x), -1)  # forced: all that is left
        gain.append(rows[-1] @ (step * log_mu_revealed).sum(-1))
        rows.append(rows[-1] @ step)
    return SelfBound(Chain(torch.stack(rows[::-1]), masked), torch.stack(gain[::-1]))


def generative_chain(model: TinyModel, length: int, budget: int, prompt: Tensor | None = None) -> tuple[Chain, Tensor]:
    """The exact law of the sequence under P, and the states [M, N] it runs over, (V+1)^N of them.

    `prompt` [N] fixes the start x_T; by default all mask.
    """
    V, mask = model.vocab_size, model.mask
    x = torch.tensor(list(product(range(V + 1), repeat=length)))  # [M, N]
    masked = x == mask
    log_mu = model.denoiser(x)  # [M, N, V]
    reveal = masked[:, None] & ~masked[None]  # [M, M', N]
    unchanged = (x[:, None] == x[None]) | reveal
    possible = unchanged.all(-1)
    target = torch.where(masked, 0, x)[None].expand(len(x), -1, -1)  # [M, M', N]
    log_token = log_mu[:, None].expand(-1, len(x), -1, -1).gather(-1, target[..., None])[..., 0]
    log_tokens = torch.where(reveal, log_token, 0.0).sum(-1)  # [M, M']

    start = torch.full((length,), mask) if prompt is None else prompt
    rows = [(x == start).all(-1).to(log_mu.dtype)]
    for t in range(budget - 1, -1, -1):
        if t > 0:
            logits = model.selector(x, t)[:, None]
            log_reveals = model.selection.log_prob(reveal, logits, masked[:, None].expand_as(reveal))
        else:  # forced: all that is left
            log_reveals = torch.where((reveal == masked[:, None]).all(-1), 0.0, -torch.inf)
        step = torch.where(possible & torch.isfinite(log_reveals), log_tokens + log_reveals, -torch.inf).exp()
        rows.append(rows[-1] @ step)
    return Chain(torch.stack(rows[::-1]), masked), x


def exact_log_likelihood(model: TinyModel, x0: Tensor, budget: int, response: Tensor | None = None) -> Tensor:
    """log P(x_0), the marginal over all orders, for one x0 [N] (given its prompt where `response` is False)."""
    prompt = torch.where(_response(x0, response), model.mask, x0)
    chain, states = generative_chain(model, len(x0), budget, prompt)
    return chain.probabilities[0][(states == x0).all(-1)].log().squeeze(0)


def enumerate_trajectories(scores: Tensor, response: Tensor, t: int, budget: int, tau: float) -> Trajectories:
    """Every trajectory down to time t that Q can draw for one sequence (scores and response [N]): B = 1, k of them."""
    times = [*range(budget - 1, t, -1), -1]
    choices = [times if is_response else [-1] for is_response in response.tolist()]
    reveal_time = torch.tensor(list(product(*choices)))[None]  # [1, k, N]
    impossible = torch.zeros(reveal_time.shape[:2], dtype=torch.bool)
    for s in range(budget - 1, t, -1):
        masked = (reveal_time <= s) & response
        certain = (log_reveal(scores, masked, tau) == 0) & masked  # q = 1: the arg-max cannot stay masked
        impossible |= (certain & (reveal_time != s)).any(-1)
    reveal_time = reveal_time[:, ~impossible[0]]
    return Trajectories(reveal_time, (reveal_time == -1) & response)


def _subsets(response: Tensor) -> Tensor:
    """[2^N, N] bool: every subset of the response, the empty one first and the whole one last."""
    choices = [(False, True) if is_response else (False,) for is_response in response.tolist()]
    return torch.tensor(list(product(*choices)))


def _response(x0: Tensor, response: Tensor | None) -> Tensor:
    return torch.ones_like(x0, dtype=torch.bool) if response is None else response
