"""threshold, factor, eb, klass, prophet, credit: as many masks as the denoiser is sure of."""

import math
import random
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import pytest
import torch

from tests.decoding.steps import (
    MASK,
    SCORES,
    CountingDenoiser,
    best,
    blocks_of,
    case_of,
    counting_denoiser,
    ordered,
    places,
    plain_row,
    positions,
    random_case,
    random_row,
    random_weights,
    reveals,
    tensor,
)
from unmask.decoding.generate import generate
from unmask.decoding.policies import (
    Blocks,
    Credit,
    Entropy,
    EntropyBounded,
    Factor,
    KLStable,
    LeftToRight,
    Margin,
    Prophet,
    Threshold,
)

CASES = [random_case(seed) for seed in range(10, 13)]


# --- threshold --------------------------------------------------------------------------------------------------------


def test_threshold():
    for confidence in ("max", "sampled"):
        for threshold in (0.05, 0.7, 1.0):
            for case in CASES:
                for row, chosen in zip(
                    case.rows, reveals(Threshold(threshold, confidence=confidence), case), strict=True
                ):
                    sure = {n for n in row.masked if row.c(n, confidence) >= threshold}
                    assert chosen == (sure or best(partial(row.c, confidence=confidence), row.masked, 1))


def test_threshold_paced():
    """At least an equal share of the masks for each step that is left."""
    for confidence in ("max", "sampled"):
        for threshold in (0.5, 0.9):
            shares = set()
            for case in CASES:
                rule = Threshold(threshold, paced=True, confidence=confidence)
                for row, chosen in zip(case.rows, reveals(rule, case), strict=True):
                    share = math.ceil(len(row.masked) / (row.S - row.i))
                    sure = {n for n in row.masked if row.c(n, confidence) >= threshold}
                    assert chosen == sure | best(partial(row.c, confidence=confidence), row.masked, share)
                    shares.add(share)
            assert len(shares) > 2, "the test has no power"


def test_a_paced_threshold_that_is_never_met_reveals_equal_shares():
    assert reveals_of(Threshold(1.0, paced=True), (0.6, 0.4), torch.float64, steps=3) == [3, 3, 2]


def test_threshold_holds_at_equality():
    """c = lambda is enough: >=, not >."""
    for threshold in (0.9, 0.5, 1.0):
        equal, below = round(20 * threshold), round(20 * threshold) - 1
        row = plain_row([[below, 20 - below, 0, 0], [equal, 20 - equal, 0, 0]], S=2, parts=20, proposal=[0, 0])
        assert reveals(Threshold(threshold, confidence="sampled"), case_of([row])) == [{1}]


def test_threshold_without_any_takes_the_leftmost_of_the_largest():
    assert reveals(Threshold(0.9), case_of([plain_row([[8, 5, 5, 5], [12, 11, 0, 0], [0, 12, 11, 0]])])) == [{1}]


# --- factor -----------------------------------------------------------------------------------------------------------


def slow_factor(row, factor, confidence):
    kept = []
    for r, n in enumerate(ordered(lambda n: row.c(n, confidence), row.masked), start=1):
        if r >= 2 and not row.c(n, confidence) >= 1 - factor / (r + 1):
            break
        kept.append(n)
    return set(kept)


def test_factor():
    for confidence in ("max", "sampled"):
        for factor in (0.1, 1.0, 4.0):
            sizes = set()
            for case in CASES:
                for row, chosen in zip(case.rows, reveals(Factor(factor, confidence=confidence), case), strict=True):
                    assert chosen == slow_factor(row, factor, confidence)
                    sizes |= {len(chosen)} if row.masked else set()
            assert 1 in sizes or factor >= 4
            assert len(sizes) > 2


