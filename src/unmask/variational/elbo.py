"""The terms of the bound, named, one value per trajectory, unreduced.

    log P(x_0) >= E_{t ~ Unif{0..T-1}, x_{t+1} ~ Q} [ T * F_t(x_{t+1}) ]

    F_t = F1 - KL
    F1  = sum_{n masked} q^{t,n} log mu^n(x_{t+1})[x_0^n]         reconstruction
    KL  = KL(Q(r_t | x_{t+1}, x_0) || P(r_t | x_{t+1}))           order KL  (the paper's F2 is its negative)

At t = 0 the budget is spent: every remaining mask is revealed with probability one under Q and under P, so q = 1 and
KL = 0.  Where x_{t+1} holds no mask, F_t = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unmask.variational.posterior import full_precision, log_reveal
from unmask.variational.selection import Selection


class BoundTerms(NamedTuple):
    """F_t of each trajectory, [B, k] each, in nats.  Multiply by T for an unbiased estimate of the bound."""

    reconstruction: Tensor  # F1 <= 0
    order_kl: Tensor  # KL >= 0

    @property
    def elbo(self) -> Tensor:
        return self.reconstruction - self.order_kl


def bound_terms(
    scores: Tensor,
    masked: Tensor,
    t: Tensor,
    tau: float,
    log_mu: Tensor,
    selector_logits: Tensor,
    selection: Selection,
) -> BoundTerms:
    """F1 and KL at x_{t+1}.

    scores [B, N]; masked [B, k, N], the masks of x_{t+1}; t [B]; log_mu [B, k, N], the denoiser's log-probability of
    the true token (read at masked positions only); selector_logits [B, k, N].
    Gradients: scores through q, log_mu through F1, selector_logits through KL.
    """
    return terms_under(log_reveal(scores[:, None], masked, tau), masked, t, log_mu, selector_logits, selection)


def terms_under(
    log_q: Tensor, masked: Tensor, t: Tensor, log_mu: Tensor, selector_logits: Tensor, selection: Selection
) -> BoundTerms:
    """The same from log q [B, k, N], the marginal probabilities of a reveal at the masked positions."""
    forced = (t == 0)[:, None]  # [B, 1]
    log_q = torch.where(forced[..., None], 0.0, log_q)
    # Where the mask is off, log_mu may hold anything, -inf included: choose before multiplying.
    log_mu = torch.where(masked, full_precision(log_mu), 0.0)
    reconstruction = (log_q.exp() * log_mu).sum(-1)
    order_kl = torch.where(forced, 0.0, selection.kl(log_q, selector_logits, masked))
    return BoundTerms(reconstruction, order_kl)
