"""top-prob, margin, entropy, left-to-right, pc-sampler, stochastic: a score ranks, k_i cuts."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.decoding.steps import (
    FREQUENCIES,
    MASK,
    SCORES,
    best,
    blocks_of,
    case_of,
    counting_denoiser,
    plain_row,
    positions,
    random_case,
    repeated,
    reveals,
)
from tests.statistics import assert_follows
from unmask.decoding.generate import generate
from unmask.decoding.policies import Blocks, Entropy, LeftToRight, Margin, PCSampler, Random, Stochastic, TopProbability
from unmask.decoding.policies.rule import highest

CASES = [random_case(seed) for seed in range(2)]


def pc_score(p, token, j, decay, clip):
    return math.exp(-decay * j) * min(clip, -p * math.log(FREQUENCIES[token].item() + 1e-9))


def pc_score_of(row, n, decay, clip):
    return pc_score(row.p(n, row.proposal[n]), row.proposal[n], row.response.index(n), decay, clip)


RANKED = {
    **SCORES,
    "left-to-right": (LeftToRight(), lambda row, n: -n),
    "pc-sampler": (PCSampler(FREQUENCIES), partial(pc_score_of, decay=0.25, clip=10)),
    "pc-sampler, clipped": (PCSampler(FREQUENCIES, 0.03, 0.2), partial(pc_score_of, decay=0.03, clip=0.2)),
}


def test_the_k_best_masks_are_revealed():
    for rule, score in RANKED.values():
        for case in CASES:
            for row, chosen in zip(case.rows, reveals(rule, case), strict=True):
                assert chosen == best(partial(score, row), row.masked, row.k)


def counted(row, kind):
    masks = len(row.masked)
    if kind == "floor":
        return masks * 999 // (1000 * row.S - 999 * row.i)
    return max(1, masks - math.floor(row.N * math.cos(math.pi / 2 * (row.i + 1) / row.S) + 1e-9))


def test_other_counts_cut_elsewhere():
    for name, (rule, score) in RANKED.items():
        for case, kind in itertools.product(CASES, ("floor", "cosine")):
            for row, chosen in zip(case.rows, reveals(replace(rule, count=kind), case), strict=True):
                assert chosen == best(partial(score, row), row.masked, counted(row, kind)), name
    for case, kind in itertools.product(CASES, ("floor", "cosine")):
        rule = Stochastic(Margin(count=kind), 0.5)
        for row, chosen in zip(case.rows, reveals(rule, case), strict=True):
            assert len(chosen) == min(len(row.masked), counted(row, kind))


def test_random_takes_the_largest_draws():
    """Which are k_i uniform ones: every set of that size has the same probability."""
    for case in CASES:
        for row, chosen in zip(case.rows, reveals(Random(), case), strict=True):
            assert chosen == best(lambda n, row=row: row.u[n], row.masked, row.k)
    out = generate(counting_denoiser(4), torch.full((6000, 4), MASK), Random(), 2, seed=3)
    first = Counter(tuple(n for n in range(4) if steps[n] == 0) for steps in out.reveal_step.tolist())
    assert_follows([first[pair] for pair in itertools.combinations(range(4), 2)], [1000.0] * 6)


def test_the_cases_hold_what_can_go_wrong():
    """Ties at the cut, rows with more masks than k, with fewer, with none, and a count with a remainder."""
    rows = [row for case in CASES for row in case.rows]
    tied = [row for row in rows if len({row.c(n) for n in row.masked}) < len(row.masked)]
    assert len(tied) > 100
    assert sum(len(row.masked) > row.k > 0 for row in rows) > 100
    assert sum(0 < len(row.masked) < row.k for row in rows) > 5
    assert sum(not row.masked for row in rows) > 50
    assert sum(row.i < row.N % row.S for row in rows) > 50


def test_ties_go_to_the_leftmost():
    for rule, _ in RANKED.values():
        row = plain_row([[14, 6, 3, 0]] * 7, i=1, S=3, masked=[1, 2, 4, 5, 6])  # k = 2
        assert reveals(rule, case_of([row])) == [{1, 2}]


def test_entropy_reveals_the_smallest():
    """The sign: ranking by +H writes first what the denoiser knows least about."""
    certain, unsure, torn = [23, 0, 0, 0], [6, 6, 6, 5], [12, 11, 0, 0]
    assert reveals(Entropy(), case_of([plain_row([unsure, certain, torn], S=3)])) == [{1}]


def test_entropy_is_not_top_probability():
    """(12, 11, 0, 0) has the larger top, (13, 4, 3, 3) the larger entropy: the two orders differ."""
    case = case_of([plain_row([[13, 4, 3, 3], [12, 11, 0, 0]], S=2)])
    assert reveals(TopProbability(), case) == [{0}]
    assert reveals(Entropy(), case) == [{1}]


def test_margin_is_not_top_probability():
    case = case_of([plain_row([[12, 11, 0, 0], [9, 7, 7, 0]], S=2)])
    assert reveals(TopProbability(), case) == [{0}]
    assert reveals(Margin(), case) == [{1}]


def test_sampled_confidence_is_that_of_the_proposal():
    row = plain_row([[20, 3, 0, 0], [12, 11, 0, 0]], S=2, proposal=[1, 0])
    assert reveals(TopProbability(), case_of([row])) == [{0}]
    assert reveals(TopProbability(confidence="sampled"), case_of([row])) == [{1}]


def test_counts_of_a_whole_generation():
    """N not a multiple of S, and N < S: the first N mod S steps reveal one more, each row by its own N."""
    for rule, S in itertools.product(
        [*(rule for rule, _ in RANKED.values()), Stochastic(Margin(), 0.5)], (1, 3, 7, 13)
    ):
        sizes = [1, 3, 7, 10]
        prompts = torch.tensor([[MASK if n < N else 0 for n in range(10)] for N in sizes])
        out = generate(counting_denoiser(10), prompts, rule, S, seed=1, temperature=1.0)
        for N, steps, num_steps in zip(sizes, out.reveal_step.tolist(), out.num_steps.tolist(), strict=True):
            assert [steps.count(i) for i in range(S)] == [N // S + (1 if i < N % S else 0) for i in range(S)]
            assert num_steps == min(N, S)


def test_highest_breaks_ties_to_the_left():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-2, 3, (300, 8), generator=generator).double()  # many ties, negative scores too
    scores[scores == -2] = -torch.inf  # log 0 is a score like another
    among = torch.rand(300, 8, generator=generator) < 0.6
    count = torch.randint(0, 10, (300,), generator=generator)  # none, some, more than there are
    for taken, score, allowed, k in zip(highest(scores, among, count), scores.tolist(), among, count, strict=True):
        assert positions(taken) == best(lambda n, score=score: score[n], positions(allowed), int(k))


# --- stochastic order -------------------------------------------------------------------------------------------------

ORDERS = {**SCORES, "left-to-right": (LeftToRight(), lambda row, n: -row.response.index(n))}


def without_replacement(weights, count):
    """{set: probability} of drawing `count` times in proportion to the weights of what is left."""
    law = Counter()
    for sequence in itertools.permutations(weights, count):
        left, probability = dict(weights), 1.0
        for n in sequence:
            probability *= left[n] / sum(left.values())
            del left[n]
        law[frozenset(sequence)] += probability
    return law


@pytest.mark.parametrize(("S", "temperature"), [(5, 1.0), (2, 0.3)], ids=["k = 1", "k = 3"])
@pytest.mark.parametrize(("order", "score"), ORDERS.values(), ids=ORDERS)
def test_stochastic_draws_without_replacement(order, score, S, temperature):
    draws = 20_000
    temperature *= 4 if order == LeftToRight() else 1  # its scores lie further apart
    weights = [[9, 8, 6, 0], [23, 0, 0, 0], [15, 4, 4, 0], [2, 20, 1, 0], [8, 5, 5, 5], [6, 6, 6, 5]]
    row = plain_row(weights, S=S, proposal=[1, 0, 0, 0, 0, 3], response=[0, 2, 3, 4, 5], masked=[0, 2, 3, 5])
    case = case_of([row])
    u = torch.rand(draws, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(S))
    step = repeated(case.step, draws, u)
    chosen = Counter(frozenset(positions(r)) for r in Stochastic(order, temperature).decide(step).reveal)
    law = without_replacement({n: math.exp(score(row, n) / temperature) for n in row.masked}, row.k)
    assert set(chosen) <= set(law)
    assert_follows([chosen[outcome] for outcome in law], [draws * probability for probability in law.values()])


def test_stochastic_reveals_k_masks():
    for case in CASES:
        for row, chosen in zip(case.rows, reveals(Stochastic(Entropy(), 0.5), case), strict=True):
            assert chosen <= set(row.masked)
            assert len(chosen) == min(row.k, len(row.masked))


def test_a_cold_stochastic_order_is_the_order():
    """Where no two scores tie: at temperature 1e-4 a gap of 1/23 is worth 400 nats."""
    for order, score in ORDERS.values():
        for case in CASES:
            for row, chosen in zip(case.rows, reveals(Stochastic(order, 1e-4), case), strict=True):
                if len({round(score(row, n), 3) for n in row.masked}) == len(row.masked):
                    assert chosen == best(partial(score, row), row.masked, row.k)


def test_pc_sampler_counts_places_in_its_block():
    """Against a plain loop; a large decay makes it left to right, whatever the tokens."""
    N, size, S = 11, 4, 6
    for seed in range(5):
        denoiser = counting_denoiser(N, seed=seed)
        out = generate(denoiser, torch.full((1, N), MASK), Blocks(size, PCSampler(FREQUENCIES, 0.4, 1.5)), S)
        masked, steps, i = set(range(N)), {}, 0
        for inside, own in blocks_of(range(N), size, S):
            for own_i in range(own):
                left = masked & set(inside)
                p = {n: denoiser.p(len(masked), n) for n in left}
                score = {n: pc_score(max(p[n]), p[n].index(max(p[n])), n - inside[0], 0.4, 1.5) for n in left}
                chosen = best(score.get, left, len(inside) // own + (own_i < len(inside) % own))
                steps |= dict.fromkeys(chosen, i)
                masked, i = masked - chosen, i + 1
        assert out.reveal_step.tolist() == [[steps[n] for n in range(N)]]
    leftmost = generate(denoiser, torch.full((1, N), MASK), PCSampler(FREQUENCIES, 50.0), N)
    assert leftmost.reveal_step.tolist() == [list(range(N))]


def test_pc_sampler_in_other_rules():
    """stochastic weighs by its score; at a low temperature it is the rule itself."""
    denoiser, order = counting_denoiser(9, seed=1), PCSampler(FREQUENCIES)
    plain, cold = (generate(denoiser, torch.full((1, 9), MASK), rule, 9) for rule in (order, Stochastic(order, 1e-6)))
    assert torch.equal(plain.reveal_step, cold.reveal_step)