def test_factor_takes_the_last_element_too():
    """Where every mask is sure enough, all are revealed: a loop that stops at the first failure finds none."""
    certain = [23, 0, 0, 0]
    row = plain_row([certain] * 5)
    assert reveals(Factor(1.0), case_of([row])) == [{0, 1, 2, 3, 4}]
    row.masked = [1, 3]
    assert reveals(Factor(1.0), case_of([row])) == [{1, 3}]
    row.masked = [4]
    assert reveals(Factor(1.0), case_of([row])) == [{4}]


def test_factor_counts_from_r_plus_one():
    """The second needs 1 - 1/3, the third 1 - 1/4; the first needs nothing."""
    at = {
        "above 2/3": [16, 7, 0, 0],
        "below 2/3": [15, 8, 0, 0],
        "above 3/4": [18, 5, 0, 0],
        "below 3/4": [17, 6, 0, 0],
    }

    def chosen(*names):
        return reveals(Factor(1.0), case_of([plain_row([at[name] for name in names])]))[0]

    assert chosen("below 2/3", "below 2/3") == {0}
    assert chosen("above 2/3", "above 2/3") == {0, 1}
    assert chosen("below 3/4", "below 3/4", "below 3/4") == {0, 1}
    assert chosen("above 3/4", "above 3/4", "above 3/4") == {0, 1, 2}


def test_factor_s_bar_is_as_precise_as_c():
    """The fourth needs 1 - 1/5 = 0.8: one part in 1e9 above it is enough, one below is not."""
    for c, expected in ((800_000_001, {0, 1, 2, 3}), (799_999_999, {0, 1, 2})):
        row = plain_row([[c, 10**9 - c, 0, 0]] * 4, parts=10**9)
        assert reveals(Factor(1.0), case_of([row])) == [expected]


# --- entropy-bounded --------------------------------------------------------------------------------------------------


def slow_eb(row, gamma, score):
    order = ordered(lambda n: score(row, n), row.masked)
    for size in range(len(order), 1, -1):  # from the longest prefix down
        H = [row.entropy(n) for n in order[:size]]
        lost = sum(H) - max(H)
        assert lost == 0 or abs(lost - gamma) > 1e-9, "too near to tell"
        if lost <= gamma:
            return set(order[:size])
    return set(order[:1])


def test_entropy_bounded():
    for order, score in SCORES.values():
        for gamma in (0.0, 0.7, 2.0):
            for case in CASES:
                for row, chosen in zip(case.rows, reveals(EntropyBounded(gamma, order=order), case), strict=True):
                    assert chosen == slow_eb(row, gamma, score)


def test_entropy_bounded_takes_the_largest_entropy_off_wherever_it_stands():
    """Ordered by c, the largest H need not come last: an implementation that takes off the last H stops too soon."""
    spread, narrow, certain = [13, 4, 3, 3], [12, 11, 0, 0], [23, 0, 0, 0]
    row = plain_row([spread, narrow, certain])
    H = [row.entropy(n) for n in range(3)]
    assert row.c(0) > row.c(1)
    assert H[0] > H[1]  # in the order 2, 0, 1 the largest is second
    gamma = (H[0] + H[1]) / 2  # between H[1], what is lost, and H[0], what taking off the last would say
    assert reveals(EntropyBounded(gamma), case_of([row])) == [{0, 1, 2}]
    assert reveals(EntropyBounded(H[1] - 0.01), case_of([row])) == [{0, 2}]


def test_entropy_bounded_order_matters():
    """One prefix or another within the same bound: (12, 11, 0, 0) has the lower entropy, (13, 4, 3, 3) the larger c."""
    case = case_of([plain_row([[13, 4, 3, 3], [12, 11, 0, 0]])])
    assert reveals(EntropyBounded(0.1), case) == [{0}]
    assert reveals(EntropyBounded(0.1, order=Margin()), case) == [{0}]
    assert reveals(EntropyBounded(0.1, order=Entropy()), case) == [{1}]


# --- KLASS ------------------------------------------------------------------------------------------------------------

KLASS_PARTS = 1000


