"""What every rule must keep to, whatever it chooses by."""

import pytest
import torch

from tests.decoding.small import MASK, Recorded, V, small_denoiser, small_selector
from unmask.decoding.generate import generate
from unmask.decoding.policies import IID, Learned, Margin, TopProbability
from unmask.variational.selection import Bernoulli, NonEmpty

BUDGETS = (1, 3, 6, 20)
DENOISER = small_denoiser()
POLICIES = {
    "iid": IID(),
    "top-prob": TopProbability(),
    "margin": Margin(),
    "learned-nonempty": Learned(small_selector(BUDGETS, NonEmpty())),
    "learned-bernoulli": Learned(small_selector(BUDGETS, Bernoulli())),
}
RANDOM = ("iid", "learned-nonempty", "learned-bernoulli")

m = MASK
PROMPTS = [
    torch.tensor(prompt)
    for prompt in (
        [3, 1, 4, m, m, m, m, m],  # a prefix
        [m, m, m, m, m, m, m, m, m, m, m],  # nothing given
        [m, 5, m, m, 9, m, 2, m, m, 6, m, m],  # clues
        [2, 7, m, m, m, 1, 8],  # infilling
        [m, m, 0],  # a suffix
        [10, m, 10],  # one token to write
        [0, 0, m, m, m, m, m, m, m, m, m, m, m, 4],  # the longest
    )
]
IDS = torch.tensor([100, 7, 31, 8, 2, 55, 1_000_003])


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


def results(out, row):
    """Of one sequence, padding left out."""
    here = out.attention[row]
    return (
        out.tokens[row, here].tolist(),
        out.reveal_step[row, here].tolist(),
        out.num_steps[row].item(),
        out.nothing_selected[row].item(),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", BUDGETS)
def test_invariants(policy, budget, temperature):
    denoiser = Recorded(DENOISER)
    out = generate(denoiser, PROMPTS, policy, budget, seed=3, temperature=temperature)
    response = torch.zeros_like(out.attention)
    for row, prompt in enumerate(PROMPTS):
        here = out.attention[row]
        assert here.sum() == len(prompt)
        assert here[-len(prompt) :].all()  # padded on the left
        given = prompt != MASK
        assert torch.equal(out.tokens[row, here][given], prompt[given])  # prompts untouched
        response[row, here] = ~given
    assert ((out.tokens[response] >= 0) & (out.tokens[response] < V)).all()  # no mask left
    assert (out.reveal_step[~response] == -1).all()
    assert (out.reveal_step[response] >= 0).all()
    assert (out.num_steps <= budget).all()
    assert torch.equal(out.num_steps, out.reveal_step.amax(-1) + 1)  # a finished sequence stops counting
    assert (out.nothing_selected <= out.num_steps.clamp(max=budget - 1)).all()  # the last step asks nobody
    if policy is not POLICIES["learned-bernoulli"]:
        assert not out.nothing_selected.any()

    # Pass i saw the unfinished sequences only, with exactly the tokens that reveal_step says were there by then:
    # so each token was revealed once, at the step reported, and stayed as it was.
    assert len(denoiser.passes) == out.num_steps.max()
    for i, seen in enumerate(denoiser.passes):
        by_then = torch.where(response & (out.reveal_step >= i), MASK, out.tokens)[out.num_steps > i]
        assert torch.equal(seen, by_then)
    assert out.num_forwards == sum(len(seen) for seen in denoiser.passes) == out.num_steps.sum()


def test_counting_rules_keep_their_schedule():
    for policy in (TopProbability(), Margin()):
        out = generate(DENOISER, PROMPTS, policy, 6)
        for row, prompt in enumerate(PROMPTS):
            N = (prompt == MASK).sum().item()
            counts = [(out.reveal_step[row] == i).sum().item() for i in range(6)]
            assert counts == [N // 6 + (i < N % 6) for i in range(6)]


def test_a_budget_larger_than_the_response_stops_early(policy):
    short = [prompt for prompt in PROMPTS if (prompt == MASK).sum() <= 5]
    out = generate(DENOISER, short, policy, 20, seed=1)
    N = torch.tensor([(prompt == MASK).sum() for prompt in short])
    if policy.name == "iid":  # a step may reveal nothing, and still is a step
        assert (out.num_steps <= 20).all()
    else:
        assert (out.num_steps <= N).all()
    if policy.name in ("top-prob", "margin"):
        assert torch.equal(out.num_steps, N)


def test_one_step_reveals_everything(policy):
    out = generate(DENOISER, PROMPTS, policy, 1, seed=1)
    assert out.num_steps.tolist() == [1] * len(PROMPTS)
    assert out.reveal_step.max() == 0
    assert out.nothing_selected.tolist() == [0] * len(PROMPTS)
    for row, prompt in enumerate(PROMPTS):  # greedy: the arg-max of the first pass
        best = torch.where(prompt == MASK, DENOISER(prompt[None])[0].argmax(-1), prompt)
        assert torch.equal(out.tokens[row, out.attention[row]], best)


def test_same_seed_same_output_another_seed_another(policy):
    first, again, other = (generate(DENOISER, PROMPTS, policy, 6, seed=s, temperature=1.0) for s in (5, 5, 6))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.reveal_step, again.reveal_step)
    assert torch.equal(first.num_steps, again.num_steps)
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize("name", RANDOM)
def test_the_seed_draws_the_order_too(name):
    first, other = (generate(DENOISER, PROMPTS, POLICIES[name], 6, seed=seed) for seed in (5, 6))
    assert not torch.equal(first.reveal_step, other.reveal_step)


def test_ids_name_the_random_streams(policy):
    """Equal prompts with equal ids are written alike, with different ids apart; the default id is the place."""
    prompts = PROMPTS[1].repeat(3, 1)
    out = generate(DENOISER, prompts, policy, 6, ids=torch.tensor([4, 9, 4]), temperature=1.0)
    assert results(out, 0) == results(out, 2)
    assert results(out, 0) != results(out, 1)
    default = generate(DENOISER, prompts, policy, 6, temperature=1.0)
    named = generate(DENOISER, prompts, policy, 6, ids=torch.arange(3), temperature=1.0)
    assert torch.equal(default.tokens, named.tokens)


def test_draws_of_different_positions_differ():
    """At temperature 1 and nothing to go by, equal draws would show as equal tokens."""

    class Uniform(Recorded):
        def logits(self, hidden):
            return torch.zeros(len(hidden), 1000, dtype=torch.float64)

        mask_token_id = 1000

        def hidden(self, tokens, attention=None):
            return torch.zeros(*tokens.shape, 1, dtype=torch.float64)

    out = generate(Uniform(DENOISER), torch.full((1, 12), 1000), TopProbability(), 12, temperature=1.0)
    assert len(set(out.tokens[0].tolist())) > 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [3, 6])
