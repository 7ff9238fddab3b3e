"""Suppressed and penalised tokens, several EOS, EOS last, stop strings, processors, kept tokens: done by hand."""

import math
import re
from dataclasses import dataclass
from itertools import pairwise

import numpy
import pytest
import torch

from tests.decoding.small import DENOISER, MASK, POLICIES, PROMPTS, Recorded, V, all_results, prompts_for, results
from tests.decoding.steps import best, blocks_of, counting_denoiser
from unmask.decoding.generate import Engine, generate
from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError

SAMPLED = {"temperature": 1.0, "seed": 5}


def written_with(policy, prompts=None, max_steps=6, denoiser=DENOISER, **options):
    return generate(denoiser, prompts_for(policy) if prompts is None else prompts, policy, max_steps, **options)


@dataclass
class Forbids(Recorded):
    """A denoiser that gives some tokens no mass itself."""

    tokens: tuple = ()

    def logits(self, hidden):
        return super().logits(hidden).index_fill(-1, torch.tensor(self.tokens), -torch.inf)


def test_suppressed_tokens_are_those_of_a_denoiser_that_gives_them_no_mass(policy):
    expected = written_with(policy, denoiser=Forbids(DENOISER, tokens=(3, 7)), **SAMPLED)
    out = written_with(policy, suppress_tokens=[3, 7], **SAMPLED)
    assert all_results(out) == all_results(expected)
    assert not torch.isin(out.tokens[out.reveal_step >= 0], torch.tensor([3, 7])).any()


def test_every_eos_ends_a_sequence_and_is_forbidden_before_the_minimum():
    """EOS 4 and 6 are one end: as if a denoiser wrote 4 for both, and what is left is filled with the first."""
    policy, both = POLICIES["left-to-right"], {4, 6}
    stops = set()
    for seed in range(20):
        free = generate(DENOISER, PROMPTS, policy, 13, seed=seed, temperature=1.5)
        out = generate(DENOISER, PROMPTS, policy, 13, seed=seed, temperature=1.5, eos_token_id=[4, 6], stop_at_eos=True)
        for row, prompt in enumerate(PROMPTS):
            here, response = out.attention_mask[row], prompt == MASK
            tokens = free.tokens[row, here][response].tolist()
            end = next((j for j, token in enumerate(tokens) if token in both), None)
            if end is not None and end + 1 < len(tokens):
                stops.add(tokens[end])
                tokens[end + 1 :] = [4] * (len(tokens) - end - 1)
                assert out.num_steps[row] == end + 1
            assert out.tokens[row, here][response].tolist() == tokens
    assert stops == both
    forbidden = Forbids(DENOISER, tokens=(4, 6))
    options = {"temperature": 1.0, "seed": 2}
    out = generate(DENOISER, PROMPTS, policy, 13, eos_token_id=[4, 6], min_length=99, **options)
    assert all_results(out) == all_results(generate(forbidden, PROMPTS, policy, 13, **options))


# --- repetition penalty and processors --------------------------------------------------------------------------------