def kl(now, before):
    return sum(a / KLASS_PARTS * math.log(a / b) for a, b in zip(now, before, strict=True))


def next_table(rng, weights):
    """What the next pass says: the same, something near, or something else."""
    how = rng.random()
    if weights and how < 0.7:
        return list(weights)
    if weights and how < 0.85:
        low, high, moved = weights.index(min(weights)), weights.index(max(weights)), rng.randint(1, 20)
        return [w + moved * (v == low) - moved * (v == high) for v, w in enumerate(weights)]
    top = rng.choice([400, 900, 900, 901, 960, 990])  # 0.9 itself is not above 0.9
    rest = rng.randint(1, KLASS_PARTS - top - 1)
    return rng.sample([top, rest, KLASS_PARTS - top - rest], 3)


@pytest.mark.parametrize(
    ("tau", "eps", "h", "confidence"),
    [(0.9, 0.01, 2, "max"), (0.9, 0.01, 1, "sampled"), (0.5, 0.002, 3, "sampled"), (0.0, 1e-9, 2, "max")],
)
def test_klass(tau, eps, h, confidence):
    """Pass after pass, rows at different steps; a row that is full starts over at i = 0, its history goes on."""
    rng, L = random.Random(5), 7
    policy = KLStable(tau, eps, h, confidence=confidence)
    rows = [replace(random_row(rng, L), i=0, S=rng.randint(2, 8), parts=KLASS_PARTS) for _ in range(100)]
    passes = [[] for _ in rows]  # [pass][position][token]
    memory, by_stability, by_count = policy.init_state(len(rows), L, torch.device("cpu")), 0, 0
    for _ in range(16):
        for row, history in zip(rows, passes, strict=True):
            if row.i == 0:
                row.masked, row.tokens = list(row.response), [0] * L
            row.weights = [next_table(rng, history[-1][n] if history else None) for n in range(L)]
            row.proposal = [rng.randrange(3) for _ in range(L)]
            history.append(row.weights)
        step = case_of(rows).step
        step.stats["change"] = tensor(  # before the second pass there is nothing to compare with
            [[kl(seen[-1][n], seen[-2][n]) if len(seen) > 1 else math.inf for n in range(L)] for seen in passes]
        )
        decision = policy.decide(replace(step, memory=memory))
        memory = decision.memory
        for row, history, chosen in zip(rows, passes, decision.reveal & step.masked, strict=True):
            stable = {
                n
                for n in row.masked
                if len(history) > h  # pass h + 1 at the earliest
                and row.i >= h - 1
                and all(kl(history[-j][n], history[-j - 1][n]) < eps for j in range(1, h + 1))
                and row.c(n, confidence) > tau
            }
            by_stability, by_count = by_stability + bool(stable), by_count + (not stable)
            expected = stable or best(partial(row.c, confidence=confidence), row.masked, row.k)
            assert positions(chosen) == expected
            row.masked = [n for n in row.masked if n not in expected]
            row.i = row.i + 1 if row.masked and row.i + 1 < row.S else 0
    assert min(by_stability, by_count) > 50


def unmoved(L, c=0.95):
    """A denoiser that says the same at every pass, surer the further left."""
    p = torch.tensor([c + (1 - c) * (L - n) / (2 * L) for n in range(L)], dtype=torch.float64)
    return CountingDenoiser(torch.stack([p, 1 - p], dim=-1).log().expand(L + 1, L, 2))


def test_klass_waits_for_pass_h_plus_one():
    """However sure and however still: k_i = 2 a pass until h passes can have been compared, then all at once."""
    for h, expected in ((1, [0, 0] + [1] * 8), (2, [0, 0, 1, 1] + [2] * 6)):
        out = generate(unmoved(10), torch.full((1, 10), 2), KLStable(h=h), 5)
        assert out.reveal_step.tolist() == [expected]
        assert out.num_steps.item() == h + 1


