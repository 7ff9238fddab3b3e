"""learned, lo-arm, reward: a network decides."""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
import torch

from tests.decoding.steps import (
    best,
    case_of,
    plain_row,
    positions,
    product_law,
    random_case,
    repeated,
    reveals,
    sigmoid,
    tensor,
)
from tests.statistics import assert_follows
from unmask.decoding.confidence import LEAST_LOG_P
from unmask.decoding.policies import Learned, OneAtATime, RewardTrained
from unmask.variational.selection import Bernoulli, NonEmpty

CASES = [random_case(seed) for seed in range(40, 43)]
DRAWS = 20_000


class LookUp:
    """A network whose logits are given; keeps what it was asked."""

    def __init__(self, logits, selection=None, budget=None):
        self.prices = ()
        self.logits, self.selection, self.budget = logits, selection or NonEmpty(), budget

    def __call__(self, hidden, confidences, masked, t, attention_mask, max_steps, price):
        self.asked = {"hidden": hidden, "masked": masked, "attention_mask": attention_mask}
        self.asked |= {"confidences": confidences, "t": t}
        return self.logits.expand(masked.shape)


def some_logits(case, shift, seed=0):
    """In steps of 0.15: many ties."""
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(case.step.masked.shape, dtype=torch.float64, generator=generator).round(decimals=1) + shift


RULES = {
    "learned": Learned,
    "learned with knobs": lambda network: Learned(network, temperature=2.0, floor=0.3, cap=1, deterministic=True),
    "lo-arm": OneAtATime,
    "reward": RewardTrained,
}


def test_what_the_network_is_asked():
    """t = S - 1 - i and S of each row; c, margin and entropy where masked, 0 elsewhere; its own logits are reported."""
    for make in RULES.values():
        case = CASES[0]
        network = LookUp(some_logits(case, 0.0))
        decision = make(network).decide(case.step)
        asked = network.asked
        assert asked["t"].tolist() == [row.S - 1 - row.i for row in case.rows]
        for name in ("hidden", "masked", "attention_mask"):
            assert asked[name] is getattr(case.step, name)
        for row, told in zip(case.rows, asked["confidences"].tolist(), strict=True):
            for n in range(len(told)):
                expected = [row.c(n), row.margin(n), row.entropy(n)] if n in row.masked else [0.0, 0.0, 0.0]
                assert told[n] == pytest.approx(expected, abs=1e-14)
        assert torch.equal(decision.scores, network.logits)


def test_what_a_network_that_sees_the_drawn_tokens_is_asked():
    """log p of the drawn token, bounded below; the tokens, those drawn only where they are on offer."""

    class Drawn(LookUp):
        drawn = True

        def __call__(self, *given):
            *others, self.tokens = given
            return super().__call__(*others)

    masked = torch.tensor([[True, True, False, False]])  # the last is held back: its draw is not to be seen
    tokens, proposal = torch.tensor([[9, 9, 3, 9]]), torch.tensor([[1, 2, 3, 4]])
    stats = {name: torch.zeros(1, 4) for name in ("log_top", "margin", "entropy")}
    stats["log_proposal"] = torch.tensor([[-0.5, -torch.inf, -0.5, -0.5]])
    step = dataclasses.replace(CASES[0].step, tokens=tokens, masked=masked, proposal=proposal, stats=stats)
    step = dataclasses.replace(step, index=torch.tensor([0]), max_steps=torch.tensor([3]), states=lambda: tokens)
    network = Drawn(torch.zeros(1, 4))
    Learned(network).logits(step)
    assert network.tokens.tolist() == [[1, 2, 3, 9]]
    assert network.asked["confidences"][0, :, 3].tolist() == [-0.5, LEAST_LOG_P, 0.0, 0.0]


# --- learned ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "floor", "cap"),
    [(1.0, 0.0, 0), (0.4, 0.0, 0), (3.0, 0.0, 0), (1.0, 0.2, 0), (1.0, 0.0, 1), (1.0, 0.0, 3), (0.5, 0.1, 2)],
)
def test_learned_bernoulli(temperature, floor, cap):
    """Independent draws; none: the most probable, leftmost of equals, and it is counted."""
    for shift in (-4.0, 2.0):
        fell_back = 0
        for case in CASES:
            logits = some_logits(case, shift)
            rule = Learned(LookUp(logits, Bernoulli()), temperature=temperature, floor=floor, cap=cap)
            nothing = rule.decide(case.step).nothing_selected.tolist()
            for row, s, chosen, empty in zip(case.rows, logits.tolist(), reveals(rule, case), nothing, strict=True):
                p = {n: max(floor, sigmoid(s[n] / temperature)) for n in row.masked}
                selected = {n for n in row.masked if row.u[n] < p[n]}
                assert empty == (bool(row.masked) and not selected)
                fell_back += empty
                expected = selected or best(lambda n, p=p: p[n], row.masked, 1)
                assert chosen == (best(lambda n, p=p: p[n], expected, cap) if cap else expected)
        assert fell_back > 0 or shift > 0


