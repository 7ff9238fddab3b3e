"""The selector as its own posterior: value, gradient and bounds against enumeration, and planted mistakes."""

from itertools import product

import pytest
import torch

from tests.variational.tiny import tiny
from unmask.variational.enumeration import exact_log_likelihood, exact_self_bound
from unmask.variational.selection import Bernoulli, NonEmpty, OneByOne
from unmask.variational.self_posterior import (
    SelfEstimate,
    baseline,
    distinct_reward,
    estimate_self,
    many_sample_bound,
    returns,
)

X0 = torch.tensor([1, 0, 1])
BUDGET, K, PRICE = 3, 2, 0.3
EACH = pytest.mark.parametrize("selection", [Bernoulli(), NonEmpty(), OneByOne()])


def every_trajectory(model, response):
    """g, E[g | x], log P and holds_mask [T, M] of every trajectory that P can take on X0, with their graphs."""
    times = [range(BUDGET - 1, -1, -1) if chosen else [BUDGET] for chosen in response.tolist()]
    reveal_time = torch.tensor(list(product(*times)))  # [M, N]
    gain, expected, log_p, holds_mask = [], [], [], []
    for t in range(BUDGET):
        masked, reveal = (reveal_time <= t) & response, reveal_time == t
        x = torch.where(masked, model.mask, X0)
        log_mu = model.denoiser(x).gather(-1, X0.expand_as(x)[..., None])[..., 0]
        gain.append(torch.where(reveal, log_mu, 0.0).sum(-1))
        forced, logits = torch.zeros(len(x), dtype=log_mu.dtype), model.selector(x, t)
        log_p.append(model.selection.log_prob(reveal, logits, masked) if t else forced)
        expected.append((model.selection.marginal(logits, masked) * log_mu.detach()).sum(-1) if t else forced)
        holds_mask.append(masked.any(-1))
    possible = torch.isfinite(torch.stack(log_p)).all(0)
    return tuple(torch.stack(rows)[:, possible] for rows in (gain, expected, log_p, holds_mask))


def exact_value(model, response, reward=None):
    """J_lambda; with a reward for each trajectory, its mean less the price of the steps."""
    exact = exact_self_bound(model, X0, BUDGET, response)
    steps = exact.chain.expected_steps()
    if reward is None:
        return exact.gain.sum() - PRICE * steps
    return every_trajectory(model, response)[2].sum(0).exp() @ reward - PRICE * steps


def averaged(model, response, estimate, reward=None):
    """Value and loss, averaged over all k-tuples of trajectories with their probabilities."""
    gain, expected, log_p, holds_mask = every_trajectory(model, response)
    tuples = torch.cartesian_prod(*[torch.arange(gain.shape[1])] * K)  # [B, k]
    weights = log_p.detach().sum(0)[tuples].sum(-1).exp()  # [B]
    price = torch.full((len(tuples),), PRICE, dtype=gain.dtype)
    parts = (gain, expected) if reward is None else (torch.zeros_like(gain), torch.zeros_like(gain))
    parts = (part[:, tuples] for part in (*parts, log_p, holds_mask))
    found = estimate(*parts, price, None if reward is None else reward[tuples])
    return weights @ found.value, weights @ found.loss


def check(selection, estimate=estimate_self, seed=0, response=(True, True, True), with_reward=False):
    tables = tiny(selection, budget=BUDGET, seed=seed)
    model, response = tables.model, torch.tensor(response)
    reward = None
    if with_reward:  # any function of the trajectory will do
        count = every_trajectory(model, response)[0].shape[1]
        reward = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = [tables.psi] if with_reward else [tables.theta, tables.psi]
    exact = exact_value(model, response, reward)
    value, loss = averaged(model, response, estimate, reward)
    assert abs(float(value.detach()) - float(exact.detach())) < 1e-10
    truth = torch.autograd.grad(exact, parameters)
    ours = torch.autograd.grad(loss, parameters)
    for true_gradient, gradient in zip(truth, ours, strict=True):
        assert true_gradient.abs().max() > 1e-3, "the test has no power"
        assert (true_gradient + gradient).abs().max() < 1e-10, "biased"


@EACH
@pytest.mark.parametrize("with_reward", [False, True])
def test_value_and_gradient_are_unbiased(selection, with_reward):
    for seed in (0, 1):
        check(selection, seed=seed, with_reward=with_reward)


def test_with_a_prompt():
    check(NonEmpty(), response=(True, False, True))


