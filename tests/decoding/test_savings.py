"""What is left out costs nothing and changes nothing: against a plain loop that reads everything, always."""

from dataclasses import dataclass, field

import pytest
import torch

from tests.decoding.small import DENOISER, MASK, POLICIES, PROMPTS, Recorded, V, all_results, prompts_for
from tests.decoding.steps import blocks_of
from tests.decoding.test_cache import network
from unmask.decoding import stepper
from unmask.decoding.generate import generate
from unmask.decoding.policies import Blocks, Decision, Margin, Policy, parse_policy
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser
from unmask.rng import Purpose, uniforms


def in_blocks(prompt, row, size, S, seed, score):
    """(tokens, reveal steps) in blocks, every position of the sequence read at every step, tokens sampled."""
    tokens, response = prompt.clone(), [n for n, token in enumerate(prompt.tolist()) if token == MASK]
    i, when = 0, {}
    for inside, steps in blocks_of(response, size, S):
        for own in range(steps):
            masks = [n for n in inside if tokens[n] == MASK]
            if not masks:
                break
            p = DENOISER(tokens[None])[0].softmax(-1)
            u = uniforms(seed, Purpose.TOKEN, i, row, torch.arange(len(tokens)), dtype=torch.float64)
            drawn = (p.cumsum(-1) <= u[:, None]).sum(-1)
            count = len(inside) // steps + (own < len(inside) % steps)
            ranked = sorted(masks, key=lambda n: (-score(p[n], drawn[n]), n))
            for n in masks if own == steps - 1 else ranked[:count]:
                tokens[n], when[n] = drawn[n], i
            i += 1
    return tokens.tolist(), [when.get(n, -1) for n in range(len(tokens))]


SCORES = {
    "top-prob": lambda p, drawn: p.max(),
    "top-prob(confidence=sampled)": lambda p, drawn: p[drawn],
    "margin": lambda p, drawn: p.topk(2).values[0] - p.topk(2).values[1],
}


@pytest.mark.parametrize("inner", SCORES)
def test_blocks_read_their_own_masks_and_write_the_same(inner):
    for size, S in ((2, 8), (3, 13)):
        policy = parse_policy(f"blocks({size},{inner})")
        prompts, denoiser = prompts_for(policy), Recorded(DENOISER)
        out = generate(denoiser, prompts, policy, S, seed=9, temperature=1.0)
        for row, prompt in enumerate(prompts):
            here = out.attention_mask[row]
            expected = in_blocks(prompt, row, size, S, 9, SCORES[inner])
            assert (out.tokens[row, here].tolist(), out.reveal_step[row, here].tolist()) == expected
        assert max(denoiser.projected) <= size * len(prompts)


def test_with_fixed_shapes_blocks_read_no_more_chunks_than_their_masks_fill(monkeypatch):
    monkeypatch.setitem(stepper.CHUNK, "cpu", 4 * V)
    prompts = torch.full((3, 12), MASK)
    denoiser = Recorded(DENOISER)
    out = generate(denoiser, prompts, "blocks(3,margin)", 12, fixed_shapes=True)
    for step in range(12):  # the first pass is made twice
        assert denoiser.projected_after(step + 1, step + 1) <= 12  # nine masks of the block: three chunks of four
    assert all_results(out) == all_results(generate(DENOISER, prompts, "blocks(3,margin)", 12))


class Whole:
    """A denoiser that does not say how its passes end."""

    def __init__(self, denoiser):
        names = "mask_token_id", "block_size", "can_cache", "new_cache", "cached", "logits", "hidden_with"
        vars(self).update({name: getattr(denoiser, name) for name in names if hasattr(denoiser, name)})
        self.hidden = lambda tokens, attention_mask=None: denoiser.hidden(tokens, attention_mask)


def deep_denoiser(block_size=0, shift=False):
    return network(lambda: Denoiser(BackboneConfig(16, 2, 2, 24, 64, block_size=block_size), V, shift=shift))


