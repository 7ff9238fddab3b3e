"""The whole path of a block-causal run, in seconds: recipe, training, evaluation, bound, sample, caches."""

from dataclasses import replace

import pytest
import torch

from unmask.errors import UserError
from unmask.evaluation.bound import evaluate_run_bound
from unmask.evaluation.curve import read_curve
from unmask.evaluation.evaluate import HalfTrunk
from unmask.evaluation.plan import evaluate
from unmask.evaluation.records import read_records
from unmask.models.frozen import FrozenDenoiser
from unmask.models.order_model import OrderModel
from unmask.recipe import EvaluateRecipe, load_recipe
from unmask.tasks import make_task
from unmask.training.run import train

FAST = ["denoise.updates=3", "denoise.batch=8", "order.updates=2", "order.batch=4", "order.trajectories=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("blocks") / "run"
    train(load_recipe("groups-blocks", FAST), out, cpu=True)
    return out


def test_a_run_is_trained_and_evaluated(run):
    model = OrderModel.from_pretrained(run)
    assert (model.block_size, model.selector.block_size, model.selector.budget) == (8, 8, 2)
    records = evaluate(run, policies=["learned", "blocks(8,margin)"], examples=6, cpu=True)
    learned = next(record for record in records if record.spec.learned)
    assert (learned.spec.budget, learned.spec.cache) == (4, "none")  # two steps in each of two blocks
    assert learned.outcome.most_steps <= 4
    assert read_records(run / "results.jsonl")


def test_the_exact_cache_is_not_part_of_a_record(run):
    """It changes no token but for last bits; with another key, a comparison would not find it."""
    with_, without = (
        evaluate(run, policies=["blocks(8,margin)"], steps=[4], examples=6, cache=cache, again=True, cpu=True)[0]
        for cache in ("auto", "none")
    )
    assert with_.key == without.key
    assert with_.verdicts.valid.tolist() == without.verdicts.valid.tolist()


def test_an_approximate_cache_is_part_of_a_record(tmp_path):
    out = tmp_path / "bidirectional"
    train(load_recipe("groups-blocks", [*FAST, "model.block_size=0"]), out, cpu=True)
    asked = {"policies": ["blocks(4,margin)"], "steps": [4], "examples": 6, "cpu": True}
    kept, plain = (evaluate(out, cache=cache, **asked)[0] for cache in ("prefix", "auto"))
    assert (kept.spec.cache, plain.spec.cache) == ("prefix", "none")
    assert kept.key != plain.key
    assert kept.spec.setting != plain.spec.setting
    for rule, message in (("p2", "re-masks anywhere"), ("margin", "writes anywhere")):
        with pytest.raises(UserError, match=f"{rule} {message}.*give a rule inside blocks"):
            evaluate(out, cache="prefix", **asked | {"policies": [rule]})


def test_the_bound_is_that_of_all_blocks(run):
    """Nearly untrained, it is near the uniform one: log 1/8 per token; and below the truth."""
    bound = evaluate_run_bound(run, examples=4, samples=2, cpu=True)
    assert bound.self_bound < bound.true_log_likelihood
    assert 2 < bound.steps <= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ["margin"]}, r"trained for blocks of 8: give the rule as blocks\(8,margin\)"),
        (
            {"policies": ["blocks(4,margin)"], "steps": [4]},
            r"trained for blocks of 8: give the rule as blocks\(8,margin\)",
        ),
        ({"policies": ["p2"]}, "trained for blocks of 8"),
        ({"cache": "dual"}, "cache must be auto, none or prefix"),
    ],
)
def test_bad_input(run, options, message):
    with pytest.raises(UserError, match=message):
        evaluate(run, examples=2, cpu=True, **options)


def test_the_command_line(run, ok, refused):
    ok("sample", run, "--num", "1", "--cache", "none")
    said = refused("evaluate", run, "--policy", "p2", "--steps", 4, "--examples", 2, "--cache", "prefix", "--cpu")
    assert said.startswith("unmask: the denoiser is block-causal and was trained for blocks of 8")


def test_without_an_order_the_rules_that_nobody_chose_are_in_its_blocks(tmp_path, ok):
    recipe = replace(load_recipe("groups-blocks", FAST), order=None, evaluate=EvaluateRecipe())
    train(recipe, tmp_path / "run", cpu=True)
    records = evaluate(tmp_path / "run", examples=2, cpu=True)
    assert [record.spec.policy for record in records] == ["blocks(8,iid)", "blocks(8,top-prob)", "blocks(8,margin)"]
    ok("sample", tmp_path / "run", "--num", "1")


def test_a_curve_is_swept_inside_its_blocks(run, tmp_path, call):
    priced = tmp_path / "priced"
    own = ["order.budget=4", "order.least_budget=2", "order.spread=0"]
    train(load_recipe("groups-blocks", [*FAST, *own]), priced, cpu=True)
    words = ["--curve", "--policy", "learned", "--policy", "margin", "--examples", "4", "--cpu"]
    for folder, caps in ((run, {4}), (priced, {4, 6, 8})):
        code, out, err = call("evaluate", folder, *words)
        assert code == 0, err
        assert out.startswith("learned is ")
        assert "cannot run" not in err
        points = read_curve(folder / "curve.json").points
        assert {point.cap for point in points if point.family == "learned"} == caps
        rules = [point for point in points if point.family == "blocks(8,margin)"]
        assert [point.cap for point in rules] == [point.mean_steps for point in rules] == [4, 6, 8, 10, 12, 16]
    few = evaluate(priced, policies=["learned"], steps=[1, 3], curve=True, examples=4, cpu=True)
    assert {record.spec.budget for record in few} == {3, 8}, "one step is too few for two blocks"
    with pytest.raises(UserError, match=r"give the rule as blocks\(8,threshold:0.97\)"):
        evaluate(priced, policies=["learned", "threshold:0.97"], curve=True, examples=4, cpu=True)


def test_a_response_shorter_than_a_block_is_evaluated(run):
    """Nobody can choose the blocks of a block-causal denoiser."""
    model, task = OrderModel.from_pretrained(run), make_task("groups", groups=2, group_size=2)
    for curve in (False, True):
        asked = {"policies": ["blocks(8,margin)"], "steps": [2], "curve": curve}
        (record,) = evaluate(model, task, **asked, examples=4, cpu=True)
        assert record.mean_steps == 2


def test_what_a_recipe_may_not_say(run):
    for overrides, message in (
        (["order.reward=true"], "one block at a time: set it to false"),
        ([f"init='{run}'", "model.block_size=4"], "has block_size 8, but the recipe's .model. says 4"),
        (["model.block_size=-1"], "block_size must be between 0 and"),
    ):
        with pytest.raises(UserError, match=message):
            train(load_recipe("groups-blocks", [*FAST, *overrides]), run.parent / "other", cpu=True)


def test_wrapped_denoisers_keep_their_blocks_and_their_cache(run):
    denoiser = OrderModel.from_pretrained(run).denoiser
    for wrapped in (HalfTrunk(denoiser), FrozenDenoiser(denoiser)):
        assert (wrapped.block_size, wrapped.can_cache) == (8, True)
        tokens, at = torch.tensor([[1, 2]]), torch.tensor([[0, 1]])
        cache = wrapped.new_cache(1, 2)
        found = wrapped.cached(tokens, at, torch.ones(1, 2, 2).bool(), cache, torch.tensor([0]))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, denoiser.hidden(tokens), atol=0.05, rtol=0.05)
