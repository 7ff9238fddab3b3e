"""Bad input is named in one line."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.decoding.small import DENOISER, MASK, NONEMPTY, POLICIES, ReadsFirst, Recorded, all_results, small_selector
from unmask.decoding.generate import Engine, generate
from unmask.decoding.policies import (
    IID,
    Blocks,
    Decision,
    Learned,
    PCSampler,
    Policy,
    Prophet,
    Step,
    Stochastic,
    Threshold,
    parse_policy,
)
from unmask.errors import UserError
from unmask.models.networks import Denoiser, Selector, SelectorConfig

PROMPTS = torch.tensor([[1, 2, MASK, MASK], [3, MASK, 4, MASK]])


def refused(message, *arguments, denoiser=DENOISER, **options):
    with pytest.raises(UserError, match=re.escape(message)):
        generate(denoiser, *arguments, **options)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_an_empty_response_is_named():
    full = torch.tensor([1, 2, 3, 4])
    refused("prompt 1 has an empty response", torch.stack([PROMPTS[0], full, PROMPTS[1]]), IID(), 3)
    refused("prompt 2 has an empty response", [PROMPTS[0], PROMPTS[1], full[:2]], IID(), 3)
    refused("prompt 1 has an empty response", [PROMPTS[0], full[:0]], IID(), 3)
    refused("prompt 0 has an empty response", PROMPTS[:, :0], IID(), 3)
    refused("prompt 0 has an empty response", [[], []], IID(), 3)


def test_masks_on_padding_are_no_response():
    attention_mask = torch.tensor([[True, True, True, True], [True, False, True, False]])
    refused("prompt 1 has an empty response", PROMPTS, IID(), 3, attention_mask=attention_mask)


def test_no_prompts():
    refused("the list of prompts is empty", [], IID(), 3)
    refused("got shape [0, 4]", PROMPTS[:0], IID(), 3)
    refused("got shape [4]", PROMPTS[0], IID(), 3)


def test_a_list_is_padded_by_generate_itself():
    refused("leave attention_mask out", list(PROMPTS), IID(), 3, attention_mask=torch.ones(2, 4, dtype=torch.bool))


def test_ids_that_do_not_fit_the_prompts():
    for ids in (torch.tensor([1]), torch.tensor([1, 2, 3]), torch.tensor([[1, 2], [3, 4]])):
        message = f"ids must be one number for each of the 2 prompts, got shape {list(ids.shape)}"
        refused(message, PROMPTS, IID(), 3, ids=ids)
        refused(message, PROMPTS, IID(), 3, ids=ids.tolist())


KINDS = [
    torch.Tensor.tolist,
    lambda tensor: tuple(tensor.tolist()),
    torch.Tensor.numpy,
    lambda tensor: tensor.numpy().astype(np.uint16),
    torch.Tensor.int,
    lambda tensor: tensor.to(torch.uint8),
]


def test_prompts_and_ids_of_every_kind():
    """Draws are named by ids: narrow integers must not be hashed otherwise."""
    for kind in KINDS:
        ids, options = torch.tensor([200, 7]), {"seed": 1, "temperature": 1.0}
        expected = all_results(generate(DENOISER, PROMPTS, IID(), 3, ids=ids, **options))
        assert expected != all_results(generate(DENOISER, PROMPTS, IID(), 3, **options)), "ids show"
        assert all_results(generate(DENOISER, kind(PROMPTS), IID(), 3, ids=kind(ids), **options)) == expected
        given = [kind(prompt) for prompt in (PROMPTS[0], PROMPTS[1, :2])]
        uneven = generate(DENOISER, [PROMPTS[0], PROMPTS[1, :2]], IID(), 3, ids=ids, **options)
        assert uneven.tokens.dtype == torch.int64
        assert all_results(generate(DENOISER, given, IID(), 3, ids=kind(ids), **options)) == all_results(uneven)


def test_ids_that_are_no_whole_numbers():
    for ids, got in (
        (torch.tensor([1.0, 2.0]), "torch.float32"),
        (torch.tensor([True, False]), "torch.bool"),
        (np.array([0.5, 1.0]), "torch.float64"),
        ([0.0, 1.0], "torch.float32"),
        ([True, False], "torch.bool"),
        (["a", "b"], "list"),
        ("ab", "str"),
        (np.array(["a", "b"]), "ndarray"),
    ):
        refused(f"ids must be whole numbers, got {got}", PROMPTS, IID(), 3, ids=ids)


def test_prompts_that_are_no_token_ids():
    for prompts, message in (
        (PROMPTS.double(), "prompts must be whole numbers, got torch.float64"),
        (PROMPTS == MASK, "prompts must be whole numbers, got torch.bool"),
        (PROMPTS.numpy() * 1.0, "prompts must be whole numbers, got torch.float64"),
        ([PROMPTS[0], PROMPTS[1].float()], "a prompt must be whole numbers, got torch.float32"),
        ([[1, MASK], [True, False]], "a prompt must be whole numbers, got torch.bool"),
        ([[1, MASK], [1.5, MASK]], "a prompt must be whole numbers, got torch.float32"),
        ([PROMPTS, PROMPTS], "a list of prompts holds one sequence of token ids each; give a [B, L] tensor instead"),
        ([1, MASK, MASK], "a list of prompts holds one sequence of token ids each; give a [B, L] tensor instead"),
        (["write a poem"], "a prompt must be whole numbers, got str"),
        ([["a", "b"]], "a prompt must be whole numbers, got list"),
        ([[1, None]], "a prompt must be whole numbers, got list"),
        ("write a poem", "a prompt must be whole numbers, got str"),
        (torch.tensor([[1, MASK], [-2, MASK]]), "prompts hold token ids from 0 to 11, got -2"),
        ([[1, MASK], [-1, MASK, MASK]], "prompts hold token ids from 0 to 11, got -1"),
        ([[1, MASK], [MASK + 1, MASK, MASK]], "prompts hold token ids from 0 to 11, got 12"),
    ):
        refused(message, prompts, IID(), 3)


def test_attention_that_does_not_fit_the_prompts():
    for shape in ((1, 4), (2, 3), (2, 4, 1)):
        message = f"attention_mask has shape {list(shape)}, the prompts have [2, 4]"
        refused(message, PROMPTS, IID(), 3, attention_mask=torch.ones(shape, dtype=torch.bool))


def test_a_sequence_longer_than_the_context():
    refused("longer than the model's context of 64", torch.full((1, 65), MASK), IID(), 3)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_no_steps_and_no_batch():
    for number in (0, -1, 2.5, 3.0, "3", 2**31):
        refused(f"max_steps must be a whole number from 1 on, got {number!r}", PROMPTS, IID(), number)
        refused(f"batch_size must be a whole number from 1 on, got {number!r}", PROMPTS, IID(), 3, batch_size=number)


def test_a_number_of_steps_must_be_given():
    """A batch size need not: all prompts at once."""
    refused("max_steps must be a whole number from 1 on, got None", PROMPTS, IID(), None)
    generate(DENOISER, PROMPTS, IID(), 3, batch_size=None)


def test_a_rule_is_an_object_or_a_string():
    for policy in (IID, None, IID().decide):
        refused("policy must be a rule such as unmask.policies.Margin() or 'margin', got ", PROMPTS, policy, 3)


def test_a_rule_as_a_string():
    by_name, by_class = (generate(DENOISER, PROMPTS, policy, 3) for policy in ("threshold:0.9", Threshold(0.9)))
    assert all_results(by_name) == all_results(by_class)
    refused("in Python, pass Learned(selector)", PROMPTS, "learned", 3)


def test_whole_numbers_of_every_kind():
    expected = all_results(generate(DENOISER, PROMPTS, IID(), 3, seed=3, temperature=1.0, batch_size=1))
    for kind in (np.int64, np.uint8, np.int32, torch.tensor):
        found = generate(DENOISER, PROMPTS, IID(), kind(3), seed=kind(3), temperature=1.0, batch_size=kind(1))
        assert all_results(found) == expected, kind


def test_token_choice_out_of_range():
    """All bad values are in test_tokens.py.  Here: generate() passes every option on, and checks the types."""
    for options, message in (
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"temperature": 1.0, "top_p": None}, "top_p must be a number, got None"),
        ({"temperature": 1.0, "top_k": "5"}, "top_k must be a whole number, got '5'"),
        ({"guidance": "strong"}, "guidance must be a number, got 'strong'"),
        ({"min_length": 4}, "give eos_token_id"),
        ({"stop_at_eos": True}, "give eos_token_id"),
    ):
        refused(message, PROMPTS, IID(), 3, **options)


def test_blocks_that_do_not_fit():
    policy = parse_policy("blocks(3,margin)")
    refused("blocks of 3 are larger than a response of 2 tokens", PROMPTS, policy, 4)
    uneven = [torch.full((8,), MASK), torch.full((3,), MASK)]
    refused("a response of 8 tokens has 3 blocks of 3: give at least 3 steps, not 2", uneven, policy, 2)
    assert generate(DENOISER, uneven, policy, 3).num_steps.tolist() == [3, 3]


def test_end_of_sequence_last_does_not_go_with_second_thoughts_in_blocks():
    refused("eos_last does not go with blocks(2,p2), which masks again", PROMPTS, "blocks(2,p2)", 3,
            eos_last=True, eos_token_id=1)  # fmt: skip


def test_frequencies_that_do_not_fit():
    refused("pc-sampler needs the frequencies of tokens", PROMPTS, "blocks(2,stochastic(pc-sampler,1))", 3)
    few = PCSampler(torch.full((5,), 0.2))
    for rule in (few, Blocks(2, few), Stochastic(few, 0.5), Prophet(order=few)):
        refused("there are frequencies of 5 tokens, and the denoiser writes 11", PROMPTS, rule, 3)
    refused("the frequencies are on meta: move them to cpu", PROMPTS, unchecked(torch.ones(11, device="meta")), 3)
    for wrong in ([0.5, 0.5], torch.tensor([3, 4]), torch.tensor([3.0, 4.0]), torch.tensor([-0.5, 0.5]),
                  torch.tensor([torch.nan, 1.0]), torch.ones(2, 2)):  # fmt: skip
        with pytest.raises(ValueError, match=r"frequencies must be \[V\] shares from 0 to 1: divide counts"):
            PCSampler(wrong)


def unchecked(frequencies):
    """As if they had been on this device from the start: no value of a tensor on `meta` can be looked at."""
    rule = PCSampler(torch.ones(11))
    object.__setattr__(rule, "frequencies", frequencies)
    return rule


def test_a_denoiser_without_shadows():
    """It takes no attention masks and position ids, or it gives something else, or it reads another state."""
    needs = "needs attention masks and position ids: a denoiser with hidden_with(tokens, attend, positions); Other"
    for rule in ("wino", "blocks(2,wino)"):
        refused(needs, PROMPTS, rule, 3, denoiser=changed())
        generate(changed(hidden_with=lambda self, *given: DENOISER.hidden_with(*given)), PROMPTS, rule, 3)
    for answer in (lambda self, tokens, *rest: DENOISER.hidden(tokens[:, :4]), lambda self, *given: None):
        wrong = changed(hidden_with=answer)
        refused("`hidden_with` must be [B, L, D] from tokens [B, L]", PROMPTS, "wino", 3, denoiser=wrong)
    shifted = Denoiser(DENOISER.backbone.config, 11, shift=True)
    refused("hidden_with(tokens, attend, positions); Denoiser has none", PROMPTS, "wino", 3, denoiser=shifted)
    refused("65 tokens is longer than the model's context of 64", torch.full((1, 65), MASK), "wino", 3)
    assert not generate(DENOISER, torch.full((1, 64), MASK), "wino", 30).masked.any()  # shadows need no context


def test_a_budget_that_the_selector_was_not_trained_for():
    for name in ("learned", "lo-arm", "reward"):
        policy = parse_policy(name, small_selector(5))
        refused("trained for T = 5, not for 3 steps", PROMPTS, policy, 3)
        generate(DENOISER, PROMPTS, policy, 5)


def test_a_selector_of_another_width():
    """Trained with another denoiser: not a matter of matrix shapes, deep inside."""
    for name in ("learned", "lo-arm", "reward"):
        config = SelectorConfig(width=8, layers=1, heads=2, budget=3)
        policy = parse_policy(name, Selector(config, denoiser_width=12).double())
        refused("12", PROMPTS, policy, 3)


# --- denoisers and rules of others ------------------------------------------------------------------------------------


def changed(**methods):
    """The denoiser with other methods, and without those that are None."""
    given = {
        "mask_token_id": MASK,
        "hidden": lambda self, tokens, attention_mask=None: DENOISER.hidden(tokens, attention_mask),
        "logits": lambda self, hidden: DENOISER.logits(hidden),
    }
    return type("Other", (), {name: value for name, value in {**given, **methods}.items() if value is not None})()


NEEDS = "a denoiser needs mask_token_id, hidden(tokens, attention_mask) and logits(hidden); Other has no "
OTHERS = [
    ({"mask_token_id": None}, NEEDS + "mask_token_id"),
    ({"hidden": None}, NEEDS + "hidden"),
    ({"logits": None}, NEEDS + "logits"),
    ({"mask_token_id": "[MASK]"}, "the denoiser's mask_token_id must be a whole number from 0 on, got '[MASK]'"),
    (
        {"hidden": lambda self, tokens, attention_mask=None: DENOISER.hidden(tokens)[0]},
        "the denoiser's `hidden` must be [B, L, D] from tokens [B, L], got [4, 16]",
    ),
    (
        {"hidden": lambda self, tokens, attention_mask=None: (DENOISER.hidden(tokens),)},
        "the denoiser's `hidden` must be [B, L, D] from tokens [B, L], got a tuple",
    ),
    (
        {"logits": lambda self, hidden: DENOISER.logits(hidden)[0]},
        "the denoiser's `logits` must be [M, V] from hidden states [M, D], got [11] for M = 1",
    ),
    (
        {"logits": lambda self, hidden: DENOISER.logits(hidden)[:1]},
        "the denoiser's `logits` must be [M, V] from hidden states [M, D], got [1, 11] for M = 4 and V = 11",
    ),
    (
        {"hidden": lambda self, tokens, attention_mask=None: torch.zeros(5, 16)[tokens]},
        "its vocabulary must hold ids up to 11, its context 4 positions",
    ),
]


def test_a_denoiser_that_is_none():
    """A chunk of fixed shapes is four positions too."""
    for methods, message in OTHERS:
        for fixed_shapes in (False, True):
            refused(message, PROMPTS, IID(), 1, denoiser=changed(**methods), fixed_shapes=fixed_shapes)


@dataclass(frozen=True)
class Answers(Policy):
    """Whatever it is told to."""

    key = "answers"
    answer: Callable[[Step], Any]
    reads: Any = frozenset()

    def decide(self, step):
        return self.answer(step)


RULES_OF_OTHERS = [
    ((lambda step: step.masked,), "answers must answer with a Decision(reveal=...), not with a Tensor"),
    ((lambda step: None,), "answers must answer with a Decision(reveal=...), not with a NoneType"),
    ((lambda step: Decision(step.masked.long()),), "answers must reveal by booleans [2, 4], got torch.int64 [2, 4]"),
    ((lambda step: Decision(step.masked[0]),), "answers must reveal by booleans [2, 4], got torch.bool [4]"),
    (
        (lambda step: Decision(step.stats["margin"] > 0.5),),
        "answers looks at step.stats['margin']: it must declare this in `reads`",
    ),
    (
        (lambda step: Decision(step.stats["log_top"] > -1), {"margin"}),
        "answers looks at step.stats['log_top']: it must declare this in `reads`",
    ),
    ((lambda step: None, None), "answers: `reads` must be a set of names, got None"),
]


def test_a_rule_that_is_none():
    for arguments, message in RULES_OF_OTHERS:
        for fixed_shapes in (False, True):
            refused(message, PROMPTS, Answers(*arguments), 3, fixed_shapes=fixed_shapes)


def test_large_logits_are_sound():
    """Eight of 1e38 are beyond float32; each of them is a number."""
    for name in ("iid", "top-prob", "entropy"):
        large = changed(logits=lambda self, hidden: 1e38 * DENOISER.logits(hidden).float().sign())
        for max_steps, fixed_shapes in ((1, False), (2, False), (2, True)):
            out = generate(large, torch.full((2, 8), MASK), parse_policy(name), max_steps, fixed_shapes=fixed_shapes)
            assert (out.tokens < MASK).all()


# --- logits that are not finite ---------------------------------------------------------------------------------------

NINE = torch.tensor([[1, 1, 1, MASK, MASK, MASK], [2, MASK, MASK, MASK, MASK, MASK], [9, MASK, MASK, MASK, MASK, MASK]])


class Breaks(Recorded):
    """Not finite for sequences that begin with token 9, once fewer than three masks are left.  The token travels with
    the hidden state."""

    value = torch.nan
    reads_revealed = True  # in every logit, or in one of them

    def hidden(self, tokens, attention_mask=None):
        hidden = super().hidden(tokens, attention_mask)
        broken = (tokens[:, :1] == 9) & ((tokens == MASK).sum(-1, keepdim=True) < 3)
        return torch.cat([hidden, broken.double().expand(-1, tokens.shape[1])[..., None]], dim=-1)

    def logits(self, hidden):
        logits = super().logits(hidden[:, :16])
        logits[hidden[:, 16] > 0, :: 1 if self.reads_revealed else 5] = self.value
        return logits


def breaking(value, reads_revealed):
    denoiser = Breaks(DENOISER)
    denoiser.value, denoiser.reads_revealed = value, reads_revealed
    return denoiser


def test_a_denoiser_s_logits_that_are_not_finite_name_the_sequence_and_the_step(policy):
    """Rows leave the batch, so rows are not sequences."""
    for options in ({}, {"temperature": 1.0, "top_p": 0.9}):
        for value, reads_revealed in [(torch.nan, True), (torch.nan, False), (torch.inf, False), (-torch.inf, True)]:
            denoiser, steps = breaking(value, reads_revealed), []
            with pytest.raises(ValueError, match="not finite") as caught:
                generate(denoiser, NINE, policy, 6, seed=1, on_step=steps.append, **options)
            step = len(steps)  # all sequences began together
            assert str(caught.value) == f"the denoiser's logits are not finite for sequence 2 at step {step}"
            if policy.reads:  # it was noticed at once
                masks = [(seen[seen[:, 0] == 9] == MASK).sum() for seen in denoiser.passes]
                assert masks[-1] < 3
                assert all(count >= 3 or not policy.reads_revealed for count in masks[:-1])
            generate(denoiser, NINE[:2], policy, 6, **options)


def test_a_single_logit_of_minus_infinity_is_a_token_without_mass():
    out = generate(breaking(-torch.inf, False), NINE, POLICIES["margin"], 6)
    assert (out.tokens < MASK).all()


def test_the_sequence_is_named_in_a_batch_that_is_refilled(uncompiled):
    """Sequence 5 enters when another has finished: neither its row nor the number of passes names it."""
    for compile in (False, True):
        prompts = torch.cat([NINE[:2], NINE[:2], NINE[:1], NINE[2:], NINE[:2]])
        engine = Engine(breaking(torch.nan, True), POLICIES["left-to-right"], 6, batch_size=2, compile=compile)
        with pytest.raises(ValueError, match=r"for sequence 5 at step 3$"):  # five masks, one a step: two are left
            engine.generate(prompts)


class BrokenSelector(ReadsFirst):
    """As `Breaks`, which it reads the flag of; `when` is asked about t [b]."""

    value = torch.nan

    def when(self, t):
        return torch.ones_like(t, dtype=torch.bool)

    def __call__(self, hidden, confidences, masked, t, attention_mask, max_steps, price):
        logits = super().__call__(hidden, confidences, masked, t, attention_mask, max_steps, price)
        return torch.where(((hidden[:, 0, 16] > 0) & self.when(t))[:, None], self.value, logits)


class Flags(Breaks):
    """Says where `Breaks` would break, and does not."""

    def logits(self, hidden):
        return Recorded.logits(self, hidden[:, :16])


def test_a_selector_s_logits_that_are_not_finite_name_the_sequence_and_the_step():
    denoiser, broken = Flags(DENOISER), BrokenSelector(NONEMPTY.selector)

    def until_refused(policy):
        for seed in range(20):  # until the sequence is asked about when fewer than three are left
            denoiser.passes.clear()
            generate(denoiser, NINE, policy, 13, seed=seed)

    for name, value in (("learned", torch.nan), ("learned(deterministic)", -torch.inf), ("lo-arm", torch.inf)):
        object.__setattr__(broken, "value", value)
        with pytest.raises(ValueError, match="not finite") as caught:
            until_refused(parse_policy(name, broken))
        step = len(denoiser.passes) - 1
        assert str(caught.value) == f"the selector's logits are not finite for sequence 2 at step {step}"


@pytest.mark.parametrize(("batch_size", "compile"), [(1, False), (2, True), (3, False), (3, True)])
def test_at_the_last_step_nobody_asks_the_selector(batch_size, compile, uncompiled):
    """Not even where another row of the batch, which has begun later, is still to be asked about."""

    class BreaksAt(BrokenSelector):
        def when(self, t):
            return t == broken_at

    prompts = torch.tensor([[9, 1, 1, MASK], [9, MASK, MASK, MASK], [9, MASK, MASK, MASK], [9, MASK, MASK, MASK]])
    options = {"batch_size": batch_size, "compile": compile}
    policy = Learned(BreaksAt(NONEMPTY.selector), cap=1)  # one a step: after the first, fewer than three are left
    broken_at = 0
    assert generate(Flags(DENOISER), prompts, policy, 3, **options).num_steps.tolist() == [1, 3, 3, 3]
    broken_at = 1
    refused("the selector's logits are not finite for sequence 1 at step 1", prompts, policy, 3,
            denoiser=Flags(DENOISER), **options)  # fmt: skip