def penalised_by_hand(prompt, S, penalty, remasks):
    """Greedy, of one sequence: top probability with S steps, or P2."""
    tokens, response = prompt.clone(), [n for n, token in enumerate(prompt.tolist()) if token == MASK]
    for i in range(S):
        logits, p = DENOISER(tokens[None])[0], {}
        for n in response:
            others = {token for m, token in enumerate(tokens.tolist()) if m != n}
            changed = [
                (value / penalty if value > 0 else value * penalty) if token in others else value
                for token, value in enumerate(logits[n].tolist())
            ]
            total = sum(map(math.exp, changed))
            p[n] = [math.exp(value) / total for value in changed]
        proposal = {n: p[n].index(max(p[n])) for n in response}
        masked = [n for n in response if tokens[n] == MASK]
        if remasks:
            score = {n: p[n][proposal[n] if tokens[n] == MASK else tokens[n]] for n in response}
            low = best(lambda n: -score[n], response, len(response) * (S - 1 - i) // S)  # noqa: B023
            reveal, again = set(masked) - low, low - set(masked)
        else:
            count = len(response) // S + (i < len(response) % S)
            reveal, again = best(lambda n: max(p[n]), masked, len(masked) if i == S - 1 else count), set()  # noqa: B023
        for n in reveal:
            tokens[n] = proposal[n]
        for n in again:
            tokens[n] = MASK
    return tokens.tolist()


def test_the_repetition_penalty_counts_what_stands_elsewhere():
    """The prompt counts, masks and padding do not; nor does a token count against itself, which P2 reads."""
    for name, remasks in (("top-prob", False), ("p2", True)):
        out = generate(DENOISER, PROMPTS, name, 6, repetition_penalty=1.7)
        assert not torch.equal(out.tokens, generate(DENOISER, PROMPTS, name, 6).tokens)
        for row, prompt in enumerate(PROMPTS):
            expected = penalised_by_hand(prompt, 6, 1.7, remasks)
            assert out.tokens[row, out.attention_mask[row]].tolist() == expected, (name, row)


def test_hugging_face_s_processors_work_as_they_are():
    transformers = pytest.importorskip("transformers")
    policy = POLICIES["margin"]  # reads masks only: nothing counts against itself
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    out = written_with(policy, processors=[penalty], **SAMPLED)
    assert all_results(out) == all_results(written_with(policy, repetition_penalty=1.7, **SAMPLED))
    chain = transformers.LogitsProcessorList([penalty, transformers.SuppressTokensLogitsProcessor([3])])
    out = written_with(policy, processors=[chain], **SAMPLED)
    assert all_results(out) == all_results(written_with(policy, repetition_penalty=1.7, suppress_tokens=[3], **SAMPLED))


def test_a_processor_gets_each_position_s_sequence_and_scores(policy):
    """A processor that knows the sequence from its ids gives what a denoiser that does would give."""

    def by_sum(input_ids, scores):
        assert input_ids.shape == (len(scores), 15)
        assert scores.shape[1] == V + 1  # it may look up the mask token's score, which is -inf
        assert (scores[:, MASK] == -torch.inf).all()
        shift = torch.where(input_ids == MASK, 0, input_ids).sum(-1) % 3
        return scores.scatter_add(1, shift[:, None], torch.full_like(shift, 2.0, dtype=scores.dtype)[:, None])

    class BySum(Recorded):
        def hidden(self, tokens, attention_mask):
            shift = torch.where(attention_mask & (tokens != MASK), tokens, 0).sum(-1) % 3
            return torch.cat(
                [super().hidden(tokens, attention_mask), shift[:, None, None].expand(*tokens.shape, 1).double()], dim=-1
            )

        def logits(self, hidden):
            logits, shift = super().logits(hidden[:, :16]), hidden[:, 16:].long()
            return logits.scatter_add(1, shift, torch.full_like(shift, 2.0, dtype=logits.dtype))

    out = written_with(policy, processors=[by_sum], **SAMPLED)
    assert all_results(out) == all_results(written_with(policy, denoiser=BySum(DENOISER), **SAMPLED))
    assert all_results(out) != all_results(written_with(policy, **SAMPLED))


# --- eos_last ---------------------------------------------------------------------------------------------------------


def eos_last_by_hand(denoiser, response, blocks, S, eos, choose):
    """Reveal steps in blocks, EOS only where nothing else is left: {n: step}."""
    masked, when, i = set(response), {}, 0
    for inside, steps in blocks_of(response, math.ceil(len(response) / blocks), S):
        for own in range(steps):
            left = sorted(masked & set(inside))
            if not left:
                break
            p = {n: denoiser.p(len(masked), n) for n in left}
            others = [n for n in left if p[n].index(max(p[n])) not in eos] or left
            chosen = choose({n: max(p[n]) for n in others}, own, steps, len(inside), len(left))
            chosen = set(left) if own == steps - 1 else chosen
            when |= dict.fromkeys(chosen, i)
            masked -= chosen
            i += 1
    return when


def sure(c, i, S, N, masks):
    return {n for n in c if c[n] >= 0.7} or best(c.get, c, 1)


def paced(c, i, S, N, masks):
    return sure(c, i, S, N, masks) | best(c.get, c, math.ceil(masks / (S - i)))


def even(c, i, S, N, masks):
    return best(c.get, c, N // S + (i < N % S))


def cosine(c, i, S, N, masks):
    return best(c.get, c, max(1, masks - math.floor(N * math.cos(math.pi / 2 * (i + 1) / S))))


@pytest.mark.parametrize(
    ("rule", "choose"),
    [("threshold:0.7", sure), ("threshold(0.7,paced)", paced), ("top-prob", even), ("top-prob(count=cosine)", cosine)],
)
def test_a_mask_whose_proposal_is_eos_waits_for_all_others(rule, choose):
    """Where fewer others are left than the rule counts, it waits too, wherever the prompt stands."""
    N, differs, options = 12, 0, {"eos_token_id": [0, 2], "eos_last": True}
    for seed in range(6):
        given = seed % 4
        denoiser = counting_denoiser(N + given, seed=seed)
        prompt = torch.tensor([[1] * given + [4] * N])
        for name, blocks, S in ((rule, 1, 12), (rule, 1, 2), (f"blocks(4,{rule})", 3, 7)):
            out = generate(denoiser, prompt, name, S, **options)
            when = eos_last_by_hand(denoiser, list(range(given, N + given)), blocks, S, {0, 2}, choose)
            assert out.reveal_step[0].tolist() == [when.get(n, -1) for n in range(N + given)]
            fixed = generate(denoiser, prompt, name, S, fixed_shapes=True, **options)
            assert all_results(fixed) == all_results(out)
            plain = generate(denoiser, prompt, name, S)
            differs += not torch.equal(plain.reveal_step, out.reveal_step)
    assert differs > 6


# --- stop strings -----------------------------------------------------------------------------------------------------


class Letters:
    """Token 0 is "a", token 1 "b", ..."""

    def decode(self, token_ids):
        return "".join(chr(97 + token) for token in token_ids)


def test_a_sequence_ends_when_its_beginning_holds_a_stop_string(policy):
    """With every draw keyed by its step, the run with the stop is the run without it, cut short."""
    strings, stops = ["b", "d", "gk", "cj"], 0
    for batch_size, fixed in ((None, False), (3, False), (3, True)):
        layout = {"batch_size": batch_size, "fixed_shapes": fixed}
        free = written_with(policy, history=True, **SAMPLED)
        out = written_with(
            policy, stop_strings=strings, tokenizer=Letters(), eos_token_id=4, history=True, **layout, **SAMPLED
        )
        for row, prompt in enumerate(prompts_for(policy)):
            response = torch.zeros_like(out.attention_mask[row])
            response[out.attention_mask[row]] = prompt == MASK
            expected, steps = free.tokens[row], int(free.num_steps[row])
            for step, (_, after) in enumerate(pairwise(free.history[row, : steps + 1])):
                text = Letters().decode(after[response].tolist()).split(chr(97 + MASK))[0]
                if any(string in text for string in strings):
                    expected, steps = torch.where(response & (after == MASK), 4, after), step + 1
                    stops += 1
                    break
            assert torch.equal(out.tokens[row], expected)
            assert out.num_steps[row] == steps
            assert torch.equal(out.history[row, -1], expected)
            assert out.reveal_step[row].max() < steps
            assert not out.masked[row].any()
    assert stops


def test_what_a_stop_fills_up_is_eos_whatever_is_forbidden():
    """Every first token is a stop string: behind it stands EOS, which nothing else may write."""
    prompts, allowed = torch.full((3, 5), MASK), torch.arange(V).expand(5, V) != 4
    for forbidden in ({"suppress_tokens": [4]}, {"allowed": allowed}, {"min_length": 5}):
        ends = {"eos_token_id": 4, "stop_strings": list("abcdefghijk"), "tokenizer": Letters(), **forbidden}
        out = generate(DENOISER, prompts, "left-to-right", 5, **ends, **SAMPLED)
        assert out.num_steps.tolist() == [1, 1, 1]
        assert (out.tokens == 4).tolist() == [[False, True, True, True, True]] * 3


# --- guidance ---------------------------------------------------------------------------------------------------------


def test_kept_tokens_stay_in_the_pass_without_the_prompt():
    denoiser = Recorded(DENOISER, guided=True)
    prompts = torch.tensor([[3, 1, 4, MASK, MASK, 5], [4, 4, 1, MASK, 3, MASK]])
    generate(denoiser, prompts, "left-to-right", 2, guidance=1.0, cfg_keep_tokens=[4, 5])
    assert denoiser.passes[1].tolist() == [[MASK, MASK, 4, MASK, MASK, 5], [4, 4, MASK, MASK, MASK, MASK]]
    with_prompt, without = denoiser.passes[2:4]
    written = with_prompt[:, 3].tolist()
    assert without[0].tolist()[3:] == [written[0], MASK, 5]


# --- what may not be asked for ----------------------------------------------------------------------------------------

ENDS = {"stop_strings": "x", "eos_token_id": 4}


def fails(token_ids):
    raise KeyError("two\nlines")


class Decodes:
    def __init__(self, decode):
        self.decode = decode


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("stop_strings need a tokenizer", {"stop_strings": "x", "eos_token_id": 4}),
        ("give eos_token_id", {"stop_strings": "x", "tokenizer": Letters()}),
        ("stop_strings must be texts, got ['a', '']", {"stop_strings": ["a", ""], "tokenizer": Letters()}),
        ("give eos_token_id", {"eos_last": True}),
        ("eos_token_id must be one token id or several, from 0 on, got '4'", {"eos_token_id": "4"}),
        ("eos_token_id must be one token id or several, from 0 on, got [4, -1]", {"eos_token_id": [4, -1]}),
        ("suppress_tokens must be token ids from 0 on, got [-3]", {"suppress_tokens": [-3]}),
        ("eos_token_id 11 is not one of the 11 tokens", {"eos_token_id": [4, 11]}),
        ("suppress_tokens: 12 is not one of the 11 tokens", {"suppress_tokens": [1, 12]}),
        ("suppress_tokens must be token ids, got 3", {"suppress_tokens": 3}),
        ("suppress_tokens holds every token", {"suppress_tokens": range(V)}),
        ("before min_length, eos_token_id hold every token", {"eos_token_id": range(V), "min_length": 1}),
        ("stop_at_eos never stops", {"suppress_tokens": [3, 4], "eos_token_id": [4, 3], "stop_at_eos": True}),
        ("on_step and on_finished must be functions", {"on_step": 3}),
        ("on_step and on_finished must be functions", {"on_finished": None}),
        ("cannot decode what was written (KeyError('two\\nlines'))", {**ENDS, "tokenizer": Decodes(fails)}),
        ("decode must give a text, got a list", {**ENDS, "tokenizer": Decodes(list)}),
        ("repetition_penalty must be above 0 and finite, got 0", {"repetition_penalty": 0}),
        ("cfg_keep_tokens needs guidance", {"cfg_keep_tokens": [1]}),
        ("processors must be a list of functions", {"processors": [3]}),
        ("processors must be a list of functions", {"processors": math.exp}),
        ("stop_strings must be texts, got [5]", {"stop_strings": 5, "tokenizer": Letters(), "eos_token_id": 4}),
        ("processors cannot be compiled", {"processors": [lambda ids, scores: scores], "compile": True}),
        ("processor cut must return scores [42, 12] as it gets, not [42, 3]", {"processors": ["cut"]}),
        ("processor cut must return scores [42, 12] as it gets, not a NoneType", {"processors": ["nothing"]}),
        ("processor cut must return scores, not torch.bool: -inf is for", {"processors": ["mask"]}),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(message, options):
    def cut(input_ids, scores):
        return {"cut": scores[:, :3], "nothing": None, "mask": scores > 0}[options["processors"][0]]

    given = (
        {**options, "processors": [cut]} if options.get("processors") in (["cut"], ["nothing"], ["mask"]) else options
    )
    with pytest.raises(UserError, match=re.escape(message)):
        generate(DENOISER, PROMPTS, "margin", 6, **given)


def test_ids_of_every_kind():
    for several in ([4, 3], (4, 3), torch.tensor([4, 3]), [torch.tensor(4), numpy.int64(3)], numpy.array([4, 3])):
        choice = TokenChoice(eos_token_id=several, suppress_tokens=several)
        assert choice.eos_ids == choice.suppress_tokens == (4, 3)
    for one in (4, numpy.int64(4), torch.tensor(4)):
        assert TokenChoice(eos_token_id=one).eos_ids == (4,)


class TakesAnyId(Recorded):
    """What it does not know looks like a mask to it."""

    def hidden(self, tokens, attention_mask=None):
        return super().hidden(tokens.clamp(max=MASK), attention_mask)


def test_a_prompt_may_hold_ids_above_those_of_the_head_and_the_mask():
    """The penalty counts them for nobody, and a processor may look their scores up."""
    prompts, denoiser = torch.tensor([[MASK + 5, MASK, MASK, MASK, 3]]), TakesAnyId(DENOISER)
    found = [
        generate(denoiser, given, "margin", 3, repetition_penalty=penalty).tokens[0, 1:].tolist()
        for given, penalty in ((prompts, 9.0), (prompts.clamp(max=MASK + 1), 9.0), (prompts, 1.0))
    ]
    assert found[0] == found[1] != found[2]
    seen = []
    generate(denoiser, prompts, "margin", 3, processors=[lambda ids, p: seen.append(p.gather(1, ids)[:, 0]) or p])
    assert seen
    assert all((scores == -torch.inf).all() for scores in seen)


def test_what_is_given_as_an_iterator_outlasts_its_check():
    choice = TokenChoice(suppress_tokens=iter([3]), processors=iter([max]), guidance=1.0, cfg_keep_tokens=iter([5]))
    assert (choice.suppress_tokens, choice.processors, choice.cfg_keep_tokens) == ((3,), (max,), (5,))


def test_eos_last_needs_a_rule_that_it_can_hold_back_from():
    choice = TokenChoice(eos_token_id=4, eos_last=True)
    for name, why in (("iid", "decides before the denoiser's pass"), ("p2", "masks again what was revealed")):
        with pytest.raises(ValueError, match=f"eos_last does not go with {name}, which {why}"):
            Engine(DENOISER, name, 3, choice)
    assert choice.eos_policy == "last"
    assert results(Engine(DENOISER, "margin", 3, choice).generate(PROMPTS), 0)["num_steps"] == 3