def test_the_last_mlp_runs_only_where_the_rule_looks(monkeypatch):
    """On sequences of different lengths with different numbers of masks: every mask, or what `iid` reveals."""
    denoiser, widths = deep_denoiser(), []
    last, down = denoiser.backbone.blocks[-1], denoiser.backbone.blocks[-1].down.forward
    monkeypatch.setattr(last.down, "forward", lambda x: widths.append(x.shape[:-1].numel()) or down(x))
    masks = sum(int((prompt == MASK).sum()) for prompt in PROMPTS)
    generate(denoiser, PROMPTS, "margin", 1)
    assert widths == [1, masks]  # one to see V
    for policy, most in (("margin", 13 * masks), ("iid", masks)):
        widths.clear()
        expected = generate(Whole(denoiser), PROMPTS, policy, 13)
        positions = sum(widths)
        widths.clear()
        assert all_results(generate(denoiser, PROMPTS, policy, 13)) == all_results(expected)
        assert sum(widths) <= 1 + min(most, positions // 2)
    widths.clear()
    last.register_forward_hook(lambda *given: None)
    generate(denoiser, PROMPTS, "margin", 1)
    assert widths == [sum(map(len, PROMPTS))], "who listens hears the whole block"


@pytest.mark.parametrize(
    ("denoiser", "rule", "options"),
    [
        (deep_denoiser(), "margin", {}),
        (deep_denoiser(), "threshold:0.7", {"temperature": 1.0, "guidance": 1.5}),
        (deep_denoiser(shift=True), "top-prob", {}),
        (deep_denoiser(), "p2", {"fixed_shapes": True}),
        (deep_denoiser(), "wino(0.4,0.5)", {}),
        (deep_denoiser(), "blocks(3,margin)", {"cache": "prefix"}),
        (deep_denoiser(3), "blocks(3,margin)", {}),
        (deep_denoiser(3), "blocks(3,margin)", {"cache": "none"}),
    ],
)
def test_what_it_leaves_out_changes_nothing(denoiser, rule, options):
    prompts = prompts_for(parse_policy(rule))
    expected = generate(Whole(denoiser), prompts, rule, 13, seed=5, **options)
    assert all_results(generate(denoiser, prompts, rule, 13, seed=5, **options)) == all_results(expected)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("options", [{}, {"fixed_shapes": True}], ids=str)
def test_a_rule_that_looks_at_hidden_states_gets_all_of_them(declared, options):
    """Declared or not; of what is given too."""
    denoiser, told = deep_denoiser(), []

    @dataclass(frozen=True)
    class Looks(Margin):
        key = f"looks-{declared}-{len(options)}"
        reads_hidden = declared

        def decide(self, step):
            told.append((step.tokens.clone(), step.hidden.clone()))
            return super().decide(step)

    prompts = torch.stack([PROMPTS[0], PROMPTS[0].flip(0)])
    generate(denoiser, prompts, Looks(), 5, **options)
    assert len(told) >= 4
    for tokens, hidden in told:
        torch.testing.assert_close(hidden, denoiser.hidden(tokens), rtol=0, atol=1e-12)


@dataclass(frozen=True)
class SeesAll(Policy):
    """Keeps the top probability that it is told, everywhere; reveals the leftmost mask."""

    key = "sees-all"
    reads = frozenset({"log_top"})
    reads_ahead = True
    told: list = field(default_factory=list, compare=False)

    def decide(self, step):
        self.told.append(step.stats["log_top"])
        return Decision(step.masked & (step.masked.long().cumsum(-1) == 1))


def test_a_rule_that_reads_ahead_is_told_of_the_blocks_to_come():
    for ahead in (True, False):
        rule = type("Sees", (SeesAll,), {"reads_ahead": ahead})()
        generate(DENOISER, torch.full((1, 6), MASK), Blocks(2, rule), 6)
        assert [int((told < 0).sum()) for told in rule.told] == ([6, 5, 4, 3, 2] if ahead else [2, 1, 2, 1, 2])


def test_rows_that_reveal_nothing_cost_nothing():
    """IID with 4 N steps: about e^(-1/4) of the row steps reveal nothing.  A step in which no row does has no pass."""
    prompts, N, denoiser = torch.full((200, 8), MASK), 8, Recorded(DENOISER)
    out = generate(denoiser, prompts, POLICIES["iid"], 4 * N, seed=1)
    reveals = sum(len(set(steps)) for steps in out.reveal_step.tolist())  # steps in which a row reveals something
    assert out.num_forwards == out.num_passes.sum() == sum(map(len, denoiser.passes)) == reveals
    assert reveals < 0.25 * out.num_steps.sum()
    alone, denoiser = PROMPTS[2][None], Recorded(DENOISER)
    out = generate(denoiser, alone, POLICIES["iid"], 40, seed=1)  # one token: one pass, whenever it comes
    assert (len(denoiser.passes), out.num_passes.item(), out.num_forwards) == (1, 1, 1)
    assert out.num_steps.item() > 1
    fixed = generate(DENOISER, alone, POLICIES["iid"], 40, seed=1, fixed_shapes=True)
    assert all_results(fixed) == all_results(out)
    assert fixed.num_forwards == out.num_steps.item()  # with fixed shapes the pass is made all the same
