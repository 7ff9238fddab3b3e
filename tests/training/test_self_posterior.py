"""The objective with the selector as its own posterior: a naive reference, the start, and what a recipe may ask."""

import copy
import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

from tests.training.small import TINY_RECIPE, FixedTask, json_lines, padded, randomised
from unmask.decoding.confidence import DRAWN, FEATURES, confidence, features
from unmask.decoding.generate import generate
from unmask.decoding.policies import EntropyBounded, Learned, OneAtATime, Threshold
from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError
from unmask.evaluation.bound import evaluate_bound
from unmask.evaluation.evaluate import half_selector
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Selector, SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer
from unmask.recipe import load_recipe
from unmask.rng import Purpose, uniforms
from unmask.training.checkpoint import CheckpointError
from unmask.training.reading import with_layout
from unmask.training.run import _check_same_networks, load_task, train
from unmask.training.self_posterior import SelfObjective
from unmask.variational.self_posterior import estimate_self

PRICES, BUDGET, K, SEED = (0.1, 3.0), 4, 3, 5
SEQUENCES = [[0, 1, 2, 0, 1, 1], [2, 2, 1], [1, 0, 0, 2]]
RESPONSES = [[False, False, True, True, True, True], [True, True, True], [True, False, True, True]]
IDS = torch.tensor([7, 2**40, 3])


def model_of(**options):
    # Without positions of their own those of an all-mask response tie, and rounding would rank them.
    shape = BackboneConfig(width=16, layers=1, heads=2, intermediate=16, max_length=8, absolute_positions=True)
    selector = SelectorConfig(8, 1, 2, BUDGET, **{"prices": PRICES, **options})
    model = OrderModel(OrderModelConfig(3, shape, selector=selector), word_level_tokenizer(["a", "b", "c"])).double()
    return randomised(model, std=0.5)


def examples(extra=0):
    return padded(SEQUENCES, RESPONSES, left=True, extra=extra)


def as_it_starts(model):
    """The selector with f = 0."""
    selector = copy.deepcopy(model.selector)
    with torch.no_grad():
        for parameter in selector.out.parameters():
            parameter.zero_()
    return selector


@torch.no_grad()
def naive(model, tokens, response, name, trajectory, budget, price, writes=False, temperature=0.0):
    """One trajectory of one sequence alone: what each step gained and decided, and the tokens at the end."""
    masked, truth, rows = response.clone(), tokens, []
    tokens, rule = tokens.clone(), as_it_starts(model)
    for index in range(budget):
        if not masked.any():
            break
        hidden = model.denoiser.hidden(torch.where(masked, 3, tokens)[None])
        log_p = model.denoiser.logits(hidden).log_softmax(-1)
        position = torch.tensor([*range(len(tokens)), 2**31])
        chosen = log_p[0].argmax(-1)
        if temperature:
            u = uniforms(SEED, Purpose.TOKEN, name, index, position[:-1], dtype=torch.float64)
            chosen = TokenChoice(temperature).sample(log_p[0], u)
        stats, drawn = confidence(log_p), None
        if model.selector.drawn:
            stats["log_proposal"] = log_p.gather(-1, chosen[None, :, None])[..., 0]
            drawn = torch.where(masked, chosen, tokens)[None]
        said = torch.where(masked[..., None], features(stats), 0.0)
        t, total = torch.tensor([budget - 1 - index]), torch.tensor([budget])
        asked = (hidden, said, masked[None], t, None, total, torch.tensor([price], dtype=torch.float64), drawn)
        logits, by_rule = model.selector(*asked), rule(*asked)
        draws = uniforms(SEED, Purpose.TRAJECTORY, name, trajectory, index, position, dtype=torch.float64)
        reveal = masked.clone()
        if t > 0:
            reveal = model.selection.sample(logits, masked[None], draws[None])[0]
        log_mu = log_p[0].gather(-1, truth[:, None])[:, 0]
        both = (model.selection.log_prob(reveal[None], given, masked[None])[0] for given in (logits, by_rule))
        decided, ruled = both if t > 0 else torch.zeros(2)
        expected = float((model.selection.marginal(logits, masked[None])[0] * log_mu).sum()) if t > 0 else 0.0
        rows.append((float(log_mu[reveal].sum()), expected, float(decided), float(decided - ruled)))
        if writes:
            tokens = torch.where(reveal, chosen, tokens)
        masked = masked & ~reveal
    return rows, tokens


