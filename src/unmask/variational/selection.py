"""The forms of the selector P(r_t | x_{t+1}): their probability, their exact KL from Q, and their exact sampler.

Legend: s_n = `logits` [..., N], p_n = sigmoid(s_n); only masked positions count.  r = `reveal` [..., N] bool.

    bernoulli   P(r) = prod_n Bern(r_n; p_n)                                         the paper's; r = 0 is possible
    nonempty    P(r) = prod_n Bern(r_n; p_n) / (1 - prod_n (1 - p_n)),  r != 0       the same, given at least one reveal
    one         P(r) = softmax(s)_n,  r = {n}                                        LO-ARM's; Q reveals one as well

Q never reveals nothing, so for the first two, with q = exp(log_q),

    KL(Q || P) = sum_n KL(Bern(q_n) || Bern(p_n)) + log P(r != 0 under the product)      (the last term: nonempty only)
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unmask.variational.posterior import full_precision, log1mexp


class Selection(Protocol):
    """How reveals are distributed, given one logit a position."""

    name: str

    def log_prob(self, reveal: Tensor, logits: Tensor, masked: Tensor) -> Tensor:
        """log P(r) [...], for `reveal` inside `masked`."""

    def kl(self, log_q: Tensor, logits: Tensor, masked: Tensor) -> Tensor:
        """KL(Q || P) [...] of the product of Bern(q_n) from P; 0 where nothing is masked."""

    def marginal(self, logits: Tensor, masked: Tensor) -> Tensor:
        """P(r_n = 1) [..., N]; 0 where not masked."""

    def sample(self, logits: Tensor, masked: Tensor, uniforms: Tensor) -> Tensor:
        """r ~ P [..., N] bool from uniforms [..., N + 1]: one a position, and one for the whole sequence."""


class Bernoulli:
    """Independent reveals, as in the paper.  A step may reveal nothing."""

    name = "bernoulli"

    def log_prob(self, reveal: Tensor, logits: Tensor, masked: Tensor) -> Tensor:
        logits = full_precision(logits)
        return _sum(torch.where(reveal, logsigmoid(logits), logsigmoid(-logits)), masked)

    def kl(self, log_q: Tensor, logits: Tensor, masked: Tensor) -> Tensor:
        # KL(Bern(q) || Bern(p)) = q log q + (1-q) log(1-q) - q log p - (1-q) log(1-p),  log p = logsigmoid(s)
        # (not -softplus(-s): torch's softplus is linear above 20)
        log_q, logits = torch.where(masked, full_precision(log_q), 0.0), full_precision(logits)
        q, not_q = log_q.exp(), -torch.expm1(log_q)
        negative_entropy = q * log_q + not_q * log1mexp(log_q)
        expected_log_p = q * logsigmoid(logits) + not_q * logsigmoid(-logits)
        return _sum(negative_entropy - expected_log_p, masked)

    def marginal(self, logits: Tensor, masked: Tensor) -> Tensor:
        return torch.where(masked, torch.sigmoid(full_precision(logits)), 0.0)

    def sample(self, logits: Tensor, masked: Tensor, uniforms: Tensor) -> Tensor:
        return masked & (uniforms[..., :-1] < torch.sigmoid(full_precision(logits)))


class NonEmpty:
    """The product of Bernoullis conditioned on at least one reveal: no step is wasted, and the KL is never larger.

    Everything comes from the law of the first revealed position, in the order of the positions:

        f_n = P(first is n) = p_n prod_{m<n} (1 - p_m)   under the product,     sum_n f_n = 1 - prod_n (1 - p_n)
    """

    name = "nonempty"

    def log_prob(self, reveal: Tensor, logits: Tensor, masked: Tensor) -> Tensor:
        product = Bernoulli().log_prob(reveal, logits, masked) - self._log_nonempty(logits, masked)
        empty = ~(reveal & masked).any(-1)
        # r = 0 is impossible while something is masked, and certain once nothing is.
        return torch.where(empty, torch.where(masked.any(-1), -torch.inf, 0.0), product)

    def kl(self, log_q: Tensor, logits: Tensor, masked: Tensor) -> Tensor:
        return Bernoulli().kl(log_q, logits, masked) + self._log_nonempty(logits, masked)

    def marginal(self, logits: Tensor, masked: Tensor) -> Tensor:
        log_marginal = logsigmoid(full_precision(logits)) - self._log_nonempty(logits, masked)[..., None]
        return torch.where(masked, log_marginal, -torch.inf).exp()

    def sample(self, logits: Tensor, masked: Tensor, uniforms: Tensor) -> Tensor:
        """The first revealed position by inverse CDF from f, the later ones independently; in float64."""
        logits = logits.double()
        log_first = self._log_first(logits, masked)
        # Relative to the largest, so that probabilities far below the smallest float still compare.
        highest = log_first.amax(-1, keepdim=True)
        cdf = torch.where(masked, (log_first - highest).exp(), 0.0).cumsum(-1)
        is_first, is_later = draw_first(cdf, masked, uniforms[..., -1:])
        return is_first | (is_later & Bernoulli().sample(logits, masked, uniforms))

    @staticmethod
    def _log_first(logits: Tensor, masked: Tensor) -> Tensor:
        """log f_n [..., N]; very negative where not masked."""
        logits = full_precision(logits)
        log_p = torch.where(masked, logsigmoid(logits), torch.finfo(logits.dtype).min)
        log_not_p = torch.where(masked, logsigmoid(-logits), 0.0)
        return log_p + log_not_p.cumsum(-1) - log_not_p

    def _log_nonempty(self, logits: Tensor, masked: Tensor) -> Tensor:
        """log(1 - prod_n (1 - p_n)) as log sum_n f_n, which is exact even where 1 - prod would round to 0."""
        log_total = torch.logsumexp(self._log_first(logits, masked), -1)
        return torch.where(masked.any(-1), log_total, 0.0)


class OneByOne:
    """Exactly one position per step, from softmax(s) over the masks (LO-ARM, Wang et al. 2025)."""

    name = "one"

    def log_prob(self, reveal: Tensor, logits: Tensor, masked: Tensor) -> Tensor:
        count = (reveal & masked).sum(-1)
        chosen = _sum(torch.where(reveal, self._log_p(logits, masked), 0.0), masked)
        return torch.where(count == masked.any(-1), chosen, -torch.inf)

    def kl(self, log_q: Tensor, logits: Tensor, masked: Tensor) -> Tensor:
        """sum_n q_n (log q_n - log p_n): here q is a distribution over the masks."""
        log_q = torch.where(masked, full_precision(log_q), 0.0)
        return _sum(log_q.exp() * (log_q - self._log_p(logits, masked)), masked)

    def marginal(self, logits: Tensor, masked: Tensor) -> Tensor:
        return torch.where(masked, self._log_p(logits, masked).exp(), 0.0)

    def sample(self, logits: Tensor, masked: Tensor, uniforms: Tensor) -> Tensor:
        cdf = self.marginal(logits.double(), masked).cumsum(-1)
        return draw_first(cdf, masked, uniforms[..., -1:])[0]

    @staticmethod
    def _log_p(logits: Tensor, masked: Tensor) -> Tensor:
        logits = full_precision(logits)
        return torch.where(masked, logits, torch.finfo(logits.dtype).min).log_softmax(-1)


def draw_first(cdf: Tensor, masked: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF: is n the first masked position with cdf_n > u * total; does n come after it ([..., N] bool each).

    cdf [..., N]; u [..., 1] in [0, 1).  Where something is masked one position is the first, even if the cdf falls
    somewhere by a rounding: CUDA's cumsum need not be monotone.
    """
    total = torch.where(masked, cdf, 0.0).amax(-1, keepdim=True)
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    above = masked & (cdf > target)
    num_above = above.cumsum(-1)
    is_first = above & (num_above == 1)
    return is_first, (num_above > 0) & ~is_first


def _sum(terms: Tensor, masked: Tensor) -> Tensor:
    return torch.where(masked, terms, 0.0).sum(-1)
