"""iid, dus, blocks: by position or by chance, and blocks with their own i, S and N."""

import math
import random
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import torch

from tests.decoding.steps import best, case_of, counting_denoiser, places, plain_row, positions, random_case, reveals
from unmask.decoding.generate import generate
from unmask.decoding.policies import (
    IID,
    Blocks,
    Decision,
    Dilated,
    Entropy,
    LeftToRight,
    Policy,
    Stochastic,
    Threshold,
    TopProbability,
)

CASES = [random_case(seed) for seed in range(20, 22)]


# --- iid --------------------------------------------------------------------------------------------------------------


def test_iid():
    for case in CASES:
        for row, chosen in zip(case.rows, reveals(IID(), case), strict=True):
            assert chosen == {n for n in row.masked if row.u[n] < 1 / (row.S - row.i)}


def test_iid_is_exact_at_the_edge():
    """u < 1/(S - i), and u may be 0 but never 1: on a grid of 60 draws, exactly 60/(S - i) reveal."""
    for S in (1, 2, 3, 4, 5, 6):
        for i in range(S):
            rows = [plain_row([[23, 0, 0, 0]], i=i, S=S, u=[g / 60 + 1e-12 * (g > 0), 0.0]) for g in range(60)]
            assert sum(map(len, reveals(IID(), case_of(rows)))) == math.ceil(60 / (S - i))


# --- dus --------------------------------------------------------------------------------------------------------------


def test_dilated():
    """j counts the response only: prompts in between do not count."""
    for case in CASES:
        for row, chosen in zip(case.rows, reveals(Dilated(), case), strict=True):
            stride = max(1, math.floor(row.N / 2 ** (row.i + 1)))
            assert chosen == {n for j, n in enumerate(row.response) if n in row.masked and j % stride == 0}


SIZES = [*range(1, 41), 63, 64, 65, 100, 127, 128, 129, 200]