def test_a_denoiser_that_learns_along_gets_the_gradient_of_what_was_gained(monkeypatch):
    """The mean over the steps of a trajectory, each with its draw, is the gradient of sum_t g_t; and no other."""
    model, batch, u = model_of(), examples(), torch.tensor([0.1, 0.5, 0.9])
    objective = SelfObjective(model, K, BUDGET, SEED, learn_denoiser=True)
    weights, price = list(model.denoiser.parameters()), torch.ones(3, dtype=torch.float64)
    budget = torch.tensor([4, 2, 3])
    orders = objective.orders(batch, IDS, budget, price)
    steps = orders.holds_mask[..., 0].sum(0)
    total = torch.zeros(3, dtype=torch.float64)
    for row in range(3):
        at = orders.revealed_at[row, 0]
        assert sorted(set(at[at >= 0].tolist())) == list(range(steps[row])), "every step reveals something"
        assert ((at >= 0) == batch.response[row]).all()
        for index in range(steps[row]):
            draw = torch.full((3,), (index + 0.5) / int(steps[row]), dtype=torch.float64)
            monkeypatch.setattr("unmask.training.self_posterior.uniforms", lambda *_, draw=draw, **__: draw)
            total[row] = total[row] + objective._one_step(batch, IDS, orders)[row] / steps[row]
    monkeypatch.undo()
    assert torch.allclose(total, orders.gain[..., 0].sum(0))
    found = torch.autograd.grad(objective(batch, IDS, u).loss, weights)
    drawn = objective.orders(batch, IDS, objective._budgets(IDS), prices_of(u))
    expected = -(objective._one_step(batch, IDS, drawn) / batch.num_response).mean()
    torch.testing.assert_close(found, torch.autograd.grad(expected, weights))


def test_beside_a_reward_the_denoiser_learns_the_true_tokens_on_the_states_of_its_order():
    model, batch, u = model_of(), examples(), torch.tensor([0.1, 0.5, 0.9])
    objective = SelfObjective(model, K, BUDGET, SEED, checker=FixedTask(batch), temperature=0.0, learn_denoiser=True)
    weights = list(model.denoiser.parameters())
    found = torch.autograd.grad(objective(batch, IDS, u).loss, weights)
    drawn = objective.orders(batch, IDS, objective._budgets(IDS), prices_of(u))
    assert (drawn.tokens[:, 0] != batch.tokens)[batch.response].any(), "it wrote something else"
    at, steps = drawn.revealed_at[:, 0], drawn.holds_mask[..., 0].sum(0)
    index = (steps * uniforms(SEED, Purpose.STATE, IDS, dtype=torch.float64)).long()
    earned = []
    for row, real in enumerate(batch.attention_mask):
        tokens, masked = batch.tokens[row][real], (at[row] >= index[row])[real]
        hidden = model.denoiser.hidden(torch.where(masked, 3, tokens)[None])
        log_mu = model.denoiser.logits(hidden)[0].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        earned.append(steps[row] * log_mu[(at[row] == index[row])[real]].sum())
    torch.testing.assert_close(found, torch.autograd.grad(-torch.stack(earned).mean(), weights))


def prices_of(u):
    return (math.log(PRICES[0]) + u.double() * math.log(PRICES[1] / PRICES[0])).exp().float()


