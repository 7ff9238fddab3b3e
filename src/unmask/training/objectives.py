"""The two objectives, as modules: sequences in, a loss to minimise and named numbers out.

Legend: B sequences, k trajectories, L positions, N response positions of a sequence, V tokens.
Losses are in nats per response token: the mean over sequences of -bound / N, with the N of each.  Every sequence counts
alike; where lengths differ, the gradient is not that of the mean bound, in which every token counts alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unmask.models.frozen import FrozenDenoiser
from unmask.models.networks import Denoiser
from unmask.models.order_model import OrderModel
from unmask.models.packing import places, scatter
from unmask.recipe import parse_teacher
from unmask.rng import Purpose, uniforms
from unmask.tasks.task import Examples, to_device
from unmask.training.reading import log_likelihood, one_block, read_denoiser, selector_features, with_layout
from unmask.training.teacher import first_logits, reveal_steps
from unmask.variational.elbo import BoundTerms, bound_terms
from unmask.variational.estimators import Baseline, MovingAverage, estimate_bound
from unmask.variational.posterior import Trajectories, log_prob, sample_times, sample_trajectories


class Outcome(NamedTuple):
    loss: Tensor  # scalar
    metrics: dict[str, Tensor]  # scalars without gradient


class DenoiseObjective(nn.Module):
    """The standard masked-diffusion bound with a linear schedule, its time integrated out.

    With t ~ U(0, 1), every response position masked with probability t, and the weight 1 / t,

        NELBO = E_t E_mask [ 1/t sum_{n masked} -log mu^n(x_0^n) ]  =  E_{m ~ U{1..N}} E_{|mask| = m} [ N/m sum ... ],

    because the integral of t^(m-1) (1-t)^(N-m) over t gives every count m the total weight 1 / m.  The right-hand side
    is the same number with less variance: no sequence comes without a mask, and no weight exceeds N.  A token's share,
    NELBO / N, is then the mean cross-entropy over the masks.  The prompt is never masked.
    """

    def __init__(self, denoiser: Denoiser | FrozenDenoiser, seed: int, compile: bool = False) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.seed = seed
        self.likelihood = torch.compile(log_likelihood, dynamic=True) if compile else log_likelihood

    def forward(self, examples: Examples, ids: Tensor, u: Tensor) -> Outcome:
        """examples [B]; ids [B], which name their draws; u [B] stratified uniforms, which choose the counts m."""
        examples, layout = with_layout(examples, self.denoiser)
        tokens = examples.tokens
        counts = mask_counts(u.cpu(), examples.num_response)
        num_masked, counts, ids = int(counts.sum()), to_device(counts, tokens.device), to_device(ids, tokens.device)
        masked = mask_uniformly(examples.response, examples.position, counts, ids, self.seed)
        reading = read_denoiser(self.denoiser, tokens, masked, layout, num_masked)
        log_mu = reading.spread(self.likelihood(reading.logits, reading.truth))
        loss = -(log_mu.sum(-1) / counts).mean()
        return Outcome(loss, {"elbo": -loss.detach()})


def mask_counts(u: Tensor, num_response: Tensor) -> Tensor:
    """m = 1 + floor(u N) [B]."""
    return 1 + (u * num_response).floor().long()


def mask_uniformly(response: Tensor, position: Tensor, counts: Tensor, ids: Tensor, seed: int) -> Tensor:
    """[B, L] bool: `counts` [B] of the response positions [B, L] of each row, every choice equally likely."""
    draw = uniforms(seed, Purpose.MASKING, ids[:, None], position, dtype=torch.float64)
    rank = draw.masked_fill(~response, 2.0).argsort(-1).argsort(-1)
    return response & (rank < counts[:, None])


class Rollout(NamedTuple):
    """k trajectories per sequence down to x_{t+1}, and what the networks say there: all that the bound is made of."""

    scores: Tensor  # [B, L]
    response: Tensor  # [B, L] bool
    t: Tensor  # [B]
    drawn: Trajectories  # [B, k, L]
    which: Tensor  # [R]: the places of the flattened [B, k] that were evaluated
    log_mu: Tensor  # [R, L]
    logits: Tensor  # [R, L]: the selector's


class OrderObjective(nn.Module):
    """The paper's bound: one time t per sequence, k trajectories of it, and the surrogate of `estimate_bound`.

    T is that of the selector.  On a block-causal denoiser it is the bound of one block of each sequence, given those
    before it (`one_block`).  A frozen denoiser (`learn_denoiser` False) is run without a graph.  What the selector
    reads from the denoiser is detached, so that theta gets the gradient of the reconstruction only.

    `initial_kl_weight` w > 1 trains on F1 - w KL at first, w falling linearly to 1 at half of the updates.  The
    posterior sees x_0 and can write it into the order, which the selector cannot follow: a local optimum with a high
    reconstruction and a high KL.  A high weight of the KL at the start makes it look for orders that can be followed.
    What is reported is always the bound itself, w = 1.
    """

    def __init__(
        self,
        model: OrderModel,
        trajectories: int,
        baseline: Baseline,
        seed: int,
        learn_denoiser: bool = True,
        initial_kl_weight: float = 1.0,
        compile: bool = False,
    ) -> None:
        super().__init__()
        assert model.selector is not None
        self.model, self.budget = model, model.selector.budget
        self.initial_kl_weight = self.kl_weight = initial_kl_weight
        self.trajectories, self.baseline, self.seed = trajectories, baseline, seed
        self.learn_denoiser = learn_denoiser
        self.teacher = parse_teacher(model.config.teacher) if model.config.teacher else None
        self.parts = _Parts(self.draw, self.read, selector_features, self.bound, self.conclude)
        if compile:
            still, moving = (partial(torch.compile, dynamic=dynamic) for dynamic in (False, True))
            draw, read, features, bound, conclude = self.parts
            if isinstance(baseline, MovingAverage):  # which keeps what it sees on the CPU
                bound = moving(bound)
            else:  # the bound is part of it
                conclude = moving(conclude)
            self.parts = _Parts(still(draw), moving(read), moving(features), bound, conclude)

    def forward(self, examples: Examples, ids: Tensor, u: Tensor) -> Outcome:
        """examples [B]; ids [B], which name their draws; u [B] stratified uniforms, which choose the times t."""
        if size := self.model.block_size:
            examples = one_block(examples, u, size, self.seed)
        rollout = self.rollout(examples, ids, sample_times(u, self.budget))
        num_response = to_device(examples.num_response, rollout.t.device)
        # A tensor: for a number, a program would be compiled at each update.
        kl_weight = to_device(torch.tensor(self.kl_weight), rollout.t.device)
        return Outcome(*self.parts.conclude(rollout, num_response, kl_weight))

    def conclude(self, rollout: Rollout, num_response: Tensor, kl_weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss in nats per token, and the metrics."""
        terms, log_q = self.parts.bound(rollout)
        objective = terms.reconstruction - kl_weight * terms.order_kl
        estimate = estimate_bound(objective, log_q, rollout.t, self.budget, self.baseline)
        loss = (estimate.loss / num_response).mean()

        def per_token(values: Tensor) -> Tensor:
            return (self.budget * values.detach().mean(-1) / num_response).mean()

        return loss, {
            "elbo": per_token(terms.elbo),
            "reconstruction": per_token(terms.reconstruction),
            "order_kl": per_token(terms.order_kl),
            # E[steps] = sum_t P(x_{t+1} holds a mask): the same uniform t estimates it
            "q_steps": self.budget * rollout.drawn.masked.any(-1).float().mean(),
            "saturated": saturation(rollout.scores, rollout.response),
        }

    def begin_update(self, progress: float) -> None:
        """Set the KL weight at `progress` in [0, 1) of the stage."""
        self.kl_weight = 1 + (self.initial_kl_weight - 1) * max(0.0, 1 - 2 * progress)

    def terms(
        self, examples: Examples, ids: Tensor, t: Tensor, scores: Tensor | None = None
    ) -> tuple[BoundTerms, Tensor, Tensor]:
        """F1 and KL [B, k], log Q [B, k] and the masks of x_{t+1} [B, k, L], at the times t [B].

        scores: those of the examples, where known.
        """
        rollout = self.rollout(examples, ids, t, scores)
        return *self.bound(rollout), rollout.drawn.masked

    def bound(self, rollout: Rollout) -> tuple[BoundTerms, Tensor]:
        """F1 and KL [B, k], and log Q [B, k]."""
        scores, response, t, drawn, tau = *rollout[:4], self.model.config.tau
        terms = bound_terms(scores, drawn.masked, t, tau, *self.spread(rollout), self.model.selection)
        return terms, log_prob(scores, response, t, self.budget, tau, drawn)

    def spread(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """log mu and the selector's logits of all trajectories [B, k, L]."""
        shared, shape = (rollout.t == self.budget - 1)[:, None, None], rollout.drawn.masked.shape[:2]
        spread = (scatter(values, rollout.which, shape) for values in (rollout.log_mu, rollout.logits))
        log_mu, logits = (torch.where(shared, values[:, :1], values) for values in spread)
        return log_mu, logits

    def rollout(self, examples: Examples, ids: Tensor, t: Tensor, scores: Tensor | None = None) -> Rollout:
        """Draw k trajectories per sequence down to x_{t+1}, and ask the networks there."""
        k = self.trajectories
        device = next(self.model.parameters()).device
        examples = examples.to(device)
        scores = self.scores(examples) if scores is None else scores
        first_step = (t == self.budget - 1).cpu()  # [B]
        t, ids = to_device(t, device), to_device(ids, device)
        # Made here: Triton would take numbers that a compiled program counts out itself for 32-bit ones.
        steps, trajectory = torch.arange(1, self.budget, device=device), torch.arange(k, device=device)
        with torch.no_grad():
            drawn = self.parts.draw(scores, examples.response, t, ids, examples.position, steps, trajectory)

        # x_T is the same for all k trajectories, so at t = T-1 one of them is evaluated and stands for all; where no
        # mask is left, F = 0 and nothing is evaluated.
        num_masked = drawn.masked.sum(-1).cpu()  # [B, k]: the one time that the device is waited for
        needed = (num_masked > 0) & (~first_step[:, None] | (torch.arange(k) == 0))
        asked = self._ask(examples, drawn.masked, t, needed, int(num_masked[needed].sum()))
        return Rollout(scores, examples.response, t, drawn, *asked)

    def scores(self, examples: Examples) -> Tensor:
        """alpha [B, L]: one pass of the scorer, whatever k and t; a teacher adds up to T - 1 of the denoiser."""
        assert self.model.scorer is not None
        examples, layout = with_layout(examples, self.model)
        scores: Tensor = self.model.scorer(examples.tokens, layout, self._start(examples) if self.teacher else None)
        return scores

    @torch.no_grad()
    def _start(self, examples: Examples) -> Tensor:
        """[B, L]: where the teacher starts the scores.

        Q may depend on x_0 in any way; that it depends on theta too is left out of theta's gradient.
        """
        assert self.teacher is not None
        assert isinstance(self.model.denoiser, Denoiser)
        steps = reveal_steps(self.teacher, self.model.denoiser, examples, self.budget, self.parts.features)
        # In older versions of torch later passes would take the weights that autocast has cast here, without a graph.
        torch.clear_autocast_cache()
        return first_logits(steps, examples.response)

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
        """The draws are a function of seed, id, trajectory, step and position alone; 24 bits would miss a small q."""
        words = ids[:, None, None], trajectory[:, None], steps[:, None, None, None], position[:, None]
        draws = uniforms(self.seed, Purpose.TRAJECTORY, *words, dtype=torch.float64)  # [T-1, B, k, L]
        return sample_trajectories(scores, response, t, self.budget, self.model.config.tau, draws)

    def _ask(
        self, examples: Examples, masked: Tensor, t: Tensor, needed: Tensor, num_masked: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The trajectories in `needed` [B, k] as places [R]; log mu of their true tokens, selector logits: [R, L]."""
        model = self.model
        assert model.selector is not None
        which = places(needed, None)  # [R], on the CPU, as `needed`
        chosen = examples.rows(which // self.trajectories)
        which = to_device(which, masked.device)
        at = masked.flatten(0, 1)[which]  # [R, L]
        chosen, layout = with_layout(chosen, model)
        with torch.set_grad_enabled(self.learn_denoiser and torch.is_grad_enabled()):
            reading = read_denoiser(model.denoiser, chosen.tokens, at, layout, num_masked)
            log_mu, features = self.parts.read(reading.logits, reading.truth)
        times = t[which // self.trajectories]
        logits = model.selector(reading.hidden.detach(), reading.spread(features), at, times, layout)
        return which, reading.spread(log_mu), logits

    def read(self, logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """log mu of the true tokens [M], and what the selector reads of the logits [M, V]: [M, 3]."""
        return log_likelihood(logits, truth), selector_features(logits.detach())


class _Parts(NamedTuple):
    """What is worth compiling beside the networks: many small operations each."""

    draw: Callable[..., Trajectories]
    read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    features: Callable[[Tensor], Tensor]  # for the teacher
    bound: Callable[[Rollout], tuple[BoundTerms, Tensor]]
    conclude: Callable[..., tuple[Tensor, dict[str, Tensor]]]


def saturation(scores: Tensor, response: Tensor) -> Tensor:
    """The share of the response's scores [B, L] within 1/1000 of 0 or 1, where the sigmoid passes hardly a gradient."""
    alpha = scores.detach()
    return (((alpha < 1e-3) | (alpha > 1 - 1e-3)) & response).sum() / response.sum()
