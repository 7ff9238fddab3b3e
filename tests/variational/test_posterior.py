import math
from itertools import product

import pytest
import torch

from tests.statistics import assert_follows
from unmask.variational import posterior
from unmask.variational.enumeration import enumerate_trajectories
from unmask.variational.posterior import (
    STEPS_AT_ONCE,
    Trajectories,
    log1mexp,
    log_prob,
    log_reveal,
    sample_times,
    sample_trajectories,
)

SCORES = torch.tensor([0.31, 0.87, 0.05, 0.64], dtype=torch.float64)


def all_response(scores):
    return torch.ones_like(scores, dtype=torch.bool)


def test_log_reveal_is_the_formula():
    masked = torch.tensor([True, False, True, True])
    log_q = log_reveal(SCORES, masked, tau=0.1)
    highest = max(SCORES[n].item() for n in range(4) if masked[n])
    for n in range(4):
        if masked[n]:
            assert log_q[n].item() == pytest.approx((SCORES[n].item() - highest) / 0.1, abs=1e-12)
    assert log_q[3] == 0  # the arg-max, exactly


def test_a_prompt_score_above_the_masked_ones_changes_nothing():
    masked = torch.tensor([True, False, True, True])
    loud = SCORES.clone()
    loud[1] = 1e4
    assert torch.equal(log_reveal(loud, masked, 0.05)[masked], log_reveal(SCORES, masked, 0.05)[masked])
    assert torch.isfinite(log_reveal(loud, masked, 0.05)).all()


