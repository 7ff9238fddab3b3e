"""The bound against brute force: every path of reveals, weighed and logged one by one."""

import math
from itertools import product

import pytest
import torch

from tests.variational.tiny import sequences, tiny
from unmask.variational.elbo import bound_terms
from unmask.variational.enumeration import exact_bound, exact_log_likelihood, generative_chain, posterior_chain
from unmask.variational.posterior import log_reveal
from unmask.variational.selection import Bernoulli, NonEmpty

FORMS = [Bernoulli(), NonEmpty()]


def paths_of_q(model, x0, budget, response):
    """(probability, [(t, masked before, revealed), ...]) for every path of reveals of Q, by plain recursion."""
    scores = model.scorer(x0[None])[0]

    def go(t, masked):
        if t == 0:
            yield 1.0, [(0, masked, masked)]
            return
        positions = [n for n in range(len(x0)) if masked[n]]
        q = log_reveal(scores, torch.tensor(masked), model.tau).exp().tolist()
        for choice in product([False, True], repeat=len(positions)):
            revealed = [False] * len(x0)
            for n, r in zip(positions, choice, strict=True):
                revealed[n] = r
            probability = math.prod(q[n] if revealed[n] else 1 - q[n] for n in positions)
            if probability > 0:
                rest = [m and not r for m, r in zip(masked, revealed, strict=True)]
                for tail_probability, tail in go(t - 1, rest):
                    yield probability * tail_probability, [(t, masked, revealed), *tail]

    yield from go(budget - 1, response.tolist())


def log_p_of_path(model, x0, path):
    """log P(x_0, r) along one path, step by step, from the definition of the generative model."""
    total = 0.0
    for t, masked, revealed in path:
        x = torch.where(torch.tensor(masked), model.mask, x0)[None]
        log_mu = model.denoiser(x)[0]
        total += sum(log_mu[n, x0[n]].item() for n in range(len(x0)) if revealed[n])
        if t > 0:
            total += model.selection.log_prob(
                torch.tensor(revealed), model.selector(x, t)[0], torch.tensor(masked)
            ).item()
    return total


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_bound_is_the_expected_log_ratio_over_all_paths(form, budget):
    tables = tiny(form, budget=budget, seed=budget)
    x0 = torch.tensor([1, 0, 1])
    response = torch.tensor([True, True, True])
    paths = list(paths_of_q(tables.model, x0, budget, response))
    assert sum(p for p, _ in paths) == pytest.approx(1, abs=1e-12)
    slow = sum(p * (log_p_of_path(tables.model, x0, path) - math.log(p)) for p, path in paths)
    assert exact_bound(tables.model, x0, budget).sum().item() == pytest.approx(slow, abs=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_bound_and_likelihood_with_a_prompt(form):
    tables = tiny(form, budget=3, seed=8)
    x0, response = torch.tensor([1, 0, 1]), torch.tensor([True, False, True])
    paths = list(paths_of_q(tables.model, x0, 3, response))
    slow = sum(p * (log_p_of_path(tables.model, x0, path) - math.log(p)) for p, path in paths)
    bound = exact_bound(tables.model, x0, 3, response).sum().item()
    assert bound == pytest.approx(slow, abs=1e-10)
    assert bound < exact_log_likelihood(tables.model, x0, 3, response).item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("length", "vocab_size", "budget"), [(2, 3, 2), (3, 2, 3), (3, 2, 5), (4, 2, 3)])
def test_all_outcomes_sum_to_one_and_the_bound_lies_below(form, length, vocab_size, budget):
    tables = tiny(form, length=length, vocab_size=vocab_size, budget=budget, seed=length)
    likelihoods = []
    for x0 in sequences(length, vocab_size):
        log_likelihood = exact_log_likelihood(tables.model, x0, budget).item()
        assert exact_bound(tables.model, x0, budget).sum().item() < log_likelihood
        likelihoods.append(math.exp(log_likelihood))
    assert sum(likelihoods) == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_one_step_bound_is_the_likelihood(form):
    tables = tiny(form, budget=1)
    x0 = torch.tensor([0, 1, 1])
    assert exact_bound(tables.model, x0, 1).sum().item() == pytest.approx(
        exact_log_likelihood(tables.model, x0, 1).item(), abs=1e-12
    )


