import math

import pytest
import torch

from unmask.decoding.generate import choose_tokens

BELOW_ONE = math.nextafter(1.0, 0.0)
P = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)


def drawn(p, temperature, uniforms):
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64)
    return choose_tokens(p.log().expand(len(uniforms), -1), temperature, uniforms)


def test_temperature_zero_takes_the_most_probable():
    log_p = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    chosen = choose_tokens(log_p, 0.0, torch.rand(50, dtype=torch.float64)).tolist()
    for row, token in zip(log_p.tolist(), chosen, strict=True):
        assert row[token] == max(row)


def test_tokens_follow_the_cumulative_distribution():
    """Interval [0, 0.2) is token 1, [0.2, 0.7) token 3, [0.7, 1) token 4."""
    uniforms = [0.0, 0.1, 0.1999, 0.2001, 0.5, 0.6999, 0.7001, 0.9, BELOW_ONE]
    assert drawn(P, 1.0, uniforms).tolist() == [1, 1, 1, 3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0, 2.0, 50.0])
def test_a_token_of_probability_zero_is_never_chosen(temperature):
    uniforms = torch.cat([torch.tensor([0.0, 2**-53, BELOW_ONE]), torch.linspace(0, 1, 1001)[:-1]]).double()
    uniforms[2] = BELOW_ONE  # float32 would have made it 1
    assert set(drawn(P, temperature, uniforms).tolist()) <= {1, 3, 4}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-320])
def test_a_tiny_temperature_takes_the_most_probable(temperature):
    assert drawn(P, temperature, [0.0, 0.5, BELOW_ONE]).tolist() == [3, 3, 3]


@pytest.mark.parametrize("certain", range(4))
def test_a_certain_token_is_always_chosen(certain):
    p = torch.zeros(4, dtype=torch.float64)
    p[certain] = 1.0
    assert drawn(p, 1.0, [0.0, 0.3, BELOW_ONE]).tolist() == [certain] * 3


def test_rounding_at_the_end_of_the_cdf_chooses_a_token_with_mass():
    """Probabilities of thirds and tenths add up to just below or above 1 in floating point."""
    for V in (3, 7, 10, 49, 1000):
        p = torch.full((V + 2,), 1 / V, dtype=torch.float64)
        p[V:] = 0.0
        assert drawn(p, 1.0, [BELOW_ONE]).item() == V - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_vocabulary(dtype):
    assert choose_tokens(torch.zeros(2, 1, dtype=dtype), 1.0, torch.tensor([0.0, BELOW_ONE]).double()).tolist() == [
        0,
        0,
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_tempered_probabilities(temperature):
    """A grid of uniforms instead of random ones: frequencies are then exact to the grid's width."""
    draws = 100_000
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    counts = drawn(P, temperature, grid).bincount(minlength=len(P)).tolist()
    weights = [p ** (1 / temperature) for p in P.tolist()]
    expected = [weight / sum(weights) for weight in weights]
    assert [count / draws for count in counts] == pytest.approx(expected, abs=2 / draws)


def test_every_row_has_its_own_distribution_and_uniform():
    log_p = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]], dtype=torch.float64).log()
    assert choose_tokens(log_p, 1.0, torch.tensor([0.5, 0.5, 0.95], dtype=torch.float64)).tolist() == [0, 1, 1]