def test_klass_with_nobody_above_tau_counts():
    out = generate(unmoved(10), torch.full((1, 10), 2), KLStable(tau=0.99), 4)
    assert out.reveal_step.tolist() == [[0] * 3 + [1] * 3 + [2] * 2 + [3] * 2]


def test_klass_carries_its_history_into_the_next_block():
    """The masks of later blocks were compared all along, but h - 1 passes of a block go by, as in the authors' code."""
    for h, steps in ((1, [0, 1, 1, 1, *[2] * 4, *[3] * 4]), (2, [0, 1, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6])):
        out = generate(unmoved(12), torch.full((1, 12), 2), Blocks(4, KLStable(h=h)), 12)
        assert out.reveal_step.tolist() == [steps]


@pytest.mark.parametrize("size", [12, 4], ids=["whole", "blocks"])
def test_klass_of_a_whole_generation(size):
    """With the loop's own bookkeeping: KL(now || the pass before) of each position, which other rows cannot touch."""
    L, h, tau, eps, S = 12, 1, 0.45, 0.05, 12
    denoiser = counting_denoiser(L, seed=3, scale=1.5)
    steady = denoiser.table[:1] + 0.25 * (denoiser.table - denoiser.table[:1])  # moves a little from pass to pass
    denoiser = CountingDenoiser(steady)
    responses = [range(12), range(2, 12), [0, 3, 4, 7], range(7)]
    prompts = torch.where(places(responses, L), denoiser.mask_token_id, 0)
    rule = KLStable(tau, eps, h)
    out = generate(denoiser, prompts, rule if size == L else Blocks(size, rule), S)
    by_stability, at_the_start_of_a_later_block, late = 0, 0, 0
    for response, steps in zip(responses, out.reveal_step.tolist(), strict=True):
        masked, before, i = set(response), None, 0
        for inside, own in blocks_of(response, size, S):
            for own_i in range(own):
                left = masked & set(inside)
                if not left:
                    break
                p = {n: denoiser.p(len(masked), n) for n in masked}
                stable = set()
                for n in left if before else ():
                    change = sum(a * math.log(a / b) for a, b in zip(p[n], before[n], strict=True))
                    assert abs(change - eps) > 1e-9
                    if change < eps and max(p[n]) > tau:
                        stable.add(n)
                by_stability, late = by_stability + bool(stable), late + (bool(stable) and i > 2)
                at_the_start_of_a_later_block += bool(stable) and own_i == 0
                k = len(inside) // own + (own_i < len(inside) % own)
                chosen = stable or best(lambda n, p=p: max(p[n]), left, k)
                chosen = left if own_i == own - 1 else chosen
                assert {n for n in response if steps[n] == i} == chosen
                masked, before, i = masked - chosen, p, i + 1
    assert by_stability > late > 3
    assert (at_the_start_of_a_later_block > 0) == (size < L)


# --- equal up to rounding is equal ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Says:
    """The same distribution at every position, whatever stands around it."""

    p: tuple[float, ...]
    dtype: torch.dtype
    shift: float = 0.0

    @property
    def mask_token_id(self):
        return len(self.p)

    def hidden(self, tokens, attention_mask=None):
        return (torch.tensor(self.p, dtype=self.dtype).log() + self.shift).expand(*tokens.shape, -1)

    def logits(self, hidden):
        return hidden.clone()


def reveals_of(rule, p, dtype, size=8, shift=0.0, steps=None):
    """How many positions each step reveals."""
    out = generate(Says(p, dtype, shift), torch.full((1, size), len(p)), rule, steps or size)
    return torch.bincount(out.reveal_step[0], minlength=int(out.num_steps)).tolist()


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
one_by_one = [1] * 8


