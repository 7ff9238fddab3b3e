import math
from itertools import product

import pytest
import torch

from tests.statistics import assert_follows
from unmask.variational.selection import Bernoulli, NonEmpty, OneByOne, draw_first

LOGITS = torch.tensor([0.4, -1.3, 2.0, 0.1], dtype=torch.float64)
MASKED = torch.tensor([True, True, False, True])
FORMS = [Bernoulli(), NonEmpty()]
ALL = [*FORMS, OneByOne()]


def subsets(masked):
    return torch.tensor(list(product(*[(False, True) if m else (False,) for m in masked.tolist()])))


@pytest.mark.parametrize("form", ALL)
def test_probabilities_sum_to_one_over_the_masked_subsets(form):
    reveals = subsets(MASKED)
    total = form.log_prob(reveals, LOGITS, MASKED.expand_as(reveals)).exp().sum()
    assert total.item() == pytest.approx(1, abs=1e-12)


def test_log_prob_is_the_formula():
    p = LOGITS.sigmoid()
    for reveal in subsets(MASKED):
        product_probability = math.prod((p[n] if reveal[n] else 1 - p[n]).item() for n in range(4) if MASKED[n])
        assert Bernoulli().log_prob(reveal, LOGITS, MASKED).exp().item() == pytest.approx(product_probability)
        some = 1 - math.prod((1 - p[n]).item() for n in range(4) if MASKED[n])
        conditioned = product_probability / some if reveal.any() else 0.0
        assert NonEmpty().log_prob(reveal, LOGITS, MASKED).exp().item() == pytest.approx(conditioned)


@pytest.mark.parametrize("form", FORMS)
def test_kl_is_the_sum_over_subsets(form):
    log_q = torch.tensor([-0.2, 0.0, -9.0, -1.7], dtype=torch.float64)  # position 1 is the arg-max
    q = log_q.exp()
    slow = 0.0
    for reveal in subsets(MASKED):
        q_r = math.prod((q[n] if reveal[n] else 1 - q[n]).item() for n in range(4) if MASKED[n])
        if q_r > 0:
            slow += q_r * (math.log(q_r) - form.log_prob(reveal, LOGITS, MASKED).item())
    assert form.kl(log_q, LOGITS, MASKED).item() == pytest.approx(slow, abs=1e-10)


def test_one_by_one_is_a_softmax():
    p = torch.where(MASKED, LOGITS.exp(), 0.0) / LOGITS[MASKED].exp().sum()
    q = torch.tensor([0.2, 0.7, 0.0, 0.1], dtype=torch.float64)
    alone = torch.eye(4, dtype=torch.bool)[MASKED]
    assert torch.allclose(OneByOne().log_prob(alone, LOGITS, MASKED.expand_as(alone)).exp(), p[MASKED])
    wanted = sum(q[n] * (q[n] / p[n]).log() for n in range(4) if MASKED[n])
    assert OneByOne().kl(q.log(), LOGITS, MASKED).item() == pytest.approx(wanted.item(), abs=1e-12)
    assert OneByOne().log_prob(~MASKED & False, LOGITS, ~MASKED & False) == 0, "nothing is masked"


def test_nonempty_kl_is_never_larger():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, 5, dtype=torch.float64, generator=generator)
    gaps = -torch.rand(500, 5, dtype=torch.float64, generator=generator) * 4
    log_q = gaps - gaps.amax(-1, keepdim=True)
    masked = torch.ones(500, 5, dtype=torch.bool)
    paper, ours = Bernoulli().kl(log_q, logits, masked), NonEmpty().kl(log_q, logits, masked)
    assert (ours <= paper + 1e-12).all()
    assert (ours >= -1e-12).all()


