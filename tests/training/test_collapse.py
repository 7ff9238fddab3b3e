"""The collapse guard: loud when an order or a denoiser is lost, silent otherwise."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.training.small import TINY_RECIPE, FixedTask, json_lines, padded
from unmask.recipe import Optimisation, load_recipe
from unmask.tasks.puzzles.groups import Groups
from unmask.training.checkpoint import Checkpoint
from unmask.training.collapse import PATIENCE, CollapseGuard
from unmask.training.loop import Stage, run_stage
from unmask.training.metrics import Metrics
from unmask.training.objectives import Outcome
from unmask.training.run import train
from unmask.training.state import StageState

BUDGET = 5
TASK = FixedTask(padded([[2, 0, 1]], [[True] * 3]))


def good(**values):
    return {"elbo": -1.0, "q_steps": 4.0, "saturated": 0.2, **values}


def guard_of(budget=BUDGET, restored_rate=0.0):
    """A guard of one number."""
    parameter = nn.Parameter(torch.zeros(1))
    return CollapseGuard({"weight": parameter}, torch.optim.AdamW([parameter]), budget, restored_rate)


def said(guard, recorded, updates=200):
    """What a guard says over so many updates of the same metrics, and when."""
    return [(update, why) for update in range(updates) if (why := guard.watch(recorded)) is not None]


BAD = {
    "reveals everything at once": good(q_steps=1.0),
    "saturated": good(saturated=1.0),
    "nats per token, its best was -1.00": good(elbo=-2.0),
}


def test_each_sign_is_reported_once_and_not_before_it_has_lasted():
    for words, bad in BAD.items():
        guard = guard_of()
        assert said(guard, good()) == []
        found = said(guard, bad)
        assert len(found) == 1
        assert words in found[0][1]
        assert PATIENCE <= found[0][0] < 3 * PATIENCE


def test_noise_is_not_a_collapse():
    guard, draw = guard_of(), random.Random(0)
    for _ in range(3000):
        noisy = good(elbo=-1 + draw.gauss(0, 0.8), q_steps=draw.choice([1.0, 5.0]), saturated=draw.random())
        assert guard.watch(noisy) is None


def test_a_short_fall_is_not_a_collapse():
    guard = guard_of()
    for _ in range(10):
        assert said(guard, good()) == []
        assert said(guard, good(elbo=-3.0), PATIENCE // 2) == []


def test_a_selector_that_is_its_own_posterior_is_watched_by_its_value():
    """Its bound may fall while the value rises, because fewer steps are paid for."""
    guard = guard_of()
    assert said(guard, {"value": -1.0, "elbo": -0.5, "q_steps": 4.0}) == []
    assert said(guard, {"value": -0.9, "elbo": -1.5, "q_steps": 3.0}) == []
    [(_, why)] = said(guard, {"value": -2.0, "elbo": -0.5, "q_steps": 4.0})
    assert "the value is" in why


def test_a_denoiser_is_watched_by_its_bound_alone():
    guard = guard_of(budget=None)
    assert said(guard, {"loss": 0.4, "elbo": -0.4}) == []
    assert said(guard, {"loss": 0.6, "elbo": -0.6}) == []
    [(_, why)] = said(guard, {"loss": 1.3, "elbo": -1.3})
    assert "nats per token, its best was -0.40" in why


def test_facts_bring_it_back():
    one, other = guard_of(), guard_of()
    said(one, good())
    said(one, good(elbo=-2.0), PATIENCE)
    other.load(one.facts(), {}, {})
    assert said(one, good(elbo=-2.0)) == said(other, good(elbo=-2.0)) != []


CLIFF, UPDATES = -1.2, 260  # the weight falls by 1/100 an update


class Falling(nn.Module):
    """The weight falls, and its bound becomes better and better until it goes over the cliff."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, examples, ids, u):
        weight = self.weight.detach()[0]
        metrics = {
            "elbo": torch.where(weight < CLIFF, -5.0, -1.0 - weight * 0.1),
            "q_steps": torch.tensor(3.0),
        }
        return Outcome(self.weight.sum(), metrics)


def run(tmp_path, restored_rate, what="order"):
    objective = Falling()
    objective.budget = BUDGET if what == "order" else None
    restore = {"on_collapse": "restore", "restored_rate": restored_rate} if restored_rate else {}
    how = Optimisation(updates=UPDATES, batch=2, warmup=0, final_rate=1.0, **restore)
    path = tmp_path / "metrics.jsonl"
    rates = {"scorer": (objective, 1e-2)}
    run_stage(Stage.ORDER, objective, rates, how, TASK, 0, Accelerator(cpu=True), Metrics(path))
    return objective, [line for line in json_lines(path) if "event" in line], json_lines(path)


def test_a_collapse_is_reported_loudly(tmp_path, capsys):
    objective, events, _ = run(tmp_path, 0.0)
    assert len(events) == 1
    assert "THE ORDER HAS COLLAPSED: the bound is" in events[0]["event"]
    assert "on_collapse = 'restore'" in events[0]["event"]
    assert f"order, update {events[0]['update']}: THE ORDER HAS COLLAPSED" in capsys.readouterr().err
    assert objective.weight < -2.5, "and nothing else happens"


def test_the_advice_is_for_what_has_collapsed(tmp_path):
    _, [event], _ = run(tmp_path, 0.0, "denoiser")
    assert "THE DENOISER HAS COLLAPSED" in event["event"]
    assert "try a smaller learning_rate, a longer warmup, or on_collapse = 'restore'" in event["event"]


