"""What the benchmarks count and compare with: FLOP by hand, and plain loops that do the same as ours."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.training.small import FixedTask, padded, small_model
from tests.training.test_self_posterior import model_of
from unmask.decoding.generate import Engine
from unmask.decoding.policies import parse_policy
from unmask.decoding.tokens import TokenChoice
from unmask.evaluation.evaluate import HalfTrunk
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser, Selector
from unmask.runtime import process_settings
from unmask.training.self_posterior import SelfObjective


def load(name):
    spec = importlib.util.spec_from_file_location(
        f"{name}_benchmark", Path(__file__).parents[1] / f"benchmarks/{name}.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train, throughput, cache, decode = load("train"), load("throughput"), load("cache"), load("decode")
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
    model = model_of()
    model.denoiser.requires_grad_(False)
    return model


@pytest.mark.parametrize("half", [False, True])
def test_the_order_is_timed_in_the_precision_of_the_trunk(half, monkeypatch):
    model, seen = order_model().float(), []
    run = Selector.run
    monkeypatch.setattr(Selector, "run", lambda self, *given: (seen.append(given[0].dtype), run(self, *given))[1])
    denoiser = HalfTrunk(model.denoiser) if half else model.denoiser
    *_, order = throughput.ways(denoiser, denoiser, model.selector, T, [0.9], [0.5], CPU)
    with process_settings(bf16=half):
        order.make(order.settings[0], throughput.Mode(2))(EXAMPLES)
    assert set(seen) == {torch.bfloat16 if half else torch.float32}


def test_what_a_peer_reads_with_its_cache():
    """Of the last tokens, the rest unchanged, what a whole pass says of them."""
    denoiser = order_model().denoiser
    model, tokens = decode.PeerModel(denoiser, CPU, "eager"), torch.tensor([[0, 1, 3, 2, 3, 1], [2, 3, 1, 0, 0, 3]])
    whole, first = model(tokens).logits, model(tokens, use_cache=True)
    last = model(tokens[:, 2:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(first.logits, whole)
    torch.testing.assert_close(last.logits, whole[:, 2:])


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


LLADA = """
import torch


def generate(model, prompt, attention_mask=None, steps=1, gen_length=1, block_length=1, mask_id=0):
    x = torch.cat([prompt, torch.full((len(prompt), gen_length), mask_id)], dim=-1)
    for i in range(steps):
        c, token = model(x, attention_mask=attention_mask).logits.softmax(-1).max(-1)
        best = c.masked_fill(x != mask_id, -1).topk(gen_length // steps).indices
        x = x.scatter(-1, best, token.gather(-1, best))
    return x
"""

FAST_DLLM = """
import torch


def reveal(x, logits, mask_id, threshold, until):
    c, token = logits.softmax(-1).max(-1)
    c = c.masked_fill((x != mask_id) | (torch.arange(x.shape[1]) >= until), -1)
    sure = (c >= threshold) | ((c == c.amax(-1, keepdim=True)) & (c > 0))
    return torch.where(sure, token, x)


def generate(model, prompt, steps=1, gen_length=1, block_length=1, mask_id=0, threshold=None, factor=None):
    x, passes = torch.cat([prompt, torch.full((len(prompt), gen_length), mask_id)], dim=-1), 0
    while (x == mask_id).any():
        x, passes = reveal(x, model(x).logits, mask_id, threshold, x.shape[1]), passes + 1
    return x, passes


def generate_with_prefix_cache(model, prompt, steps, gen_length, block_length, mask_id, threshold):
    x = torch.cat([prompt, torch.full((len(prompt), gen_length), mask_id)], dim=-1)
    for start in range(prompt.shape[1], x.shape[1], block_length):
        out = model(x, use_cache=True)
        kept = [[each[:, :, :start] for each in layer] for layer in out.past_key_values]
        assert kept[-1][1].shape[2] == start
        x = reveal(x, out.logits, mask_id, threshold, start + block_length)
        while (x[:, start : start + block_length] == mask_id).any():
            logits = model(x[:, start:], past_key_values=kept, use_cache=True).logits
            x[:, start:] = reveal(x[:, start:], logits, mask_id, threshold, block_length)
    return x, 0
"""

DLLM = """
import torch
from llada_of_dllm import generate


class MDLMSampler:
    def __init__(self, model, tokenizer):
        self.model, self.mask = model, tokenizer.mask_token_id

    def sample(self, inputs, steps, max_new_tokens, block_size):
        assert len(inputs[0]) == 4 and block_size == max_new_tokens
        return generate(self.model, torch.stack(inputs), None, steps, max_new_tokens, block_size, self.mask)
"""


@pytest.mark.parametrize(
    ("path", "text", "name", "rule"),
    [
        ("of_llada.py", LLADA, decode.LLADA, "top-prob"),
        ("of_fast.py", FAST_DLLM, decode.FAST_DLLM, "threshold:0.3"),
        ("of_fast.py", FAST_DLLM, decode.FAST_DLLM, "blocks(4,threshold:0.3)"),
        ("package_of_dllm/mdlm.py", DLLM, decode.DLLM, "top-prob"),
    ],
)
def test_a_peer_is_known_by_its_file_and_runs_on_the_same_model(path, text, name, rule, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / "package_of_dllm").mkdir(exist_ok=True)
    (tmp_path / "package_of_dllm" / "__init__.py").touch()
    (tmp_path / "llada_of_dllm.py").write_text(LLADA)
    (tmp_path / path).write_text(text)
    found, peer = decode.open_peer(tmp_path / path)
    assert found == name
    case = decode.Case(32, 2, 2, 64, 50, 3, 4, 8, 4, torch.float64, "cpu", 1, {})
    denoiser, _, prompts = decode.build(case)
    denoiser.head.weight.data.mul_(4)
    policy = parse_policy(rule)
    cached = "prefix" if rule.startswith("blocks") else "auto"
    ours = Engine(denoiser, policy, 4 if rule == "top-prob" else 8, cache=cached).generate(prompts)
    if rule != "top-prob":
        assert 1 < ours.num_steps.double().mean() < 8
    with torch.no_grad():
        theirs = decode.peer_loop(peer, denoiser, policy, case, prompts, "eager")()
    assert theirs.tolist() == ours.tokens.tolist()


def test_a_rule_that_is_not_measured_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "also_of_llada.py").write_text(LLADA)
    monkeypatch.setattr(sys, "path", [*sys.path])
    peer = ["--peer", str(tmp_path / "also_of_llada.py")]
    for words, said in (
        (["margin"], "margin: give one of top-prob, iid, learned"),
        (["iid", *peer], "iid: give one of top-prob"),
    ):
        monkeypatch.setattr(sys, "argv", ["decode.py", "cpu", "--policy", *words])
        with pytest.raises(SystemExit):
            decode.main()
        assert f"--policy {said}\n" in capsys.readouterr().err