def test_the_gap_of_the_bernoulli_selector_that_no_score_can_close():
    """One token, T = 2: Q reveals it at once, P may wait; the gap is exactly -log p.  The conditioned form has none."""
    for form, gap_expected in [(Bernoulli(), True), (NonEmpty(), False)]:
        tables = tiny(form, length=1, budget=2)
        x0 = torch.tensor([1])
        log_likelihood = exact_log_likelihood(tables.model, x0, 2).item()
        gap = log_likelihood - exact_bound(tables.model, x0, 2).sum().item()
        log_p = torch.nn.functional.logsigmoid(tables.model.selector(torch.tensor([[2]]), 1))[0, 0].item()
        assert gap == pytest.approx(-log_p if gap_expected else 0.0, abs=1e-12)


def test_the_bound_does_not_exceed_the_likelihood_at_large_logits():
    """One token, T = 2: the conditioned form reveals it for certain, so the bound is log P itself."""
    tables = tiny(NonEmpty(), length=1, budget=2)
    tables.psi.data.fill_(-21.0)
    x0 = torch.tensor([1])
    gap = exact_log_likelihood(tables.model, x0, 2) - exact_bound(tables.model, x0, 2).sum()
    assert gap.item() == pytest.approx(0, abs=1e-14)


def test_time_zero_is_forced_and_an_empty_state_is_worth_nothing():
    scores = torch.tensor([[0.1, 0.9, 0.5]], dtype=torch.float64)
    masked = torch.tensor([[[True, True, False], [False, False, False]]])
    log_mu = torch.tensor([[[-1.0, -2.0, -torch.inf], [-torch.inf] * 3]], dtype=torch.float64)
    logits = torch.randn(1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for form in FORMS:
        at_zero = bound_terms(scores, masked, torch.tensor([0]), 0.1, log_mu, logits, form)
        assert at_zero.reconstruction.tolist() == [[-3.0, 0.0]]
        assert at_zero.order_kl.tolist() == [[0.0, 0.0]]
        later = bound_terms(scores, masked, torch.tensor([1]), 0.1, log_mu, logits, form)
        assert later.elbo[0, 1] == 0
        q = math.exp((0.1 - 0.9) / 0.1)
        assert later.reconstruction[0, 0].item() == pytest.approx(-2.0 - q)


def test_expected_steps_and_reveal_steps_under_q():
    tables = tiny(NonEmpty(), budget=4, seed=3)
    x0, response = torch.tensor([1, 1, 0]), torch.tensor([True, True, True])
    chain = posterior_chain(tables.model, x0, 4)
    steps, reveal = 0.0, torch.zeros(4, 3, dtype=torch.float64)
    for probability, path in paths_of_q(tables.model, x0, 4, response):
        steps += probability * sum(any(masked) for _, masked, _ in path)
        for t, _, revealed in path:
            reveal[t] += probability * torch.tensor(revealed)
    assert chain.expected_steps().item() == pytest.approx(steps, abs=1e-12)
    assert torch.allclose(chain.reveal_step_distribution(), reveal, atol=1e-12)
    assert torch.allclose(chain.reveal_step_distribution().sum(0), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("form", FORMS)
def test_steps_under_p_count_wasted_steps_too(form):
    """With logits of -40 the paper's form waits until the last step; the conditioned one reveals one a step."""
    tables = tiny(form, length=3, budget=3)
    tables.psi.data.fill_(-40.0)
    chain, _ = generative_chain(tables.model, 3, 3)
    by_step = chain.reveal_step_distribution().sum(-1)  # [T], expected number of reveals at t = 0, 1, 2
    expected = [3.0, 0.0, 0.0] if isinstance(form, Bernoulli) else [1.0, 1.0, 1.0]
    assert by_step.tolist() == pytest.approx(expected, abs=1e-9)
    assert chain.expected_steps().item() == pytest.approx(3, abs=1e-9)


def test_float32_under_autocast():
    """What comes in as bfloat16 is computed with in float32: the same numbers as from its float32 copy."""
    generator = torch.Generator().manual_seed(0)
    scores, log_mu, logits = (
        torch.rand(*shape, generator=generator).bfloat16() for shape in [(2, 3), *[(2, 4, 3)] * 2]
    )
    masked, t = torch.ones(2, 4, 3, dtype=torch.bool), torch.tensor([1, 2])
    for form in FORMS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = bound_terms(scores, masked, t, 0.1, -log_mu, logits, form)
        high = bound_terms(scores.float(), masked, t, 0.1, -log_mu.float(), logits.float(), form)
        assert low.elbo.dtype == torch.float32
        assert torch.equal(low.elbo, high.elbo)
