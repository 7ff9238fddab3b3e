"""How work is laid out must not show in the results: continuous batching, fixed shapes, chunks, engines used again."""

import shutil
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.decoding.small import (
    DENOISER,
    MASK,
    POLICIES,
    PROMPTS,
    Recorded,
    V,
    accounts,
    all_results,
    histories,
    prompts_for,
    results,
)
from unmask.decoding import stepper
from unmask.decoding.generate import Engine, generate
from unmask.decoding.policies import Decision, Policy, parse_policy
from unmask.decoding.tokens import TokenChoice
from unmask.variational.selection import NonEmpty

IDS = torch.tensor([100, 7, 31, 8, 2, 55, 1_000_003])
CHOICE = TokenChoice(temperature=1.2, top_p=0.9, guidance=0.5, eos_token_id=4, min_length=1, stop_at_eos=True)
SAMPLED = TokenChoice(temperature=1.0)


def fresh(policy, prompts, choice=SAMPLED, **options):
    """What a call of its own, all prompts at once, eagerly, gives."""
    return all_results(Engine(DENOISER, policy, 6, choice).generate(prompts, **options))


# --- continuous batching ----------------------------------------------------------------------------------------------


def test_the_batch_is_full_while_prompts_wait():
    """The next prompt enters where one has finished, rows leave when none waits, and every pass is counted."""
    for batch_size, guidance in ((1, 0.0), (2, 1.0), (3, 0.0), (6, 0.0), (50, 0.0)):
        denoiser, prompts, policy = Recorded(DENOISER, guided=guidance > 0), PROMPTS, POLICIES["iid"]
        options = {"seed": 4, "batch_size": batch_size, "guidance": guidance, "history": True}
        out = generate(denoiser, prompts, policy, 6, **options)
        for row, history in enumerate(histories(denoiser, out, policy, 6, batch_size)):  # asserts what passes hold
            assert torch.equal(history[0], prompts[row])
            assert len(history) == out.num_steps[row] + 1
            assert accounts(history) == (results(out, row)["reveal_step"], results(out, row)["revisions"])
        assert out.num_forwards == sum(len(seen) for seen in denoiser.passes) == out.num_passes.sum()
        assert max(len(seen) for seen in denoiser.passes) <= min(batch_size, 7)


def test_finished_sequences_are_told(uncompiled):
    for compile in (False, True):
        told = []
        out = generate(
            DENOISER, PROMPTS, POLICIES["top-prob"], 13, batch_size=3, compile=compile, on_finished=told.append
        )
        assert sum(told) == 7
        assert all(told)
        assert max(told) <= 3
        assert out.num_steps.tolist() == [(prompt == MASK).sum() for prompt in PROMPTS]


def test_distributions_of_the_pass_before_belong_to_their_sequence():
    """KLASS, its rows moving as others leave and enter: it is the one rule that the loop keeps something for."""
    policy, seen = POLICIES["klass(0.2,0.05,1)"], set()
    longest_first = sorted(PROMPTS, key=lambda prompt: -(prompt == MASK).sum())
    expected = fresh(policy, longest_first)
    for batch_size in (1, 2, 3, 4):
        out = generate(DENOISER, longest_first, policy, 6, temperature=1.0, batch_size=batch_size)
        assert all_results(out) == expected
        seen |= set(out.num_steps.tolist())
    alone = [
        results(generate(DENOISER, p[None], policy, 6, temperature=1.0, ids=torch.tensor([row])), 0)
        for row, p in enumerate(longest_first)
    ]
    assert expected == alone
    top = fresh(POLICIES["top-prob"], longest_first)
    assert expected != top, "nothing was stable: the test would see no distribution"


# --- chunks of the projection -----------------------------------------------------------------------------------------


def test_chunks_of_the_projection_do_not_show(policy, monkeypatch):
    """More positions than fit a chunk, and a last chunk that is not full; draws for two steps at a time."""
    prompts = prompts_for(policy)
    expected = fresh(policy, prompts, CHOICE)
    monkeypatch.setitem(stepper.CHUNK, "cpu", 4 * V)
    monkeypatch.setattr(stepper, "AHEAD", 2 * 7 * 15, raising=False)
    denoiser = Recorded(DENOISER)
    assert all_results(Engine(denoiser, policy, 6, CHOICE).generate(prompts)) == expected
    assert max(denoiser.projected) <= 4


