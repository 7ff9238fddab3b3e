"""Each rule against its definition, read slowly: one position at a time, in plain Python."""

import math

import pytest
import torch

from unmask.decoding.confidence import Confidence, confidence, log_probabilities
from unmask.decoding.policies import IID, Learned, Margin, Step, TopProbability, highest
from unmask.variational.selection import Bernoulli, NonEmpty

CASES = [(i, S) for S in (2, 3, 5, 16) for i in range(S - 1)]  # never the last step: the loop reveals what is left


def random_step(index, max_steps, seed=0, rows=40, L=9, vocab=4):
    """A step of random tables, some positions exact copies of others: ties.  Returns it with p [rows][L] as lists."""
    generator = torch.Generator().manual_seed(1000 * seed + 17 * index + max_steps)
    logits = 2 * torch.randn(rows, L, vocab, dtype=torch.float64, generator=generator)
    copy_of = torch.randint(L, (rows, L), generator=generator)
    copied = torch.rand(rows, L, generator=generator) < 0.4
    logits = torch.where(copied[..., None], logits.gather(1, copy_of[..., None].expand_as(logits)), logits)
    masked = torch.rand(rows, L, generator=generator) < 0.6
    masked[:, 0] |= ~masked.any(-1)
    said = confidence(log_probabilities(logits))
    uniforms = torch.rand(rows, L + 1, dtype=torch.float64, generator=generator)
    junk = Confidence(*(torch.where(masked, value, 99.0) for value in said))  # rules read only where masked
    step = Step(
        index=index,
        max_steps=max_steps,
        masked=masked,
        num_response=masked.sum(-1) + torch.randint(3, (rows,), generator=generator),  # some already revealed
        confidence=junk,
        hidden=torch.randn(rows, L, 3, dtype=torch.float64, generator=generator),
        attention=torch.ones_like(masked),
        uniforms=lambda: uniforms,
    )
    return step, [[softmax(position) for position in row] for row in logits.tolist()]


def softmax(logits):
    weights = [math.exp(value) for value in logits]
    return [weight / sum(weights) for weight in weights]


def positions(row):
    return {n for n, is_true in enumerate(row) if is_true}


def revealed(policy, step):
    """What the loop would reveal, as one set of positions a row."""
    return [positions(row) for row in (policy.decide(step).reveal & step.masked).tolist()]


def slow_count(N, i, S):
    return N // S + (1 if i < N % S else 0)


def slow_highest(scores, masked, count):
    """Take the best masked position `count` times; a later one must be strictly better to win."""
    left, taken = sorted(masked), set()
    while left and len(taken) < count:
        best = left[0]
        for n in left:
            if scores[n] > scores[best]:
                best = n
        taken.add(best)
        left.remove(best)
    return taken


def test_highest_breaks_ties_to_the_left():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-2, 3, (300, 8), generator=generator).double()  # many ties, negative scores too
    scores[scores == -2] = -torch.inf  # log 0 is a score like another
    masked = torch.rand(300, 8, generator=generator) < 0.6
    count = torch.randint(0, 10, (300,), generator=generator)  # none, some, more than there are
    taken = highest(scores, masked, count).tolist()
    for row in range(300):
        expected = slow_highest(scores[row].tolist(), positions(masked[row].tolist()), count[row].item())
        assert positions(taken[row]) == expected


def test_highest_of_all_equal_scores_is_the_left():
    masked = torch.tensor([[False, True, True, False, True, True]])
    assert positions(highest(torch.zeros(1, 6), masked, torch.tensor([2]))[0].tolist()) == {1, 2}


@pytest.mark.parametrize(("i", "S"), CASES)
def test_iid(i, S):
    step, _ = random_step(i, S)
    u = step.uniforms().tolist()
    for row, chosen in enumerate(revealed(IID(), step)):
        assert chosen == {n for n in positions(step.masked[row].tolist()) if u[row][n] < 1 / (S - i)}


@pytest.mark.parametrize(("i", "S"), CASES)
def test_top_probability(i, S):
    step, p = random_step(i, S)
    for row, chosen in enumerate(revealed(TopProbability(), step)):
        c = [max(position) for position in p[row]]
        k = slow_count(step.num_response[row].item(), i, S)
        assert chosen == slow_highest(rounded(c), positions(step.masked[row].tolist()), k)


@pytest.mark.parametrize(("i", "S"), CASES)
def test_margin(i, S):
    step, p = random_step(i, S)
    for row, chosen in enumerate(revealed(Margin(), step)):
        margins = []
        for position in p[row]:
            first, second = sorted(position, reverse=True)[:2]
            margins.append(first - second)
        k = slow_count(step.num_response[row].item(), i, S)
        assert chosen == slow_highest(rounded(margins), positions(step.masked[row].tolist()), k)


