"""Tokens allowed per position: the law of the denoiser conditioned on them, position by position."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from tests.decoding.small import DENOISER, MASK, Recorded, TabularDenoiser, V, all_results, prompts_for
from tests.statistics import assert_follows
from unmask.decoding.generate import Engine, generate
from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError

SAMPLED = {"temperature": 1.0, "seed": 5}
RULE = torch.rand(64, V, generator=torch.Generator().manual_seed(0)) < 0.4
RULE[:, 3] |= ~RULE.any(-1)


@dataclass
class ByPosition(Recorded):
    """A denoiser that gives what RULE forbids no mass: hidden = [state, position]."""

    def hidden(self, tokens, attention_mask=None):
        position = torch.arange(tokens.shape[1]).double().expand(tokens.shape)[..., None]
        return torch.cat([super().hidden(tokens, attention_mask), position], dim=-1)

    def logits(self, hidden):
        return torch.where(RULE[hidden[:, 16].long()], super().logits(hidden[:, :16]), -torch.inf)


def test_it_is_a_denoiser_that_gives_the_others_no_mass(policy, uncompiled):
    """As masks and as a function, for a padded list; in every layout of the work."""
    prompts = prompts_for(policy)
    expected = all_results(generate(ByPosition(DENOISER), prompts, policy, 6, **SAMPLED))
    masks = [RULE[: len(prompt)] for prompt in prompts]

    def of_position(sequences, rows, positions):
        for sequence, row, position in zip(sequences, rows.tolist(), positions.tolist(), strict=True):
            given = prompts[row] != MASK
            assert torch.equal(sequence[: len(prompts[row])][given], prompts[row][given])
            assert prompts[row][position] == MASK
            assert (sequence[len(prompts[row]) :] == MASK).all()  # padding
        return RULE[positions]

    for allowed, layouts in ((masks, ({}, {"batch_size": 3}, {"batch_size": 3, "compile": True})),
                             (of_position, ({}, {"batch_size": 2, "fixed_shapes": True}))):  # fmt: skip
        for layout in layouts:
            out = generate(DENOISER, prompts, policy, 6, allowed=allowed, **layout, **SAMPLED)
            assert all_results(out) == expected
    longest = torch.full((4, 15), MASK)
    shared = generate(DENOISER, longest, policy, 8, allowed=RULE[:15], **SAMPLED)
    assert all_results(shared) == all_results(generate(ByPosition(DENOISER), longest, policy, 8, **SAMPLED))


def test_an_engine_takes_other_masks_each_time(uncompiled):
    """Compiled too: what was compiled reads the mask where it stands."""
    prompts = torch.full((3, 6), MASK)
    engine = Engine(DENOISER, "margin", 3, TokenChoice(temperature=1.0), batch_size=2, compile=True)
    given = []
    for seed in range(3):
        allowed = torch.rand(3, 6, V, generator=torch.Generator().manual_seed(seed)) < 0.5
        allowed[..., seed] = True
        given.append((allowed, allowed.clone()))
        out = engine.generate(prompts, allowed=allowed)
        assert allowed.gather(-1, out.tokens[..., None]).all()
    assert all(torch.equal(mask, before) for mask, before in given)  # the caller's own are left alone
    assert all_results(engine.generate(prompts)) == all_results(
        generate(DENOISER, prompts, "margin", 3, temperature=1.0)
    )


def test_the_law_is_the_denoiser_s_conditioned_on_what_is_allowed():
    """Left to right: P(x) = prod p(x_n | x_<n) / p(allowed | x_<n), by enumeration.  The function forbids repeats."""
    tokens, length, draws = 3, 3, 20_000
    theta = torch.randn(
        (tokens + 1) ** length, length, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )

    def no_repeat(sequences, rows, positions):
        return (sequences[..., None] != torch.arange(tokens)).all(1)

    prompts = torch.full((draws, length), tokens)
    out = generate(TabularDenoiser(theta), prompts, "left-to-right", length, temperature=1.0, allowed=no_repeat)
    law = {}
    for x in product(range(tokens), repeat=length):
        state, probability = [tokens] * length, 1.0
        for n, token in enumerate(x):
            p = theta[sum(t * (tokens + 1) ** m for m, t in enumerate(state)), n].softmax(-1).tolist()
            free = [v for v in range(tokens) if v not in state]
            probability *= p[token] / sum(p[v] for v in free) if token in free else 0.0
            state[n] = token
        law[x] = probability
    counts = Counter(map(tuple, out.tokens.tolist()))
    assert set(counts) <= {x for x, probability in law.items() if probability}
    possible = [x for x, probability in law.items() if probability]
    assert_follows([counts[x] for x in possible], [draws * law[x] for x in possible])


EMPTY = torch.ones(2, 4, V, dtype=torch.bool)
EMPTY[1, 3] = False
FOURTH = torch.ones(4, V, dtype=torch.bool)
FOURTH[2] = torch.arange(V) == 4


def not_four(input_ids, scores):
    return scores.index_fill(1, torch.tensor([4]), -torch.inf)


@pytest.mark.parametrize(
    ("message", "allowed", "options"),
    [
        ("no token is allowed at position 3 of sequence 1: allow one there", EMPTY, {}),
        ("no token is allowed at position 2 of sequence 0", FOURTH, {"suppress_tokens": [4]}),
        ("no token is allowed at position 2 of sequence 0", FOURTH, {"eos_token_id": 4, "min_length": 1}),
        ("no token is allowed at position 2 of sequence 0", lambda s, r, p: FOURTH[p], {"suppress_tokens": [4]}),
        ("at step 0, processors and allowed tokens applied: leave a token", FOURTH, {"processors": [not_four]}),
        (
            "at step 0, processors applied: leave a token",
            None,
            {"processors": [lambda ids, scores: scores - torch.inf]},
        ),
        ("allowed must be booleans, got torch.int64", EMPTY.long(), {}),
        ("allowed must be [4, V] or [2, 4, V], got [2, 3, 11]", EMPTY[:, :3], {}),
        ("allowed is for 5 tokens, and the denoiser writes 11", EMPTY[..., :5] | True, {}),
        ("allowed must return booleans [4, 11], got [4]", lambda s, r, p: p > 0, {}),
        ("cannot be compiled", lambda s, r, p: p > 0, {"compile": True}),
        ("a list of masks goes with a list of prompts", [FOURTH, FOURTH], {}),
        ("allowed must be booleans [L, V] or [B, L, V], or a function, got dict", {3: FOURTH}, {}),
    ],
)
def test_what_leaves_no_token_is_refused_in_one_line(message, allowed, options):
    prompts = torch.tensor([[1, 2, MASK, MASK], [3, MASK, 4, MASK]])
    with pytest.raises(UserError, match=re.escape(message)):
        generate(DENOISER, prompts, "margin", 2, allowed=allowed, **options)
    with pytest.raises(UserError, match=re.escape("each mask of allowed must be booleans [L, V], got dict")):
        generate(DENOISER, [prompts[0], prompts[1, :2]], "margin", 2, allowed=[FOURTH, {}])
    for masks in ([FOURTH, FOURTH], [FOURTH, FOURTH[:2, :5]], [True, True]):
        with pytest.raises(ValueError, match=re.escape("give each prompt a mask [L, V]")):
            generate(DENOISER, [prompts[0], prompts[1, :2]], "margin", 2, allowed=masks)
