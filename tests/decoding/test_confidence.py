import math

import pytest
import torch

from unmask.decoding.confidence import confidence, log_probabilities

TABLES = {
    "random": torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(2).tolist(),
    "zeros": [[0.0, -math.inf, 1.0], [-math.inf, -math.inf, 3.0], [2.0, 2.0, -math.inf]],
    "one token": [[0.7], [-40.0]],
    "ties": [[1.0, 1.0, 1.0, 1.0], [0.0, 3.0, 3.0, -1.0]],
    "huge": [[1e4, 0.0, -1e4], [-800.0, -801.0, -802.0]],
}


def slow_softmax(logits):
    highest = max(logits)
    weights = [math.exp(value - highest) for value in logits]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_the_three_confidences(table):
    log_p = log_probabilities(torch.tensor(table, dtype=torch.float64))
    said = confidence(log_p)
    for row, logits in enumerate(table):
        p = slow_softmax(logits)
        assert log_p[row].exp().tolist() == pytest.approx(p, abs=1e-14)
        ranked = sorted([*p, 0.0], reverse=True)  # with V = 1 there is no second: its probability is 0
        entropy = -sum(value * math.log(value) for value in p if value > 0)
        expected = [ranked[0], ranked[0] - ranked[1], entropy]
        assert said.log_top[row].item() == pytest.approx(math.log(ranked[0]), abs=1e-12)
        assert said.margin[row].item() == pytest.approx(expected[1], abs=1e-12)
        assert said.entropy[row].item() == pytest.approx(entropy, abs=1e-12)
        assert said.features()[row].tolist() == pytest.approx(expected, abs=1e-12)


def test_any_leading_shape():
    logits = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(1))
    whole = confidence(log_probabilities(logits))
    flat = confidence(log_probabilities(logits.reshape(-1, 7)))
    for one, other in zip(whole, flat, strict=True):
        assert torch.equal(one.reshape(-1), other)
    assert whole.features().shape == (2, 3, 4, 3)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_at_least_float32(dtype, computed):
    log_p = log_probabilities(torch.tensor([[3.0, 1.0, -2.0]], dtype=dtype))
    assert log_p.dtype == computed
    assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_the_log_keeps_apart_what_the_probability_rounds_together():
    """In float32, 1 - 1e-8 and 1 - 2e-8 are both 1; a rule that ranks by probability would see a tie."""
    logits = torch.tensor([[0.0, math.log(2e-8)], [0.0, math.log(1e-8)]])
    said = confidence(log_probabilities(logits))
    assert said.log_top[1] > said.log_top[0]
    assert said.log_top.exp()[0] == said.log_top.exp()[1]


def test_the_gradient_stays_finite_where_probabilities_vanish():
    """entr'(0) is infinite, and infinite times zero is NaN: it once reached the denoiser through attach_selector."""
    for logits in ([80.0, 0.0, -80.0], [1000.0, 0.0, -1000.0], [0.0, 0.0, 0.0]):
        x = torch.tensor([logits], requires_grad=True)
        confidence(log_probabilities(x)).features().sum().backward()
        assert torch.isfinite(x.grad).all()
