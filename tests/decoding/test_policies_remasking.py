"""rdm, p2, remdm, joint-threshold, saber, wino: rules with second thoughts, inside blocks too."""

import math
import random
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
import torch

from tests.decoding.steps import (
    MASK,
    CountingDenoiser,
    V,
    best,
    blocks_of,
    case_of,
    counting_denoiser,
    places,
    plain_row,
    positions,
    random_case,
    random_row,
    remasks,
    repeated,
    reveals,
)
from unmask.decoding.generate import generate
from unmask.decoding.policies import (
    P2,
    RDM,
    WINO,
    Blocks,
    JointThreshold,
    Policy,
    ReMDMCap,
    ReMDMConf,
    ReMDMRescale,
    Saber,
)
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser

CASES = [random_case(seed, reads_revealed=True) for seed in range(30, 34)]
CERTAIN = [23, 0, 0, 0]
all_rdm = pytest.mark.parametrize(
    ("schedule", "revise"), [(s, r) for s in ("cosine", "linear") for r in ("uncond", "cond")]
)


def test_the_cases_hold_what_can_go_wrong():
    rows = [row for case in CASES for row in case.rows]
    assert sum(not row.masked for row in rows) > 50  # full
    assert sum(not row.revealed for row in rows) > 50  # nothing to doubt
    assert sum(row.i == 0 and bool(row.revealed) for row in rows) > 30
    assert sum(row.i == row.S - 1 for row in rows) > 50
    assert sum(row.S % 3 == 0 and row.i + 1 == 2 * row.S // 3 for row in rows) > 10  # cos(pi/3)


# --- rdm --------------------------------------------------------------------------------------------------------------


def kept_back(N, i, S, schedule):
    """floor(N r_i), where cos(pi/3) is 1/2 and cos(pi/2) is 0."""
    if schedule == "linear":
        return math.floor(N * (1 - Fraction(i + 1, S)))
    exact = {Fraction(2, 3): Fraction(1, 2), Fraction(1): Fraction(0)}
    return math.floor(N * exact.get(Fraction(i + 1, S), math.cos(math.pi / 2 * (i + 1) / S)))


@all_rdm
def test_rdm(schedule, revise):
    policy, doubts = RDM(schedule, revise), 0
    for case in CASES:
        for row, shown, hidden in zip(case.rows, reveals(policy, case), remasks(policy, case), strict=True):
            low = best(lambda n, row=row: -row.c(n, "sampled"), row.response, kept_back(row.N, row.i, row.S, schedule))
            assert shown == {n for n in row.masked if n not in low}
            doubted = set()
            for n in row.revealed:
                fallen = row.weights[n][row.proposal[n]] < row.at_reveal[n]
                if n in low and (revise == "uncond" or (row.proposal[n] == row.tokens[n] and fallen)):
                    doubted.add(n)
            assert hidden == doubted
            doubts += len(doubted)
    assert doubts > 100


def test_rdm_cosine_where_it_is_one_half():
    """cos(pi/3) computes to 1/2 and a bit (or less a bit): N / 2 must be kept back, not one less."""
    for S in (3, 6, 9, 30, 99, 300):
        for N in (2, 4, 6, 10, 50):
            case = case_of([plain_row([CERTAIN] * N, i=2 * S // 3 - 1, S=S)])
            assert len(reveals(RDM("cosine"), case)[0]) == N // 2


def test_rdm_linear_where_it_is_whole():
    """1 - (i + 1)/S in floats puts 10 (1 - 9/10) below 1."""
    for S in (3, 7, 10, 49, 100):
        for i in range(S):
            case = case_of([plain_row([CERTAIN] * S, i=i, S=S)])
            assert len(reveals(RDM("linear"), case)[0]) == i + 1


def test_rdm_keeps_back_the_leftmost_of_equals():
    row = plain_row([CERTAIN] * 6, i=1, S=3, masked=[0, 2, 4])
    case = case_of([row], reads_revealed=True)
    assert reveals(RDM(), case) == [{4}]
    assert remasks(RDM(), case) == [{1}]


def test_rdm_cond_needs_the_same_token_and_less_of_it():
    """All three are in L.  0: another proposal.  1: as sure as before.  2: less sure than before."""
    row = plain_row([[8, 7, 8, 0]] * 3 + [CERTAIN] * 3, i=1, S=3, masked=[], at_reveal=[9, 8, 9, 23, 23, 23])
    row.proposal = [2, 0, 0, 0, 0, 0]
    case = case_of([row], reads_revealed=True)
    assert remasks(RDM("cosine", "cond"), case) == [{2}]
    assert remasks(RDM("cosine", "uncond"), case) == [{0, 1, 2}]


# --- p2 ---------------------------------------------------------------------------------------------------------------


def test_p2():
    for case in CASES:
        for row, shown, hidden in zip(case.rows, reveals(P2(), case), remasks(P2(), case), strict=True):

            def score(n, row=row):
                return row.p(n, row.proposal[n] if n in row.masked else row.tokens[n])

            low = best(lambda n, score=score: -score(n), row.response, (row.N * (row.S - 1 - row.i)) // row.S)
            assert shown == {n for n in row.masked if n not in low}
            assert hidden == {n for n in row.revealed if n in low}


def test_p2_doubts_the_token_that_stands_there():
    """Where revealed it is p of the current token that counts, not of the new proposal."""
    row = plain_row([[1, 22, 0, 0], [20, 3, 0, 0], [18, 5, 0, 0]], i=1, S=3, masked=[2])
    case = case_of([row], reads_revealed=True)
    assert remasks(P2(), case) == [{0}]
    assert reveals(P2(), case) == [{2}]


# --- remdm ------------------------------------------------------------------------------------------------------------


def sigma_max(i, S):
    """min(1, (1 - alpha_s) / alpha_t), 1 at i = 0."""
    alpha_t, alpha_s = Fraction(i, S), Fraction(i + 1, S)
    return Fraction(1) if i == 0 else min(Fraction(1), (1 - alpha_s) / alpha_t)


def reveal_probability(sigma, i, S):
    alpha_t, alpha_s = Fraction(i, S), Fraction(i + 1, S)
    return (alpha_s - (1 - Fraction(sigma)) * alpha_t) / (1 - alpha_t)


def slow_sigmas(name, row, eta):
    """{n: sigma} of the response."""
    most = sigma_max(row.i, row.S)
    if name == "cap":
        return {n: min(Fraction(eta), most) for n in row.response}
    if name == "rescale":
        return {n: Fraction(eta) * most for n in row.response}
    weights = {n: math.exp(-row.at_reveal[n] / row.parts) for n in row.revealed}
    return {n: float(most) * weights[n] / sum(weights.values()) if n in weights else 0 for n in row.response}


REMDM = {
    "cap": [ReMDMCap(0.3), ReMDMCap(1.0), ReMDMCap(0.0)],
    "rescale": [ReMDMRescale(0.4), ReMDMRescale(1.0)],
    "conf": [ReMDMConf()],
}
each_remdm = pytest.mark.parametrize(
    ("name", "rule"), [(name, rule) for name, rules in REMDM.items() for rule in rules], ids=str
)


@each_remdm
def test_remdm(name, rule):
    """Every position of the response by its own draw: revealed, masked again, or left."""
    both = [0, 0]
    for case in CASES:
        for row, shown, hidden in zip(case.rows, reveals(rule, case), remasks(rule, case), strict=True):
            sigmas = slow_sigmas(name, row, getattr(rule, "eta", None))
            assert shown == {n for n in row.masked if row.u[n] < reveal_probability(sigmas[n], row.i, row.S)}
            assert hidden == {n for n in row.revealed if row.u[n] < sigmas[n]}
            both = [both[0] + len(shown), both[1] + len(hidden)]
    assert both[0] > 100
    assert both[1] > 20 or rule == ReMDMCap(0.0)


GRID = 4000


@each_remdm
def test_remdm_probabilities_on_a_grid_of_draws(name, rule):
    """u = (g + 1/2) / GRID: the share of draws that reveal, or mask again, is the probability to 1 / GRID."""
    for i, S in ((0, 5), (2, 5), (4, 5), (60, 64)):
        row = plain_row([CERTAIN] * 5, i=i, S=S, masked=[1, 4], at_reveal=[23, 1, 9, 16, 1])
        u = ((torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID)[:, None].expand(GRID, 6)
        decision = rule.decide(repeated(case_of([row], reads_revealed=True).step, GRID, u))
        sigmas = slow_sigmas(name, row, getattr(rule, "eta", None))
        for n in row.masked:
            expected = float(reveal_probability(sigmas[n], i, S))
            assert decision.reveal[:, n].double().mean().item() == pytest.approx(expected, abs=0.51 / GRID)
        for n in row.revealed:
            assert decision.remask[:, n].double().mean().item() == pytest.approx(float(sigmas[n]), abs=0.51 / GRID)


def test_remdm_at_the_first_step():
    """i = 0: alpha_t is 0 and sigma_max is 1, not 1/0; a mask is revealed with probability 1/S whatever sigma is."""
    for rule, sigma in ((ReMDMCap(0.3), 0.3), (ReMDMRescale(0.3), 0.3), (ReMDMCap(1.0), 1.0), (ReMDMConf(), None)):
        rows = [
            plain_row([CERTAIN] * 2, i=0, S=5, masked=[1], u=[u, u, 0.0])
            for u in (0.0, 0.199, 0.201, 0.29, 0.31, 0.999)
        ]
        case = case_of(rows, reads_revealed=True)
        assert [len(chosen) for chosen in reveals(rule, case)] == [1, 1, 0, 0, 0, 0]
        sigma = 1.0 if sigma is None else sigma  # conf: the softmax over one
        assert [len(chosen) for chosen in remasks(rule, case)] == [int(row.u[0] < sigma) for row in rows]


def test_remdm_conf_with_nothing_revealed():
    """A softmax over nothing must not poison the row: masks are revealed with probability 1/(S - i)."""
    rows = [plain_row([CERTAIN] * 3, i=2, S=6, u=[u] * 4) for u in (0.24, 0.26)]
    case = case_of(rows, reads_revealed=True)
    assert reveals(ReMDMConf(), case) == [{0, 1, 2}, set()]
    assert remasks(ReMDMConf(), case) == [set(), set()]


def test_remdm_conf_doubts_the_unsure_most():
    """Softmax of -p: p = 1, 12/23 and 1/23 at reveal, (S - i - 1)/i = 1/2 of the shares."""
    shares = [math.exp(-w / 23) for w in (23, 12, 1)]
    for n, share in enumerate(shares):
        sigma = share / sum(shares) / 2
        for u, expected in ((sigma - 1e-9, {n}), (sigma + 1e-9, set())):
            draws = [0.9] * 4
            draws[n] = u
            row = plain_row([CERTAIN] * 3, i=2, S=4, masked=[], at_reveal=[23, 12, 1], u=draws)
            assert remasks(ReMDMConf(), case_of([row], reads_revealed=True)) == [expected]


# --- whole generations ------------------------------------------------------------------------------------------------


RULES = [RDM(), RDM("linear", "cond"), P2(), ReMDMCap(1.0), ReMDMRescale(1.0), ReMDMConf()]


def test_all_steps_are_taken_also_after_the_sequence_is_full():
    """Two tokens and twelve steps: full long before the end, and still asked, and full at the end."""
    for rule in RULES:
        prompts = torch.tensor([[MASK, MASK, 1, 1], [1, MASK, 1, 1], [MASK] * 4]).repeat(20, 1)
        out = generate(counting_denoiser(4, seed=2), prompts, rule, 12, seed=1, temperature=1.0)
        assert out.num_steps.tolist() == [12] * 60
        assert out.num_forwards == out.num_passes.sum()
        asked = 11 * 60 if rule.reads else 0  # the last step asks only where there is something left
        assert asked <= out.num_forwards <= 12 * 60
        assert (out.tokens != MASK).all()
        assert torch.equal(out.tokens[prompts != MASK], prompts[prompts != MASK])
        assert (out.revisions[prompts != MASK] == 0).all()


def test_a_full_sequence_may_be_masked_again():
    for rule in (RDM(), P2(), ReMDMCap(1.0), ReMDMRescale(1.0), ReMDMConf()):
        row = plain_row([[6, 6, 6, 5]] * 6, i=1, S=3, masked=[], u=[0.01] * 7)
        case = case_of([row], reads_revealed=True)
        assert remasks(rule, case)[0]
        assert reveals(rule, case) == [set()]


@all_rdm
def test_rdm_of_a_whole_generation(schedule, revise):
    """With the loop's own bookkeeping: what was proposed, and c at the last reveal, not at the first."""
    L, S = 12, 12
    revised, told_apart = 0, 0
    for seed in range(15):
        denoiser = counting_denoiser(L, seed=seed, scale=1.0, vocab=2)
        responses = [sorted(random.Random(seed + N).sample(range(L), N)) for N in (2, 7, 10, 12)]
        out = generate(denoiser, torch.where(places(responses, L), 2, 0), RDM(schedule, revise), S)
        for r, response in enumerate(responses):
            written, at_reveal, when, times = {}, {}, {}, dict.fromkeys(response, 0)
            at_first = {}
            for i in range(S):
                p = {n: denoiser.p(len(response) - len(written), n) for n in response}
                proposal = {n: p[n].index(max(p[n])) for n in response}
                low = best(lambda n, p=p: -max(p[n]), response, kept_back(len(response), i, S, schedule))
                before = dict(written)
                for n in response:
                    if n not in before and n not in low:
                        written[n], at_reveal[n], when[n] = proposal[n], max(p[n]), i
                        at_first.setdefault(n, max(p[n]))
                    elif n in before and n in low:
                        same, fallen = proposal[n] == before[n], max(p[n]) < at_reveal[n] - 1e-12
                        told_apart += same and fallen != (max(p[n]) < at_first[n] - 1e-12)
                        if revise == "uncond" or (same and fallen):
                            del written[n]
                            times[n] += 1
            assert [out.tokens[r, n].item() for n in response] == [written[n] for n in response]
            assert [out.reveal_step[r, n].item() for n in response] == [when[n] for n in response]
            assert [out.revisions[r, n].item() for n in response] == [times[n] for n in response]
            revised += sum(times.values())
    assert revised > 0
    assert told_apart > 0 or revise == "uncond"


@pytest.mark.parametrize("size", [9, 3, 2], ids=["whole", "blocks", "small blocks"])
def test_p2_of_a_whole_generation(size):
    """Inside blocks: only the block is read and revised, for all of its steps."""
    L, S = 9, 14
    revised = 0
    for seed in range(4):
        denoiser = counting_denoiser(L, seed=seed, scale=1.0)
        responses = [sorted(random.Random(seed + N).sample(range(L), N)) for N in (3, 5, 8, 9)]
        prompts = torch.where(places(responses, L), MASK, 0)
        out = generate(denoiser, prompts, P2() if size == L else Blocks(size, P2()), S)
        assert out.num_steps.tolist() == [S] * 4
        for r, response in enumerate(responses):
            written, when, times, taken = {}, {}, dict.fromkeys(response, 0), 0
            for inside, own in blocks_of(response, size, S):
                for i in range(own):
                    p = {n: denoiser.p(len(response) - len(written), n) for n in inside}
                    score = {n: p[n][written[n]] if n in written else max(p[n]) for n in inside}
                    low = best(lambda n, score=score: -score[n], inside, len(inside) * (own - 1 - i) // own)
                    for n in inside:
                        if n in low and n in written:
                            del written[n]
                            times[n] += 1
                        elif n not in low and n not in written:
                            written[n], when[n] = p[n].index(max(p[n])), taken
                    taken += 1
            assert [out.tokens[r, n].item() for n in response] == [written[n] for n in response]
            assert [out.reveal_step[r, n].item() for n in response] == [when[n] for n in response]
            assert [out.revisions[r, n].item() for n in response] == [times[n] for n in response]
            revised += sum(times.values())
    assert revised > 0


@dataclass(frozen=True)
class Watched(Policy):
    """A rule whose draws are kept."""

    rule: Policy
    key = "watched"
    remasks = True
    draws: list = field(default_factory=list)

    @property
    def reads(self):
        return self.rule.reads

    def decide(self, step):
        self.draws.append(step.uniforms().tolist())
        return self.rule.decide(step)


@each_remdm
def test_remdm_of_a_whole_generation(name, rule):
    """With the loop's own bookkeeping: p of the token when it was last revealed, sampled at temperature 1."""
    L, S = 6, 8
    denoiser = counting_denoiser(L, seed=1, scale=1.5)
    responses = [sorted(random.Random(r).sample(range(L), 2 + r % 5)) for r in range(60)]
    watched = Watched(rule)
    prompts = torch.where(places(responses, L), MASK, 0)
    out = generate(denoiser, prompts, watched, S, temperature=1.0, seed=4, history=True)
    canvases = out.history.transpose(0, 1)
    for r, response in enumerate(responses):
        masked, at_reveal, times = set(response), {}, 0
        for i in range(S):
            row = plain_row([[1] * V] * L, i=i, S=S)
            row.response, row.masked, row.parts = response, sorted(masked), 1
            row.at_reveal = [at_reveal.get(n) for n in range(L)]
            sigmas, last = slow_sigmas(name, row, getattr(rule, "eta", None)), i == S - 1
            u = [0.0] * L if last else watched.draws[i][r]  # the loop need not ask at the last step
            shown = {n for n in masked if last or u[n] < reveal_probability(sigmas[n], i, S)}
            hidden = {n for n in set(response) - masked if not last and u[n] < sigmas[n]}
            for n in shown:
                at_reveal[n] = denoiser.p(len(masked), n)[canvases[i + 1][r, n].item()]
            masked, times = (masked - shown) | hidden, times + len(hidden)
            assert {n for n in response if canvases[i + 1][r, n] == MASK} == masked
        assert out.revisions[r].sum().item() == times


def joint_threshold_by_hand(denoiser, response, size, S, tau, tau_e):
    """(tokens, revisions, steps) of a sequence, greedy, in blocks."""
    written, times, i = {}, dict.fromkeys(response, 0), 0
    for inside, own in blocks_of(response, size, S):
        after = 0
        for own_i in range(own):
            masked = [n for n in inside if n not in written]
            p = {n: denoiser.p(len(response) - len(written), n) for n in inside}
            proposal = {n: p[n].index(max(p[n])) for n in inside}
            i += 1
            if own_i == own - 1:
                written |= {n: proposal[n] for n in masked}
                break
            edits = [n for n in inside if n in written and proposal[n] != written[n] and max(p[n]) > tau_e]
            for n in edits:
                written[n], times[n] = proposal[n], times[n] + 1
            sure = [n for n in masked if max(p[n]) > tau]
            for n in sure or best(lambda n, p=p: max(p[n]), masked, 1):
                written[n] = proposal[n]
            after += not masked
            if not masked and (not edits or after == 16):
                break
    return written, times, i


class Flips(CountingDenoiser):
    """Once nothing is masked it says something else at every pass: by the sum of the tokens."""

    def hidden(self, tokens, attention_mask=None):
        hidden = super().hidden(tokens, attention_mask)
        hidden[..., 0] = torch.where(hidden[..., 0] == 0, (tokens.sum(-1, keepdim=True) % 2).double(), 2.0)
        return hidden


@pytest.mark.parametrize("size", [9, 2], ids=["whole", "blocks"])
def test_joint_threshold_of_a_whole_generation(size):
    L, revised, early = 9, 0, 0
    for seed in range(8):
        denoiser = counting_denoiser(L, seed=seed, scale=1.5)
        responses = [sorted(random.Random(seed + N).sample(range(L), N)) for N in (2, 5, 8, 9)]
        for tau, tau_e, S in ((0.7, 0.5, 20), (0.4, 0.0, 20), (0.4, 0.4, 5)):
            prompts, rule = torch.where(places(responses, L), MASK, 0), JointThreshold(tau, tau_e)
            rule = rule if size == L else Blocks(size, rule)
            out = generate(denoiser, prompts, rule, S)
            fixed = generate(denoiser, prompts, rule, S, fixed_shapes=True)
            assert torch.equal(fixed.tokens, out.tokens)
            assert torch.equal(fixed.num_steps, out.num_steps)
            for r, response in enumerate(responses):
                tokens, times, steps = joint_threshold_by_hand(denoiser, response, size, S, tau, tau_e)
                assert [out.tokens[r, n].item() for n in response] == [tokens[n] for n in response]
                assert [out.revisions[r, n].item() for n in response] == [times[n] for n in response]
                assert out.num_steps[r].item() == steps
                revised, early = revised + sum(times.values()), early + (steps < S)
    assert revised > 20
    assert early > 20


def test_joint_threshold_ends_after_sixteen_passes_that_change_something():
    table = torch.zeros(3, 1, 2, dtype=torch.float64)
    table[0, 0], table[1, 0], table[2, 0] = torch.tensor([[0.0, 9.0], [9.0, 0.0], [9.0, 0.0]], dtype=torch.float64)
    out = generate(Flips(table), torch.tensor([[2]]), JointThreshold(), 40)  # 0 -> 1 -> 0 -> ...
    assert out.num_steps.item() == 17
    assert out.revisions.item() == 16
    twice = generate(Flips(table.expand(-1, 2, -1)), torch.tensor([[2, 2]]), Blocks(1, JointThreshold()), 60)
    assert twice.num_steps.item() == 2 + 17  # while the second block is masked, nothing changes in the first
    assert twice.revisions.tolist() == [[0, 16]]


def saber_by_hand(denoiser, response, size, S, n, mu):
    """(revisions, steps); p at the reveals so far is that of the blocks before too."""
    masked, at_reveal, times, i = set(response), {}, dict.fromkeys(response, 0), 0
    for inside, own in blocks_of(response, size, S):
        before = dict.fromkeys(inside, 0.0)
        for own_i in range(own):
            p = {m: max(denoiser.p(len(masked), m)) for m in inside}
            left, i = masked & set(inside), i + 1
            mean = sum(at_reveal.values()) / len(at_reveal) if at_reveal else 1.0
            chosen = {m for m in left if p[m] > mean}
            chosen = chosen if len(chosen) >= n else best(p.get, left, n)
            at_reveal |= {m: p[m] for m in chosen}
            if own_i == own - 1 or chosen == left:
                masked -= left
                break
            r = max(n, len(chosen))
            count = min(max(n // 2, math.ceil(r / mu)), r - 1)
            drop = {m: before[m] - p[m] for m in inside}
            again = best(drop.get, set(inside) - (left - chosen), count)
            for m in again - left:
                times[m] += 1
            masked, before = (masked - chosen) | again, p
    return times, i


@pytest.mark.parametrize("size", [12, 5], ids=["whole", "blocks"])
def test_saber_of_a_whole_generation(size):
    L, revised, early = 12, 0, 0
    for seed in range(8):
        denoiser = counting_denoiser(L, seed=seed, scale=1.5)
        responses = [sorted(random.Random(seed + N).sample(range(L), N)) for N in (5, 6, 9, 12)]
        responses += [[4], [7, 9]] if size == L else []
        for n, mu, S in ((2, 8, 20), (1, 3, 20), (4, 2, 20), (2, 8, 4)):
            prompts, rule = torch.where(places(responses, L), MASK, 0), Saber(n, mu)
            out = generate(denoiser, prompts, rule if size == L else Blocks(size, rule), S)
            for r, response in enumerate(responses):
                times, steps = saber_by_hand(denoiser, response, size, S, n, mu)
                assert [out.revisions[r, m].item() for m in response] == [times[m] for m in response]
                assert out.num_steps[r].item() == steps
                revised, early = revised + sum(times.values()), early + (steps < S)
    assert revised > 20
    assert early > 20


# --- wino -------------------------------------------------------------------------------------------------------------


def test_wino():
    """Against the definition, with memories in which something stands; more masks than twenty, too."""
    rng, doubts = random.Random(8), 0
    rows = [random_row(rng, 34) for _ in range(300)]
    for tau, tau_back in ((0.6, 0.9), (0.9, 0.5), (0.3, 0.2)):
        rule, case = WINO(tau, tau_back), case_of(rows, reads_revealed=True)
        before = [rng.choice([1, 2, 3, 30]) for _ in rows]
        decision = rule.decide(replace(case.step, memory={"revealed": torch.tensor(before)}))
        for r, row in enumerate(rows):
            sure = [n for n in row.masked if row.c(n) > tau]
            most = min(max(math.floor(Fraction(7, 10) * len(row.masked)), 5), 20)
            chosen = set(sure) if len(sure) <= most else best(row.c, sure, most)
            chosen = chosen or best(row.c, row.masked, 1)
            assert positions(decision.reveal[r]) == chosen
            doubted = [n for n in row.revealed if row.p(n, row.tokens[n]) < tau_back]
            allowed = (30 if row.i == 0 else before[r]) - 1
            again = best(lambda n, row=row: -row.p(n, row.tokens[n]), doubted, allowed)
            assert positions(decision.remask[r]) == (again if len(chosen) > 1 else set())
            assert decision.memory["revealed"][r] == len(chosen)
            doubts += 0 < len(again) < len(doubted) and len(chosen) > 1
        assert decision.finished.all()
    assert doubts > 50


def with_shadows(denoiser, tokens, inside):
    """Distributions of a sequence and of a shadow of each position `inside`: who sees whom, one pair at a time."""
    L, W = len(tokens), len(inside)

    def sees(i, j):
        if j >= L:  # a shadow is seen by shadows alone
            return i >= L
        return i < L or j != inside[i - L]

    attend = torch.tensor([[[sees(i, j) for j in range(L + W)] for i in range(L + W)]])
    hidden = denoiser.hidden_with(
        torch.tensor([tokens + [denoiser.mask_token_id] * W]), attend, torch.tensor([[*range(L), *inside]])
    )
    p = denoiser.logits(hidden[0]).softmax(-1)
    return p[:L].tolist(), dict(zip(inside, p[L:].tolist(), strict=True))


def wino_by_hand(denoiser, prompt, size, S, tau, tau_back):
    """(tokens, reveal steps, revisions, steps), greedy, in blocks."""
    mask, tokens, i = denoiser.mask_token_id, list(prompt), 0
    response = [n for n, token in enumerate(prompt) if token == mask]
    when, times = dict.fromkeys(response, -1), dict.fromkeys(response, 0)
    for inside, own in blocks_of(response, size, S):
        last_reveals = 30
        for own_i in range(own):
            masked = [n for n in inside if tokens[n] == mask]
            p, shadow = with_shadows(denoiser, tokens, inside)
            c = {n: max(p[n]) for n in masked}
            sure = [n for n in masked if c[n] > tau]
            chosen = best(c.get, sure, min(max(7 * len(masked) // 10, 5), 20)) or best(c.get, masked, 1)
            chosen = masked if own_i == own - 1 else chosen
            said = {n: shadow[n][tokens[n]] for n in inside if n not in masked}
            doubted = [n for n in said if said[n] < tau_back]
            again = best(lambda n, said=said: -said[n], doubted, last_reveals - 1) if len(chosen) > 1 else set()
            for n in chosen:
                tokens[n], when[n] = p[n].index(max(p[n])), i
            for n in again if own_i < own - 1 else ():
                tokens[n], times[n] = mask, times[n] + 1
            i, last_reveals = i + 1, len(chosen)
            if all(tokens[n] != mask for n in inside):
                break
    return tokens, when, times, i


@pytest.mark.parametrize("size", [20, 6], ids=["whole", "blocks"])
def test_wino_of_a_whole_generation(size):
    """Two layers, so that tokens could tell what shadows should not see; prompts of any shape, padded, refilled."""
    torch.manual_seed(0)
    config = BackboneConfig(width=16, layers=2, heads=2, intermediate=24, max_length=20, absolute_positions=True)
    revised, early = 0, 0
    for _ in range(4):
        denoiser = Denoiser(config, 7).double().requires_grad_(False)
        for parameter in denoiser.parameters():
            parameter.normal_(std=0.7)
        prompts = [[7] * 20, [1, 2, 3, *[7] * 12], [7, 7, 7, 0, 7, 7, 1, 7, 7, 7, 7, 5]]
        for tau, tau_back, S in ((0.3, 0.9, 20), (0.6, 0.5, 20), (0.2, 0.8, 8)):
            rule = WINO(tau, tau_back) if size == 20 else Blocks(size, WINO(tau, tau_back))
            expected = [wino_by_hand(denoiser, prompt, size, S, tau, tau_back) for prompt in prompts]
            for options in ({}, {"batch_size": 2}, {"batch_size": 2, "fixed_shapes": True}):
                out = generate(denoiser, [torch.tensor(prompt) for prompt in prompts], rule, S, **options)
                for r, prompt in enumerate(prompts):
                    (tokens, when, times, steps), here = expected[r], out.attention_mask[r]
                    assert out.tokens[r, here].tolist() == tokens
                    assert out.reveal_step[r, here].tolist() == [when.get(n, -1) for n in range(len(prompt))]
                    assert out.revisions[r, here].tolist() == [times.get(n, 0) for n in range(len(prompt))]
                    assert out.num_steps[r].item() == steps
                    revised, early = revised + sum(times.values()), early + (steps < S)
    assert revised > 10
    assert early > 20