@pytest.mark.parametrize(
    ("writes", "start", "temperature", "drawn"),
    [
        *((False, start, 0.0, 0) for start in ("iid", "threshold", "paced", "eb")),
        *((True, "iid", temperature, 0) for temperature in (0.0, 1.0)),
        (True, "threshold", 1.0, 4),
    ],
)
def test_every_trajectory_is_that_of_the_sequence_alone(writes, start, temperature, drawn):
    """Whatever the padding; gains, decisions and tokens, with budgets and prices of their own."""
    model, budget, price = (
        model_of(start=start, drawn=drawn),
        torch.tensor([4, 1, 2]),  # some last steps reveal several tokens
        torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64),
    )
    for extra in (0, 2):
        batch = examples(extra)
        checker = FixedTask(batch) if writes else None
        objective = SelfObjective(
            model, K, BUDGET, SEED, checker=checker, temperature=temperature, reference_weight=0.1
        )
        found = objective.orders(batch, IDS, budget, price)
        T = len(found.gain)
        for row, (sequence, where) in enumerate(zip(SEQUENCES, RESPONSES, strict=True)):
            for trajectory in range(K):
                tokens, response = torch.tensor(sequence), torch.tensor(where)
                words = (int(IDS[row]), trajectory, int(budget[row]), float(price[row]), writes, temperature)
                steps, written = naive(model, tokens, response, *words)
                assert int(found.holds_mask[:, row, trajectory].sum()) == len(steps)
                real = batch.attention_mask[row]
                assert found.tokens[row, trajectory][real].tolist() == written.tolist()
                for index, (gained, expected, decided, deviation) in enumerate(steps):
                    at = T - 1 - index, row, trajectory
                    assert found.gain[at].item() == pytest.approx(0.0 if writes else gained, abs=1e-10)
                    assert found.expected[at].item() == pytest.approx(0.0 if writes else expected, abs=1e-10)
                    assert found.log_p[at].item() == pytest.approx(decided, abs=1e-10)
                    assert found.deviation[at].item() == pytest.approx(deviation, abs=1e-10)


def test_the_loss_is_that_of_the_estimator_and_reaches_the_selector_alone():
    model, batch = model_of(), examples()
    objective = SelfObjective(model, K, BUDGET, SEED)
    u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    outcome = objective(batch, IDS, u)
    price = torch.tensor([PRICES[0] * (PRICES[1] / PRICES[0]) ** float(x) for x in u])
    orders = objective.orders(batch, IDS, torch.full((3,), BUDGET), price)
    wanted = estimate_self(orders.gain, orders.expected, orders.log_p, orders.holds_mask, price)
    assert outcome.loss.item() == pytest.approx((wanted.loss / batch.num_response).mean().item(), abs=1e-6)
    assert float(outcome.metrics["q_steps"]) == pytest.approx(float(orders.holds_mask.sum(0).double().mean()))
    outcome.loss.backward()
    assert all(parameter.grad is None for parameter in model.denoiser.parameters())
    assert sum(float(parameter.grad.abs().sum()) for parameter in model.selector.parameters()) > 1e-3
    model.zero_grad()
    SelfObjective(model, K, BUDGET, SEED, learn_denoiser=True)(batch, IDS, u).loss.backward()
    assert sum(float(p.grad.abs().sum()) for p in model.denoiser.parameters() if p.grad is not None) > 1e-3


def test_the_selectors_graph_may_be_made_in_parts(monkeypatch):
    """Of a few states at a time: the same gradient, and in the forward pass hardly anything is kept."""
    model, batch, u, found = model_of(), examples(), torch.tensor([0.1, 0.5, 0.9]), []
    weights = list(model.selector.parameters())
    for at_once in (BUDGET, 1):
        monkeypatch.setattr("unmask.training.self_posterior.AT_ONCE", at_once)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda x: x
        ):
            loss = SelfObjective(model, K, BUDGET, SEED)(batch, IDS, u).loss
        found.append((loss, torch.autograd.grad(loss, weights), len(kept)))
    (whole, gradient, kept), (parted, in_parts, fewer) = found
    assert whole.item() == pytest.approx(parted.item(), abs=1e-12)
    torch.testing.assert_close(gradient, in_parts)
    assert fewer < kept / 2


def test_without_a_graph_no_hidden_states_are_kept():
    model, batch, kept = model_of(), examples(), []
    objective = SelfObjective(model, K, BUDGET, SEED)
    rollouts = objective._rollouts
    objective._rollouts = lambda *given, **how: kept.append(rollouts(*given, **how)) or kept[-1]
    asked = batch, IDS, torch.full((3,), BUDGET), torch.ones(3)
    drawn = objective.orders(*asked)
    with torch.no_grad():
        for part, again in zip(drawn, objective.orders(*asked), strict=True):
            assert part is again is None or torch.allclose(part, again)
    sizes = [sum(step.states.hidden.numel() for step in steps) for steps, *_ in kept]
    assert sizes[0] > sizes[1] == 0