def mistaken(mistake):
    def estimate(gain, expected, log_p, holds_mask, price, reward=None):
        if mistake == "the last step left out":
            holds_mask = holds_mask.clone()
            holds_mask[0] = False
        values = gain.detach()
        G = returns(values, holds_mask, price, reward)
        if mistake == "price paid after the end":
            G = (values - price[:, None]).cumsum(0)
        if mistake == "the gain of earlier steps counted instead":
            G = returns(values.flip(0), holds_mask.flip(0), price, reward).flip(0)
        after = torch.cat([torch.zeros_like(G[:1]) if reward is None else reward[None], G[:-1]])
        if mistake == "what the step itself earns counted twice":
            after = G
        others = (torch.where(holds_mask, after, 0.0) if reward is None else after).flip(-1)  # of two trajectories
        if mistake == "itself in the baseline":
            others = after.mean(-1, keepdim=True)
        advantage = torch.where(holds_mask, after - others, 0.0)
        if mistake == "what the step itself earns left out":
            expected = 0 * expected
        loss = -(gain.sum(0) + (expected + advantage * log_p).sum(0)).mean(-1)
        return SelfEstimate(returns(values, holds_mask, price, reward)[-1].mean(-1), loss)

    return estimate


@pytest.mark.parametrize("selection", [Bernoulli(), NonEmpty()])
@pytest.mark.parametrize(
    ("mistake", "with_reward"),
    [
        *(("the last step left out", each) for each in (False, True)),
        *(("price paid after the end", each) for each in (False, True)),
        *(("itself in the baseline", each) for each in (False, True)),
        *(("the gain of earlier steps counted instead", each) for each in (False, True)),
        ("what the step itself earns left out", False),  # with a reward it earns nothing
        ("what the step itself earns counted twice", False),
    ],
)
def test_planted_mistakes_are_found(mistake, with_reward, selection):
    check(selection, mistaken(""), with_reward=with_reward)
    with pytest.raises(AssertionError):
        check(selection, mistaken(mistake), with_reward=with_reward)


