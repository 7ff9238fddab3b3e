"""The two objectives, as modules: sequences in, a loss to minimise and named numbers out.

Legend: B sequences, k trajectories, L positions, N response positions of a sequence, V tokens.
Losses are in nats a response token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unmask.decoding.confidence import confidence, features, log_probabilities, spread
from unmask.models.networks import Denoiser
from unmask.models.order_model import OrderModel
from unmask.streams import Purpose, uniforms
from unmask.tasks.task import Examples
from unmask.variational.elbo import BoundTerms, bound_terms
from unmask.variational.estimators import Baseline, MovingAverage, estimate_bound
from unmask.variational.posterior import log_prob, sample_times, sample_trajectories


class Outcome(NamedTuple):
    loss: Tensor  # scalar
    metrics: dict[str, Tensor]  # scalars without gradient


class Reading(NamedTuple):
    """What the denoiser says of the masked positions of R sequences, M of them."""

    hidden: Tensor  # [R, L, D]
    logits: Tensor  # [M, V]: the masked positions only, row by row
    log_mu: Tensor  # [R, L]: log-probability of the true token where masked, else 0


def read_denoiser(denoiser: Denoiser, tokens: Tensor, masked: Tensor, attention: Tensor | None) -> Reading:
    """Mask the clean tokens [R, L] where `masked` [R, L] and ask for them back; logits only where masked."""
    hidden = denoiser.hidden(torch.where(masked, denoiser.mask_token_id, tokens), attention)
    logits = denoiser.logits(hidden[masked])
    return Reading(hidden, logits, spread(log_likelihood(logits, tokens[masked]), masked))


def log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p [M] of the tokens [M] under logits [M, V]."""
    return -cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens, reduction="none")


def selector_features(logits: Tensor) -> Tensor:
    """[M, 3]: what the selector reads of the logits [M, V]."""
    return features(confidence(log_probabilities(logits)))


class DenoiseObjective(nn.Module):
    """The standard masked-diffusion bound with a linear schedule, its time integrated out.

    With t ~ U(0, 1), every response position masked with probability t, and the weight 1 / t,

        NELBO = E_t E_mask [ 1/t sum_{n masked} -log mu^n(x_0^n) ]  =  E_{m ~ U{1..N}} E_{|mask| = m} [ N/m sum ... ],

    because the integral of t^(m-1) (1-t)^(N-m) over t gives every count m the total weight 1 / m.  The right-hand side
    is the same number with less variance: no sequence comes without a mask, and no weight exceeds N.  A token's share,
    NELBO / N, is then the mean cross-entropy over the masks.  The prompt is never masked.
    """

    def __init__(self, denoiser: Denoiser, seed: int) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.seed = seed

    def forward(self, examples: Examples, ids: Tensor, u: Tensor) -> Outcome:
        """examples and ids [B]; u [B] stratified uniforms, which choose the counts m."""
        masked = mask_uniform_count(examples, u, self.seed, ids)
        reading = read_denoiser(self.denoiser, examples.tokens, masked, padding(examples))
        loss = -(reading.log_mu.sum(-1) / masked.sum(-1)).mean()
        return Outcome(loss, {"elbo": -loss.detach()})


def mask_uniform_count(examples: Examples, u: Tensor, seed: int, ids: Tensor) -> Tensor:
    """[B, L] bool: m = 1 + floor(u N) of the N response positions of each row, chosen uniformly."""
    response = examples.response
    count = 1 + (u.to(response.device) * response.sum(-1)).floor().long()
    draw = uniforms(seed, Purpose.MASKING, ids[:, None], examples.position, dtype=torch.float64)
    rank = draw.masked_fill(~response, 2.0).argsort(-1).argsort(-1)
    return response & (rank < count[:, None])