def test_without_prices_steps_are_free():
    model, batch = model_of(prices=()), examples()
    outcome = SelfObjective(model, K, BUDGET, SEED)(batch, IDS, torch.tensor([0.1, 0.5, 0.9]))
    orders = SelfObjective(model, K, BUDGET, SEED).orders(batch, IDS, torch.full((3,), BUDGET), torch.ones(3))
    wanted = estimate_self(orders.gain, orders.expected, orders.log_p, orders.holds_mask, torch.zeros(3))
    assert outcome.loss.item() == pytest.approx((wanted.loss / batch.num_response).mean().item(), abs=1e-6)
    assert outcome.metrics["value"].item() == pytest.approx((wanted.value / batch.num_response).mean().item(), abs=1e-6)


def test_budgets_are_drawn():
    logs = [2000 * math.log((n + 1) / n) / math.log(5 / 2) for n in (2, 3, 4)]
    for log_uniform, drawn in ((False, [667, 667, 667]), (True, logs)):
        objective = SelfObjective(model_of(), K, 2, SEED, log_uniform=log_uniform)
        counts = torch.bincount(objective._budgets(torch.arange(4000)), minlength=5).tolist()
        assert counts[:2] == [0, 0]
        expected = [*drawn[:2], drawn[2] + 2000]
        assert all(abs(count - wanted) < 100 for count, wanted in zip(counts[2:], expected, strict=True))
    assert (SelfObjective(model_of(), K, BUDGET, SEED)._budgets(torch.arange(50)) == BUDGET).all()


def test_the_reward_is_the_tasks_verdict():
    batch = examples()
    objective = SelfObjective(model_of(), K, BUDGET, SEED, checker=FixedTask(batch), temperature=0.0)
    outcome = objective(batch, IDS, torch.tensor([0.0, 0.0, 0.0]))
    orders = objective.orders(batch, IDS, torch.full((3,), BUDGET), torch.full((3,), PRICES[0]))
    right = (orders.tokens == batch.tokens[:, None]).all(-1).double()
    steps = orders.holds_mask.sum(0)
    assert float(outcome.metrics["reward"]) == pytest.approx(float(right.mean()))
    assert float(outcome.metrics["value"]) == pytest.approx(float((right - PRICES[0] * steps).mean()), abs=1e-6)


def test_answers_that_are_written_again_earn_nothing():
    """Compared up to the first EOS, which is 2; the three sequences wrote 1, 11 and 0, 1 and 1, 00 and 1."""

    class Ended(FixedTask):
        eos_token_id = 2

    objective = SelfObjective(model_of(), 2, BUDGET, SEED, checker=Ended(examples()), distinct=True)
    written = torch.tensor([[[1, 2, 0], [1, 1, 2]], [[0, 2, 1], [1, 2, 1]], [[0, 0, 2], [1, 2, 2]]])
    orders = objective.orders
    objective.orders = lambda *batch: orders(*batch)._replace(tokens=written)
    objective._judged = lambda *_: torch.tensor([[True, True], [True, True], [False, True]])
    metrics = objective(examples(), IDS, torch.zeros(3)).metrics
    assert float(metrics["reward"]) == pytest.approx((0.5 + 1 + 1 + 0 + 0 + 0) / 6)
    assert float(metrics["valid"]) == pytest.approx(5 / 6)


@pytest.mark.parametrize("own", [True, False])
def test_rollouts_are_packed_but_for_denoisers_of_others(own, monkeypatch):
    """Which would get a mask where nothing is padded."""
    where, asked, model = "unmask.training.self_posterior", [], model_of()
    monkeypatch.setattr(f"{where}.with_layout", lambda *given, **how: asked.append(how) or with_layout(*given, **how))
    if not own:
        monkeypatch.setattr(f"{where}.FrozenDenoiser", type(model.denoiser))
    SelfObjective(model, K, BUDGET, SEED).orders(examples(), IDS, torch.full((3,), BUDGET), torch.ones(3))
    assert asked == [{"any_number": own}] * len(asked)
    assert len(asked) > 1