@both_dtypes
@pytest.mark.parametrize("bar", [0.9, 0.55])
def test_a_threshold_that_is_met_exactly_is_met(dtype, bar):
    """p = 0.9 comes out of a softmax as 0.9, more or less a rounding."""
    for shift in (0.0, 0.3, -1.0):
        assert reveals_of(Threshold(bar), (bar, 1 - bar), dtype, shift=shift) == [8]
    assert reveals_of(Threshold(bar), (bar - 1e-5, 1 - bar + 1e-5), dtype) == one_by_one, "close is not equal"
    assert reveals_of(Threshold(1.0), (1.0, 0.0), dtype) == [8]


@both_dtypes
def test_a_factor_that_is_met_exactly_is_met(dtype):
    """1 - 1/(r + 1) is 0.75 at r = 3, and 0.8 at r = 4."""
    assert reveals_of(Factor(1.0), (0.75, 0.25), dtype) == [3, 3, 2]
    assert reveals_of(Factor(1.0), (0.8, 0.2), dtype) == [4, 4]
    assert reveals_of(Factor(1.0), (0.75 - 1e-5, 0.25 + 1e-5), dtype) == [2, 2, 2, 2]


@both_dtypes
def test_an_entropy_bound_that_is_met_exactly_is_met(dtype):
    """Three equal entropies lose two of them."""
    H = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert reveals_of(EntropyBounded(2 * H), (0.75, 0.25), dtype) == [3, 3, 2]
    assert reveals_of(EntropyBounded(2 * H - 1e-5), (0.75, 0.25), dtype) == [2, 2, 2, 2]


@both_dtypes
@pytest.mark.parametrize("tau", [0.9, 0.6])
def test_klass_needs_more_than_tau(dtype, tau):
    """Nothing changes from pass to pass: from the second on, all are stable, and c > tau alone decides."""
    p = (tau, 1 - tau)
    for shift in (0.0, 0.3, -1.0):
        assert reveals_of(KLStable(tau, 0.01, 1), p, dtype, shift=shift) == one_by_one, "c = tau is not above it"
    assert reveals_of(KLStable(tau - 1e-5, 0.01, 1), p, dtype) == [1, 7]


# --- prophet ----------------------------------------------------------------------------------------------------------


def test_prophet():
    """Gaps of log(18/5) and less never reach a bar, so weights are of 10^4 parts; the answer is revealed or masked.
    A position with one possible token says nothing: its gap is infinite."""
    rng, everything = random.Random(3), 0
    for start, size in ((0, 0), (1, 2), (3, 0)):
        rows = []
        for _ in range(150):
            row = random_row(rng, 8)
            row.parts, row.weights = 10**4, [random_weights(rng, 10**4) for _ in range(8)]
            rows += [row] if len(row.response) > start else []
        case = case_of(rows, reads_revealed=True)
        for row, chosen in zip(case.rows, reveals(Prophet(start, size), case), strict=True):
            answer = row.response[start : start + size if size else None]
            gaps = [row.gap(n) for n in answer if row.gap(n) < math.inf]
            g = sum(gaps) / len(gaps) if gaps else 0.0
            progress = Fraction(row.i + 1, row.S)
            bar = 7.5 if progress < Fraction(1, 3) else 5.0 if progress < Fraction(2, 3) else 2.5
            everything += g >= bar and len(row.masked) > row.k
            assert chosen == (set(row.masked) if g >= bar else best(row.c, row.masked, row.k))
    assert everything > 20


def test_prophet_with_an_order_inside_blocks():
    """Block by block until the answer is clear, then all that is left of all blocks."""
    order, rule, L = "blocks(3,top-prob)", "prophet(order=blocks(3,top-prob))", 9
    canvas, denoiser = torch.full((1, L), MASK), counting_denoiser(L, seed=3)
    unsure, sure = (CountingDenoiser(scale * denoiser.table) for scale in (0.1, 1000.0))
    for options in ({}, {"eos_token_id": 1, "eos_last": True}):
        by_blocks = generate(unsure, canvas, order, L, **options)
        assert torch.equal(generate(unsure, canvas, rule, L, **options).reveal_step, by_blocks.reveal_step)
    assert generate(sure, canvas, rule, L).num_steps.tolist() == [1]
    later = torch.cat([sure.table[: L - 4], unsure.table[L - 4 :]])  # by the masks that are left: sure from four on
    out = generate(CountingDenoiser(later), canvas, rule, L)
    expected = generate(unsure, canvas, order, L).reveal_step
    assert torch.equal(out.reveal_step, expected.clamp(max=int(out.num_steps) - 1))
    assert 3 < int(out.num_steps) < L


