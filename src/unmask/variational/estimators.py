"""The gradient of the bound: a surrogate whose autograd gradient is unbiased, kept apart from the value of the bound.

For k trajectories of the same x_0 at the same t, with F_i = F_t(x^i_{t+1}) and a baseline b_i that does not depend on
trajectory i,

    surrogate_i = F_i + stop_gradient(F_i - b_i) * log Q(x^i_{>=t+1} | x_0)
    grad = T * mean_i grad surrogate_i

theta (denoiser) and psi (selector) receive grad F only, since log Q does not depend on them; phi (scorer) receives both
terms.  The surrogate's own value means nothing: report `elbo`, differentiate `loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Baseline(Protocol):
    """b_i for each value F_i: anything that does not depend on trajectory i itself keeps the gradient unbiased."""

    min_trajectories: int

    def __call__(self, values: Tensor, t: Tensor) -> Tensor:
        """Baselines [B, k] for values [B, k] at times t [B]; never differentiated."""


class LeaveOneOut:
    """b_i = mean of the other k - 1 values of the same x_0 and t (Kool et al. 2019)."""

    min_trajectories = 2

    def __call__(self, values: Tensor, t: Tensor) -> Tensor:
        k = values.shape[-1]
        return (values.sum(-1, keepdim=True) - values) / (k - 1)


class NoBaseline:
    """b_i = 0: plain REINFORCE, to see what leave-one-out buys."""

    min_trajectories = 1

    def __call__(self, values: Tensor, t: Tensor) -> Tensor:
        return torch.zeros_like(values)


class MovingAverage:
    """b = an exponential moving average of F at the same t over the updates before this one.

    Call `fold` after every update: until then its micro-batches all see the same baseline.
    """

    min_trajectories = 1

    def __init__(self, budget: int, decay: float = 0.9) -> None:
        self.decay = decay
        self.mean = torch.zeros(budget, dtype=torch.float64)  # [T]
        self.seen = torch.zeros(budget, dtype=torch.bool)  # [T]
        self._clear()

    def __call__(self, values: Tensor, t: Tensor) -> Tensor:
        means, t_cpu = values.detach().mean(-1).double().cpu(), t.cpu()
        self._sum.index_add_(0, t_cpu, means)
        self._count.index_add_(0, t_cpu, torch.ones_like(means))
        return self.mean.to(values)[t][:, None].expand_as(values)

    def fold(self, total: Callable[[Tensor], Tensor] = lambda sums: sums) -> None:
        """Fold the update's mean at each t that occurred into its average; the first one seen starts it.

        A mean that is not finite is left out.
        total: adds up the sums of all processes, so that they share one baseline.
        """
        sums, count = total(torch.stack([self._sum, self._count]))
        count = torch.where(sums.isfinite(), count, 0.0)
        update_mean = sums / count.clamp(min=1)
        blended = torch.where(self.seen, self.decay * self.mean + (1 - self.decay) * update_mean, update_mean)
        self.mean = torch.where(count > 0, blended, self.mean)
        self.seen = self.seen | (count > 0)
        self._clear()

    def _clear(self) -> None:
        self._sum, self._count = torch.zeros_like(self.mean), torch.zeros_like(self.mean)

    def state(self) -> dict[str, Tensor]:
        """The tensors themselves, not copies: all that goes from one update to the next."""
        return {"mean": self.mean, "seen": self.seen}


class BoundEstimate(NamedTuple):
    """One x_0, one time t, k trajectories: [B] each."""

    elbo: Tensor  # unbiased estimate of the bound in nats; carries no gradient
    loss: Tensor  # minimise its mean; its gradient is minus an unbiased gradient of the bound; its value means nothing


def estimate_bound(elbo_terms: Tensor, log_q: Tensor, t: Tensor, budget: int, baseline: Baseline) -> BoundEstimate:
    """The estimate and its surrogate loss from F [B, k] and log Q [B, k], both with their graphs."""
    k = elbo_terms.shape[-1]
    if k < baseline.min_trajectories:
        raise ValueError(
            f"{type(baseline).__name__} needs k >= {baseline.min_trajectories} trajectories a sequence, got k = {k}"
        )
    values = elbo_terms.detach()
    advantage = values - baseline(values, t)
    surrogate = elbo_terms + advantage * log_q
    return BoundEstimate(elbo=budget * values.mean(-1), loss=-budget * surrogate.mean(-1))
