"""What every rule must keep to, whatever it chooses by."""

import re
from itertools import pairwise

import pytest
import torch

from tests.decoding.small import (
    BUILT_IN,
    DENOISER,
    ENDS_EARLY,
    MASK,
    POLICIES,
    PROMPTS,
    REPRESENTATIVE,
    Recorded,
    V,
    accounts,
    all_results,
    ends_early,
    histories,
    needs_pass,
    prompts_for,
    results,
    small_denoiser,
    writes_blocks,
)
from unmask.decoding.generate import generate
from unmask.decoding.policies import Blocks, Learned, RewardTrained
from unmask.rng import Purpose, uniforms

IDS = torch.tensor([100, 7, 31, 8, 2, 55, 1_000_003])
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0}
GUIDED = {"temperature": 1.0, "guidance": 1.5}
EOS = {"temperature": 1.5, "eos_token_id": 4, "min_length": 1, "stop_at_eos": True}
ALL = {**EOS, "top_k": 6, "top_p": 0.9, "guidance": 0.5}
ORDER_IS_DRAWN = (
    "iid",
    "random",
    "stochastic",
    "remdm",
    "learned",
    "lo-arm",
    "reward",
    "blocks(3,iid)",
    "blocks(2,stochastic",
    "blocks(3,remdm",
)


A_FEW = [POLICIES[name] for name in ("iid", "klass", "p2", "learned")]


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


def test_every_rule_is_here():
    assert {policy.key for policy in POLICIES.values()} == set(BUILT_IN)


