"""The gradient of the estimator, averaged over every k-tuple of trajectories, is the gradient of the bound.

Nothing is sampled: the tuples are enumerated, each with its probability.  The same check is then run on planted
mistakes, and must reject every one of them.
"""

from functools import partial

import pytest
import torch

from tests.variational.tiny import tiny
from unmask.variational.elbo import bound_terms
from unmask.variational.enumeration import enumerate_trajectories, exact_bound
from unmask.variational.estimators import BoundEstimate, LeaveOneOut, MovingAverage, NoBaseline, estimate_bound
from unmask.variational.posterior import Trajectories, log_prob
from unmask.variational.selection import Bernoulli, NonEmpty

X0 = torch.tensor([1, 0, 1])
BUDGET, K = 3, 2


def averaged_loss(tables, estimate, response):
    """sum_t 1/T sum over k-tuples of Q(tuple) * loss(tuple), the weights detached: an expectation of gradients."""
    model, total = tables.model, 0.0
    for t in range(BUDGET):
        scores = model.scorer(X0[None])[0]
        drawn = enumerate_trajectories(scores.detach(), response, t, BUDGET, model.tau)
        count = drawn.masked.shape[1]
        index = torch.cartesian_prod(*[torch.arange(count)] * K)  # [tuples, k]: one batch row a tuple
        tuples = Trajectories(drawn.reveal_time[0][index], drawn.masked[0][index])
        times = torch.full((len(index),), t)
        rows = scores.expand(len(index), -1)
        log_q = log_prob(rows, response.expand(len(index), -1), times, BUDGET, model.tau, tuples)
        x = torch.where(tuples.masked, model.mask, X0)  # [tuples, k, N]
        log_mu = model.denoiser(x).gather(-1, X0.expand_as(x)[..., None])[..., 0]
        logits = model.selector(x, t)
        terms = bound_terms(rows, tuples.masked, times, model.tau, log_mu, logits, model.selection)
        weights = log_q.detach().sum(-1).exp()  # Q of the whole tuple
        estimated = estimate(terms.elbo, log_q, times, BUDGET)
        total = total + (weights * estimated.loss).sum() / BUDGET
    return total


def check_unbiased(selection, estimate, seed=0, response=(True, True, True)):
    tables = tiny(selection, budget=BUDGET, seed=seed)
    response = torch.tensor(response)
    exact = torch.autograd.grad(exact_bound(tables.model, X0, BUDGET, response).sum(), tables.parameters())
    estimated = torch.autograd.grad(averaged_loss(tables, estimate, response), tables.parameters(), allow_unused=True)
    for name, truth, ours in zip(["theta", "psi", "phi"], exact, estimated, strict=True):
        assert truth.abs().max() > 1e-3, f"the test has no power for {name}"
        assert ours is not None, f"no gradient for {name}"
        assert (truth + ours).abs().max() < 1e-10, f"biased gradient for {name}"


def constant_moving_average():
    """A moving average that has seen other updates: any constant is a fair baseline."""
    baseline = MovingAverage(BUDGET)
    baseline(torch.tensor([[-3.0], [-1.0], [-7.0]], dtype=torch.float64), torch.arange(3))
    baseline.fold()
    return baseline


@pytest.mark.parametrize("selection", [Bernoulli(), NonEmpty()])
@pytest.mark.parametrize("baseline", [LeaveOneOut(), NoBaseline(), constant_moving_average()])
@pytest.mark.parametrize("seed", [0, 1])
def test_unbiased(selection, baseline, seed):
    check_unbiased(selection, partial(estimate_bound, baseline=baseline), seed)


def test_unbiased_with_a_prompt():
    check_unbiased(NonEmpty(), partial(estimate_bound, baseline=LeaveOneOut()), response=(True, False, True))


class SelfInTheBaseline:
    min_trajectories = 2

    def __call__(self, values, t):
        return values.mean(-1, keepdim=True).expand_as(values)


def _missing_detach(elbo, log_q, t, budget):
    surrogate = elbo + (elbo - LeaveOneOut()(elbo, t)) * log_q
    return BoundEstimate(budget * elbo.mean(-1), -budget * surrogate.mean(-1))


def _flipped_sign(elbo, log_q, t, budget):
    return estimate_bound(elbo, -log_q, t, budget, LeaveOneOut())


