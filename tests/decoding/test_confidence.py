import math

import pytest
import torch

from unmask.decoding.confidence import Confidence, confidence, features, largest, log_probabilities

TABLES = {
    "random": torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(2).tolist(),
    "zeros": [[0.0, -math.inf, 1.0], [-math.inf, -math.inf, 3.0], [2.0, 2.0, -math.inf]],
    "one token": [[0.7], [-40.0]],
    "ties": [[1.0, 1.0, 1.0, 1.0], [0.0, 3.0, 3.0, -1.0]],
    "huge": [[1e4, 0.0, -1e4], [-800.0, -801.0, -802.0]],
}
EVERYTHING = frozenset(Confidence.__annotations__)


def slow_softmax(logits):
    highest = max(logits)
    weights = [math.exp(value - highest) for value in logits]
    return [weight / sum(weights) for weight in weights]


def slow_log_softmax(logits):
    """Where p underflows, its log does not."""
    highest = max(logits)
    total = sum(math.exp(value - highest) for value in logits)
    return [value - highest - math.log(total) for value in logits]


def log_probabilities_of(table):
    return log_probabilities(torch.tensor(table, dtype=torch.float64))


def test_the_three_confidences():
    for table in TABLES.values():
        log_p = log_probabilities_of(table)
        stats = confidence(log_p)
        for row, logits in enumerate(table):
            p = slow_softmax(logits)
            assert log_p[row].exp().tolist() == pytest.approx(p, abs=1e-14)
            ranked = sorted([*p, 0.0], reverse=True)  # with V = 1 there is no second: its probability is 0
            entropy = -sum(value * math.log(value) for value in p if value > 0)
            expected = [ranked[0], ranked[0] - ranked[1], entropy]
            assert stats["log_top"][row].item() == pytest.approx(math.log(ranked[0]), abs=1e-12)
            assert stats["margin"][row].item() == pytest.approx(expected[1], abs=1e-12)
            assert stats["entropy"][row].item() == pytest.approx(entropy, abs=1e-12)
            assert features(stats)[row].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("V", [5, 4096, 4097, 5000])
def test_the_largest_is_the_leftmost(V):
    logits = torch.randint(0, 9, (40, V), generator=torch.Generator().manual_seed(V)).double()  # full of ties
    logits[0], logits[1, V // 2], logits[2, -1], logits[3, 0] = -math.inf, math.nan, 99.0, math.inf
    logits[4, -3:] = 50.0
    with torch.device("meta"):  # whatever the default is, the logits say where
        found, truth = largest(logits), logits.max(-1)
    assert torch.equal(found[1], truth.indices)
    assert torch.equal(found[0].nan_to_num(nan=-7), truth.values.nan_to_num(nan=-7))


def test_the_log_probability_of_a_token():
    """Of the one proposed and of the one that stands there: every token in turn, impossible ones too."""
    for table in TABLES.values():
        for token in range(len(table[0])):
            here = torch.full((len(table),), token)
            other = (here + 1) % len(table[0])
            wanted = frozenset({"log_proposal", "log_current"})
            stats = confidence(log_probabilities_of(table), wanted, proposal=here, current=other)
            for row, logits in enumerate(table):
                log_p = slow_log_softmax(logits)
                assert stats["log_proposal"][row].item() == pytest.approx(log_p[token], abs=1e-12)
                assert stats["log_current"][row].item() == pytest.approx(log_p[int(other[row])], abs=1e-12)


def test_a_change_is_the_kl_of_now_from_before():
    """KL(now || before), in this order, also where a token has no mass now or had none before."""
    now = [[0.5, 0.5, 0.0], [0.9, 0.05, 0.05], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.4, 0.6, 0.0], [0.4, 0.5, 0.1]]
    before = [[0.25, 0.25, 0.5], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]
    log_now, log_before = (torch.tensor(p, dtype=torch.float64).log() for p in (now, before))
    stats = confidence(log_now, frozenset({"change"}), previous=log_before)
    for row, (p, q) in enumerate(zip(now, before, strict=True)):
        expected = sum(a * (math.log(a / b) if b else math.inf) for a, b in zip(p, q, strict=True) if a)
        assert stats["change"][row].item() == pytest.approx(expected, abs=1e-12)
    assert stats["change"][5].item() == math.inf
    assert abs(stats["change"][0].item() - stats["change"][1].item()) > 0.1


