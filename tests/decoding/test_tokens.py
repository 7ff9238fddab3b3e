"""Which token a position gets, against plain Python."""

import math
import re
from itertools import product

import pytest
import torch

from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError

BELOW_ONE = math.nextafter(1.0, 0.0)
P = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)


def drawn(p, uniforms, **options):
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64)
    return TokenChoice(**{"temperature": 1.0, **options}).sample(p.log().expand(len(uniforms), -1), uniforms)


def slow_weights(p, temperature=1.0, top_k=0, top_p=1.0):
    """Probabilities of the tokens kept: temper, keep the k largest, renormalise, keep the fewest that hold top_p."""
    tempered = [value ** (1 / temperature) for value in p]
    order = sorted(range(len(p)), key=lambda v: (-tempered[v], v))  # of equals, the lowest ids first
    kept = order[:top_k] if top_k else order
    total = sum(tempered[v] for v in kept)
    nucleus, mass = [], 0.0
    for v in kept:
        if mass < top_p:
            nucleus.append(v)
        mass += tempered[v] / total
    total = sum(tempered[v] for v in nucleus)
    return [tempered[v] / total if v in nucleus else 0.0 for v in range(len(p))]


def frequencies(p, **options):
    """On a grid of uniforms, so that they are exact to the width of the grid."""
    draws = 5_000
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    counts = drawn(torch.tensor(p, dtype=torch.float64), grid, **options).bincount(minlength=len(p))
    return [count / draws for count in counts.tolist()], len(p) / draws


# --- temperature ------------------------------------------------------------------------------------------------------


def test_tokens_follow_the_cumulative_distribution():
    """Interval [0, 0.2) is token 1, [0.2, 0.7) token 3, [0.7, 1) token 4."""
    uniforms = [0.0, 0.1, 0.1999, 0.2001, 0.5, 0.6999, 0.7001, 0.9, BELOW_ONE]
    assert drawn(P, uniforms).tolist() == [1, 1, 1, 3, 3, 3, 4, 4, 4]


def test_a_token_of_probability_zero_is_never_chosen():
    uniforms = torch.cat([torch.tensor([0.0, 2**-53, BELOW_ONE]), torch.linspace(0, 1, 1001)[:-1]]).double()
    uniforms[2] = BELOW_ONE  # float32 would have made it 1
    for temperature in (0.01, 0.5, 1.0, 2.0, 50.0):
        for options in ({}, {"top_k": 5}, {"top_p": 0.999}, {"top_k": 100, "top_p": 1.0}):
            assert set(drawn(P, uniforms, temperature=temperature, **options).tolist()) <= {1, 3, 4}, options


def test_a_tiny_temperature_takes_the_most_probable():
    for temperature in (1e-3, 1e-30, 1e-320):
        assert drawn(P, [0.0, 0.5, BELOW_ONE], temperature=temperature).tolist() == [3, 3, 3]
        assert drawn(P, [0.0, 0.5, BELOW_ONE], temperature=temperature, top_p=0.5, top_k=2).tolist() == [3, 3, 3]


def test_a_certain_token_is_always_chosen():
    for certain in range(4):
        p = torch.zeros(4, dtype=torch.float64)
        p[certain] = 1.0
        for options in ({}, {"top_k": 3}, {"top_p": 0.01}):
            assert drawn(p, [0.0, 0.3, BELOW_ONE], **options).tolist() == [certain] * 3


def test_rounding_at_the_end_of_the_cdf_chooses_a_token_with_mass():
    """Probabilities of thirds and tenths add up to just below or above 1 in floating point."""
    for V in (3, 7, 10, 49, 1000):
        p = torch.full((V + 2,), 1 / V, dtype=torch.float64)
        p[V:] = 0.0
        assert drawn(p, [BELOW_ONE]).item() == V - 1


def test_one_token_vocabulary():
    uniforms = torch.tensor([0.0, BELOW_ONE], dtype=torch.float64)
    for options in ({}, {"top_k": 1}, {"top_p": 0.5}):
        for dtype in (torch.float32, torch.float64):
            choice = TokenChoice(temperature=1.0, **options)
            assert choice.sample(torch.zeros(2, 1, dtype=dtype), uniforms).tolist() == [0, 0]


def test_every_row_has_its_own_distribution_and_uniform():
    logits = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]], dtype=torch.float64).log()
    uniforms = torch.tensor([0.5, 0.5, 0.95], dtype=torch.float64)
    assert TokenChoice(temperature=1.0).sample(logits, uniforms).tolist() == [0, 1, 1]
    assert TokenChoice(temperature=1.0, top_k=1).sample(logits, uniforms).tolist() == [0, 1, 0]


# --- top-k and top-p --------------------------------------------------------------------------------------------------