def check_reference(selection, mistake=""):
    """J_lambda - w KL(P || P_ref) and its gradient, both over all trajectories, P_ref another tiny model's selector."""
    weight, response = 0.7, torch.ones(3, dtype=torch.bool)
    tables, rule = tiny(selection, budget=BUDGET), tiny(selection, budget=BUDGET, seed=9)
    log_p, log_rule = (every_trajectory(m, response)[2] for m in (tables.model, rule.model))
    kl = log_p.sum(0).exp() @ (log_p - log_rule).sum(0)
    exact = exact_value(tables.model, response) - weight * kl
    penalty = weight * (log_p - log_rule)
    penalty = penalty if mistake == "with its graph" else penalty.detach()
    if mistake == "the reference forgotten":
        penalty = weight * log_p.detach()
    if mistake == "pulled away":
        penalty = -penalty
    if mistake == "paid at the first step only":
        penalty = torch.cat([torch.zeros_like(penalty[:-1]), penalty[-1:]])

    def estimate(*arguments):
        tuples = torch.cartesian_prod(*[torch.arange(penalty.shape[1])] * K)
        return estimate_self(*arguments, penalty=penalty[:, tuples])

    value, loss = averaged(tables.model, response, estimate)
    assert abs(float((value - exact).detach())) < 1e-10
    for parameter in (tables.theta, tables.psi):
        (truth,) = torch.autograd.grad(exact, parameter, retain_graph=True)
        (ours,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        assert truth.abs().max() > 1e-3, "the test has no power"
        assert (truth + ours).abs().max() < 1e-10, "biased"


@EACH
def test_with_a_reference_rule(selection):
    check_reference(selection)


@pytest.mark.parametrize(
    "mistake", ["the reference forgotten", "pulled away", "paid at the first step only", "with its graph"]
)
def test_planted_mistakes_with_a_reference_are_found(mistake):
    with pytest.raises(AssertionError):
        check_reference(NonEmpty(), mistake)


def check_distinct(mistake=""):
    """S and its gradient over all answers of three sequences with two trajectories each; one answer is wrong."""
    right, rows = torch.tensor([True, True, False]), torch.tensor([[7, 0], [7, 1], [6, 1]])
    logits = torch.tensor([0.3, -0.4, 0.6], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(0)
    share = ((1 - (1 - log_p.exp()) ** 3) * right).sum() / 3
    (truth,) = torch.autograd.grad(share, logits, retain_graph=True)
    loss = torch.zeros(())
    for answers in torch.cartesian_prod(*[torch.arange(3)] * 6).view(-1, 3, K):
        reward = distinct_reward(right[answers], rows[answers])
        if mistake == "wrong answers too":
            reward = distinct_reward(right[answers] | True, rows[answers])
        if mistake == "one part of an answer compared":
            reward = distinct_reward(right[answers], rows[answers][..., :1])
        if mistake == "all trajectories of the others compared":
            own = (answers[..., None] == answers[:, None]).sum(-1)
            alike = (answers[..., None, None] == answers).sum((-1, -2)) - own
            reward = (right[answers] & (alike == 0)).double()
        advantage = reward - reward.flip(-1)
        loss = loss + log_p[answers].sum().exp().detach() * (advantage * log_p[answers]).mean()
    (ours,) = torch.autograd.grad(loss, logits)
    assert truth.abs().max() > 1e-2, "the test has no power"
    assert (ours - truth).abs().max() < 1e-10


def test_the_reward_for_different_answers_has_the_gradient_of_their_number():
    check_distinct()
    answers = torch.tensor([[4, 4], [5, 4]])[..., None]
    reward = distinct_reward(torch.tensor([[True, False], [True, True]]), answers)
    assert reward.tolist() == [[0.5, 0.0], [1.0, 0.0]], "its own sequence, whose draws it shares, does not count"


@pytest.mark.parametrize(
    "mistake", ["wrong answers too", "one part of an answer compared", "all trajectories of the others compared"]
)
def test_planted_mistakes_with_different_answers_are_found(mistake):
    with pytest.raises(AssertionError):
        check_distinct(mistake)


@EACH
def test_the_bounds(selection):
    """J <= the bound from 2 samples <= from 3 <= log P, each averaged exactly."""
    model, response = tiny(selection, budget=BUDGET).model, torch.ones(3, dtype=torch.bool)
    gain, _, log_p, _ = every_trajectory(model, response)
    total, p = gain.sum(0).detach(), log_p.detach().sum(0).exp()
    bounds = []
    for k in (1, 2, 3):
        tuples = torch.cartesian_prod(*[torch.arange(len(total))] * k).view(-1, k)
        bounds.append(float(p[tuples].prod(-1) @ many_sample_bound(total[tuples])))
    assert bounds[0] == pytest.approx(float(exact_self_bound(model, X0, BUDGET).gain.sum().detach()), abs=1e-12)
    assert bounds[0] < bounds[1] < bounds[2] < float(exact_log_likelihood(model, X0, BUDGET).detach())
    assert float((p * total.exp()).sum().log()) == pytest.approx(
        float(exact_log_likelihood(model, X0, BUDGET).detach()), abs=1e-12
    )


def test_the_baseline_is_the_mean_of_the_others_that_count():
    after = torch.tensor([1.0, 5.0, 9.0, 100.0])
    counted = torch.tensor([True, True, True, False])  # the last has ended
    assert baseline(after, counted).tolist() == [7.0, 5.0, 3.0, 5.0]
    assert baseline(after, torch.tensor([True, False, False, False])).tolist() == [0.0, 1.0, 1.0, 1.0]


def test_what_has_ended_counts_with_a_reward_only():
    """Three trajectories, the last of one step; the advantage is read from the gradient of log P, t = 0 first."""
    log_p = torch.zeros(3, 1, 3, requires_grad=True)
    gain = torch.tensor([[[-1.0, -3.0, 0.0]], [[-2.0, -2.0, 0.0]], [[-1.0, -1.0, -9.0]]])
    holds_mask = torch.tensor([[[True, True, False]], [[True, True, False]], [[True, True, True]]])
    none, price, reward = torch.zeros_like(gain), torch.tensor([0.5]), torch.tensor([[1.0, 0.0, 1.0]])

    def advantage(gain, *reward):
        (found,) = torch.autograd.grad(estimate_self(gain, none, log_p, holds_mask, price, *reward).loss, log_p)
        return (-3 * found)[:, 0].tolist()

    # To come after t = 2: -4, -6 and 0; after t = 1: -1.5 and -3.5; after t = 0: nothing.
    assert advantage(gain) == [[0.0, 0.0, 0.0], [2.0, -2.0, 0.0], [-1.0, -4.0, 5.0]]
    # With the rewards 1, 0 and 1, after t = 2: 0, -1 and 1; after t = 1: 0.5, -0.5 and 1; after t = 0: the rewards.
    assert advantage(none, reward) == [[0.5, -1.0, 0.0], [0.25, -1.25, 0.0], [0.0, -1.5, 1.5]]


def test_one_trajectory_is_refused():
    one = torch.zeros(2, 1, 1)
    with pytest.raises(ValueError, match="k >= 2"):
        estimate_self(one, one, one, one.bool(), torch.zeros(1))
