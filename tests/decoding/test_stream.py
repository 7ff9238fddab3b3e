"""What stands after each step: the loop of `generate`, looked at on the way."""

import pytest
import torch

from tests.decoding.small import DENOISER, MASK, POLICIES, PROMPTS, all_results, prompts_for
from unmask.decoding import generate as module
from unmask.decoding.generate import Engine, generate
from unmask.decoding.tokens import TokenChoice

CHOICE = TokenChoice(temperature=1.2, guidance=0.5, eos_token_id=4, stop_at_eos=True)
FOUR = [POLICIES[name] for name in ("iid", "threshold:0.7", "p2", "blocks(3,klass(0.2,0.05,1))")]


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"batch_size": 3, "compile": True}], ids=str)
def test_the_last_is_what_generate_returns_and_each_is_one_step_further(policy, options, uncompiled):
    prompts = prompts_for(policy)
    out = Engine(DENOISER, policy, 6, CHOICE, **options).generate(prompts, seed=2, history=True)
    seen = list(Engine(DENOISER, policy, 6, CHOICE, **options).stream(prompts, seed=2))
    assert all_results(seen[-1]) == all_results(out)
    assert seen[-1].num_forwards == out.num_forwards
    assert not out.masked.any()
    before = torch.zeros(len(prompts), dtype=torch.long)
    for each in seen:
        steps = each.num_steps - before
        assert steps.max() == 1
        assert steps.min() >= 0
        assert steps.sum() <= options.get("batch_size", 7)
        assert torch.equal(each.masked, (each.tokens == MASK) & each.attention_mask)
        for row in range(len(prompts)):  # kept under the sequence's own steps, not the loop's
            assert torch.equal(out.history[row, each.num_steps[row]], each.tokens[row])
        before = each.num_steps
    for row, prompt in enumerate(prompts):
        assert torch.equal(out.history[row, 0, out.attention_mask[row]], prompt)
        assert torch.equal(
            out.history[row, out.num_steps[row] :],
            out.tokens[row].expand(len(out.history[row]) - out.num_steps[row], -1),
        )
    assert out.history.shape[1] == out.num_steps.max() + 1


def test_a_history_takes_the_room_of_the_steps_that_are_taken(monkeypatch):
    """Not of max_steps, which may be far more."""
    rooms, new_empty = [], torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape: rooms.append(shape) or new_empty(x, *shape))
    out = generate(DENOISER, PROMPTS, "threshold:0.001", 1000, history=True)
    assert out.history.shape[1] == 2
    rooms = [shape for shape in rooms if len(shape) == 3]
    assert rooms
    assert sum(shape[1] for shape in rooms) <= 3


def test_a_callback_sees_what_the_stream_gives():
    for policy in FOUR:
        told, prompts = [], prompts_for(policy)
        out = generate(DENOISER, prompts, policy, 6, seed=3, batch_size=2, on_step=told.append)
        streamed = list(Engine(DENOISER, policy, 6, batch_size=2).stream(prompts, seed=3))
        assert [all_results(each) for each in told] == [all_results(each) for each in streamed]
        assert all_results(told[-1]) == all_results(out)
        assert out.history is None


def test_nothing_is_built_where_nobody_looks(monkeypatch):
    built = []
    result = module._Turn.result
    monkeypatch.setattr(module._Turn, "result", lambda turn: built.append(turn) or result(turn))
    monkeypatch.setattr(module._Turn, "record", lambda turn: pytest.fail("nobody looks"))
    generate(DENOISER, PROMPTS, "margin", 6, batch_size=3)
    assert len(built) == 1


def test_between_the_steps_the_caller_has_its_own_modes():
    weight = torch.ones(1, requires_grad=True)
    for each in Engine(DENOISER, "margin", 4).stream(PROMPTS):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert (weight * each.tokens).requires_grad  # no inference tensor


def test_streams_that_are_left_or_interleaved_do_not_disturb_an_engine(uncompiled):
    for policy in FOUR:
        prompts = prompts_for(policy)
        expected = [all_results(generate(DENOISER, prompts, policy, 6, seed=seed, temperature=1.0)) for seed in (0, 1)]
        engine = Engine(DENOISER, policy, 6, TokenChoice(temperature=1.0), batch_size=3, compile=True)
        engine.generate(prompts)
        next(engine.stream(prompts, seed=5))
        first, second = engine.stream(prompts, seed=0), engine.stream(prompts, seed=1)
        ends = [None, None]
        for _ in range(40):
            ends = [next(stream, end) for stream, end in zip((first, second), ends, strict=True)]
        assert [all_results(end) for end in ends] == expected
        assert all_results(engine.generate(prompts, seed=1)) == expected[1]