class OrderObjective(nn.Module):
    """The paper's bound: one time t a sequence, k trajectories of it, and the surrogate of `estimate_bound`.

    A frozen denoiser (`learn_denoiser` False) is run without a graph.  What the selector reads from the denoiser is
    detached unless `attach_selector`, so that theta gets the gradient of the reconstruction only.

    `initial_kl_weight` w > 1 trains on F1 - w KL at first, w falling linearly to 1 at half of the updates.  The
    posterior sees x_0 and can write it into the order, which the selector cannot follow: a local optimum with a high
    reconstruction and a high KL.  A dear KL at the start makes it look for orders that can be followed.  What is
    reported is always the bound itself, w = 1.
    """

    def __init__(
        self,
        model: OrderModel,
        budget: int,
        trajectories: int,
        baseline: Baseline,
        seed: int,
        learn_denoiser: bool = True,
        attach_selector: bool = False,
        initial_kl_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.initial_kl_weight = self.kl_weight = initial_kl_weight
        self.budget, self.trajectories, self.baseline, self.seed = budget, trajectories, baseline, seed
        self.learn_denoiser, self.attach_selector = learn_denoiser, attach_selector

    def forward(self, examples: Examples, ids: Tensor, u: Tensor) -> Outcome:
        """examples and ids [B]; u [B] stratified uniforms, which choose the times t."""
        t = sample_times(u.to(ids.device), self.budget)
        num_response = examples.response.sum(-1)
        terms, log_q, masked = self.terms(examples, ids, t)
        objective = terms.reconstruction - self.kl_weight * terms.order_kl
        estimate = estimate_bound(objective, log_q, t, self.budget, self.baseline)
        loss = (estimate.loss / num_response).mean()

        def per_token(values: Tensor) -> Tensor:
            return (self.budget * values.detach().mean(-1) / num_response).mean()

        metrics = {
            "elbo": per_token(terms.elbo),
            "reconstruction": per_token(terms.reconstruction),
            "order_kl": per_token(terms.order_kl),
            # E[steps] = sum_t P(x_{t+1} holds a mask): the same uniform t estimates it
            "q_steps": self.budget * masked.any(-1).float().mean(),
        }
        return Outcome(loss, metrics)

    def begin_update(self, progress: float) -> None:
        """Set the KL weight at `progress` in [0, 1) of the stage; let a moving average take in the update before."""
        self.kl_weight = 1 + (self.initial_kl_weight - 1) * max(0.0, 1 - 2 * progress)
        if isinstance(self.baseline, MovingAverage):
            self.baseline.fold()

    def terms(self, examples: Examples, ids: Tensor, t: Tensor) -> tuple[BoundTerms, Tensor, Tensor]:
        """F1 and KL [B, k], log Q [B, k] and the masks of x_{t+1} [B, k, L], at the times t [B]."""
        model, k, response = self.model, self.trajectories, examples.response
        assert model.scorer is not None
        scores = model.scorer(examples.tokens, padding(examples))  # [B, L]: one pass, whatever k and t
        drawn = sample_trajectories(scores, response, t, self.budget, model.config.tau, self._uniforms(ids, examples))
        log_q = log_prob(scores, response, t, self.budget, model.config.tau, drawn)

        # x_T is the same for all k trajectories, so at t = T-1 one of them is evaluated and stands for all; where no
        # mask is left, F = 0 and nothing is evaluated.
        first_step = (t == self.budget - 1)[:, None]  # [B, 1]
        needed = drawn.masked.any(-1) & (~first_step | (torch.arange(k, device=t.device) == 0))  # [B, k]
        log_mu, logits = self._evaluate(examples, drawn.masked, t, needed)
        first_step = first_step[..., None]
        log_mu = torch.where(first_step, log_mu[:, :1], log_mu)
        logits = torch.where(first_step, logits[:, :1], logits)
        terms = bound_terms(scores, drawn.masked, t, model.config.tau, log_mu, logits, model.selection)
        return terms, log_q, drawn.masked

    def _evaluate(self, examples: Examples, masked: Tensor, t: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
        """log mu of the true token and selector logits, [B, k, L] each, for the trajectories in `needed` [B, k]."""
        model = self.model
        assert model.selector is not None
        row, _ = needed.nonzero(as_tuple=True)  # the sequence of each of R trajectories
        at = masked[needed]  # [R, L]
        tokens = examples.tokens[row]
        attention = None if padding(examples) is None else examples.attention[row]
        with torch.set_grad_enabled(self.learn_denoiser and torch.is_grad_enabled()):
            reading = read_denoiser(self.model.denoiser, tokens, at, attention)
        said, hidden = selector_features(reading.logits), reading.hidden
        if not self.attach_selector:
            said, hidden = said.detach(), hidden.detach()
        logits = model.selector(hidden, spread(said, at), at, t[row], self.budget, attention)  # [R, L]
        return spread(reading.log_mu, needed), spread(logits, needed)

    def _uniforms(self, ids: Tensor, examples: Examples) -> Tensor:
        """[T-1, B, k, L]: a function of seed, id, trajectory, step and position alone."""
        steps = torch.arange(1, self.budget, device=ids.device)[:, None, None, None]
        trajectory = torch.arange(self.trajectories, device=ids.device)[:, None]
        position = examples.position[:, None]  # [B, 1, L]
        return uniforms(self.seed, Purpose.TRAJECTORY, ids[:, None, None], trajectory, steps, position)


def padding(examples: Examples) -> Tensor | None:
    """None where nothing is padded, which lets attention take its fastest path."""
    return None if bool(examples.attention.all()) else examples.attention
