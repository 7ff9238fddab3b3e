"""The training loop: learning rates, clipping, freezing, accumulation, averaging, and what happens to a bad number."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.training.small import FixedTask, json_lines, padded, same, small_model, weights
from unmask.recipe import Optimisation
from unmask.rng import Purpose, integers
from unmask.tasks import make_task
from unmask.training.loop import (
    NonFiniteError,
    Stage,
    _progress_text,
    backward,
    batch_ids,
    learning_rate_factor,
    micro_batches,
    run_stage,
)
from unmask.training.metrics import Metrics
from unmask.training.objectives import DenoiseObjective, OrderObjective, Outcome
from unmask.variational.estimators import LeaveOneOut, MovingAverage

BUDGET, K = 3, 2
TASK = FixedTask(
    padded(
        [[2, 0, 1, 1, 0], [1, 2, 0], [0, 2, 1, 2], [1, 0, 0, 2, 2]],
        [[False, True, True, True, True], [True, False, True], [True, True, True, True], [True] * 5],
    )
)
NETWORKS = ("denoiser", "selector", "scorer")


def stage(**values):
    return Optimisation(**{"updates": 4, "batch": 8, "warmup": 1, **values})


def objectives_of(model, seed=0, learn_denoiser=True):
    return {
        "denoise": DenoiseObjective(model.denoiser, seed),
        "order": OrderObjective(model, K, LeaveOneOut(), seed, learn_denoiser=learn_denoiser),
    }


def rates_of(model, kind, **rates):
    names = ("denoiser",) if kind == "denoise" else NETWORKS
    return {name: (getattr(model, name), rates.get(name, 1e-3)) for name in names}


def run(tmp_path, kind="order", how=None, seed=0, model=None, **rates):
    """A short stage on a small model; the model and the recorded metrics."""
    model = small_model(budget=BUDGET) if model is None else model
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    objective = objectives_of(model, seed, rates.get("denoiser", 1e-3) > 0)[kind]
    how = how or stage()
    accelerator = Accelerator(cpu=True)
    which = Stage.DENOISE if kind == "denoise" else Stage.ORDER
    run_stage(which, objective, rates_of(model, kind, **rates), how, TASK, seed, accelerator, Metrics(path))
    return model, json_lines(path)


class Stub(nn.Module):
    """Two networks with gradients of known norms; `change` is called with the number of the forward pass."""

    def __init__(self, large, change):
        super().__init__()
        self.networks = nn.ModuleDict({"loud": nn.Linear(4, 1, bias=False), "quiet": nn.Linear(4, 1, bias=False)})
        self.large, self.calls, self.change = large, 0, change

    def forward(self, examples, ids, u):
        direction = torch.full((4,), 0.5)  # of norm one
        loss = self.large * (self.networks["loud"].weight @ direction).sum()
        loss = loss + 0.25 * (self.networks["quiet"].weight @ direction).sum()
        loss = self.change(self.calls, loss)
        self.calls += 1
        return Outcome(loss, {"elbo": -loss.detach()})


def run_stub(tmp_path, change=lambda call, loss: loss, large=1000.0, **values):
    stub, path = Stub(large, change), tmp_path / "metrics.jsonl"
    rates = {name: (module, 1e-2) for name, module in stub.networks.items()}
    how = stage(**{"updates": 9, **values})
    try:
        run_stage(Stage.DENOISE, stub, rates, how, TASK, 0, Accelerator(cpu=True), Metrics(path))
    finally:
        stub.recorded = json_lines(path)
    return stub


@pytest.fixture
def steps(monkeypatch):
    """A list that receives, for every optimiser step: gradients and rates before it, weights after it, by group."""
    recorded = []

    class Spy(torch.optim.AdamW):
        def step(self, *arguments, **options):
            gradients = {
                group["name"]: [None if p.grad is None else p.grad.clone() for p in group["params"]]
                for group in self.param_groups
            }
            rates = {group["name"]: group["lr"] for group in self.param_groups}
            result = super().step(*arguments, **options)
            after = {group["name"]: [p.detach().clone() for p in group["params"]] for group in self.param_groups}
            recorded.append({"gradients": gradients, "rates": rates, "weights": after})
            return result

    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    return recorded


def norm(gradients):
    return math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None))


# --- the learning rate ------------------------------------------------------------------------------------------------


def test_warm_up_then_cosine():
    how = stage(updates=24, warmup=4, final_rate=0.1)
    factors = [learning_rate_factor(update, how) for update in range(25)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[14] == pytest.approx((1 + 0.1) / 2), "half-way down"
    assert factors[9] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert all(later < earlier for earlier, later in pairwise(factors[4:]))
    assert factors[24] == pytest.approx(0.1)
    assert factors[23] == pytest.approx(0.1, abs=0.01), "the last update is all but there"


def test_no_warm_up_starts_at_the_full_rate():
    assert learning_rate_factor(0, stage(updates=10, warmup=0)) == 1


def test_a_constant_rate():
    how = stage(updates=10, warmup=0, final_rate=1.0)
    assert [learning_rate_factor(update, how) for update in range(10)] == [1.0] * 10


def test_a_warm_up_longer_than_the_training_only_rises():
    factors = [learning_rate_factor(update, stage(updates=3, warmup=10)) for update in range(3)]
    assert factors == pytest.approx([1 / 11, 2 / 11, 3 / 11])


def test_each_network_has_its_own_rate_and_the_common_factor(tmp_path, steps):
    how = stage(updates=5, warmup=2)
    run(tmp_path, how=how, denoiser=1e-4, selector=2e-3, scorer=3e-3)
    assert len(steps) == 5
    for update, step in enumerate(steps):
        factor = learning_rate_factor(update, how)
        expected = {"denoiser": 1e-4 * factor, "selector": 2e-3 * factor, "scorer": 3e-3 * factor}
        assert step["rates"] == pytest.approx(expected)


# --- clipping ---------------------------------------------------------------------------------------------------------


def test_each_network_is_clipped_by_its_own_norm(tmp_path, steps):
    """Clipped together, the quiet one would be shrunk by the loud one's norm, a factor of 1000."""
    stub = run_stub(tmp_path, updates=1, clip=1.0)
    assert norm(steps[0]["gradients"]["loud"]) == pytest.approx(1.0, rel=1e-4)
    assert norm(steps[0]["gradients"]["quiet"]) == pytest.approx(0.25, rel=1e-6)
    assert stub.recorded[0]["gradient_norm"] == pytest.approx({"loud": 1000.0, "quiet": 0.25}), "before clipping"