def test_a_sequence_does_not_see_its_batch(policy, budget, temperature):
    """Alone, in a shuffled list (padded on the left), and padded on the right with junk, masks among it."""
    options = {"seed": 2, "temperature": temperature}
    alone = [
        results(generate(DENOISER, prompt[None], policy, budget, ids=IDS[row : row + 1], **options), 0)
        for row, prompt in enumerate(PROMPTS)
    ]
    shuffled = [4, 0, 6, 2, 5, 1, 3]
    batch = generate(DENOISER, [PROMPTS[row] for row in shuffled], policy, budget, ids=IDS[shuffled], **options)
    for place, row in enumerate(shuffled):
        assert results(batch, place) == alone[row]

    junk = torch.randint(V + 1, (7, 16), generator=torch.Generator().manual_seed(0))
    attention = torch.zeros(7, 16, dtype=torch.bool)
    canvas = junk.clone()
    for row, prompt in enumerate(PROMPTS):
        canvas[row, : len(prompt)], attention[row, : len(prompt)] = prompt, True
    assert (canvas[~attention] == MASK).any()
    right = generate(DENOISER, canvas, policy, budget, ids=IDS, attention=attention, **options)
    for row in range(7):
        assert results(right, row) == alone[row]
    assert torch.equal(right.tokens[~attention], junk[~attention])  # what stands on padding stays
    assert (right.reveal_step[~attention] == -1).all()


def test_integer_attention_and_short_integers_are_read_as_meant(policy):
    """Tokenizers give attention as 0 and 1."""
    prompts, attention = torch.stack([PROMPTS[0], PROMPTS[0]]), torch.ones(2, 8, dtype=torch.bool)
    attention[1, 6:] = False
    meant = generate(DENOISER, prompts, policy, 3, attention=attention)
    read = generate(DENOISER, prompts.int(), policy, 3, attention=attention.long())
    assert torch.equal(read.tokens, meant.tokens)
    assert torch.equal(read.reveal_step, meant.reveal_step)
    assert read.attention.dtype == torch.bool


def test_the_caller_s_tensors_are_left_alone(policy):
    prompts, attention = PROMPTS[2].repeat(2, 1), torch.ones(2, 12, dtype=torch.bool)
    generate(DENOISER, prompts, policy, 3, attention=attention)
    assert torch.equal(prompts, PROMPTS[2].repeat(2, 1))
    assert attention.all()
    listed = [prompt.clone() for prompt in PROMPTS]
    generate(DENOISER, listed, policy, 3)
    assert all(torch.equal(one, other) for one, other in zip(listed, PROMPTS, strict=True))


def test_the_learned_rule_is_not_the_iid_rule_here():
    """The random selector matters: else the suite above would test IID three times."""
    orders = [generate(DENOISER, PROMPTS, POLICIES[name], 6, seed=2).reveal_step for name in RANDOM]
    assert not any(torch.equal(orders[a], orders[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert generate(DENOISER, PROMPTS, POLICIES["learned-bernoulli"], 20, seed=2).nothing_selected.sum() > 0