def test_ties_are_all_revealed():
    scores = torch.tensor([0.2, 0.7, 0.7, 0.7])
    assert (log_reveal(scores, all_response(scores), 0.05) == 0).tolist() == [False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_one_rounding_apart_tie_at_every_temperature(dtype):
    eps = torch.finfo(dtype).eps
    for tau in (1e-3, 0.05, 1.0):
        scores = torch.tensor([0.9, 0.9 - eps, 0.9 - 100 * eps], dtype=dtype).requires_grad_()
        log_q = log_reveal(scores, all_response(scores), tau)
        assert (log_q == 0).tolist() == [True, True, False]
        log1mexp(log_q).sum().backward()
        assert scores.grad[1] == 0
        assert scores.grad.abs().max() < 1 / (8 * eps)


def test_gradient_flows_through_the_maximum():
    scores = SCORES.clone().requires_grad_()
    masked = torch.tensor([True, True, False, True])
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    (log_reveal(scores, masked, 0.1).exp() * weights)[masked].sum().backward()
    assert scores.grad[masked].sum().abs() < 1e-12
    assert scores.grad[1].abs() > 1e-3  # the arg-max itself moves the others
    assert scores.grad[2] == 0


def test_gradcheck_log_reveal_and_log_prob():
    scores = torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    masked = torch.tensor([[True, True, False, True], [True, True, True, True]])
    assert torch.autograd.gradcheck(lambda a: log_reveal(a, masked, 0.3)[masked], (scores,))
    response = torch.ones(2, 4, dtype=torch.bool)
    t = torch.tensor([0, 1])
    uniforms = torch.rand(3, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = sample_trajectories(scores, response, t, 4, 0.3, uniforms)
    assert torch.autograd.gradcheck(lambda a: log_prob(a, response, t, 4, 0.3, drawn), (scores,))


def test_log1mexp_against_high_precision():
    for x in [-1e-12, -1e-6, -1e-3, -0.3, -0.7, -1.0, -20.0, -700.0]:
        exact = math.log(-math.expm1(x)) if x > -0.7 else math.log1p(-math.exp(x))
        assert log1mexp(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("t", [0, 1, 2])
def test_trajectory_probabilities_sum_to_one(t):
    response = all_response(SCORES)
    drawn = enumerate_trajectories(SCORES, response, t, 3, 0.3)
    total = log_prob(SCORES[None], response[None], torch.tensor([t]), 3, 0.3, drawn).exp().sum()
    assert total.item() == pytest.approx(1, abs=1e-12)


def test_log_prob_is_the_sum_over_steps_and_masks():
    """A slow reading of log Q: for each step, for each mask, one Bernoulli."""
    budget, tau, t = 4, 0.3, 0
    response = torch.tensor([True, True, False, True])
    drawn = enumerate_trajectories(SCORES, response, t, budget, tau)
    fast = log_prob(SCORES[None], response[None], torch.tensor([t]), budget, tau, drawn)[0]
    for i, reveal_time in enumerate(drawn.reveal_time[0].tolist()):
        masked = {n for n in range(4) if response[n]}
        slow = 0.0
        for s in range(budget - 1, t, -1):
            highest = max((SCORES[n].item() for n in masked), default=0.0)
            for n in sorted(masked):
                q = math.exp((SCORES[n].item() - highest) / tau)
                slow += math.log(q) if reveal_time[n] == s else math.log(1 - q)
            masked -= {n for n in masked if reveal_time[n] == s}
        assert fast[i].item() == pytest.approx(slow, abs=1e-9)


def test_log_prob_in_chunks_of_steps_is_the_same(monkeypatch):
    """Value and gradient, over every trajectory that Q can draw."""
    budget, t, response = 6, torch.tensor([1]), all_response(SCORES)
    drawn = enumerate_trajectories(SCORES, response, 1, budget, 0.3)
    weights = torch.rand(drawn.masked.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for steps_at_once in (budget, 2):
        monkeypatch.setattr(posterior, "STEPS_AT_ONCE", steps_at_once)
        scores = SCORES[None].clone().requires_grad_()
        value = log_prob(scores, response[None], t, budget, 0.3, drawn)
        (value[0] @ weights).backward()
        found.append(torch.cat([value[0].detach(), scores.grad[0]]))
    assert torch.allclose(*found, rtol=1e-12, atol=1e-12)


def test_the_graph_of_log_prob_does_not_grow_with_the_budget():
    kept = []
    for budget in (STEPS_AT_ONCE + 1, 4 * STEPS_AT_ONCE):
        reveal_time = torch.arange(64).view(1, 2, 32) % (budget - 1) + 1
        drawn = Trajectories(reveal_time, torch.zeros(1, 2, 32, dtype=torch.bool))
        scores = torch.linspace(0, 1, 32)[None].requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.nbytes), lambda x: x):
            log_prob(scores, torch.ones(1, 32, dtype=torch.bool), torch.tensor([0]), budget, 0.05, drawn)
        kept.append(sum(saved))
    assert kept[1] <= kept[0]


def test_samples_follow_log_prob():
    """Every trajectory that Q can draw, as often as log Q says."""
    budget, tau, k = 3, 0.3, 40_000
    response = all_response(SCORES)[None]
    t = torch.tensor([0])
    uniforms = torch.rand(budget - 1, 1, k, 4, generator=torch.Generator().manual_seed(3))
    drawn = sample_trajectories(SCORES[None], response, t, budget, tau, uniforms)
    exact = enumerate_trajectories(SCORES, response[0], 0, budget, tau)
    expected = k * log_prob(SCORES[None], response, t, budget, tau, exact)[0].exp()
    radix = (budget + 1) ** torch.arange(4)
    seen, counts = ((drawn.reveal_time[0] + 1) * radix).sum(-1).unique(return_counts=True)
    index = {code: i for i, code in enumerate(((exact.reveal_time[0] + 1) * radix).sum(-1).tolist())}
    observed = torch.zeros_like(expected)
    for code, count in zip(seen.tolist(), counts.tolist(), strict=True):
        observed[index[code]] = count  # a KeyError here is a trajectory that Q cannot draw
    assert_follows(observed.tolist(), expected.tolist())


def test_each_row_stops_at_its_own_time_and_every_step_reveals():
    budget, k = 6, 50
    scores = torch.rand(budget, 8, generator=torch.Generator().manual_seed(0))
    response = torch.ones(budget, 8, dtype=torch.bool)
    response[:, 2] = False
    t = torch.arange(budget)
    uniforms = torch.rand(budget - 1, budget, k, 8, generator=torch.Generator().manual_seed(1))
    drawn = sample_trajectories(scores, response, t, budget, 0.05, uniforms)
    for b in range(budget):
        times = drawn.reveal_time[b][:, response[b]]
        assert ((times > t[b]) | (times == -1)).all()
        for s in range(budget - 1, int(t[b]), -1):
            unfinished = (times <= s).any(-1)  # a mask was left when step s began
            assert (times == s).any(-1)[unfinished].all()
    assert (drawn.reveal_time[:, :, 2] == -1).all()
    assert not drawn.masked[:, :, 2].any()
    assert torch.equal(drawn.masked[-1], response[-1].expand(k, -1))  # t = T-1: nothing revealed yet


def test_a_row_does_not_depend_on_the_rows_beside_it():
    scores = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    response = torch.ones(4, 6, dtype=torch.bool)
    t = torch.tensor([0, 3, 1, 2])
    uniforms = torch.rand(4, 4, 3, 6, generator=torch.Generator().manual_seed(1))
    together = sample_trajectories(scores, response, t, 5, 0.1, uniforms)
    for b in range(4):
        row = slice(b, b + 1)
        alone = sample_trajectories(scores[row], response[row], t[row], 5, 0.1, uniforms[:, row])
        assert torch.equal(alone.reveal_time, together.reveal_time[row])


def test_ties_finish_in_one_step():
    scores = torch.full((1, 5), 0.5)
    response = torch.ones(1, 5, dtype=torch.bool)
    drawn = sample_trajectories(scores, response, torch.tensor([0]), 4, 0.05, torch.full((3, 1, 2, 5), 0.999))
    assert (drawn.reveal_time == 3).all()
    assert log_prob(scores, response, torch.tensor([0]), 4, 0.05, drawn).abs().max() == 0


@pytest.mark.parametrize(
    "scores",
    [
        [0.0, 1.0, 0.0, 1.0],
        [0.5] * 4,
        [0.5, 0.5 + 1e-8, 0.5 - 1e-8, 0.5],
        [0.0, 1e-8, 1e-30, 1e-44],
        [0.3, 0.3 + 1e-7, 0, 1],
    ],
)
def test_no_nan_or_inf_for_hard_scores(scores):
    response = torch.ones(1, 4, dtype=torch.bool)
    t = torch.tensor([0])
    uniforms = torch.rand(4, 1, 64, 4, generator=torch.Generator().manual_seed(0))
    for tau, dtype in product((1e-3, 0.05, 1.0), (torch.float32, torch.float64)):
        a = torch.tensor([scores], dtype=dtype).requires_grad_()
        drawn = sample_trajectories(a, response, t, 5, tau, uniforms)
        value = log_prob(a, response, t, 5, tau, drawn)
        assert torch.isfinite(value).all(), (tau, dtype)
        value.sum().backward()
        assert torch.isfinite(a.grad).all(), (tau, dtype)


def test_float32_inside_bfloat16():
    scores = torch.rand(1, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    drawn = Trajectories(torch.tensor([[[1, 1, 1, 1]]]), torch.zeros(1, 1, 4, dtype=torch.bool))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = log_prob(scores, torch.ones(1, 4, dtype=torch.bool), torch.tensor([0]), 2, 0.1, drawn)
    assert value.dtype == torch.float32


def test_times_are_uniform_and_reach_both_ends():
    t = sample_times(torch.linspace(0, 1 - 1e-7, 1000), 7)
    assert t.min() == 0
    assert t.max() == 6
    assert (torch.bincount(t) - 1000 / 7).abs().max() < 1
