"""LO-ARM's bound and its gradient against a sum over all orders, and planted mistakes."""

from functools import partial
from itertools import permutations

import pytest
import torch

from tests.statistics import assert_follows
from tests.variational.tiny import tiny
from unmask.variational.elbo import terms_under
from unmask.variational.enumeration import exact_log_likelihood
from unmask.variational.estimators import BoundEstimate, LeaveOneOut, estimate_bound
from unmask.variational.lo_arm import log_next, log_prob_orders, sample_orders
from unmask.variational.posterior import Trajectories
from unmask.variational.selection import OneByOne

X0, K = torch.tensor([1, 0, 1]), 2
EVERYTHING = (True, True, True)
leave_one_out = partial(estimate_bound, baseline=LeaveOneOut())


def exact_bound(model, x0, budget, response):
    """E_Q[sum_i log P(z_i) + log mu - log Q(z_i)], order by order, and at t = 0 log mu of all that is left."""
    alpha, total = model.scorer(x0[None])[0] / model.tau, 0.0
    positions = response.nonzero()[:, 0].tolist()
    for order in permutations(positions, min(len(positions), budget - 1)):
        left, log_q, value = list(positions), torch.zeros((), dtype=torch.float64), 0.0
        for i, n in enumerate(order):
            x = x0.clone()
            x[left] = model.mask
            step = alpha[n] - alpha[left].logsumexp(0)
            s = model.selector(x[None], budget - 1 - i)[0]
            log_mu = model.denoiser(x[None])[0, n, x0[n]]
            value, log_q = value + s[n] - s[left].logsumexp(0) + log_mu - step, log_q + step
            left.remove(n)
        x = x0.clone()
        x[left] = model.mask
        value = value + sum(model.denoiser(x[None])[0, n, x0[n]] for n in left)
        total = total + log_q.exp() * value
    return total


def every_trajectory(response, t, budget):
    """All that Q can have revealed before step t, one row each: reveal times and masks [M, N]."""
    positions = response.nonzero()[:, 0].tolist()
    rows = []
    for order in permutations(positions, min(len(positions), budget - 1 - t)):
        row = [-1] * len(response)
        for i, n in enumerate(order):
            row[n] = budget - 1 - i
        rows.append(row)
    reveal_time = torch.tensor(rows)
    return Trajectories(reveal_time, (reveal_time == -1) & response)


def averaged(tables, response, budget, estimate, log_prob=log_prob_orders):
    """The mean of the bound's estimate and of its loss over t and over all k-tuples, with their probabilities."""
    model, bound, loss = tables.model, 0.0, 0.0
    for t in range(budget):
        drawn = every_trajectory(response, t, budget)
        tuples = torch.cartesian_prod(*[torch.arange(len(drawn.masked))] * K)  # [M, k]
        drawn = Trajectories(drawn.reveal_time[tuples], drawn.masked[tuples])
        scores, times = model.scorer(X0[None]).expand(len(tuples), -1), torch.full((len(tuples),), t)
        everywhere = response.expand(len(tuples), -1)
        weights = log_prob_orders(scores, everywhere, model.tau, drawn).detach().sum(-1).exp()
        assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
        x = torch.where(drawn.masked, model.mask, X0)
        log_mu = model.denoiser(x).gather(-1, X0.expand_as(x)[..., None])[..., 0]
        log_q = log_next(scores[:, None], drawn.masked, model.tau)
        terms = terms_under(log_q, drawn.masked, times, log_mu, model.selector(x, t), model.selection)
        found = estimate(terms.elbo, log_prob(scores, everywhere, model.tau, drawn), times, budget)
        bound, loss = bound + weights @ found.elbo / budget, loss + weights @ found.loss / budget
    return bound, loss


def check(budget=3, response=EVERYTHING, estimate=leave_one_out, **options):
    tables, response = tiny(OneByOne(), budget=budget), torch.tensor(response)
    exact = exact_bound(tables.model, X0, budget, response)
    bound, loss = averaged(tables, response, budget, estimate, **options)
    assert float(bound.detach()) == pytest.approx(float(exact.detach()), abs=1e-10)
    truth, ours = (torch.autograd.grad(value, tables.parameters()) for value in (exact, loss))
    for name, wanted, found in zip(["theta", "psi", "phi"], truth, ours, strict=True):
        assert wanted.abs().max() > 1e-3, f"the test has no power for {name}"
        assert (wanted + found).abs().max() < 1e-10, f"biased gradient for {name}"
    assert float(exact.detach()) < float(exact_log_likelihood(tables.model, X0, budget, response).detach())


def test_bound_and_gradient():
    check()


def test_with_fewer_steps_than_positions():
    check(budget=2)


def test_with_more_steps_than_positions_and_a_prompt():
    check(budget=4, response=(True, False, True))


def itself_in_the_baseline(terms, log_q, t, budget):
    values = terms.detach()
    surrogate = terms + (values - values.mean(-1, keepdim=True)) * log_q
    return BoundEstimate(budget * values.mean(-1), -budget * surrogate.mean(-1))


def never_removed(scores, response, tau, drawn):
    """Every position with its probability at the first step."""
    return torch.where(drawn.reveal_time > 0, log_next(scores, response, tau)[:, None], 0.0).sum(-1)


@pytest.mark.parametrize(
    "options", [{"estimate": itself_in_the_baseline}, {"log_prob": never_removed}], ids=["baseline", "never removed"]
)
def test_planted_mistakes_are_found(options):
    with pytest.raises(AssertionError, match="biased gradient for phi"):
        check(**options)


def test_samples_follow_log_prob():
    budget, t, tau, draws = 3, 0, 0.4, 20_000
    response = torch.tensor([[True, True, False, True]])
    scores = torch.tensor([[0.1, 0.9, 1.0, 0.5]], dtype=torch.float64)
    u = torch.rand(1, draws, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = sample_orders(scores, response, torch.tensor([t]), budget, tau, u)
    every = every_trajectory(response[0], t, budget)
    p = log_prob_orders(scores, response, tau, Trajectories(*(part[None] for part in every)))[0].exp()
    same = (drawn.reveal_time[0][:, None] == every.reveal_time[None]).all(-1)  # [draws, M]
    assert (same.sum(-1) == 1).all()
    assert_follows(same.sum(0).tolist(), (draws * p).tolist())
    assert torch.equal(drawn.masked, (drawn.reveal_time == -1) & response[:, None])