def test_the_norm_is_the_recipes(tmp_path, steps):
    run_stub(tmp_path, updates=1, clip=0.125)
    assert norm(steps[0]["gradients"]["loud"]) == pytest.approx(0.125, rel=1e-4)
    assert norm(steps[0]["gradients"]["quiet"]) == pytest.approx(0.125, rel=1e-4)


def test_every_update_has_a_gradient_of_its_own(tmp_path, steps):
    """Nothing is left over from the update before."""
    run_stub(tmp_path, large=0.5, updates=3)
    for step in steps:
        assert norm(step["gradients"]["loud"]) == pytest.approx(0.5)
        assert norm(step["gradients"]["quiet"]) == pytest.approx(0.25)


# --- freezing ---------------------------------------------------------------------------------------------------------


def test_rate_zero_freezes_bit_for_bit(tmp_path):
    """Not even weight decay or the averaging of the weights may touch it."""
    for frozen in NETWORKS:
        before = small_model(budget=BUDGET)
        how = stage(updates=5, weight_decay=0.1, ema=0.7)
        after, recorded = run(tmp_path, how=how, **{frozen: 0.0})
        for network in NETWORKS:
            unchanged = same(weights(getattr(before, network)), weights(getattr(after, network)))
            assert unchanged == (network == frozen), network
        assert set(recorded[0]["gradient_norm"]) == set(NETWORKS) - {frozen}


def test_the_plain_objective_leaves_the_order_alone(tmp_path):
    before = small_model(budget=BUDGET)
    after, _ = run(tmp_path, "denoise")
    assert not same(weights(before.denoiser), weights(after.denoiser))
    assert same(weights(before.selector), weights(after.selector))
    assert same(weights(before.scorer), weights(after.scorer))


