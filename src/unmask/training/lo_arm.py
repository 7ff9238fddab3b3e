"""LO-ARM as an objective: the rollout, the networks and the estimator of the paper's, with another posterior."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.models.order_model import OrderModel
from unmask.rng import Purpose, uniforms
from unmask.training.objectives import OrderObjective, Rollout
from unmask.variational.elbo import BoundTerms, terms_under
from unmask.variational.lo_arm import log_next, log_prob_orders, sample_orders
from unmask.variational.posterior import Trajectories
from unmask.variational.selection import OneByOne


class LoArmObjective(OrderObjective):
    """One position per step; alpha / tau are the logits of a Plackett-Luce order (`variational.lo_arm`)."""

    def draw(
        self,
        scores: Tensor,
        response: Tensor,
        t: Tensor,
        ids: Tensor,
        position: Tensor,
        steps: Tensor,
        trajectory: Tensor,
    ) -> Trajectories:
        words = ids[:, None, None], trajectory[:, None], 0, position[:, None]
        draws = uniforms(self.seed, Purpose.TRAJECTORY, *words, dtype=torch.float64)  # [B, k, L]
        return sample_orders(scores, response, t, self.budget, self.model.config.tau, draws)

    def bound(self, rollout: Rollout) -> tuple[BoundTerms, Tensor]:
        scores, masked, tau = rollout.scores, rollout.drawn.masked, self.model.config.tau
        log_q = log_next(scores[:, None], masked, tau)  # [B, k, L]
        terms = terms_under(log_q, masked, rollout.t, *self.spread(rollout), self.model.selection)
        return terms, log_prob_orders(scores, rollout.response, tau, rollout.drawn)


def scored_objective(model: OrderModel) -> type[OrderObjective]:
    """The objective of an order with a scorer: which posterior it has follows from the form of its selector."""
    return LoArmObjective if isinstance(model.selection, OneByOne) else OrderObjective