def _dropped_log_q(elbo, log_q, t, budget):
    return estimate_bound(elbo, log_q.detach(), t, budget, LeaveOneOut())


def _one_time_too_few(elbo, log_q, t, budget):
    return estimate_bound(elbo, log_q, t, budget - 1, LeaveOneOut())


def _time_zero_left_out(elbo, log_q, t, budget):
    """As the paper's appendix prints it: no score-function term at t = 0."""
    return estimate_bound(elbo, torch.where(t[:, None] == 0, log_q.detach(), log_q), t, budget, LeaveOneOut())


def _self_in_the_baseline(elbo, log_q, t, budget):
    return estimate_bound(elbo, log_q, t, budget, SelfInTheBaseline())


PLANTED = [
    _self_in_the_baseline,
    _missing_detach,
    _flipped_sign,
    _dropped_log_q,
    _one_time_too_few,
    _time_zero_left_out,
]


@pytest.mark.parametrize("mistake", PLANTED)
@pytest.mark.parametrize("selection", [Bernoulli(), NonEmpty()])
def test_planted_mistakes_turn_the_check_red(selection, mistake):
    with pytest.raises(AssertionError, match="biased"):
        check_unbiased(selection, mistake)


def _detached_maximum(scores, masked, tau):
    highest = scores.masked_fill(~masked, -torch.inf).amax(-1, keepdim=True).detach()
    return torch.where(masked, scores - torch.where(masked.any(-1, keepdim=True), highest, 0.0), 0.0) / tau


def test_a_detached_maximum_turns_the_check_red(monkeypatch):
    """The values stay right and the gradient breaks: only the terms through q and log Q see it."""
    for module in ("posterior", "elbo"):
        monkeypatch.setattr(f"unmask.variational.{module}.log_reveal", _detached_maximum)
    with pytest.raises(AssertionError, match="biased gradient for phi"):
        check_unbiased(NonEmpty(), partial(estimate_bound, baseline=LeaveOneOut()))


def _bernoulli_kl_without_conditioning(self, log_q, logits, masked):
    return Bernoulli().kl(log_q, logits, masked)


def test_a_wrong_kl_breaks_the_bound_not_the_estimator(monkeypatch):
    """Dropping log P(r != 0) keeps estimator and bound consistent with each other, so another test must see it."""
    from tests.variational.test_selection import test_kl_is_the_sum_over_subsets

    monkeypatch.setattr(NonEmpty, "kl", _bernoulli_kl_without_conditioning)
    with pytest.raises(AssertionError):
        test_kl_is_the_sum_over_subsets(NonEmpty())


def test_self_in_the_baseline_shrinks_the_score_function_term_by_one_minus_one_over_k():
    values = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = torch.zeros(5, dtype=torch.long)
    fair, shrunk = values - LeaveOneOut()(values, t), values - SelfInTheBaseline()(values, t)
    assert torch.allclose(shrunk, fair * (1 - 1 / 4))


def test_values_and_gradients_are_kept_apart():
    elbo = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    log_q = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    estimate = estimate_bound(elbo, log_q, torch.zeros(3, dtype=torch.long), 5, LeaveOneOut())
    assert not estimate.elbo.requires_grad
    assert torch.allclose(estimate.elbo, 5 * elbo.detach().mean(-1))
    assert estimate.loss.requires_grad


def test_leave_one_out_needs_two():
    with pytest.raises(ValueError, match="k >= 2"):
        estimate_bound(torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), 2, LeaveOneOut())


def test_moving_average_follows_each_time_by_itself():
    baseline = MovingAverage(budget=3, decay=0.5)
    t = torch.tensor([0, 2, 2])
    values = torch.tensor([[-1.0, -3.0], [-4.0, -4.0], [-6.0, -6.0]])
    for micro in range(3):  # nothing seen yet, however the update is cut into micro-batches
        assert (baseline(values[micro : micro + 1], t[micro : micro + 1]) == 0).all()
    baseline.fold()
    assert baseline(2 * values, t)[:, 0].tolist() == [-2.0, -5.0, -5.0]
    baseline.fold()
    assert baseline(values, t)[:, 0].tolist() == [-3.0, -7.5, -7.5]
    baseline.fold()
    baseline(values[:1], t[:1])
    baseline.fold()
    assert baseline.mean.tolist() == [-2.25, 0.0, -6.25], "a time that does not occur keeps its average"
