"""The end of sequence, and guidance: what p_n is and when a sequence is over, against doing it by hand."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from tests.decoding.small import (
    MASK,
    POLICIES,
    PROMPTS,
    Recorded,
    V,
    accounts,
    all_results,
    histories,
    needs_pass,
    prompts_for,
    results,
    small_denoiser,
)
from unmask.decoding.generate import generate
from unmask.decoding.policies import Blocks

EOS = 4
SAMPLED = {"temperature": 1.0, "seed": 5}


@dataclass
class Leaning(Recorded):
    """A denoiser whose logit of EOS is `lean` higher."""

    lean: float = 1.5

    def logits(self, hidden):
        logits = super().logits(hidden)
        logits[:, EOS] += self.lean
        return logits


# --- stop_at_eos ------------------------------------------------------------------------------------------------------


def stopped(history):
    """A history as it would have been with the stop: the step after which only masks behind an EOS are left is the
    last one, and they become EOS."""
    is_response = (history[0] == MASK).tolist()
    for step, canvas in enumerate(history[1:]):
        eos = [n for n, token in enumerate(canvas.tolist()) if is_response[n] and token == EOS]
        masks = [n for n, token in enumerate(canvas.tolist()) if token == MASK]
        if eos and masks and masks[0] > eos[0]:
            return [*history[: step + 2], torch.where(canvas == MASK, EOS, canvas)], step
    return history, None


def test_a_sequence_stops_once_all_masks_are_behind_an_eos(policy):
    """With every draw keyed by its step, the run with the stop is the run without it, cut short."""
    prompts, stops = prompts_for(policy), 0
    for lean in (0.5, 2.5):
        denoiser = Leaning(small_denoiser(), lean=lean)
        free = generate(denoiser, prompts, policy, 6, eos_token_id=EOS, history=True, **SAMPLED)
        cut = generate(
            Leaning(small_denoiser(), lean=lean), prompts, policy, 6, eos_token_id=EOS, stop_at_eos=True, **SAMPLED
        )
        for row, history in enumerate(histories(denoiser, free, policy, 6)):
            kept, step = stopped(history)
            if step is None:
                assert results(cut, row) == results(free, row)
                continue
            stops += 1
            reveal_step, revisions = accounts(kept)  # what the stop writes shows as a step of its own, one too late
            assert results(cut, row) | {"nothing_selected": 0} == {
                "tokens": kept[-1].tolist(),
                "reveal_step": [min(when, step) for when in reveal_step],
                "revisions": revisions,
                "num_steps": step + 1,
                "num_passes": sum(
                    needs_pass(policy, before, after, i == 5)
                    for i, (before, after) in enumerate(pairwise(history[: step + 2]))
                ),
                "nothing_selected": 0,
            }
    assert stops


def test_an_eos_of_the_prompt_ends_nothing():
    prompts = torch.tensor([[EOS, 2, MASK, MASK, MASK, MASK], [2, MASK, EOS, MASK, MASK, MASK]])
    options = {"eos_token_id": EOS, "stop_at_eos": True}
    out = generate(Leaning(small_denoiser(), lean=-50.0), prompts, POLICIES["left-to-right"], 6, **options)
    assert out.num_steps.tolist() == [4, 4]


def test_only_what_is_behind_the_first_eos_is_filled():
    """Left to right, and EOS certain: it is revealed first, and one step does it.  Right to left would take all."""
    denoiser = Leaning(small_denoiser(), lean=100.0)
    prompt = torch.tensor([[2, MASK, MASK, 3, MASK, MASK]])
    out = generate(denoiser, prompt, POLICIES["left-to-right"], 6, eos_token_id=EOS, stop_at_eos=True)
    assert out.tokens.tolist() == [[2, EOS, EOS, 3, EOS, EOS]]
    assert out.reveal_step.tolist() == [[-1, 0, 0, -1, 0, 0]]
    assert out.num_steps.tolist() == [1]
    assert out.num_forwards == len(denoiser.passes) == 1


def test_it_is_off_by_default():
    denoiser, policy = Leaning(small_denoiser(), lean=100.0), POLICIES["margin"]
    named, unnamed = (generate(denoiser, PROMPTS, policy, 6, **SAMPLED, **options)
                      for options in ({"eos_token_id": EOS}, {}))  # fmt: skip
    assert all_results(named) == all_results(unnamed)
    assert named.num_steps.tolist() == [min(6, (prompt == MASK).sum()) for prompt in PROMPTS]


# --- by hand ----------------------------------------------------------------------------------------------------------

PATTERN = torch.tensor([False, True, True, False, True, True, True, False, True, True])  # the response of all prompts
CLUES = torch.tensor([[1, 0, 0, 2, 0, 0, 0, 3, 0, 0], [7, 0, 0, 7, 0, 0, 0, 9, 0, 0], [0, 0, 0, 5, 0, 0, 0, 8, 0, 0]])
SAME_PATTERN = torch.where(PATTERN, MASK, CLUES)


@dataclass
class ByHand(Leaning):
    """Guidance and a forbidden EOS as part of the denoiser: hidden = [with the prompt, without it, place]."""

    guidance: float = 0.0
    min_length: int = 0

    def hidden(self, tokens, attention_mask=None):
        self.passes.append(tokens.clone())
        bare = torch.where(PATTERN, tokens, MASK)
        place = (PATTERN.cumsum(-1) - 1).double().expand(len(tokens), -1)[..., None]
        states = [self.denoiser.hidden(canvas, attention_mask) for canvas in (tokens, bare)]
        return torch.cat([*states, place], dim=-1)

    def logits(self, hidden):
        conditional, unconditional = (self.denoiser.logits(part) for part in (hidden[:, :16], hidden[:, 16:32]))
        for logits in (conditional, unconditional):
            logits[:, EOS] += self.lean
        logits = unconditional + (1 + self.guidance) * (conditional - unconditional)
        logits[hidden[:, 32] < self.min_length, EOS] = -torch.inf
        return logits


def test_guidance_reads_un_plus_one_plus_w_times_the_difference(policy):
    """Tokens and orders; a guidance of 1.5 that is left out, or applied to another canvas, gives others."""
    denoiser = Leaning(small_denoiser(), lean=0.0)
    guided = generate(denoiser, SAME_PATTERN, policy, 6, guidance=1.5, **SAMPLED)
    by_hand = generate(ByHand(small_denoiser(), lean=0.0, guidance=1.5), SAME_PATTERN, policy, 6, **SAMPLED)
    assert torch.equal(guided.tokens, by_hand.tokens)
    assert torch.equal(guided.reveal_step, by_hand.reveal_step)
    assert torch.equal(guided.revisions, by_hand.revisions)
    assert torch.equal(guided.num_passes, 2 * by_hand.num_passes)
    assert not torch.equal(guided.tokens, generate(denoiser, SAME_PATTERN, policy, 6, **SAMPLED).tokens)


def test_no_eos_before_the_minimum_length(policy):
    """Where EOS is by far the most probable it comes at once, and exactly from response position `min_length` on; p
    and with it every confidence is renormalised, as for a denoiser that gives EOS no mass there."""
    lean = 12.0
    for min_length in (1, 4, 6, 7, 100) if policy.key == "margin" else (4,):
        options = {"eos_token_id": EOS, "min_length": min_length, **SAMPLED}
        forbidden = generate(Leaning(small_denoiser(), lean=lean), SAME_PATTERN, policy, 6, **options)
        is_eos = forbidden.tokens[:, PATTERN] == EOS
        assert not is_eos[:, :min_length].any()
        assert is_eos[:, min_length:].all()
        by_hand = ByHand(small_denoiser(), lean=lean, min_length=min_length)
        assert all_results(forbidden) == all_results(generate(by_hand, SAME_PATTERN, policy, 6, **SAMPLED))


def test_guidance_a_minimum_length_and_a_stop_together(policy):
    """And with different prompts, padded: the minimum length counts response positions, not positions."""
    options = {"eos_token_id": EOS, "min_length": 2, "guidance": 0.7}
    both = generate(Leaning(small_denoiser(), lean=2.0), SAME_PATTERN, policy, 6, **options, **SAMPLED)
    by_hand = ByHand(small_denoiser(), lean=2.0, min_length=2, guidance=0.7)
    expected = generate(by_hand, SAME_PATTERN, policy, 6, **SAMPLED)
    assert torch.equal(both.tokens, expected.tokens)
    assert torch.equal(both.reveal_step, expected.reveal_step)
    stop = {**options, "stop_at_eos": True}
    out = generate(Leaning(small_denoiser(), lean=100.0), prompts_for(policy), policy, 6, **stop, **SAMPLED)
    for row, prompt in enumerate(prompts_for(policy)):
        written = out.tokens[row, out.attention_mask[row]][prompt == MASK]
        assert not (written[:2] == EOS).any()
        assert (written[2:] == EOS).all()


def test_a_denoiser_that_forbids_a_token_can_be_guided():
    """A logit of -inf with the prompt and without it is no mass, not NaN: -inf - -inf."""

    class Forbids(Recorded):
        def logits(self, hidden):
            logits = super().logits(hidden)
            logits[:, EOS] = -torch.inf
            return logits

    plain = generate(Forbids(small_denoiser()), PROMPTS, POLICIES["top-prob"], 6, **SAMPLED)
    guided = generate(Forbids(small_denoiser()), PROMPTS, POLICIES["top-prob"], 6, guidance=1.0, **SAMPLED)
    for out in (plain, guided):
        assert not (out.tokens[out.reveal_step >= 0] == EOS).any()
        assert (out.tokens[out.reveal_step >= 0] < V).all()


def test_blocks_take_a_stop_too():
    """An EOS in the first block ends the sequence, not the block."""
    policy = next(policy for policy in POLICIES.values() if isinstance(policy, Blocks))
    denoiser = Leaning(small_denoiser(), lean=100.0)
    out = generate(denoiser, torch.full((3, 9), MASK), policy, 6, eos_token_id=EOS, stop_at_eos=True)
    assert (out.tokens == EOS).all()
    assert (out.num_steps <= 2).all()