def test_a_reward_does_not_look_at_the_true_tokens():
    """A denoiser may give them no mass at all."""
    model, batch, losses = model_of(), examples(), []
    logits = model.denoiser.logits
    model.denoiser.logits = lambda hidden: logits(hidden).index_fill(-1, torch.tensor([2]), -torch.inf)
    for tokens in (batch.tokens, torch.where(batch.response, 1, batch.tokens)):
        given = dataclasses.replace(batch, tokens=tokens)
        objective = SelfObjective(model, K, BUDGET, SEED, checker=FixedTask(batch), temperature=1.0)
        objective._judged = lambda written, _: (written.sum(-1) % 2).bool()
        losses.append(objective(given, IDS, torch.tensor([0.1, 0.5, 0.9])).loss.item())
    assert math.isfinite(losses[0])
    assert losses[0] == losses[1]


def test_the_kl_from_the_rule_of_the_start():
    """None at first; later it is in the value with its weight, and is told."""
    batch, u, model = examples(), torch.zeros(3), model_of(start="threshold")
    plain, pulled = (
        SelfObjective(model, K, BUDGET, SEED, reference_weight=weight)(batch, IDS, u).metrics for weight in (0.0, 0.5)
    )
    assert float(pulled["value"]) == pytest.approx(float(plain["value"] - 0.5 * pulled["reference_kl"]), abs=1e-6)
    assert abs(float(pulled["reference_kl"])) > 1e-3
    assert "reference_kl" not in plain
    model.selector = as_it_starts(model)
    at_first = SelfObjective(model, K, BUDGET, SEED, reference_weight=0.5)(batch, IDS, u)
    assert float(at_first.metrics["reference_kl"]) == pytest.approx(0.0, abs=1e-10)


def test_at_the_start_it_is_a_threshold():
    """s >= 0 where c >= c*, at every price; c* from 0.995 to 0.6."""
    selector = Selector(SelectorConfig(8, 1, 2, BUDGET, prices=PRICES, start="threshold"), 16)
    top = torch.linspace(0.5, 0.999, 400)
    said = torch.stack([top, top, top], -1)[None]
    masked, t = torch.ones(1, 400, dtype=torch.bool), torch.tensor([2])
    for price, wanted in ((PRICES[0], 0.995), (PRICES[1], 0.6), (math.sqrt(PRICES[0] * PRICES[1]), None)):
        s = selector(torch.randn(1, 400, 16), said, masked, t, None, None, torch.tensor([price]))[0]
        if wanted is None:  # half-way in log-odds
            odds = sum(math.log(c / (1 - c)) for c in (0.995, 0.6)) / 2
            wanted = 1 / (1 + math.exp(-odds))
        assert ((s >= 0) == (top >= wanted)).all()


@pytest.mark.parametrize("thresholds", [(0.995, 0.6), (0.5, 0.5)])
@pytest.mark.parametrize(("paced", "drawn"), [(False, 0), (True, 0), (False, 4), (True, 4)])
def test_read_greedily_at_the_start_it_is_the_rule(paced, drawn, thresholds):
    """Token by token, also where no confidence reaches the threshold, and with fewer or more steps than T."""
    model = model_of(start="paced" if paced else "threshold", thresholds=thresholds, drawn=drawn)
    sampled = {"confidence": "sampled"} if drawn else {}
    start, canvas = as_it_starts(model), torch.full((40, 8), 3)
    canvas[:, 0] = torch.arange(40) % 3
    for (price, c), steps in itertools.product(zip(PRICES, thresholds, strict=True), (BUDGET, 3, 2, 6, 8)):
        ours, rule = (
            generate(model.denoiser, canvas, policy=policy, max_steps=steps, temperature=float(drawn > 0), seed=0)
            for policy in (Learned(start, price=price, deterministic=True), Threshold(c, paced=paced, **sampled))
        )
        assert ours.reveal_step.tolist() == rule.reveal_step.tolist()
        assert ours.tokens.tolist() == rule.tokens.tolist()