def test_prophet_s_gap_is_that_of_the_logits_and_its_order_any():
    denoiser = counting_denoiser(6, scale=6.0)
    out = generate(denoiser, torch.full((1, 6), MASK), Prophet(order=LeftToRight()), 6)
    steps, i, masks = [], 0, 6
    while masks:
        tops = [denoiser.table[masks, n].topk(2).values for n in range(6)]
        g = sum((first - second).item() for first, second in tops) / 6
        now = masks if g >= [7.5, 5.0, 5.0, 2.5, 2.5, 2.5][i] else 1  # progress 1/6, 1/3, 1/2, 2/3, ...
        steps, masks, i = [*steps, *[i] * now], masks - now, i + 1
    assert out.reveal_step.tolist() == [steps]
    with pytest.raises(ValueError, match="a response of 6 tokens has no place 6"):
        generate(denoiser, torch.full((1, 6), MASK), Prophet(6), 6)


# --- credit -----------------------------------------------------------------------------------------------------------


def credit_by_hand(denoiser, N, size, S, threshold, alpha, beta, gamma):
    """(tokens, reveal steps) of a sequence that is all response, greedy, in blocks."""
    credit = {n: [0.0] * 4 for n in range(N)}
    written, when, i = {}, {}, 0
    for inside, steps in blocks_of(range(N), size, S):
        for own in range(steps):
            masks = [n for n in range(N) if n not in written]
            left = [n for n in masks if n in inside]
            if not left:
                break
            fused = {}
            for n in masks:  # those of the blocks to come too
                p = denoiser.p(len(masks), n)
                top = p.index(max(p))
                credit[n] = [beta * value + (max(p) ** gamma if v == top else 0.0) for v, value in enumerate(credit[n])]
                weights = [value * (1 + credit[n][v]) ** alpha for v, value in enumerate(p)]
                fused[n] = [value / sum(weights) for value in weights]
            c = {n: max(fused[n]) for n in left}
            chosen = {n for n in left if c[n] >= threshold} or best(c.get, left, 1)
            for n in left if own == steps - 1 else chosen:
                written[n], when[n] = fused[n].index(max(fused[n])), i
            i += 1
    return [written[n] for n in range(N)], [when[n] for n in range(N)]


def test_credit_of_a_whole_generation():
    """Alone, in a batch that is refilled (slots are used again), and with fixed shapes."""
    N, differs = 9, 0
    for seed in range(5):
        denoiser = counting_denoiser(N, seed=seed, scale=1.5)
        for size, settings in ((9, (0.7, 0.7, 0.8, 0.2)), (4, (0.8, 2.0, 0.5, 1.0))):
            rule = Credit(*settings) if size == 9 else Blocks(size, Credit(*settings))
            tokens, steps = credit_by_hand(denoiser, N, size, 9, *settings)
            for layout in ({}, {"batch_size": 2}, {"batch_size": 2, "fixed_shapes": True}):
                out = generate(denoiser, torch.full((5, N), MASK), rule, 9, **layout)
                assert out.tokens.tolist() == [tokens] * 5
                assert out.reveal_step.tolist() == [steps] * 5
            plain = Threshold(settings[0]) if size == 9 else Blocks(size, Threshold(settings[0]))
            differs += generate(denoiser, torch.full((1, N), MASK), plain, 9).reveal_step[0].tolist() != steps
    assert differs > 3