def block_of_each_step(policy, history, budget):
    """The block that a rule which masks again or edits works on at each step, from what it did."""
    response = (history[0] == MASK).nonzero()[:, 0]
    inner, N, block, used, blocks = policy.inner.key, len(response), 0, 0, []
    number = -(-N // policy.size)
    for before, after in pairwise(history):
        blocks.append(block)
        inside = response[block * policy.size : (block + 1) * policy.size]
        before, after, used = before[inside], after[inside], used + 1
        full = not (after == MASK).any()
        over = torch.equal(before, after) if inner == "joint-threshold" else inner in ENDS_EARLY
        if used == budget // number + (block < budget % number) or (full and over):
            block, used = block + 1, 0
    return blocks


def expected_projections(policy, response, before, after, decided, block):
    """Positions that a step must project: all, the masked ones, those of the block, or only what it reveals."""
    if policy.reads_revealed and not decided:
        N = int(response.sum())
        return N if block is None else min(policy.size, N - block * policy.size)
    if not policy.reads or decided:
        return int(((before == MASK) & (after != MASK)).sum())
    masks = [j for j, token in enumerate(before[response].tolist()) if token == MASK]
    if isinstance(policy, Blocks) and policy.inner.key not in ("klass", "credit"):
        masks = [j for j in masks if j // policy.size == masks[0] // policy.size]
    return len(masks)


def test_accounts_are_what_the_denoiser_saw(policy):
    """Prompts untouched, no mask left, budget kept; steps, passes, reveals and revisions as they were; no row and no
    projection more than it takes; with guidance, the second pass sees the same canvas without its prompt."""
    prompts = prompts_for(policy)
    few = 6 if writes_blocks(policy) else 3  # twelve tokens in blocks of two are six blocks
    for budget, options in ((few, GREEDY), (13, GREEDY), (6, GUIDED)):
        passes = 2 if options is GUIDED else 1
        denoiser = Recorded(DENOISER, guided=options is GUIDED)
        out = generate(denoiser, prompts, policy, budget, seed=3, history=True, **options)
        assert ((out.num_steps >= 1) & (out.num_steps <= budget)).all()
        assert (out.num_passes <= passes * out.num_steps).all()
        assert policy.remasks or not policy.reads or torch.equal(out.num_passes, passes * out.num_steps)
        assert out.num_forwards == sum(len(seen) for seen in denoiser.passes) == out.num_passes.sum()

        needed, shown = [0] * int(out.num_steps.max()), [[] for _ in range(out.num_steps.max())]
        seen = histories(denoiser, out, policy, budget)
        for row, (prompt, history) in enumerate(zip(prompts, seen, strict=True)):
            assert torch.equal(history[0], prompt)
            given = prompt != MASK
            assert all(torch.equal(canvas[given], prompt[given]) for canvas in history)
            assert ((history[-1] >= 0) & (history[-1] < V)).all()
            reveal_step, revisions = accounts(history, edits="joint-threshold" in policy.name)
            assert results(out, row)["reveal_step"] == reveal_step
            assert results(out, row)["revisions"] == revisions
            assert out.attention_mask[row].sum() == len(prompt)
            assert (out.reveal_step[row, ~out.attention_mask[row]] == -1).all()
            assert (out.revisions[row, ~out.attention_mask[row]] == 0).all()
            if not policy.remasks:
                assert max(reveal_step) + 1 == out.num_steps[row]  # a finished sequence stops counting
                assert not any(revisions)
            else:
                assert out.num_steps[row] == budget or ends_early(policy)
            revises_in_blocks = policy.remasks and isinstance(policy, Blocks)
            blocks = block_of_each_step(policy, history, budget) if revises_in_blocks else [None] * budget
            assert not revises_in_blocks or all(
                torch.equal(before[outside], after[outside])
                for before, after, block in zip(history, history[1:], blocks, strict=False)
                for outside in [
                    given | ((prompt == MASK).cumsum(-1) - 1).div(policy.size, rounding_mode="floor").ne(block)
                ]
            )
            for step, (before, after) in enumerate(pairwise(history)):
                decided = step == budget - 1  # all began together: for all of them, everything left is revealed
                needed[step] += expected_projections(policy, prompt == MASK, before, after, decided, blocks[step])
                if needs_pass(policy, before, after, decided):
                    shown[step].append((before, given))
        needed = [count for count, rows in zip(needed, shown, strict=True) if rows]  # the other steps had no pass
        for bare, rows in zip(denoiser.passes[1::2] if options is GUIDED else [], filter(None, shown), strict=False):
            for tokens, (before, given) in zip(bare, rows, strict=True):
                assert torch.equal(tokens[: len(before)], torch.where(given, MASK, before))
        projected = [denoiser.projected_after(passes * i, passes * i + passes - 1) for i in range(len(needed))]
        probe = 1  # the first pass looks once at what V is
        assert projected == [passes * count + (probe if i == 0 else 0) for i, count in enumerate(needed)]
        assert (out.nothing_selected <= out.num_steps.clamp(max=budget - 1)).all()  # the last step asks nobody
        if not isinstance(policy, Learned | RewardTrained):
            assert not out.nothing_selected.any()


def test_a_budget_of_one_step_and_one_larger_than_the_response(policy):
    """One step reveals everything, as the arg-max of the first pass; a large budget is not used up."""
    prompts = prompts_for(policy)
    N = torch.tensor([(prompt == MASK).sum() for prompt in prompts])
    large = generate(DENOISER, prompts, policy, 13, seed=1)
    if policy.remasks and not ends_early(policy):
        assert (large.num_steps == 13).all()
    elif not re.match("(blocks.3,)?(iid|margin.count=floor|joint)", policy.name):  # may reveal nothing
        assert (large.num_steps <= N).all()
    one_each = ("top-prob", "margin", "entropy", "left-to-right", "stochastic", "random", "lo-arm")
    if policy.key in one_each and "count=floor" not in policy.name:
        assert torch.equal(large.num_steps, N)
    if writes_blocks(policy):
        return  # one step cannot write several blocks
    out = generate(DENOISER, PROMPTS, policy, 1, seed=1)
    assert out.num_steps.tolist() == [1] * len(PROMPTS)
    assert out.reveal_step.max() == 0
    assert out.nothing_selected.tolist() == [0] * len(PROMPTS)
    assert not out.revisions.any()
    for row, prompt in enumerate(PROMPTS):
        best = torch.where(prompt == MASK, DENOISER(prompt[None])[0].argmax(-1), prompt)
        assert torch.equal(out.tokens[row, out.attention_mask[row]], best)


def test_seed_and_ids_name_the_random_streams():
    """The seed decides tokens and, where it is drawn, the order.  Equal prompts with equal ids are written alike, with
    different ids apart; the default id is the place."""
    for name, policy in POLICIES.items():
        first, other = (generate(DENOISER, prompts_for(policy), policy, 6, seed=seed) for seed in (5, 6))
        order_is_drawn = name.startswith(ORDER_IS_DRAWN) and "deterministic" not in name
        assert torch.equal(first.reveal_step, other.reveal_step) != order_is_drawn, name
    same = PROMPTS[3].repeat(3, 1)
    for policy in REPRESENTATIVE.values():
        first, again, other = (
            generate(DENOISER, prompts_for(policy), policy, 6, seed=seed, temperature=1.0) for seed in (5, 5, 6)
        )
        assert all_results(first) == all_results(again)
        assert not torch.equal(first.tokens, other.tokens)
        out = generate(DENOISER, same, policy, 6, ids=torch.tensor([4, 9, 4]), temperature=1.0)
        assert results(out, 0) == results(out, 2)
        assert results(out, 0) != results(out, 1)
        default = generate(DENOISER, same, policy, 6, temperature=1.0)
        named = generate(DENOISER, same, policy, 6, ids=torch.arange(3), temperature=1.0)
        assert torch.equal(default.tokens, named.tokens)


def test_draws_of_different_positions_and_steps_differ():
    """At temperature 1 and nothing to go by, equal draws would show as equal tokens."""

    class Uniform(Recorded):
        def logits(self, hidden):
            return torch.zeros(len(hidden), 1000, dtype=torch.float64)

        mask_token_id = 1000

        def hidden(self, tokens, attention_mask=None):
            return torch.zeros(*tokens.shape, 1, dtype=torch.float64)

    for budget in (1, 4, 12):
        out = generate(Uniform(DENOISER), torch.full((1, 12), 1000), POLICIES["top-prob"], budget, temperature=1.0)
        assert len(set(out.tokens[0].tolist())) > 9


def test_a_draw_is_named_by_seed_step_id_and_position():
    """IID at temperature 1, draw by draw: positions count from the first token that is not padding."""
    S, seed, denoiser = 6, 11, Recorded(DENOISER)
    policy = POLICIES["iid"]
    out = generate(denoiser, PROMPTS, policy, S, seed=seed, ids=IDS, temperature=1.0, history=True)
    for name, history in zip(IDS.tolist(), histories(denoiser, out, policy, S), strict=True):
        for i, (before, after) in enumerate(pairwise(history)):
            words = (i, name, torch.arange(len(before)))
            to_reveal, to_choose = (
                uniforms(seed, purpose, *words, dtype=torch.float64) for purpose in (Purpose.REVEAL, Purpose.TOKEN)
            )
            reveal = (before == MASK) & ((to_reveal < 1 / (S - i)) | torch.tensor(i == S - 1))
            cdf = DENOISER(before[None])[0].softmax(-1).cumsum(-1)
            chosen = (cdf <= to_choose[:, None]).sum(-1)
            assert torch.equal(after, torch.where(reveal, chosen, before))


def test_a_sequence_does_not_see_its_batch(policy):
    """Alone, in a shuffled list (padded on the left), entering as others finish, and padded on the right with junk."""
    prompts, shuffled = prompts_for(policy), [4, 0, 6, 2, 5, 1, 3]
    listed = [prompts[row] for row in shuffled]
    junk = torch.randint(V + 1, (7, 17), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.zeros(7, 17, dtype=torch.bool)
    canvas = junk.clone()
    for row, prompt in enumerate(prompts):
        canvas[row, : len(prompt)], attention_mask[row, : len(prompt)] = prompt, True
    assert (canvas[~attention_mask] == MASK).any()
    options = {"seed": 2, **ALL}
    alone = [
        results(generate(DENOISER, prompt[None], policy, 6, ids=IDS[row : row + 1], **options), 0)
        for row, prompt in enumerate(prompts)
    ]
    for batch_size in (None, 3):
        batch = generate(DENOISER, listed, policy, 6, ids=IDS[shuffled], batch_size=batch_size, **options)
        assert all_results(batch) == [alone[row] for row in shuffled], f"batch_size {batch_size}"
    right = generate(DENOISER, canvas, policy, 6, ids=IDS, attention_mask=attention_mask, **options)
    assert all_results(right) == alone
    assert torch.equal(right.tokens[~attention_mask], junk[~attention_mask])  # what stands on padding stays
    assert (right.reveal_step[~attention_mask] == -1).all()
    assert not right.revisions[~attention_mask].any()


def test_integer_attention_and_short_integers_are_read_as_meant():
    """Tokenizers give attention as 0 and 1."""
    for policy in A_FEW:
        prompts, attention_mask = torch.stack([PROMPTS[0], PROMPTS[0]]), torch.ones(2, 8, dtype=torch.bool)
        attention_mask[1, 6:] = False
        meant = generate(DENOISER, prompts, policy, 3, attention_mask=attention_mask)
        read = generate(DENOISER, prompts.int(), policy, 3, attention_mask=attention_mask.long())
        assert torch.equal(read.tokens, meant.tokens)
        assert torch.equal(read.reveal_step, meant.reveal_step)
        assert read.attention_mask.dtype == torch.bool


def test_the_caller_s_tensors_are_left_alone():
    for policy in A_FEW:
        prompts, attention_mask, ids = (
            PROMPTS[1].repeat(2, 1),
            torch.ones(2, 12, dtype=torch.bool),
            torch.tensor([3, 4]),
        )
        generate(DENOISER, prompts, policy, 6, attention_mask=attention_mask, ids=ids, batch_size=1)
        assert torch.equal(prompts, PROMPTS[1].repeat(2, 1))
        assert attention_mask.all()
        assert ids.tolist() == [3, 4]
        listed = [prompt.clone() for prompt in prompts_for(policy)]
        generate(DENOISER, listed, policy, 6, batch_size=2)
        assert all(torch.equal(one, other) for one, other in zip(listed, prompts_for(policy), strict=True))


def test_rules_report_the_memory_that_they_keep():
    """KLASS: B x N x V numbers and a counter a position; blocks: two counters a sequence; those that re-mask by what
    was sure when revealed: a number a position; the others nothing."""
    prompts = PROMPTS[0].repeat(4, 1)  # N = 5, L = 8
    B, L, N = 4, 8, 5
    distributions, counters, blocks, log_reveal = 8 * B * N * V, 8 * B * L, 2 * 8 * B, 8 * B * L
    init_state = {"rdm", "rdm(linear,cond)", "p2", "remdm-conf", "joint-threshold(0.6,0.3)", "saber"}
    init_state |= {"blocks(3,rdm)", "blocks(3,joint-threshold(0.6,0.3))", "blocks(3,saber)"}
    assert init_state < POLICIES.keys()
    for name, policy in POLICIES.items():
        expected = (distributions + counters) * ("klass" in name) + blocks * ("blocks" in name)
        expected += distributions * ("credit" in name)
        expected += log_reveal * (name in init_state) + 8 * B * ("joint" in name or "wino" in name)
        expected += 2 * 8 * B * L * ("saber" in name)
        assert generate(DENOISER, prompts, policy, 6).memory_bytes == expected, name
    rule = POLICIES["klass"]
    assert generate(DENOISER, prompts, rule, 6, batch_size=2).memory_bytes == (distributions + counters) // 2
    assert generate(DENOISER, prompts, POLICIES["rdm"], 6, batch_size=2).memory_bytes == log_reveal // 2
    single = small_denoiser().float()
    assert generate(single, prompts, rule, 6).memory_bytes == distributions // 2 + counters


# --- the suite above would prove little if rules never did what makes them different ----------------------------------


def test_the_rules_differ_here():
    """No two of them write alike; only KLASS and Prophet, which nothing is sure enough for, are top probability."""
    orders = {}
    for name, policy in POLICIES.items():
        if not writes_blocks(policy):
            out = generate(DENOISER, PROMPTS, policy, 6, seed=2, temperature=1.0)
            orders.setdefault(str((out.reveal_step.tolist(), out.revisions.tolist())), []).append(name)
    assert [names for names in orders.values() if len(names) > 1] == [["top-prob", "klass", "prophet(0,2)"]]


def test_the_random_selector_and_the_re_masking_rules_do_something():
    assert generate(DENOISER, PROMPTS, POLICIES["learned, bernoulli"], 13, seed=2).nothing_selected.sum() > 0
    assert generate(DENOISER, PROMPTS, POLICIES["reward:3"], 13, seed=2).nothing_selected.sum() > 0
    for name, policy in POLICIES.items():
        small = name.startswith(("blocks(3,wino", "blocks(3,saber"))  # one mask is left when they could doubt a token
        if policy.remasks and not small:
            out = generate(DENOISER, prompts_for(policy), policy, 13, seed=2, temperature=1.0)
            assert out.revisions.max() >= 1, name


def test_finished_sequences_left_early_here():
    """At different steps, for the rules that can: the batch did shrink."""
    for name, policy in POLICIES.items():
        if not policy.remasks and "count=floor" not in name:  # which leaves something to the last step
            out = generate(DENOISER, prompts_for(policy), policy, 13, seed=2, temperature=1.0)
            assert out.num_steps.unique().numel() > 2, name