def test_read_greedily_at_the_start_it_is_entropy_bounded():
    model = model_of(start="eb", thresholds=(0.05, 1.5))
    start, canvas = as_it_starts(model), torch.full((40, 8), 3)
    canvas[:, 0] = torch.arange(40) % 3
    between = math.sqrt(PRICES[0] * PRICES[1]), math.sqrt(0.05 * 1.5)  # half-way in the logarithms
    mean_steps = []
    for (price, gamma), steps in itertools.product(((PRICES[0], 0.05), between, (PRICES[1], 1.5)), (BUDGET, 2, 8)):
        ours, rule = (
            generate(model.denoiser, canvas, policy=policy, max_steps=steps, temperature=0.0)
            for policy in (Learned(start, price=price, deterministic=True), EntropyBounded(gamma))
        )
        assert ours.reveal_step.tolist() == rule.reveal_step.tolist()
        mean_steps.append(float(ours.num_steps.double().mean()))
    assert mean_steps[2] > mean_steps[5] > mean_steps[8], "a larger gamma takes fewer steps"
    selector = model.selector
    said = torch.tensor([[0.9, 0.0, 0.5], [0.9, 0.0, 0.4], [0.2, 0.0, 2.0], [0.95, 0.0, 9.0]]).expand(2, -1, -1)
    masked = torch.tensor([[True, True, True, False], [False] * 4])
    logits = selector.start_logits(said, masked, torch.tensor([2, 2]), torch.tensor([PRICES[0]] * 2))
    lost = torch.tensor([1e-6, 0.4, 0.9])  # the surest first, of equals the leftmost
    torch.testing.assert_close(logits[0, :3].double(), 2 * (math.log(0.05) - lost.log()).double(), rtol=1e-4, atol=1e-4)
    assert logits[1].tolist() == [0.0] * 4


def test_a_paced_start_ranks_as_the_rule():
    """Among equal confidences the leftmost, low ones too; a row without masks has finite logits."""
    selector = Selector(SelectorConfig(8, 1, 2, BUDGET, prices=PRICES, start="paced"), 16)
    top = torch.tensor([[0.2, 0.1, 0.2, 0.2, 0.2, 0.1], [0.7, 0.7, 0.7, 0.3, 0.1, 0.1], [0.5] * 6])
    masked = torch.tensor([[True] * 6, [False, *[True] * 5], [False] * 6])
    for price, t, wanted in [
        (PRICES[0], 2, [[0, 2], [1, 2], []]),  # k = 2
        (PRICES[0], 1, [[0, 2, 3], [1, 2, 3], []]),  # k = 3
        (PRICES[1], 5, [[0], [1, 2], []]),  # k = 1, and two reach 0.6
    ]:
        asked = top[..., None].expand(-1, -1, 3), masked, torch.full((3,), t)
        start = selector.start_logits(*asked, torch.full((3,), price))
        assert torch.isfinite(start).all()
        assert [row.nonzero()[:, 0].tolist() for row in masked & (start >= 0)] == wanted
    assert selector.start_logits(*asked, None).equal(selector.start_logits(*asked, torch.full((3,), PRICES[0])))


def recipe_of(tmp_path, *overrides):
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    return load_recipe(str(tmp_path / "tiny.toml"), ["order.posterior=selector", *overrides])


@pytest.mark.parametrize(("reads", "drawn"), [("hidden", False), ("logits", False), ("hidden", True)])
def test_a_run_with_it(tmp_path, ok, reads, drawn):
    """Trained, saved, loaded, and generating at another number of steps and at a price."""
    options = (
        "order.prices=[0.1, 2.0]",
        "order.least_budget=1",
        "order.budget=3",
        "order.spread=2.0",
        "order.reward=true",
    )
    options += (
        "order.reference_weight=0.1",
        f"model.selector.reads={reads}",
        f"model.selector.drawn={str(drawn).lower()}",
    )
    recipe = recipe_of(tmp_path, *options)
    train(recipe, tmp_path / "run", cpu=True)
    model = OrderModel.from_pretrained(tmp_path / "run")
    assert model.scorer is None
    assert (model.selector.read_hidden is None) == (reads == "logits")
    assert model.selector.config.drawn == (model.config.vocab_size + 1 if drawn else 0)
    assert model.selector.prices == (0.1, 2.0)
    recorded = [line for line in json_lines(tmp_path / "run" / "metrics.jsonl") if line.get("stage") == "order"]
    assert {"reward", "q_steps", "value", "reference_kl"} <= recorded[-1].keys()
    if drawn:
        with pytest.raises(UserError, match=r"looks at the tokens that are drawn .*, so it has no bound$"):
            evaluate_bound(model, model, load_task(tmp_path / "run")[1], 4, 2, seed=0)
    told = ok("evaluate", tmp_path / "run", "--policy", "learned", "--steps", "3", "--examples", "4", "--cpu")
    assert "learned without a price is at the lowest, 0.1; at all: `--curve`" in " ".join(told.split())
    rule = Learned(model.selector)
    assert half_selector(rule).reads == rule.reads == (FEATURES | DRAWN if drawn else FEATURES)
    ok("report", tmp_path / "run")
    Learned(model.selector, price=0.5).check(7, torch.tensor([4]))
    with pytest.warns(UserWarning, match=r"price 5 is outside the range that was trained, 0.1 to 2"):
        Learned(model.selector, price=5.0).check(7, torch.tensor([4]))