@pytest.mark.parametrize(
    ("batch_size", "chunk", "choice"), [(3, 4, SAMPLED), (9, 1000, CHOICE)], ids=["small", "larger than needed"]
)
def test_fixed_shapes_do_not_show(policy, batch_size, chunk, choice, uncompiled, monkeypatch):
    """The same tokens, steps and revisions, whatever idles; in one chunk or in many."""
    monkeypatch.setitem(stepper.CHUNK, "cpu", chunk * V * (4 if choice.temperature else 1))
    prompts = prompts_for(policy)[::-1]  # the longest first
    denoiser = Recorded(DENOISER)
    out = Engine(denoiser, policy, 6, choice, batch_size=batch_size, compile=True).generate(prompts, ids=IDS)
    assert all_results(out) == fresh(policy, prompts, choice, ids=IDS)
    assert {len(seen) for seen in denoiser.passes} == {batch_size}  # the shapes did stand still
    assert {rows for rows in denoiser.projected if rows > 1} == {min(chunk, -(-batch_size * 15 // 2))}
    set_up = batch_size  # the first pass is made once more, to see what V is
    assert out.num_forwards == sum(len(seen) for seen in denoiser.passes) - set_up
    assert out.num_forwards >= out.num_passes.sum()


class Rounds(Recorded):
    """Off by what depends on the shapes of its products alone, as rounding is, but far enough to decide everything."""

    def hidden(self, tokens, attention_mask=None):
        return super().hidden(tokens, attention_mask) + self.noise(16, *tokens.shape)

    def logits(self, hidden):
        return super().logits(hidden) + self.noise(V, len(hidden))

    @staticmethod
    def noise(size, *shape):
        generator = torch.Generator().manual_seed(hash(shape))
        return torch.randn(size, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(
    ("name", "option"),
    [("iid", "compile"), ("klass(0.2,0.05,1)", "fixed_shapes"), ("p2", "compile"), ("learned", "fixed_shapes")],
)
def test_with_fixed_shapes_rounding_is_the_same_in_any_batch(name, option, uncompiled):
    """Bit for bit, alone, first and last in a batch that is refilled; responses and paddings of different lengths."""
    canvas = pad_sequence(PROMPTS, batch_first=True)
    attention_mask = pad_sequence([torch.ones_like(prompt) for prompt in PROMPTS], batch_first=True)

    def results_of(rows, **options):
        engine = Engine(Rounds(DENOISER), POLICIES[name], 6, SAMPLED, batch_size=3, **options)
        return all_results(engine.generate(canvas[rows], ids=IDS[rows], attention_mask=attention_mask[rows]))

    whole = list(range(7))
    alone = [results_of([row], **{option: True})[0] for row in whole]
    assert results_of(whole, **{option: True}) == alone
    assert results_of(whole[::-1], **{option: True}) == alone[::-1]
    assert results_of(whole) != [results_of([row])[0] for row in whole], "the shapes do decide"


def test_rows_that_idle_are_not_projected(uncompiled, monkeypatch):
    """One prompt in a batch of three; then four, of which the last is alone: the rule has no say about idle rows."""
    monkeypatch.setitem(stepper.CHUNK, "cpu", 4 * 4 * V)
    for prompts in (1, 4):
        denoiser = Recorded(DENOISER)
        engine = Engine(denoiser, POLICIES["remdm-conf"], 6, SAMPLED, batch_size=3, compile=True)
        engine.generate(PROMPTS[0].repeat(prompts, 1))
        steps = range(len(denoiser.passes) - 6, len(denoiser.passes))
        assert max(denoiser.projected_after(step, step) for step in steps) <= 8  # five tokens: two chunks of four


@dataclass(frozen=True)
class Stubborn(Policy):
    """Reveals nothing, or everything, and always wants to mask again whatever was revealed."""

    key = "stubborn"
    remasks = True
    generous: bool = False

    def decide(self, step):
        return Decision(torch.full_like(step.masked, self.generous), remask=torch.ones_like(step.masked))


def test_the_loop_has_the_last_word(uncompiled):
    """At the last step everything is revealed and nothing masked again, whatever a rule says; the prompt is not its."""
    for compile in (False, True):
        for generous, steps in ((False, 4), (True, 4), (True, 5)):
            out = generate(DENOISER, PROMPTS, Stubborn(generous), steps, batch_size=2, compile=compile)
            for row, prompt in enumerate(PROMPTS):
                got = results(out, row)
                assert MASK not in got["tokens"]
                written = (prompt == MASK).tolist()
                again = [0, steps // 2 if steps % 2 else steps // 2 - 1][generous]  # revealed at 0, masked at 1, ...
                last = steps - 1 if not generous or steps % 2 else steps - 2
                assert got["revisions"] == [0 if not is_written else again for is_written in written]
                assert got["reveal_step"] == [last if is_written else -1 for is_written in written]
                assert [token for token, is_written in zip(got["tokens"], written, strict=True) if not is_written] == [
                    token for token in prompt.tolist() if token != MASK
                ]


# --- an engine used again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "compile"),
    [("klass(0.2,0.05,1)", False)]
    + [(name, True) for name in ("blocks(3,klass(0.2,0.05,1))", "remdm-conf", "learned, bernoulli")],
)
def test_an_engine_used_again_is_as_good_as_new(name, compile, uncompiled):
    """Nothing of the call before is left: shapes, seeds, ids, paddings, and longer responses than before."""
    policy = POLICIES[name]
    long, key = prompts_for(policy)[::-1], [PROMPTS[0], PROMPTS[4]]
    flat = PROMPTS[0].repeat(4, 1)
    padded = torch.ones(4, 8, dtype=torch.bool)
    padded[1:3, 7] = False
    engine = Engine(DENOISER, policy, 6, SAMPLED, batch_size=3, compile=compile)
    for call, (prompts, options) in enumerate(
        [
            (key, {}),
            (long, {"seed": 1}),  # longer sequences
            (long, {"seed": 2, "ids": IDS}),  # the same shape
            (long, {"seed": 1}),
            (flat, {"seed": 3}),  # no padding
            (flat, {"seed": 3, "attention_mask": padded}),  # the same shape with padding
            (flat, {"seed": 4}),
            ([PROMPTS[0], PROMPTS[0][2:]], {"seed": 5}),  # fewer than the batch
            (torch.full((4, 8), MASK), {"seed": 6}),  # the same shape, a longer response
            (long, {"seed": 2, "ids": IDS}),
        ]
    ):
        assert all_results(engine.generate(prompts, **options)) == fresh(policy, prompts, **options), f"call {call}"


def test_a_later_prompt_may_have_the_longest_response(uncompiled):
    """What is set up for the first batch must hold all that come."""
    for name in ("klass(0.2,0.05,1)", "blocks(3,klass(0.2,0.05,1))"):
        policy = POLICIES[name]
        prompts = sorted(prompts_for(policy), key=lambda prompt: (prompt == MASK).sum())
        for compile in (False, True):
            out = Engine(DENOISER, policy, 6, SAMPLED, batch_size=2, compile=compile).generate(prompts)
            assert all_results(out) == fresh(policy, prompts)


def test_an_engine_survives_a_denoiser_that_did_not(uncompiled):
    """After NaN logits half-way, the next call starts from nothing."""

    class Breaks(Recorded):
        broken = False

        def logits(self, hidden):
            logits = super().logits(hidden)
            return torch.full_like(logits, torch.nan) if self.broken and len(self.passes) > 4 else logits

    denoiser = Breaks(DENOISER)
    engine = Engine(denoiser, POLICIES["p2"], 6, SAMPLED, batch_size=3, compile=True)
    denoiser.broken = True
    with pytest.raises(ValueError, match="not finite"):
        engine.generate(PROMPTS)
    denoiser.broken = False
    assert all_results(engine.generate(PROMPTS)) == fresh(POLICIES["p2"], PROMPTS)


# --- the compiler -----------------------------------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    """A denoiser and a selector of a few kernels: g++ takes its time for each.  In float64 it cannot round apart."""

    mask_token_id, budget, selection, prices = 5, 4, NonEmpty(), ()

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(6, 8, dtype=torch.float64, generator=generator)
        self.head = torch.randn(8, 5, dtype=torch.float64, generator=generator)

    def hidden(self, tokens, attention_mask=None):
        hidden = self.table[tokens]
        return hidden + hidden.cumsum(1) * torch.linspace(-1, 1, tokens.shape[1], dtype=torch.float64)[:, None]

    def hidden_with(self, tokens, attend, positions):
        hidden = self.table[tokens]
        before = attend & (positions[:, None] <= positions[..., None])  # as `hidden` where all see all
        return hidden + (before.double() @ hidden) * (positions / 3 - 1)[..., None]

    def logits(self, hidden):
        return hidden @ self.head

    def forward(self, hidden, confidences, masked, t, attention_mask, max_steps, price):
        return hidden[..., 0] + confidences[..., 1] - t.clamp(min=1).log()[:, None]


OPTIONS = {"eos_token_id": (2, 0), "eos_last": True, "suppress_tokens": (1,), "repetition_penalty": 1.3}


@pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="torch.compile on the CPU needs g++ and Python.h",
)
@pytest.mark.parametrize(
    ("name", "options", "constrained"),
    [
        ("learned", {}, False),
        ("p2", {}, False),
        ("blocks(2,credit:0.6)", OPTIONS, True),
        ("wino(0.4,1,confidence=sampled)", {}, False),
    ],
    ids=["learned", "p2", "all options", "wino"],
)
def test_compiled_is_eager(name, options, constrained, monkeypatch):
    """Five prompts in a batch of two; the same engine twice, so that what was compiled is used again.

    Every piece is one program: what the compiler cannot follow it would leave to Python without a word.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True))
    torch._dynamo.reset()
    tiny = Tiny()
    policy = parse_policy(name, tiny)
    prompts = torch.tensor([[row, 5, 5, 5, 4 - row, 5, 5] for row in range(5)])
    prompts[1, 5] = prompts[3, 1] = 2
    choice = TokenChoice(temperature=1.0, **options)
    engine, revised = Engine(tiny, policy, 4, choice, batch_size=2, compile=True), False
    for seed in (0, 1):
        allowed = torch.rand(5, 7, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
        allowed[..., 3] = True
        given = {"seed": seed, "allowed": allowed if constrained else None}
        compiled = engine.generate(prompts, **given)
        assert all_results(compiled) == all_results(Engine(tiny, policy, 4, choice).generate(prompts, **given))
        revised = revised or bool(compiled.revisions.any())
    assert revised == policy.remasks
    assert compiled.num_forwards >= compiled.num_passes.sum()
