"""The held-out bound of a run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from unmask.errors import UserError
from unmask.evaluation.evaluate import BATCH, check_examples
from unmask.evaluation.plan import open_run
from unmask.fields import build
from unmask.files import write_text
from unmask.jsonl import ResultsError, sealed, unsealed
from unmask.models.order_model import OrderModel
from unmask.progress import progress
from unmask.rng import Purpose, uniforms
from unmask.runtime import Processes
from unmask.tasks.task import Task
from unmask.training.objectives import OrderObjective
from unmask.training.reading import read_denoiser, with_layout
from unmask.variational.estimators import NoBaseline


@dataclass(frozen=True)
class BoundReport:
    """Held-out bounds in nats per response token, each the mean over sequences with its standard error."""

    budget: int
    num_examples: int
    order_bound: float  # the learned order's, all T terms
    order_bound_se: float
    reconstruction: list[float]  # by t = 0..T-1; sums to order_bound with the KLs subtracted
    order_kl: list[float]
    mdm_bound: float  # the plain denoiser's, with the IID order of the same number of steps
    mdm_bound_se: float
    entropy: float | None  # of the true distribution: minus it is the most that a bound can be on average
    true_log_likelihood: float | None  # the exact one of these very sequences


def evaluate_run_bound(
    run: Path,
    examples: int | None = None,
    trajectories: int = 8,
    seed: int | None = None,
    split: str | None = None,
    trust_task: bool = False,
    cpu: bool = False,
) -> BoundReport:
    """The bound of a run, written to RUN/bound.json; what is not given is the recipe's."""
    model, plain, task, recipe = open_run(run, Processes(cpu).device, split, trust_task)
    seed, number = recipe.seed if seed is None else seed, examples or recipe.evaluate.examples
    bound = evaluate_bound(model, plain, task, number, trajectories, seed)
    write_text(run / "bound.json", sealed(asdict(bound)) + "\n")
    return bound


def read_bound(path: Path) -> BoundReport | None:
    """What `unmask evaluate --bound` wrote, if it was run."""
    if not path.exists():
        return None
    try:
        return build(BoundReport, unsealed(path.read_text(encoding="utf-8")))
    except ValueError:
        raise ResultsError(f"{path} is damaged or from another version: run `unmask evaluate --bound` again") from None


@torch.no_grad()
def evaluate_bound(
    model: OrderModel,
    plain: OrderModel,
    task: Task,
    examples: int,
    trajectories: int,
    seed: int,
) -> BoundReport:
    """The bound on held-out sequences: all T terms of every sequence, each from `trajectories` samples."""
    if model.selector is None:
        raise UserError("this run has no learned order, so it has no order bound: train one with an [order] section")
    if examples < 2:
        raise UserError(f"a bound with its standard error needs at least 2 examples, got {examples}")
    check_examples(task, examples)
    budget = model.selector.budget
    device = next(model.parameters()).device
    objective = OrderObjective(model, trajectories, NoBaseline(), seed)
    batches, lengths, exact = [], [], []
    with progress("bound", examples) as advance:
        for ids in torch.arange(examples).split(BATCH):
            truth = task.examples(ids, "test")
            batch, layout = with_layout(truth, plain.denoiser)
            ids, scores = ids.to(device), objective.scores(truth)
            by_time = []
            for t in range(budget):
                terms, _, _ = objective.terms(truth, ids, torch.full_like(ids, t), scores)
                drawn = uniforms(seed, Purpose.MASKING, t, ids[:, None], batch.position)
                masked = batch.response & (drawn < (t + 1) / budget)
                log_mu = read_denoiser(plain.denoiser, batch.tokens, masked, layout).log_mu
                plain_term = log_mu.sum(-1) / (t + 1)
                parts = (terms.reconstruction.mean(-1), terms.order_kl.mean(-1), plain_term)
                by_time.append(torch.stack([part.cpu().double() for part in parts]))
            batches.append(torch.stack(by_time, dim=1))  # [3, T, B]
            lengths.append(batch.response.sum(-1).cpu())
            exact.append(task.log_likelihood(truth.tokens, truth))
            advance(len(ids))
    tokens = torch.cat(lengths).double()  # [E]
    F1, KL, mdm = torch.cat(batches, dim=2) / tokens  # [T, E] each, in nats per token
    order_mean, order_se = _mean_and_error((F1 - KL).sum(0))
    mdm_mean, mdm_se = _mean_and_error(mdm.sum(0))
    known = [log_likelihood for log_likelihood in exact if log_likelihood is not None]
    return BoundReport(
        budget=budget,
        num_examples=examples,
        order_bound=order_mean,
        order_bound_se=order_se,
        reconstruction=F1.mean(1).tolist(),
        order_kl=KL.mean(1).tolist(),
        mdm_bound=mdm_mean,
        mdm_bound_se=mdm_se,
        entropy=None if task.entropy is None else task.entropy / float(tokens.mean()),
        true_log_likelihood=float((torch.cat(known) / tokens).mean()) if known else None,
    )


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))