def rounded(scores):
    return [round(score, 12) for score in scores]


def test_top_probability_and_margin_differ():
    """p = (0.5, 0.48, 0.02) has the higher top, (0.4, 0.3, 0.3) the higher margin."""
    log_p = torch.tensor([[[0.5, 0.48, 0.02], [0.4, 0.3, 0.3]]], dtype=torch.float64).log()
    masked = torch.ones(1, 2, dtype=torch.bool)
    step = Step(0, 2, masked, torch.tensor([2]), confidence(log_p), log_p, masked, lambda: torch.rand(1, 3))
    assert revealed(TopProbability(), step) == [{0}]
    assert revealed(Margin(), step) == [{1}]


class LookUp:
    """A selector whose logits are given; keeps what it was asked."""

    def __init__(self, logits, budgets, selection=None):
        self.logits, self.budgets, self.selection = logits, budgets, selection or NonEmpty()

    def __call__(self, hidden, confidences, masked, t, budget, attention):
        self.asked = {
            "hidden": hidden,
            "confidences": confidences,
            "masked": masked,
            "t": t,
            "budget": budget,
            "attention": attention,
        }
        return self.logits


def selector_logits(step, shift, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(step.masked.shape, dtype=torch.float64, generator=generator).round(decimals=1) + shift


def sigmoid(s):
    return 1 / (1 + math.exp(-s))


@pytest.mark.parametrize("shift", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize(("i", "S"), [(0, 2), (1, 5)])
def test_learned_nonempty(i, S, shift):
    """The first revealed is n with probability p_n prod_{m<n} (1 - p_m) / Z; those to its right are independent."""
    step, _ = random_step(i, S, rows=200)
    logits = selector_logits(step, shift)
    chosen = revealed(Learned(LookUp(logits, (S,))), step)
    decision = Learned(LookUp(logits, (S,))).decide(step)
    assert not decision.nothing_selected.any()
    for row in range(len(chosen)):
        u = step.uniforms()[row].tolist()
        p = {n: sigmoid(logits[row, n].item()) for n in sorted(positions(step.masked[row].tolist()))}
        some = 1 - math.prod(1 - value for value in p.values())
        below, none_yet, first = 0.0, 1.0, None
        for n, p_n in p.items():
            below += none_yet * p_n / some
            none_yet *= 1 - p_n
            if first is None and u[-1] < below:
                first = n
        assert chosen[row] == {first} | {n for n in p if n > first and u[n] < p[n]}


@pytest.mark.parametrize("shift", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize(("i", "S"), [(0, 2), (1, 5)])
def test_learned_bernoulli(i, S, shift):
    """Independent; where none is selected, the most probable one, leftmost of equals, and it is counted."""
    step, _ = random_step(i, S, rows=200)
    logits = selector_logits(step, shift)
    decision = Learned(LookUp(logits, (S,), Bernoulli())).decide(step)
    chosen = revealed(Learned(LookUp(logits, (S,), Bernoulli())), step)
    fell_back = 0
    for row in range(len(chosen)):
        u, masked = step.uniforms()[row].tolist(), positions(step.masked[row].tolist())
        selected = {n for n in masked if u[n] < sigmoid(logits[row, n].item())}
        assert decision.nothing_selected[row].item() == (not selected)
        assert chosen[row] == (selected or slow_highest(logits[row].tolist(), masked, 1))
        fell_back += not selected
    assert fell_back > 0 or shift > 0  # the case is there to be tested


@pytest.mark.parametrize(("i", "S"), CASES)
def test_what_the_selector_is_asked(i, S):
    step, p = random_step(i, S, rows=5)
    network = LookUp(torch.zeros(step.masked.shape), (S,))
    Learned(network).decide(step)
    asked = network.asked
    assert asked["t"].tolist() == [S - 1 - i] * 5
    assert asked["budget"] == S
    for name in ("hidden", "masked", "attention"):
        assert asked[name] is getattr(step, name)
    for row in range(5):
        for n, is_masked in enumerate(step.masked[row].tolist()):
            ranked = sorted(p[row][n], reverse=True)
            entropy = -sum(value * math.log(value) for value in ranked)
            expected = [ranked[0], ranked[0] - ranked[1], entropy] if is_masked else [0.0, 0.0, 0.0]
            assert asked["confidences"][row, n].tolist() == pytest.approx(expected, abs=1e-12)


def test_names_are_distinct():
    names = [rule.name for rule in (IID(), TopProbability(), Margin(), Learned(LookUp(None, (3,))))]
    assert names == ["iid", "top-prob", "margin", "learned"]