# --- gradient accumulation --------------------------------------------------------------------------------------------


def gradients_of(objective, update, index, how, seed=0):
    accelerator = Accelerator(cpu=True)
    return backward(objective, micro_batches(update, index, how, TASK, seed, accelerator), how.batch, accelerator)


@pytest.mark.parametrize(("kind", "accumulate"), [("denoise", 2), ("order", 8)])
def test_accumulation_is_one_big_batch(kind, accumulate):
    found = []
    for parts in (1, accumulate):
        model = small_model(budget=BUDGET)
        objective = objectives_of(model)[kind]
        recorded = gradients_of(objective, 3, 1, stage(accumulate=parts))
        found.append((recorded, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (whole_metrics, whole), (parts_metrics, in_parts) = found
    assert in_parts.keys() == whole.keys()
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-2
    for name, gradient in whole.items():
        assert (in_parts[name] - gradient).abs().max() < 1e-10, name
    assert parts_metrics.keys() == whole_metrics.keys()
    for name, value in whole_metrics.items():
        assert float(parts_metrics[name]) == pytest.approx(float(value), rel=1e-9), name


def test_accumulated_training_is_the_same_training(tmp_path):
    for kind in ["denoise", "order"]:
        whole, _ = run(tmp_path, kind, stage(updates=3))
        in_parts, _ = run(tmp_path, kind, stage(updates=3, accumulate=4))
        start = small_model(budget=BUDGET)
        assert not same(weights(start.denoiser), weights(whole.denoiser))
        for name, tensor in weights(whole).items():
            assert (weights(in_parts)[name] - tensor).abs().max() < 1e-10, name


class Listening(nn.Module):
    """An objective that only keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, examples, ids, u):
        self.seen.append((ids, u))
        return Outcome(torch.zeros((), requires_grad=True), {})


def test_times_and_examples_are_functions_of_seed_stage_and_update():
    """Any update can be said without those before it; another seed, stage or update has other times."""
    times = {}
    for seed, index, update in [(0, 1, 4), (0, 1, 5), (0, 2, 4), (7, 1, 4)]:
        first, again = Listening(), Listening()
        for listening in (first, again):
            gradients_of(listening, update, index, stage(), seed)
        (ids, u), (same_ids, same_u) = first.seen[0], again.seen[0]
        assert torch.equal(u, same_u)
        assert torch.equal(ids, same_ids)
        times[seed, index, update] = tuple(u.tolist())
    assert len(set(times.values())) == 4


def test_every_micro_batch_holds_every_stratum_of_t():
    """Strided slots: with B = 8 and two micro-batches, each sees four times spread over [0, 1)."""
    listening = Listening()
    gradients_of(listening, 5, 2, stage(accumulate=2))
    seen = listening.seen
    ids, u = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert sorted((u * 8).floor().tolist()) == list(range(8)), "stratified over the whole batch"
    for _, part in seen:
        assert sorted((part * 4).floor().tolist()) == list(range(4)), "and over each micro-batch"
    named = [integers(0, Purpose.EXAMPLE, 2, torch.tensor(5 * 8 + slot)).item() for slot in range(8)]
    assert sorted(ids.tolist()) == sorted(named), "seed, stage, update and slot name them"


@pytest.mark.parametrize("name", ["text", "groups"])
def test_no_two_stages_or_epochs_share_a_draw(tmp_path, name):
    """Also where every stage goes through the same few texts: an example that comes again has other draws."""
    (tmp_path / "texts.txt").write_text("\n".join(f"text {i}" for i in range(10)))
    options = {"files": str(tmp_path / "texts.txt"), "cache": str(tmp_path / "cache"), "test_every": 5}
    task = make_task(name, **(options if name == "text" else {}))
    accelerator, how = Accelerator(cpu=True), stage()
    batches = [micro_batches(update, index, how, task, 0, accelerator) for index in range(5) for update in range(2)]
    ids = torch.cat([ids for [(_, ids, _)] in batches])
    assert len(ids.unique()) == 5 * 2 * how.batch


# --- repeatability ----------------------------------------------------------------------------------------------------


def test_same_seed_same_bits(tmp_path):
    for kind in ["denoise", "order"]:
        first, first_metrics = run(tmp_path, kind, seed=3)
        torch.rand(7)  # the global state is nobody's business
        second, second_metrics = run(tmp_path, kind, seed=3)
        assert same(weights(first), weights(second))
        for one, two in zip(first_metrics, second_metrics, strict=True):
            assert {**one, "seconds": 0} == {**two, "seconds": 0}
        other, _ = run(tmp_path, kind, seed=4)
        assert not same(weights(first), weights(other))


# --- averaging --------------------------------------------------------------------------------------------------------


def test_the_average_replaces_the_weights(tmp_path, steps):
    """average_1 = w_1, average_j = d average_{j-1} + (1 - d) w_j, over the weights after each update."""
    decay = 0.6
    model, _ = run(tmp_path, "denoise", stage(updates=5, ema=decay))
    average = steps[0]["weights"]["denoiser"]
    for step in steps[1:]:
        average = [
            decay * old + (1 - decay) * new for old, new in zip(average, step["weights"]["denoiser"], strict=True)
        ]
    last = steps[-1]["weights"]["denoiser"]
    for ours, expected, plain in zip(model.denoiser.parameters(), average, last, strict=True):
        torch.testing.assert_close(ours.detach(), expected, rtol=0, atol=1e-12)
        assert (ours - plain).abs().max() > 1e-6, "the test has no power"


def test_averaging_does_not_change_the_training(tmp_path, steps):
    run(tmp_path, "denoise", stage(updates=3, ema=0.5))
    run(tmp_path, "denoise", stage(updates=3))
    for averaged, plain in zip(steps[:3], steps[3:], strict=True):
        for one, two in zip(averaged["weights"]["denoiser"], plain["weights"]["denoiser"], strict=True):
            assert torch.equal(one, two)


# --- bad numbers ------------------------------------------------------------------------------------------------------


def infinite_gradient(call, loss):
    """A finite loss whose gradient is not: the square root at zero."""
    return loss + ((loss - loss.detach()).sqrt() if call == 2 else 0.0)


BAD = {
    "nan loss": lambda call, loss: loss * (math.nan if call == 2 else 1.0),
    "infinite loss": lambda call, loss: loss + (math.inf if call == 2 else 0.0),
    "infinite gradient": infinite_gradient,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_number_that_is_not_finite_is_skipped_and_counted(tmp_path, steps, bad, capsys):
    stub = run_stub(tmp_path, bad)
    assert len(steps) == 9
    for name in stub.networks:
        assert torch.equal(steps[2]["weights"][name][0], steps[1]["weights"][name][0]), "the third changed nothing"
        assert not torch.equal(steps[3]["weights"][name][0], steps[2]["weights"][name][0])
    assert stub.calls == 9
    events = [line for line in stub.recorded if "event" in line]
    assert [(line["update"], line["skipped"]) for line in events] == [(2, 1)]
    assert "not finite" in events[0]["event"]
    assert "denoise, update 2: skipped" in capsys.readouterr().err
    for name, module in stub.networks.items():
        assert torch.isfinite(module.weight).all()
        assert torch.equal(module.weight, steps[-1]["weights"][name][0])


def bad_from(first, last=math.inf):
    return lambda call, loss: loss * (math.nan if first <= call <= last else 1.0)


def test_too_many_in_a_row_stop_the_run(tmp_path, steps):
    with pytest.raises(NonFiniteError) as caught:
        run_stub(tmp_path, bad_from(2), max_bad=3)
    message = str(caught.value)
    assert message.startswith("denoise, update 4: loss, elbo, gradient of the loud, gradient of the quiet not finite")
    assert "3 updates in a row" in message
    assert ", ".join(map(str, batch_ids(0, 0, 4, stage(), TASK).tolist())) in message, "the examples of the last batch"
    assert "learning rate" in message
    assert len(steps) == 5
    assert torch.equal(steps[4]["weights"]["loud"][0], steps[1]["weights"]["loud"][0]), "those of the last good update"


def test_a_good_one_in_between_starts_the_count_anew(tmp_path, steps):
    stub = run_stub(tmp_path, lambda call, loss: loss * (math.nan if call % 3 else 1.0), max_bad=3)
    assert len(steps) == 9
    assert [line["skipped"] for line in stub.recorded if "event" in line] == [1, 2, 3, 4, 5, 6]


def test_the_bad_part_is_named(tmp_path):
    with pytest.raises(NonFiniteError, match="gradient of the loud, gradient of the quiet not finite"):
        run_stub(tmp_path, infinite_gradient, max_bad=1)


def test_a_skipped_update_does_not_reach_the_moving_average(tmp_path):
    model = small_model(budget=BUDGET)
    baseline = MovingAverage(BUDGET)
    objective = OrderObjective(model, K, baseline, 0)
    forward, calls = objective.forward, []

    def poisoned(*arguments):
        calls.append(0)
        if len(calls) == 2:
            baseline(torch.full((1, K), math.nan), torch.tensor([0]))
            return Outcome(sum(p.sum() for p in model.parameters()) * math.nan, {})
        return forward(*arguments)

    objective.forward = poisoned
    how = stage(updates=3)
    rates = rates_of(model, "order")
    run_stage(Stage.ORDER, objective, rates, how, TASK, 0, Accelerator(cpu=True), Metrics(tmp_path / "m"))
    assert torch.isfinite(baseline.mean).all()
    assert baseline.seen.any()


# --- what is recorded -------------------------------------------------------------------------------------------------

FIELDS = {"stage", "update", "loss", "elbo", "gradient_norm", "rate_factor", "seconds"}


def test_metrics_of_the_plain_objective(tmp_path):
    _, recorded = run(tmp_path, "denoise", stage(updates=3))
    assert [line["update"] for line in recorded] == [0, 2], "the first, every twentieth and the last"
    for line in recorded:
        assert set(line) == FIELDS
        assert line["stage"] == "denoise"
        assert line["elbo"] == -line["loss"]
        assert line["gradient_norm"].keys() == {"denoiser"}
        assert line["rate_factor"] == pytest.approx(learning_rate_factor(line["update"], stage(updates=3)), abs=1e-6)


def test_metrics_of_the_order_objective(tmp_path):
    _, recorded = run(tmp_path, "order", stage(updates=2))
    for line in recorded:
        assert set(line) == FIELDS | {"reconstruction", "order_kl", "q_steps", "saturated"}
        assert line["elbo"] == pytest.approx(line["reconstruction"] - line["order_kl"], rel=1e-9)
        assert 0 < line["q_steps"] <= BUDGET
        assert line["gradient_norm"].keys() == set(NETWORKS)


def test_every_twentieth_update_is_recorded(tmp_path):
    assert [line["update"] for line in run_stub(tmp_path, updates=42).recorded] == [0, 20, 40, 41]


def test_metrics_are_appended(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(update=1)
    Metrics(tmp_path / "metrics.jsonl").write(update=2)
    assert json_lines(metrics.path) == [{"update": 1}, {"update": 2}]


def test_the_metrics_beside_the_progress_are_moving_averages():
    smooth = {}
    first = {"loss": 1.0, "elbo": -1.0, "reconstruction": -0.987, "order_kl": 0.247, "q_steps": 1.875}
    assert _progress_text(smooth, first) == "bound -1.000 recon -0.987 KL 0.247 Q steps 1.875"
    assert _progress_text(smooth, {**first, "elbo": -2.0}).startswith("bound -1.050 recon -0.987")


def test_a_stage_leaves_its_objective_in_evaluation_mode(tmp_path):
    model = copy.deepcopy(small_model(budget=BUDGET)).train()
    run(tmp_path, "order", stage(updates=1), model=model)
    assert not model.training
    assert not any(module.training for module in model.modules())


def test_an_example_with_an_empty_response_is_named():
    task = FixedTask(padded([[2, 0, 1], [1, 2, 0]], [[True, True, True], [False, False, False]]))
    with pytest.raises(ValueError, match=r"training example \d+ has an empty response"):
        micro_batches(0, Stage.DENOISE, stage(batch=2), task, 0, Accelerator(cpu=True))
