"""A rule as a teacher against the generation engine: where the rule writes x_0 itself, its order is the teacher's."""

from dataclasses import replace

import pytest
import torch
from accelerate.utils import DistributedType

import unmask
from tests.training.small import padded, small_model
from unmask.decoding.policies import parse_policy
from unmask.errors import UserError
from unmask.recipe import load_recipe, parse_teacher
from unmask.tasks.task import Examples
from unmask.training import teacher
from unmask.training.reading import read_denoiser, selector_features
from unmask.training.run import check_sharding
from unmask.training.teacher import first_logits, reveal_steps

BUDGET = 4
RULES = ["threshold:0.6", "threshold(0.8,paced)", "factor:1.2", "eb:0.5"]
PROMPTS = [[2, 3, 3, 3, 3, 3, 3], [1, 1, 3], [3, 3, 3, 3], [3, 0, 3, 3, 3, 3]]  # 3 is the mask; one is done early


@pytest.fixture(scope="module")
def denoiser():
    return small_model(seed=3).denoiser


def written(denoiser, rule, budget=BUDGET):
    """What the rule writes greedily, as examples x_0, and the steps at which it wrote it."""
    prompts = padded(PROMPTS, [[token == 3 for token in prompt] for prompt in PROMPTS], left=True, extra=1)
    with torch.no_grad():
        out = unmask.generate(
            denoiser, prompts.tokens, parse_policy(rule), budget, attention_mask=prompts.attention_mask
        )
    return Examples(out.tokens, prompts.response, prompts.attention_mask), out.reveal_step.clamp(min=0)


def check(denoiser, rule, budget=BUDGET):
    examples, steps = written(denoiser, rule, budget)
    assert len(set(steps[0].tolist())) > 2, "the test has no power"
    found = reveal_steps(parse_teacher(rule), denoiser, examples, budget)
    assert torch.equal(found, steps), "wrong steps"
    return examples, found


def test_the_order_is_that_of_generation_where_the_rule_writes_x0(denoiser):
    for rule in RULES:
        check(denoiser, rule)


def test_dus_teaches_places(denoiser):
    examples, steps = written(denoiser, "dus")
    found = reveal_steps(parse_teacher("dus"), denoiser, examples, BUDGET)
    assert torch.equal(found, steps)
    assert found[0, examples.response[0]].tolist() == [0, 1, 1, 0, 1, 1]


def test_the_last_step_of_the_budget_reveals_what_is_left(denoiser):
    rule, examples = parse_teacher("threshold:1"), written(denoiser, "threshold:1")[0]
    short, long = (reveal_steps(rule, denoiser, examples, budget) for budget in (3, 5))
    assert (int(short.max()), int(long.max())) == (2, 4)
    assert short[0].bincount().tolist()[1:] == [1, 4], "one a step, then all four that are left"


def test_the_true_tokens_are_filled_in(denoiser):
    """Another x_0 has another order: what the rule would have written is not what it goes on from."""
    examples, steps = check(denoiser, "threshold:0.6")
    other = replace(examples, tokens=torch.where(examples.response, (examples.tokens + 1) % 3, examples.tokens))
    found = reveal_steps(parse_teacher("threshold:0.6"), denoiser, other, BUDGET)
    assert torch.equal(found == 0, steps == 0), "the first step sees no token of the response"
    assert not torch.equal(found, steps)


def test_a_row_has_the_same_order_alone(denoiser):
    examples, steps = check(denoiser, "threshold:0.6")
    for row in range(len(examples)):
        alone = reveal_steps(parse_teacher("threshold:0.6"), denoiser, examples.rows(torch.tensor([row])), BUDGET)
        assert torch.equal(alone[0], steps[row])


def _other_tokens(denoiser, tokens, *rest):
    return read_denoiser(denoiser, (tokens + 1) % 3, *rest)


MISTAKES = {
    "other tokens are filled in": (BUDGET, _other_tokens, selector_features),
    "a step too few": (BUDGET - 1, read_denoiser, selector_features),
    "the margin for the top": (BUDGET, read_denoiser, lambda logits: selector_features(logits)[:, [1, 1, 2]]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_turn_the_check_red(denoiser, monkeypatch, mistake):
    budget, reading, features = MISTAKES[mistake]
    examples, steps = written(denoiser, "threshold:0.6")
    monkeypatch.setattr(teacher, "read_denoiser", reading)
    found = reveal_steps(parse_teacher("threshold:0.6"), denoiser, examples, budget, features)
    assert not torch.equal(found, steps)


def test_scores_start_as_far_apart_as_they_can():
    steps = torch.tensor([[0, 9, 0, 1, 2], [0, 0, 0, 0, 0]])
    response = torch.tensor([[True, False, True, True, True], [True] * 5])
    alpha = first_logits(steps, response).sigmoid()
    torch.testing.assert_close(alpha[0, response[0]], torch.tensor([0.95, 0.95, 0.5, 0.05]))
    torch.testing.assert_close(alpha[1], torch.full((5,), 0.95))


def test_rules_that_cannot_teach():
    for rule in ["iid", "margin", "klass", "threshold(0.9,confidence=sampled)", "learned"]:
        with pytest.raises(UserError, match=r"cannot teach: take threshold, factor, eb or dus, such as threshold:0\.9"):
            load_recipe("gsm8k-30m-order", ["init=runs/denoiser", f"order.teacher='{rule}'"])


def test_what_is_wrong_with_a_teacher_is_said():
    for rule, said in [("threshold:2", "at most 1, got 2"), ("treshold", "did you mean 'threshold'?")]:
        with pytest.raises(UserError) as caught:
            load_recipe("gsm8k-30m-order", ["init=runs/denoiser", f"order.teacher='{rule}'"])
        assert f"teacher = {rule!r}: " in str(caught.value)
        assert said in str(caught.value)


def test_a_teacher_is_refused_where_weights_are_sharded():
    """Processes would make different numbers of passes, and each pass gathers the shards of all."""
    recipe = load_recipe("gsm8k-30m-order", ["init=runs/denoiser"])
    check_sharding(recipe, DistributedType.MULTI_GPU)
    with pytest.raises(UserError, match="launch with DDP instead of FSDP"):
        check_sharding(recipe, DistributedType.FSDP)
    with pytest.raises(UserError, match=r"order.posterior .* launch with DDP instead of FSDP"):
        check_sharding(load_recipe("gsm8k-30m-self", ["init=runs/denoiser"]), DistributedType.FSDP)
    check_sharding(load_recipe("gsm8k-30m-order", ["init=runs/denoiser", "order.teacher=''"]), DistributedType.FSDP)
