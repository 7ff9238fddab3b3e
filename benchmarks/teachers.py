"""Which rule should teach the order at a budget: its reconstruction with the true tokens; nothing is trained.

    python benchmarks/teachers.py RUN --rule threshold:0.9 --rule threshold:0.98 --budget 5 --budget 10 --out FILE

RUN is a trained denoiser.  A rule reveals x_0 step by step, as it would write it (`unmask.training.teacher`).  For each
budget

    reconstruction    1/N sum_n log mu^n(x_0^n), each token seen from the step that reveals it: the bound
                      of a selector that follows the rule exactly, tau near 0, in nats per token
    mean_steps        how many steps that takes
    without_error     the share of sequences whose every token is the most probable one when it is revealed

One rollout serves all budgets, except for a paced rule, which depends on its budget.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.decoding.policies import Policy, Threshold
from unmask.evaluation.evaluate import device_name, revision
from unmask.models.networks import Denoiser
from unmask.recipe import parse_teacher
from unmask.tasks.task import Examples
from unmask.training.reading import read_denoiser, with_layout
from unmask.training.run import load_run
from unmask.training.teacher import reveal_steps


@torch.no_grad()
def rollout(denoiser: Denoiser, examples: Examples, steps: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step of `steps` [B, L]: log mu of the true tokens still masked, and whether each is the top one."""
    for step in range(int(steps.max()) + 1):
        masked = examples.response & (steps >= step)
        rows = masked.any(-1).nonzero()[:, 0].cpu()
        left, layout = with_layout(examples.rows(rows), denoiser)
        reading = read_denoiser(denoiser, left.tokens, masked[rows], layout)
        best = reading.spread(reading.logits.argmax(-1) == reading.truth)
        log_mu, right = torch.zeros_like(steps, dtype=torch.float32), torch.ones_like(masked)
        log_mu[rows], right[rows] = reading.log_mu.float(), best | ~masked[rows]
        yield log_mu, right


def measure(
    denoiser: Denoiser, examples: Examples, teacher: Policy, budgets: Sequence[int]
) -> Iterator[dict[str, Any]]:
    paced = isinstance(teacher, Threshold) and teacher.paced
    for group in [[budget] for budget in budgets] if paced else [budgets]:
        steps = reveal_steps(teacher, denoiser, examples, max(group))  # [B, L]
        seen = list(rollout(denoiser, examples, steps))
        for budget in group:
            yield {"rule": teacher.name, "budget": budget, **cut_at(budget, examples.response, steps, seen)}


def cut_at(budget: int, response: Tensor, steps: Tensor, seen: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The figures of the rollout where the last step of the budget reveals all that is left."""
    steps = steps.clamp(max=budget - 1)
    log_mu, right = torch.zeros_like(steps, dtype=torch.float32), torch.ones_like(response)
    for step, (log_mu_then, right_then) in enumerate(seen[:budget]):
        now = response & (steps == step)
        log_mu, right = torch.where(now, log_mu_then, log_mu), torch.where(now, right_then, right)
    return {
        "reconstruction": round(float((log_mu.sum(-1) / response.sum(-1)).mean()), 4),
        "mean_steps": round(float((steps.amax(-1) + 1.0).mean()), 3),
        "without_error": round(float(right.all(-1).float().mean()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rule", action="append", required=True)
    parser.add_argument("--budget", type=int, action="append", required=True)
    parser.add_argument("--split", help="the held-out split, where the task has several")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--out", type=Path, help="add the records to this file, one object per line")
    options = parser.parse_args()
    if min(options.budget) < 2:
        parser.error("--budget: give at least 2 steps, in one there is no order")
    try:
        teachers = [parse_teacher(rule) for rule in options.rule]
        model, _, recipe, task = load_run(options.run)
        task = task.on_split(options.split) if options.split else task
    except ValueError as error:
        parser.error(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    denoiser = model.eval().to(device).denoiser
    examples = task.examples(torch.arange(options.examples), "test").to(device)
    about = {"task": task.name, "split": task.held_out, "model": recipe.model.label}
    about |= {"num_examples": options.examples, "device": device_name(device), "revision": revision()}
    for teacher in teachers:
        for row in measure(denoiser, examples, teacher, options.budget):
            shown = "{rule:>22}  T = {budget:<3} {reconstruction:8.4f} {mean_steps:6.2f} {without_error:6.3f}"
            print(shown.format(**row), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(about | row) + "\n")


if __name__ == "__main__":
    main()