def test_learned_deterministic():
    """p >= 1/2, equality included, whatever the form and the draws; none: the most probable, counted."""
    for selection, shift, (floor, cap) in itertools.product(
        (Bernoulli(), NonEmpty()), (-1.5, 3.0), ((0.0, 0), (0.3, 0), (0.6, 2))
    ):
        for case in CASES:
            logits = some_logits(case, shift)
            rule = Learned(LookUp(logits, selection), floor=floor, cap=cap, temperature=0.5, deterministic=True)
            nothing = rule.decide(case.step).nothing_selected.tolist()
            for row, s, chosen, empty in zip(case.rows, logits.tolist(), reveals(rule, case), nothing, strict=True):
                p = {n: max(floor, sigmoid(s[n] / 0.5)) for n in row.masked}
                selected = {n for n in row.masked if p[n] >= 0.5}
                assert empty == (bool(row.masked) and not selected)
                expected = selected or best(lambda n, p=p: p[n], row.masked, 1)
                assert chosen == (best(lambda n, p=p: p[n], expected, cap) if cap else expected)
        assert any(s == 0 for s in some_logits(CASES[0], 0.0).flatten().tolist())  # p = 1/2 does occur


LOGITS = tensor([[-1.0, 9.0, 0.5, -2.5, -9.0, -0.2]])
ONE = plain_row(
    [[12, 11, 0, 0]] * 6, i=1, S=5, masked=[0, 2, 3, 5]
)  # 1 and 4 are revealed: their logits must not count


def drawn(rule):
    """How often each set is revealed in DRAWS rows that differ in their draws only."""
    u = torch.rand(DRAWS, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    step = repeated(case_of([ONE]).step, DRAWS, u)
    decision = rule.decide(step)
    return Counter(frozenset(positions(row)) for row in decision.reveal & step.masked), decision.nothing_selected


@pytest.mark.parametrize(
    ("shift", "temperature", "floor", "cap"),
    [(-6.0, 1.0, 0.0, 0), (1.0, 0.5, 0.0, 0), (-6.0, 1.0, 0.25, 0), (1.0, 1.0, 0.0, 2), (-6.0, 2.0, 0.1, 1)],
)
def test_learned_nonempty_follows_the_conditioned_product(shift, temperature, floor, cap):
    rule = Learned(LookUp(LOGITS + shift, NonEmpty()), temperature=temperature, floor=floor, cap=cap)
    counts, nothing = drawn(rule)
    p = {n: max(floor, sigmoid((LOGITS[0, n].item() + shift) / temperature)) for n in ONE.masked}
    product = product_law(p)
    something = 1 - product.pop(frozenset())
    law = Counter()
    for chosen, probability in product.items():
        kept = frozenset(best(lambda n: p[n], chosen, cap)) if cap else chosen
        law[kept] += probability / something
    assert set(counts) <= set(law)
    assert_follows([counts[outcome] for outcome in law], [DRAWS * probability for probability in law.values()])
    assert nothing is None or not nothing.any()  # no fallback


def test_a_finished_row_selects_nothing_and_is_not_counted():
    for make in RULES.values():
        case = random_case(44)
        for row in case.rows:
            row.masked = []
        case = case_of(case.rows)
        for selection in (Bernoulli(), NonEmpty()):
            decision = make(LookUp(some_logits(case, 0.0), selection)).decide(case.step)
            assert not (decision.reveal & case.step.masked).any()
            assert decision.nothing_selected is None or not decision.nothing_selected.any()


# --- LO-ARM -----------------------------------------------------------------------------------------------------------


def test_one_at_a_time_follows_the_softmax_over_the_masks():
    for shift in (0.0, -700.0):
        counts, _ = drawn(OneAtATime(LookUp(LOGITS + shift)))
        weights = {n: math.exp(LOGITS[0, n].item()) for n in ONE.masked}
        law = {frozenset([n]): weight / sum(weights.values()) for n, weight in weights.items()}
        assert set(counts) <= set(law)
        assert_follows([counts[outcome] for outcome in law], [DRAWS * probability for probability in law.values()])


def test_one_at_a_time_is_one():
    for case in CASES:
        for row, chosen in zip(case.rows, reveals(OneAtATime(LookUp(some_logits(case, 0.0))), case), strict=True):
            assert chosen <= set(row.masked)
            assert len(chosen) == min(1, len(row.masked))


# --- reward-trained ---------------------------------------------------------------------------------------------------


def test_reward_trained():
    """r_n ~ Bern(sigmoid(b_n / temperature)), whatever form a selector would have; none: the most probable, counted."""
    for shift, temperature in itertools.product((-4.0, 2.0), (1.0, 0.3)):
        fell_back = 0
        for case in CASES:
            b = some_logits(case, shift, seed=1)
            rule = RewardTrained(LookUp(b, NonEmpty()), temperature)
            nothing = rule.decide(case.step).nothing_selected.tolist()
            for row, s, chosen, empty in zip(case.rows, b.tolist(), reveals(rule, case), nothing, strict=True):
                selected = {n for n in row.masked if row.u[n] < sigmoid(s[n] / temperature)}
                assert empty == (bool(row.masked) and not selected)
                fell_back += empty
                assert chosen == (selected or best(lambda n, s=s: s[n], row.masked, 1))
        assert fell_back > 0