def test_a_collapsed_order_is_never_the_best():
    """One that was collapsed from the first update on has nothing to go back to."""
    guard = guard_of(restored_rate=0.5)
    for _ in range(3 * PATIENCE):
        guard.watch(good(q_steps=1.0))
        assert not guard.at_best
    for _ in range(3 * PATIENCE):
        guard.watch(good(elbo=-0.9))
    assert guard.at_best


def test_the_average_of_a_collapsed_order_is_given_up():
    module = nn.Linear(1, 1, bias=False)
    how = Optimisation(updates=1, batch=1, ema=0.9, on_collapse="restore")
    state = StageState(module, torch.optim.AdamW(module.parameters()), how)
    for bound in [-1.0] * (3 * PATIENCE) + [-9.0] * (2 * PATIENCE):
        state.update += 1
        nn.init.constant_(module.weight, state.update)
        state.average.update()
        state.judge([], {"elbo": bound})
        if state.guard.restored_at == state.update:
            break
    state.average.update()
    assert module.weight.item() == state.average.values["weight"].item() == state.guard.best["weight"].item() > 0


@pytest.mark.parametrize("what", ["order", "denoiser"])
def test_the_best_weights_are_restored_at_a_smaller_rate(tmp_path, what):
    objective, events, lines = run(tmp_path, 0.25, what)
    assert len(events) == 1
    assert f"THE {what.upper()} HAS COLLAPSED" in events[0]["event"]
    assert f"the best {what} is restored, learning rates times 0.25" in events[0]["event"]
    restored = events[0]["update"]
    factors = {line["update"]: line["rate_factor"] for line in lines if "rate_factor" in line}
    later = {update: min(1.0, (update - restored) / PATIENCE) * 0.25 for update in factors if update > restored}
    assert factors == pytest.approx({update: later.get(update, 1.0) for update in factors})
    assert 0 < len([factor for factor in later.values() if factor < 0.25]) < len(later)
    since = range(1, UPDATES - restored)
    best = objective.weight.item() + sum(1e-2 * 0.25 * min(1.0, i / PATIENCE) for i in since)  # AdamW moves by the rate
    assert -0.01 * (PATIENCE + 10) < best < -0.01 * (PATIENCE - 10), "the first weights that proved good"


def test_weights_are_the_best_when_they_have_lasted_and_never_from_the_edge_of_a_fall():
    """The bound falls once they were taken, and rises again before that is called a collapse."""
    guard = guard_of(budget=None, restored_rate=0.5)
    update, taken = 0, []
    for bounds in ([-1.0] * (2 * PATIENCE), [-2.0] * 20, [-0.5] * (3 * PATIENCE)):
        for bound in bounds:
            update += 1
            nn.init.constant_(guard.parameters["weight"], update)
            assert guard.after_update(update, {"elbo": bound}) is None
            taken.append(int(guard.best["weight"].item()) if guard.best else 0)
    fell, rose = 2 * PATIENCE, 2 * PATIENCE + 20
    assert taken[fell - 2 : fell + 1] == [0, PATIENCE, PATIENCE]
    assert set(taken[fell:]) - {PATIENCE} > set()
    assert all(best == PATIENCE or best > rose for best in taken[fell:])


def test_a_checkpoint_holds_what_may_be_restored():
    states = []
    for weight in (1.0, 2.0):
        module = nn.Linear(1, 1, bias=False)
        nn.init.constant_(module.weight, weight)
        how = Optimisation(updates=1, batch=1, on_collapse="restore")
        states.append(StageState(module, torch.optim.AdamW(module.parameters()), how))
    saved, loaded = (state.guard for state in states)
    saved.best, saved.candidate = ({"weight": torch.full((1, 1), value)} for value in (3.0, 4.0))
    saved.candidate_at, saved.restored_at, saved.rate_scale = 60, 40, 0.5
    states[1].load(Checkpoint(Path("here"), states[0].tensors(), {"update": 70, **states[0].facts()}))
    assert (loaded.best, loaded.candidate) == (saved.best, saved.candidate)
    assert (loaded.candidate_at, loaded.rate_factor(70)) == (60, 0.5 * 31 / PATIENCE)
    assert states[1].parameters["weight"].item() == 1.0


@dataclass(frozen=True)
class Turning(Groups):
    """3 * PATIENCE updates of one sequence, then puzzles, of which no denoiser foretells log(3) / 2 nats per token."""

    def order(self, seed, stage, positions):
        return positions

    def examples(self, ids, split):
        examples = super().examples(ids, split)
        return replace(examples, tokens=torch.where(ids[:, None] < 8 * 3 * PATIENCE, 0, examples.tokens))


def test_a_run_whose_denoiser_becomes_worse_says_so(tmp_path):
    """The bound falls because the task turns, on any machine; a second collapse would need PATIENCE more updates."""
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    rates = ["batch=8", "learning_rate=0.01", "final_rate=1", f"updates={6 * PATIENCE}", "on_collapse=restore"]
    overrides = ["task.name=tests.training.test_collapse:Turning", "order.updates=1", *(f"denoise.{r}" for r in rates)]
    train(load_recipe(tmp_path / "tiny.toml", overrides), tmp_path / "run", cpu=True)
    lines = [line for line in json_lines(tmp_path / "run" / "metrics.jsonl") if line["stage"] == "denoise"]
    [event] = [line for line in lines if "event" in line]
    assert "THE DENOISER HAS COLLAPSED: the bound is" in event["event"]
    assert "is restored, learning rates times 0.5" in event["event"]
    assert lines[-1]["rate_factor"] == 0.5