def test_a_change_of_random_tables():
    generator = torch.Generator().manual_seed(4)
    now, before = (2 * torch.randn(50, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    stats = confidence(log_probabilities(now), frozenset({"change"}), previous=log_probabilities(before))
    for row in range(50):
        p, q = slow_softmax(now[row].tolist()), slow_softmax(before[row].tolist())
        expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert stats["change"][row].item() == pytest.approx(expected, abs=1e-12)


def test_a_largest_that_is_known_makes_no_difference():
    """Any of equally probable tokens may be named as the largest."""
    for table in TABLES.values():
        log_p = log_probabilities_of(table)
        generator = torch.Generator().manual_seed(2)
        options = {
            "proposal": torch.randint(log_p.shape[-1], (len(table),), generator=generator),
            "current": torch.randint(log_p.shape[-1], (len(table),), generator=generator),
            "previous": log_probabilities(torch.randn(log_p.shape, dtype=torch.float64, generator=generator)),
        }
        found = confidence(log_p, EVERYTHING, **options)
        is_top = (log_p == log_p.amax(-1, keepdim=True)).long()
        first, last = is_top.argmax(-1), log_p.shape[-1] - 1 - is_top.flip(-1).argmax(-1)
        for best in (first, last):
            told = confidence(log_p, EVERYTHING, best, **options)
            assert set(told) == set(found) == EVERYTHING
            for name in EVERYTHING:
                assert told[name].tolist() == pytest.approx(found[name].tolist(), abs=1e-12)


def test_a_largest_that_is_known_is_used():
    """It is that of the raw logits, which may differ where log p ties: what is told is believed."""
    log_p = log_probabilities_of([[0.0, 1.0]])
    told = confidence(log_p, frozenset({"log_top", "margin"}), torch.tensor([0]))
    assert told["log_top"].item() == log_p[0, 0].item()
    assert told["margin"].item() == pytest.approx(log_p[0, 0].exp().item() - log_p[0, 1].exp().item())


def test_only_what_is_wanted():
    log_p = log_probabilities(torch.randn(3, 4, generator=torch.Generator().manual_seed(3)))
    token = torch.tensor([0, 1, 2])
    given = {"proposal": token, "current": token, "previous": log_p}
    for wanted in [
        frozenset(),
        *(frozenset({name}) for name in EVERYTHING),
        frozenset({"margin", "change"}),
        EVERYTHING,
    ]:
        assert set(confidence(log_p, wanted, **given)) == wanted
    assert set(confidence(log_p)) == {"log_top", "margin", "entropy"}
    assert confidence(log_p, frozenset(), **given) == {}


def test_any_leading_shape():
    logits = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(1))
    whole = confidence(log_probabilities(logits))
    flat = confidence(log_probabilities(logits.reshape(-1, 7)))
    for name, values in whole.items():
        assert torch.equal(values.reshape(-1), flat[name])
    assert features(whole).shape == (2, 3, 4, 3)


def test_at_least_float32():
    for dtype, computed in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        logits = torch.tensor([[3.0, 1.0, -2.0]], dtype=dtype)
        log_p = log_probabilities(logits)
        assert log_p.dtype == computed
        assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-6)
        token = torch.tensor([1])
        stats = confidence(log_p, EVERYTHING, proposal=token, current=token, previous=log_p)
        assert {values.dtype for values in stats.values()} == {computed}


def test_the_gradient_stays_finite_where_probabilities_vanish():
    """entr'(0) is infinite, and infinite times zero is NaN: it once reached the denoiser through attach_selector."""
    for logits in ([80.0, 0.0, -80.0], [1000.0, 0.0, -1000.0], [0.0, 0.0, 0.0]):
        x = torch.tensor([logits], requires_grad=True)
        features(confidence(log_probabilities(x))).sum().backward()
        assert torch.isfinite(x.grad).all()
