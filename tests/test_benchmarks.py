"""What the benchmarks count and compare with: FLOP by hand, and plain loops that do the same as ours."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.training.small import FixedTask, padded, small_model
from unmask.decoding.generate import Engine
from unmask.decoding.policies import parse_policy
from unmask.decoding.tokens import TokenChoice
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser, SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer
from unmask.training.self_posterior import SelfObjective


def load(name):
    spec = importlib.util.spec_from_file_location(
        f"{name}_benchmark", Path(__file__).parents[1] / f"benchmarks/{name}.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train, throughput, cache = load("train"), load("throughput"), load("cache")
CPU = torch.device("cpu")
EXAMPLES = padded(
    [[0, 1, 2, 0, 1, 1], [2, 2, 1, 0, 1], [1, 0, 0, 2, 0]],
    [[False, False, True, True, True, True], [False, True, True, True, True], [True, False, True, True, True]],
    left=True,
)
IDS, K, T = torch.tensor([7, 11, 3]), 3, 4


def test_operations_by_hand():
    """Blocks of 4 * 8^2 + 3 * 8 * 10 = 496 parameters each, two of them; lengths 3 and 5."""
    shape = BackboneConfig(width=8, layers=2, heads=2, intermediate=10)
    one, other = 2 * 992 * 3 + 4 * 2 * 8 * 9, 2 * 992 * 5 + 4 * 2 * 8 * 25
    found = train.trunk_operations(shape, torch.tensor([3, 5]), torch.tensor([[1, 3], [2, 2]]))
    assert found == (1 + 0 + 2) * one + (1 + 1 + 1) * other


def order_model():
    shape = BackboneConfig(width=16, layers=1, heads=2, intermediate=16, max_length=8)
    selector = SelectorConfig(8, 1, 2, T, prices=(0.1, 3.0))
    model = OrderModel(OrderModelConfig(3, shape, selector=selector), word_level_tokenizer(["a", "b", "c"])).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=generator)
    model.denoiser.requires_grad_(False)
    return model


def test_operations_are_those_of_the_passes_that_are_run(monkeypatch):
    model, lengths = order_model(), []
    run = model.denoiser.backbone.run

    def watched(x, cos, sin, attend):
        lengths.extend(attend.ends.diff().tolist() if attend is not None else [x.shape[1]] * x.shape[0])
        return run(x, cos, sin, attend)

    monkeypatch.setattr(model.denoiser.backbone, "run", watched)
    objective = train.Counted(model, K, T, 0)
    objective(EXAMPLES, IDS, torch.tensor([0.1, 0.5, 0.9]))
    ((tokens, steps),) = objective.counted
    assert steps.unique().numel() > 1
    by_pass = train.trunk_operations(model.config.denoiser, torch.tensor(lengths), torch.ones(len(lengths), 1))
    assert train.trunk_operations(model.config.denoiser, tokens, steps) == by_pass


@pytest.mark.parametrize("rewarded", [False, True])
def test_the_plain_rollouts_have_the_same_loss_and_gradient(rewarded):
    model, options = order_model(), {"temperature": 0.0, "checker": FixedTask(EXAMPLES) if rewarded else None}
    found = []
    for kind in (SelfObjective, train.PlainRollouts):
        model.zero_grad()
        loss = kind(model, K, T, 0, **options)(EXAMPLES, IDS, torch.tensor([0.1, 0.5, 0.9])).loss
        loss.backward()
        found.append((loss.detach(), model.selector.read_hidden.weight.grad.clone()))
    (ours, our_gradient), (plain, plain_gradient) = found
    assert float(our_gradient.abs().sum()) > 1e-3
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(our_gradient, plain_gradient)


@pytest.mark.parametrize(
    ("threshold", "rule", "steps"),
    [(float("inf"), "top-prob", 4), (0.5, "threshold:0.5", 4), (0.99, "threshold:0.99", 2)],
)
def test_the_plain_loop_writes_what_the_engine_writes(threshold, rule, steps):
    """Four masks each, so that top-prob with four steps reveals one per step."""
    denoiser = small_model().eval().denoiser
    plain = throughput.plain_loop(denoiser, 2, throughput.Setting(threshold, steps), CPU, EXAMPLES)
    ours = throughput.engine_loop(Engine(denoiser, rule, steps, batch_size=2), CPU, EXAMPLES)
    assert plain.tokens[EXAMPLES.attention_mask].tolist() == ours.tokens[EXAMPLES.attention_mask].tolist()
    assert plain.steps.tolist() == ours.steps.tolist()
    assert (plain.steps < 4).any() == (rule != "top-prob")
    assert plain.rows == 2 * int(plain.steps[:2].max()) + int(plain.steps[2])


def test_the_setting_with_the_fewest_rows_that_is_right_often_enough():
    right, wrong = EXAMPLES.tokens, 1 - EXAMPLES.tokens
    rows = {
        0.1: (torch.cat([right[:1], wrong[1:]]), 10),
        0.2: (torch.cat([right[:2], wrong[2:]]), 20),
        0.3: (right, 30),
    }

    def make(setting, mode):
        tokens, evaluated = rows[setting.value]
        return lambda examples: throughput.Written(tokens, torch.ones(3), evaluated)

    way = throughput.Way("some", [throughput.Setting(value, 4) for value in rows], make)
    chosen = partial(throughput.choose, way, throughput.Mode(3), FixedTask(EXAMPLES), EXAMPLES)
    assert [chosen(least).setting.value for least in (0.0, 0.5, 0.9)] == [0.1, 0.2, 0.3]
    assert chosen(0.5).enough
    assert not chosen(1.1).enough
    assert chosen(1.1).setting.value == 0.3


@pytest.mark.parametrize("seconds", [[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [2.0, 3.0, 1.0]])
def test_a_way_runs_in_the_fastest_mode(monkeypatch, seconds):
    """Not counting the warm-up, in which a compiled one is slower."""
    modes = [throughput.Mode(1), throughput.Mode(1, True), throughput.Mode(2, True)]
    clock = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock[0])

    def make(setting, mode):
        calls = []

        def write(examples):
            clock[0] += 9.0 if mode.compiled and not calls else seconds[modes.index(mode)]
            calls.append(len(examples))
            return throughput.Written(examples.tokens, torch.ones(3), 3)

        return write

    choice = throughput.Choice(throughput.Way("some", [], make), throughput.Setting(0.9, 4), 1.0, True)
    write, mode = throughput.warm(choice, EXAMPLES, modes)
    assert mode == modes[seconds.index(1.0)]
    assert throughput.timed(write, EXAMPLES).seconds == 1.0


def test_puzzles_are_compared_at_equal_mean_steps():
    """Not only at the cap T: here a threshold that runs on is better than the order, in fewer steps."""
    puzzles = load("puzzles")
    run = puzzles.Run(puzzles.RECORDS / "latin-square-self-100")
    assert run.learned.outcome.score == 0.982
    assert max(record.outcome.score for record in run.heuristics(4)) == 0.883
    assert 0.986 <= puzzles._best_mixture(run) < 0.99


@pytest.mark.parametrize("block_size", [0, 2])
def test_a_cache_is_compared_with_none(block_size):
    """The exact cache writes the same; of both, the response alone is compared."""
    torch.manual_seed(0)
    shape = BackboneConfig(width=16, layers=2, heads=2, intermediate=16, max_length=8, block_size=block_size)
    denoiser, task = Denoiser(shape, 3).double().eval(), FixedTask(EXAMPLES)
    row = cache.compared(denoiser, parse_policy("blocks(2,margin)"), 4, EXAMPLES, TokenChoice(), 2, 1, task)
    assert row["cache"] == ("exact" if block_size else "prefix")
    assert row["score"] is not None
    assert row["equal_tokens"] == 1.0 or not block_size


@pytest.mark.parametrize("reads", ["hidden", "logits"])
def test_an_update_beside_a_frozen_denoiser_leaves_it_as_it_was(reads, monkeypatch):
    monkeypatch.setitem(sys.modules, "train", train)
    frozen = load("frozen")
    monkeypatch.setattr(frozen, "BUDGET", 2)
    monkeypatch.setattr(frozen, "TRAJECTORIES", 2)
    denoiser = frozen.random_denoiser(frozen.SHAPES["tiny"], "cpu")
    before = {name: weight.clone() for name, weight in denoiser.state_dict().items()}
    row = frozen.measure("tiny", denoiser, reads, "cpu", updates=1, parts=1, compile=False)
    assert all(torch.equal(weight, before[name]) for name, weight in denoiser.state_dict().items())
    assert row["milliseconds"] > 0
    assert row["denoiser_bytes"] == 4 * row["denoiser_parameters"] == 4 * 112_448
    assert row["selector_parameters"] <= 1_000_000
    assert 1 < row["mean_steps"] <= 2