LAWS = {
    "distinct": [0.05, 0.2, 0.1, 0.4, 0.25],
    "ties": [0.1, 0.3, 0.1, 0.3, 0.1, 0.1],
    "uniform": [0.125] * 8,
    "zeros": [0.0, 0.2, 0.0, 0.5, 0.3, 0.0],
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_frequencies_are_those_of_the_tokens_kept(law):
    for temperature, top_k, top_p in product((0.5, 1.0, 2.0), (0, 1, 2, 3, 5, 100), (1.0, 0.97, 0.61, 0.33, 1e-9)):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        seen, width = frequencies(law, **options)
        expected = slow_weights(law, **options)
        assert seen == pytest.approx(expected, abs=width), options
        assert [value > 0 for value in seen] == [value > 0 for value in expected], options


def test_top_p_is_cut_exactly_where_the_mass_is_reached():
    """Equal logits are rounded nowhere; of others exp is right to a bit or two only, and the cut is beside the mass."""
    for p, top_p, kept in (
        ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1}),  # equal tokens: those with the lowest ids
        ([0.25, 0.25, 0.25, 0.25], 0.5 + 2**-40, {0, 1, 2}),
        ([0.25, 0.25, 0.25, 0.25], 0.25, {0}),
        ([0.25, 0.25, 0.25, 0.25], 0.25 - 2**-40, {0}),
        ([0.25, 0.5, 0.25], 0.5 - 2**-40, {1}),  # the mass before a token, not with it, decides
        ([0.25, 0.5, 0.25], 0.5 + 2**-40, {0, 1}),
        ([0.25, 0.5, 0.25], 0.75 - 2**-40, {0, 1}),
        ([0.25, 0.5, 0.25], 1.0, {0, 1, 2}),
    ):
        grid = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
        assert set(drawn(torch.tensor(p, dtype=torch.float64), grid, top_p=top_p).tolist()) == kept


def test_top_k_comes_first_and_is_renormalised():
    """Of 0.4, 0.3, 0.2, 0.1 the top two become 4/7 and 3/7, and 0.55 < 4/7: top-p leaves one.  Without the
    renormalisation, or with top-p first, it would leave two."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    grid = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    assert set(drawn(p, grid, top_p=0.55).tolist()) == {2, 3}
    assert set(drawn(p, grid, top_k=2).tolist()) == {2, 3}
    assert set(drawn(p, grid, top_k=2, top_p=0.55).tolist()) == {3}


def test_ties_are_kept_by_the_lowest_id():
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        grid = torch.linspace(0, 1, 101, dtype=torch.float64)[:-1]
        p = torch.full((300,), 1.0, dtype=torch.float64)
        kept = set(drawn(p / 300, grid, top_k=2).tolist())
        assert kept == {0, 1}
        assert set(drawn(torch.tensor([0.1, 0.3, 0.3, 0.3]).double(), grid, **options).tolist()) == {1, 2}


# --- what may not be asked for ----------------------------------------------------------------------------------------


def test_what_cannot_be_meant_is_refused_in_one_line():
    for options, message in (
        ({"temperature": -0.5}, "temperature must not be negative and must be finite, got -0.5"),
        ({"temperature": float("nan")}, "temperature must not be negative and must be finite, got nan"),
        ({"temperature": float("inf")}, "temperature must not be negative and must be finite, got inf"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"temperature": 1.0, "top_p": float("nan")}, "top_p must be above 0 and at most 1, got nan"),
        ({"temperature": 1.0, "top_k": -1}, "top_k must be 0 (all tokens) or more, got -1"),
        ({"guidance": -1.0}, "guidance must not be negative and must be finite, got -1.0"),
        ({"guidance": float("nan")}, "guidance must not be negative and must be finite, got nan"),
        ({"guidance": float("inf")}, "guidance must not be negative and must be finite, got inf"),
        ({"min_length": -1, "eos_token_id": 0}, "min_length must not be negative, got -1"),
        ({"min_length": 3}, "give eos_token_id"),
        ({"stop_at_eos": True}, "give eos_token_id"),
        ({"top_p": 0.9}, "give a temperature above 0"),
        ({"top_k": 3}, "give a temperature above 0"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            TokenChoice(**options)


def test_how_records_name_what_is_done_about_the_end():
    assert TokenChoice().eos_policy == "none"
    assert TokenChoice(eos_token_id=0).eos_policy == "none"
    assert TokenChoice(eos_token_id=0, min_length=20).eos_policy == "min-length:20"
    assert TokenChoice(eos_token_id=0, stop_at_eos=True).eos_policy == "stop"
    assert TokenChoice(eos_token_id=0, min_length=20, stop_at_eos=True).eos_policy == "min-length:20,stop"