def test_dilated_rounds_of_any_size():
    """Round by round, all sizes in one batch: the definition, over after ceil(log2 N) rounds, powers of two or not."""
    L, S = max(SIZES), 9
    response = places([range(N) for N in SIZES], L)
    prompts = torch.where(response, 2, 0)
    out = generate(counting_denoiser(L, vocab=2), prompts, Dilated(), S)
    for N, steps, num_steps in zip(SIZES, out.reveal_step.tolist(), out.num_steps.tolist(), strict=True):
        masked, rounds = set(range(N)), 0
        for r in range(1, max(1, math.ceil(math.log2(N))) + 1):
            stride = max(1, N // 2**r)
            now = {j for j in masked if j % stride == 0}
            assert {j for j in range(N) if steps[j] == r - 1} == now
            masked, rounds = masked - now, rounds if not masked else r
        assert not masked
        assert num_steps == rounds


def test_dilated_cut_short_reveals_the_rest():
    out = generate(counting_denoiser(16), torch.full((1, 16), 4), Dilated(), 2)
    assert out.reveal_step.tolist() == [[0 if n % 8 == 0 else 1 for n in range(16)]]


def test_dilated_with_a_budget_beyond_any_shift():
    """Round 64 of 200: 2^64 is no machine number, and shifts by 64 may be shifts by 0."""
    rows = [plain_row([[23, 0, 0, 0]] * 6, i=i, S=200) for i in (61, 62, 63, 64, 65, 99, 127, 199)]
    assert reveals(Dilated(), case_of(rows)) == [set(range(6))] * len(rows)


def test_dilated_blocks():
    """blocks(8,dus): the rounds of 8 in each block, the shorter last one by its own size."""
    out = generate(counting_denoiser(19), torch.full((1, 19), 4), Blocks(8, Dilated()), 9)
    block = [0, 2, 1, 2, 0, 2, 1, 2]
    assert out.reveal_step.tolist() == [[*block, *(3 + r for r in block), 6, 6, 6]]  # B = 3: stride 1 at once
    assert out.num_steps.item() == 7


# --- blocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paced(Policy):
    """Reveals the leftmost `pace` masks, and keeps what it was told."""

    key = "paced"
    pace: int = 1
    told: list = field(default_factory=list)

    def init_state(self, rows, length, device):
        return {"calls": torch.zeros(rows, dtype=torch.long)}

    def decide(self, step):
        self.told.append(
            (step.index, step.max_steps, step.num_response, step.response, step.masked, step.memory["calls"])
        )
        order = step.masked.long().cumsum(-1)
        return Decision(step.masked & (order <= self.pace), memory={"calls": step.memory["calls"] + 1})


def plan(N, size, S, pace):
    """[(block, i, S of the block, N of the block, masks it still has)] for every pass, by the definition."""
    b = math.ceil(N / size)
    passes = []
    for block in range(b):
        steps = S // b + (1 if block < S % b else 0)
        inside = [j for j in range(N) if j // size == block]
        masks = list(inside)
        for i in range(steps):
            if masks:
                passes.append((inside, i, steps, list(masks)))
                masks = masks[pace:] if i < steps - 1 else []
    return passes


def test_blocks_tell_the_rule_its_own_i_S_and_N():
    """Sizes that blocks divide and do not divide, in one batch; an early finish starts the next block at once."""
    for pace, S in product((0, 1, 5), (4, 7, 20)):
        size, sizes, L = 3, [3, 4, 9, 10, 11, 12], 14
        responses = [sorted(random.Random(N).sample(range(L), N)) for N in sizes]
        inner = Paced(pace)
        prompts = torch.where(places(responses, L), 4, 0)
        out = generate(counting_denoiser(L), prompts, Blocks(size, inner), S)
        active = list(range(len(sizes)))
        plans = [plan(N, size, S, pace) for N in sizes]
        for i, (index, steps, num_response, response, masked, calls) in enumerate(inner.told):
            assert len(index) == len(active)
            assert calls.tolist() == [i] * len(active)  # the rule's own memory goes through
            for place, row in enumerate(active):
                inside, own_i, own_S, masks = plans[row][i]
                assert (index[place].item(), steps[place].item()) == (own_i, own_S)
                assert num_response[place].item() == len(inside)
                assert positions(response[place]) == {responses[row][j] for j in inside}
                assert positions(masked[place]) == {responses[row][j] for j in masks}
            active = [row for row in active if len(plans[row]) > i + 1]
        assert all(len(plans[row]) == S for row in active)  # the loop need not ask anybody at the last step
        assert out.num_steps.tolist() == [len(passes) for passes in plans]


def test_the_first_blocks_get_the_remainder():
    """A rule that waits to the end of every block shows how many steps each has."""
    for N, size, S in ((10, 4, 3), (10, 4, 7), (12, 5, 4), (7, 1, 9)):
        out = generate(counting_denoiser(N), torch.full((1, N), 4), Blocks(size, Paced(0)), S)
        b = -(-N // size)
        last = [sum(S // b + (1 if block < S % b else 0) for block in range(j // size + 1)) - 1 for j in range(N)]
        assert out.reveal_step.tolist() == [last]
        assert out.num_steps.item() == S


INNER = {
    "top-prob": (TopProbability(), lambda i, S, N, masked, c, j: best(lambda n: c[n], masked, count(N, i, S))),
    "left-to-right": (LeftToRight(), lambda i, S, N, masked, c, j: best(lambda n: -n, masked, count(N, i, S))),
    "threshold": (
        Threshold(0.6),
        lambda i, S, N, masked, c, j: {n for n in masked if c[n] >= 0.6} or best(lambda n: c[n], masked, 1),
    ),
    "dus": (Dilated(), lambda i, S, N, masked, c, j: {n for n in masked if j[n] % max(1, N // 2 ** (i + 1)) == 0}),
}


def count(N, i, S):
    return N // S + (1 if i < N % S else 0)


@pytest.mark.parametrize(("inner", "slow"), INNER.values(), ids=INNER)
def test_a_whole_generation_in_blocks(inner, slow):
    for size, S in ((1, 13), (4, 7), (5, 11)):
        L = 15
        denoiser = counting_denoiser(L, seed=size, scale=2.5)
        sizes = [5, 8, 11, 13]
        responses = [sorted(random.Random(N).sample(range(L), N)) for N in sizes]
        out = generate(denoiser, torch.where(places(responses, L), 4, 0), Blocks(size, inner), S)
        for response, steps, num_steps in zip(responses, out.reveal_step.tolist(), out.num_steps.tolist(), strict=True):
            masked, b, i = set(response), math.ceil(len(response) / size), 0
            for block in range(b):
                inside = response[block * size : (block + 1) * size]
                own = S // b + (1 if block < S % b else 0)
                for own_i in range(own):
                    left = masked & set(inside)
                    if not left:
                        break
                    c = {n: max(denoiser.p(len(masked), n)) for n in left}
                    j = {n: place for place, n in enumerate(inside)}
                    chosen = left if own_i == own - 1 else slow(own_i, own, len(inside), left, c, j)
                    assert {n for n in response if steps[n] == i} == chosen
                    masked, i = masked - chosen, i + 1
            assert not masked
            assert num_steps == i


def test_blocks_by_direct_calls():
    """Ten masks in blocks of four, seven steps: 3 + 2 + 2; the second block is finished from outside after one."""
    policy = Blocks(4, LeftToRight())
    row = plain_row([[23, 0, 0, 0]] * 10, S=7)
    case = case_of([row])
    memory, masked, seen = policy.init_state(1, 10, torch.device("cpu")), set(range(10)), []
    for i in range(6):
        step = replace(case.step, index=torch.tensor([i]), masked=places([masked], 10), memory=memory)
        decision = policy.decide(step)
        memory, chosen = decision.memory, positions(decision.reveal[0])
        seen.append(sorted(chosen))
        masked -= chosen
        if i == 3:
            masked -= {4, 5, 6, 7}  # as an end of sequence would
    assert seen == [[0, 1], [2], [3], [4, 5], [8], [9]]


def test_blocks_reveal_nothing_outside_the_block():
    """Even where the rule says everything, and even where a prompt stands first."""
    row = plain_row([[23, 0, 0, 0]] * 8, S=4, response=[2, 3, 5, 6, 7], masked=[3, 5, 6, 7])
    case = case_of([row])
    policy = Blocks(2, Threshold(0.5))
    step = replace(case.step, memory=policy.init_state(1, 8, torch.device("cpu")))
    assert positions(policy.decide(step).reveal[0]) == {3}


def test_blocks_of_a_random_rule():
    """Left to right by block, all in time, and other draws in every block."""
    for inner in (IID(), Stochastic(Entropy(), 0.3)):
        prompts = torch.full((200, 12), 4)
        out = generate(counting_denoiser(12), prompts, Blocks(4, inner), 9, seed=2)
        step = out.reveal_step.view(200, 3, 4)
        assert (step[:, :-1].amax(-1) < step[:, 1:].amin(-1)).all()
        assert (out.num_steps <= 9).all()
        own = step - torch.cat([torch.full((200, 1, 1), -1), step[:, :-1].amax(-1, keepdim=True)], dim=1) - 1
        assert own.amax() == 2
        assert not torch.equal(own[:, 0], own[:, 1])