@pytest.mark.parametrize("form", ALL)
def test_samples_follow_log_prob(form):
    draws = 60_000
    uniforms = torch.rand(draws, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    drawn = form.sample(LOGITS.expand(draws, -1), MASKED.expand(draws, -1), uniforms)
    assert not drawn[:, ~MASKED].any()
    reveals = subsets(MASKED)
    expected = draws * form.log_prob(reveals, LOGITS, MASKED.expand_as(reveals)).exp()
    observed = (drawn[:, None] == reveals).all(-1).sum(0)
    assert_follows(observed.tolist(), expected.tolist())


@pytest.mark.parametrize("form", ALL)
def test_extreme_logits_stay_finite(form):
    masked = torch.tensor([[True] * 6, [False] * 6])
    log_q = torch.tensor([0.0, -1e-6, -3.0, -20.0, -1000.0, -0.5]).expand(2, -1)
    for value in (-1000.0, -80.0, 0.0, 80.0, 1000.0):
        logits = torch.full((2, 6), value, requires_grad=True)
        kl = form.kl(log_q, logits, masked)
        assert torch.isfinite(kl).all(), value
        assert kl[1] == 0
        kl.sum().backward()
        assert torch.isfinite(logits.grad).all(), value
        assert (logits.grad[1] == 0).all()


def test_nonempty_always_reveals_even_where_every_probability_underflows():
    uniforms = torch.rand(1000, 6, generator=torch.Generator().manual_seed(0))
    uniforms[0] = 0.0
    uniforms[1] = 1 - 2**-24
    for logits in [torch.full((6 - 1,), -300.0), torch.tensor([-300.0, -250.0, -300.0, -400.0, -300.0])]:
        masked = torch.ones(1000, 5, dtype=torch.bool)
        masked[:, 3] = False
        drawn = NonEmpty().sample(logits.expand(1000, -1), masked, uniforms)
        assert drawn.any(-1).all()
        assert not drawn[:, 3].any()
    assert drawn[1:, 1].all()  # e^50 times likelier than any other; only u = 0 itself falls elsewhere


def test_the_first_reveal_is_masked_whatever_rounding_does_to_the_cdf():
    """CUDA's cumsum need not be monotone: here a quarter of the steps fall, by more than a rounding."""
    generator = torch.Generator().manual_seed(0)
    rows, n = 400, 6
    steps = torch.rand(rows, n, generator=generator) - 0.25
    cdf, masked = 0.3 + steps.cumsum(-1).clamp(min=0), torch.rand(rows, n, generator=generator) < 0.5
    u = torch.rand(rows, 1, generator=generator)
    u[0] = 1 - 2**-24
    is_first, is_later = draw_first(cdf, masked, u)
    assert torch.equal(is_first.sum(-1), masked.any(-1).long())
    for row in masked.any(-1).nonzero()[:, 0].tolist():
        inside = [i for i in range(n) if masked[row, i]]
        target = u[row, 0] * max(cdf[row, i] for i in inside)
        first = next(i for i in inside if cdf[row, i] > target)
        assert is_first[row].nonzero().item() == first
        assert is_later[row].tolist() == [i > first for i in range(n)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", [False, True])
def test_a_gpu_draws_what_the_cpu_draws(compile):
    """Long canvases, of which a quarter is masked and many positions are about as likely to be the first."""
    generator = torch.Generator().manual_seed(0)
    rows, n = 256, 8192
    logits = torch.randn(rows, n, generator=generator) - 9
    masked = torch.rand(rows, n, generator=generator) < 0.25
    uniforms = torch.rand(rows, n + 1, dtype=torch.float64, generator=generator)
    uniforms[0, -1], uniforms[1, -1] = 2.0**-53, 1 - 2.0**-53
    sample = torch.compile(NonEmpty().sample) if compile else NonEmpty().sample
    drawn = sample(logits.cuda(), masked.cuda(), uniforms.cuda()).cpu()
    assert drawn.any(-1).all()
    assert not (drawn & ~masked).any()
    assert torch.equal(drawn, NonEmpty().sample(logits, masked, uniforms))


@pytest.mark.parametrize("form", ALL)
def test_gradcheck_kl(form):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, dtype=torch.float64, generator=generator).requires_grad_()
    log_q = (-torch.rand(3, 4, dtype=torch.float64, generator=generator) - 0.1).requires_grad_()
    masked = torch.tensor([[True] * 4, [True, False, True, True], [False, False, True, False]])
    assert torch.autograd.gradcheck(lambda q, s: form.kl(q, s, masked), (log_q, logits))