def test_a_recipe_asks_for_distinct_answers(tmp_path, monkeypatch):
    asked, where = [], "unmask.training.self_posterior.distinct_reward"
    monkeypatch.setattr(where, lambda valid, answers: asked.append(tuple(answers.shape)) or valid.double())
    for distinct in ("true", "false"):
        options = ("task.symbols=9", "order.reward=true", f"order.distinct={distinct}", "order.batch=8")
        train(recipe_of(tmp_path, *options), tmp_path / distinct, cpu=True)
        assert asked == [(8, 2, 4)] * 3


@pytest.mark.parametrize("posterior", ["scorer", "selector"])
def test_one_token_per_step(tmp_path, posterior):
    """LO-ARM, and the same form with the selector as its own posterior: trained, and decoded as trained."""
    recipe = recipe_of(tmp_path, f"order.posterior={posterior}", "order.selection=one", "order.budget=4")
    train(recipe, tmp_path / "run", cpu=True)
    model = OrderModel.from_pretrained(tmp_path / "run")
    recorded = [line for line in json_lines(tmp_path / "run" / "metrics.jsonl") if line.get("stage") == "order"]
    assert recorded[-1]["q_steps"] == 4
    canvas = torch.full((5, 4), model.denoiser.mask_token_id)
    for policy in (Learned(model.selector), Learned(model.selector, deterministic=True), OneAtATime(model.selector)):
        out = generate(model.denoiser, canvas, policy=policy, max_steps=4, seed=0)
        assert out.reveal_step.sort(-1).values.tolist() == [[0, 1, 2, 3]] * 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("order.trajectories=1", r"at least 2 with leave-one-out, got 1: raise it$"),
        ("order.teacher=threshold:0.9", "teacher has no effect with posterior = 'selector'"),
        ("order.least_budget=9 order.prices=[1.0,2.0]", "least_budget = 9 must be at most budget = 2"),
        ("order.prices=[1.0,2.0]", "give least_budget too, such as 2, or leave prices out$"),
        ("order.prices=[2.0,1.0] order.least_budget=2", "prices must be two"),
        ("order.thresholds=[0.9,0.8]", "set start, or leave them out$"),
        ("order.budgets_drawn=log-uniform", "give that too, or leave budgets_drawn out$"),
        (
            "order.start=paced order.least_budget=2 order.thresholds=[0.8,0.9]",
            "thresholds must be two from 1e-6 to 1 - 1e-6",
        ),
        ("order.start=paced order.least_budget=2 order.thresholds=[0.9999999,0.6]", "where log-odds end"),
        ("order.temperature=0.0", "set reward, or leave it out"),
        ("model.selector.drawn=true", "set order.reward = true and order.temperature above 0, or leave it out$"),
        ("model.selector.drawn=true order.reward=true order.temperature=0.0", "drawn for a reward"),
        ("order.distinct=true", "for a reward: set reward = true and a temperature above 0, or leave it out$"),
        ("order.distinct=true order.reward=true order.temperature=0.0", "distinct is for answers drawn for a reward"),
        ("order.distinct=true order.posterior=scorer", "distinct is for posterior = 'selector'"),
        (
            "order.reward=true order.distinct=true task.name=waiting-lines",
            "one prompt, and task waiting-lines has many",
        ),
        ("order.reward=true order.distinct=true order.batch=1", "two sequences or more: raise order.batch"),
        ("order.reward=true order.distinct=true order.accumulate=4", "two sequences or more: raise order.batch"),
        ("order.reward=true order.temperature=-1.0", "temperature must be at least 0, got -1.0"),
        ("order.reward=true order.distinct=true order.batch=32", r"task groups has about \d+ answers, not many more"),
        ("order.selector_rate=0.0", "selector_rate is 0: no order would be learned"),
        ("order.scorer_rate=0.1", "scorer_rate has no effect"),
        ("order.start=threshold", "start = 'threshold' takes its threshold from the price: set order.least_budget"),
        ("order.start=klass", "start must be iid or threshold or paced or eb, got 'klass'$"),
        (
            "order.start=eb order.least_budget=2 order.thresholds=[0.995,0.6]",
            "the lower one first: gamma of start = 'eb'",
        ),
    ],
)
def test_what_does_not_go_together(tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        train(recipe_of(tmp_path, *override.split()), tmp_path / "run", cpu=True)


def test_the_start_does_not_change_midway(tmp_path):
    """Its thresholds reach the model; a checkpoint with others is refused, one from before there were any is not."""
    chosen = ["order.start=paced", "order.least_budget=2", "order.thresholds=[0.9,0.7]"]
    recipe, usual = recipe_of(tmp_path, *chosen), recipe_of(tmp_path, *chosen[:2])
    short = dataclasses.replace(recipe, order=dataclasses.replace(recipe.order, updates=1))
    assert train(short, tmp_path / "run", cpu=True).selector.config.thresholds == (0.9, 0.7)
    facts = json.loads(recipe.to_json())
    saved = SimpleNamespace(path="RUN", facts={"recipe": facts})
    _check_same_networks(saved, "order", recipe)
    with pytest.raises(CheckpointError, match=r"order.thresholds was \[0.9, 0.7\]"):
        _check_same_networks(saved, "order", usual)
    del facts["order"]["thresholds"], facts["model"]["selector"]["drawn"]
    _check_same_networks(saved, "order", usual)
    drawn = ["order.reward=true", "model.selector.drawn=true"]
    with pytest.raises(CheckpointError, match="drawn was False"):
        _check_same_networks(saved, "order", recipe_of(tmp_path, *chosen[:2], *drawn))
    with pytest.raises(CheckpointError, match="thresholds was"):
        _check_same_networks(saved, "order", recipe)


def test_usual_prices_are_in_the_unit_of_what_it_learns_from(tmp_path):
    for given, prices in (
        ([], (0.02, 2.0)),
        (["order.reward=true"], (0.002, 0.3)),
        (["order.prices=[0.1, 1.0]"], (0.1, 1.0)),
    ):
        for recipe in (
            recipe_of(tmp_path, "order.least_budget=2", *given),
            load_recipe("order-for-your-model", given),
        ):
            assert recipe.order.prices == prices
    assert recipe_of(tmp_path, "order.reward=true").order.prices == ()


def test_its_options_need_it(tmp_path):
    with pytest.raises(UserError, match="prices is for posterior = 'selector'"):
        recipe_of(tmp_path, "order.posterior=scorer", "order.prices=[0.1, 1.0]")


def test_a_reward_needs_a_checker(tmp_path):
    recipe = recipe_of(tmp_path, "task.name=text", "order.reward=true")
    with pytest.raises(
        UserError, match=r"^order.reward needs a checker, and task text has none: set task.checker, or leave it out$"
    ):
        train(recipe, tmp_path / "run", cpu=True)
    assert not (tmp_path / "run").exists()


def test_prices_that_cannot_be():
    with pytest.raises(UserError, match="price must be 0 or more, got -1"):
        Learned(model_of().selector, price=-1.0)
    without = Learned(model_of(prices=()).selector, price=1.0)
    with pytest.raises(UserError, match="trained without prices: leave price out"):
        without.check(BUDGET, torch.tensor([4]))
    with pytest.raises(UserError, match="start must be iid or threshold or paced or eb, got 'klass'"):
        SelectorConfig(8, 1, 2, BUDGET, start="klass")
