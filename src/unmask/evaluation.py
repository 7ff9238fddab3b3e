"""Task x policy x budget -> records; and the held-out bound."""

from __future__ import annotations

import hashlib
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import unmask
from unmask.decoding.generate import generate
from unmask.decoding.policies import Learned, Policy, parse_policy
from unmask.models.networks import Denoiser
from unmask.models.order_model import OrderModel
from unmask.streams import Purpose, uniforms
from unmask.tasks.diversity import distinct_range, num_distinct
from unmask.tasks.task import Task
from unmask.training.objectives import OrderObjective, padding, read_denoiser
from unmask.variational.estimators import NoBaseline

BATCH = 250  # sequences a pass
PICTURED = 24  # sequences whose order is kept for the picture


@dataclass(frozen=True)
class Record:
    """One line of results.jsonl; the same fields everywhere in the project, null where a field does not apply."""

    task: str
    split: str
    model: str
    policy: str
    trained_budget: int | None  # the T that an order was learned for; null for heuristics
    budget: int
    mean_steps: float
    min_steps: int
    max_steps: int
    score: float  # the fraction of valid answers
    ci_low: float  # 95% Wilson interval
    ci_high: float
    num_examples: int
    num_forwards: int  # denoiser rows evaluated
    temperature: float
    eos_policy: str
    selector: str | None  # the selector's form
    denoiser: str  # hash of the weights that chose the tokens
    seconds: float
    seed: int
    device: str
    revision: str
    nothing_selected: float | None  # steps in which a bernoulli selector chose nothing, as a fraction of its steps
    distinct: int | None  # different valid answers; null for tasks with a prompt
    distinct_low: int | None  # 99% range of that number for as many draws from the true distribution
    distinct_high: int | None

    @property
    def diverse(self) -> bool:
        """Whether the valid answers are as varied as true ones."""
        if self.distinct is None or self.distinct_low is None or self.distinct_high is None:
            return True
        return self.distinct_low <= self.distinct <= self.distinct_high


@dataclass(frozen=True)
class Order:
    """The reveal steps of a few sequences, for pictures."""

    task: str
    policy: str
    budget: int
    reveal_step: list[list[int]]
    layout: list[list[int]]


def policy_named(text: str, model: OrderModel) -> Policy:
    """The rule that a string names; those that need a network take the selector of `model`."""
    return parse_policy(text, model.selector)


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95% score interval of a proportion (Wilson 1927): honest at 0 and 1, where the usual one has no width."""
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(
    model: OrderModel,
    task: Task,
    policy: Policy,
    budget: int,
    *,
    examples: int,
    temperature: float,
    seed: int,
    label: str,
    advance: Callable[[int], None] = lambda sequences: None,
) -> tuple[Record, Order]:
    """Generate for the first `examples` of the test split with the denoiser of `model`, and check every answer."""
    device = next(model.parameters()).device
    started = time.perf_counter()
    valid, steps, reveals, answers, forwards, nothing = [], [], [], [], 0, 0
    for ids in torch.arange(examples).split(BATCH):
        truth = task.examples(ids, "test")
        canvas = torch.where(truth.response, model.denoiser.mask_token_id, truth.tokens).to(device)
        out = generate(
            model.denoiser,
            canvas,
            policy,
            budget,
            seed=seed,
            ids=ids,
            temperature=temperature,
            attention=truth.attention.to(device),
        )
        tokens = out.tokens.cpu()
        valid.append(task.valid(tokens, truth))
        answers.append(tokens)
        steps.append(out.num_steps.cpu())
        reveals.append(out.reveal_step.cpu())
        forwards += out.num_forwards
        nothing += int(out.nothing_selected.sum())
        advance(len(ids))
    seconds = time.perf_counter() - started
    right, step_counts = torch.cat(valid), torch.cat(steps)
    num_valid = int(right.sum())
    low, high = wilson_interval(num_valid, examples)
    learned = isinstance(policy, Learned)
    distinct = distinct_low = distinct_high = None
    if task.unconditional:
        distinct = num_distinct(torch.cat(answers)[right])
        distinct_low, distinct_high = distinct_range(task, num_valid) if num_valid else (0, 0)
    record = Record(
        task=task.name,
        split="test",
        model=label,
        policy=policy.name,
        trained_budget=budget if learned else None,
        budget=budget,
        mean_steps=round(float(step_counts.double().mean()), 4),
        min_steps=int(step_counts.min()),
        max_steps=int(step_counts.max()),
        score=num_valid / examples,
        ci_low=round(low, 6),
        ci_high=round(high, 6),
        num_examples=examples,
        num_forwards=forwards,
        temperature=temperature,
        eos_policy="none",
        selector=policy.network.selection.name if isinstance(policy, Learned) else None,
        denoiser=weights_hash(model.denoiser),
        seconds=round(seconds, 3),
        seed=seed,
        device=device_name(device),
        revision=revision(),
        nothing_selected=round(nothing / forwards, 6) if learned else None,
        distinct=distinct,
        distinct_low=distinct_low,
        distinct_high=distinct_high,
    )
    pictured = torch.cat(reveals)[:PICTURED].tolist()
    return record, Order(task.name, policy.name, budget, pictured, [list(group) for group in task.layout])


@dataclass(frozen=True)
class BoundReport:
    """Held-out bounds in nats a response token, each the mean over sequences with its standard error."""

    budget: int
    num_examples: int
    order_bound: float  # the learned order's, all T terms
    order_bound_se: float
    reconstruction: list[float]  # by t = 0..T-1; sums to order_bound with the KLs taken off
    order_kl: list[float]
    mdm_bound: float  # the plain denoiser's, with the IID order of the same number of steps
    mdm_bound_se: float
    entropy: float | None  # of the true distribution: minus it is the most that a bound can be on average
    true_log_likelihood: float | None  # the exact one of these very sequences


@torch.no_grad()
def evaluate_bound(
    model: OrderModel,
    plain: OrderModel,
    task: Task,
    *,
    examples: int,
    trajectories: int,
    seed: int,
    advance: Callable[[int], None] = lambda sequences: None,
) -> BoundReport:
    """The bound on held-out sequences: every one of the T terms of every sequence, `trajectories` draws each."""
    if model.selector is None:
        raise ValueError("this run has no learned order, so it has no order bound: train one with an [order] section")
    if examples < 2:
        raise ValueError(f"a bound with its standard error needs at least 2 examples, got {examples}")
    budget = model.selector.budgets[0]
    device = next(model.parameters()).device
    objective = OrderObjective(model, budget, trajectories, NoBaseline(), seed)
    reconstruction, order_kl, mdm, lengths, exact = [], [], [], [], []
    for ids in torch.arange(examples).split(BATCH):
        batch = task.examples(ids, "test").to(device)
        ids = ids.to(device)
        for t in range(budget):
            times = torch.full_like(ids, t)
            terms, _, _ = objective.terms(batch, ids, times)
            reconstruction.append(terms.reconstruction.mean(-1).cpu())
            order_kl.append(terms.order_kl.mean(-1).cpu())
            masked = batch.response & (
                uniforms(seed, Purpose.MASKING, t, ids[:, None], batch.position) < (t + 1) / budget
            )
            log_mu = read_denoiser(plain.denoiser, batch.tokens, masked, padding(batch)).log_mu
            mdm.append(log_mu.sum(-1).cpu() / (t + 1))
        lengths.append(batch.response.sum(-1).cpu())
        truth = task.examples(ids.cpu(), "test")
        exact.append(task.log_likelihood(truth.tokens, truth))
        advance(len(ids))
    tokens = torch.cat(lengths).double()  # [E]

    def by_time(terms: list[Tensor]) -> Tensor:
        """[T, E] in nats a token."""
        batches = [torch.stack(terms[i : i + budget]) for i in range(0, len(terms), budget)]
        return torch.cat(batches, dim=1).double() / tokens

    F1, KL, plain_terms = by_time(reconstruction), by_time(order_kl), by_time(mdm)
    order_mean, order_se = _mean_and_error((F1 - KL).sum(0))
    mdm_mean, mdm_se = _mean_and_error(plain_terms.sum(0))
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
        true_log_likelihood=_true_log_likelihood(exact, tokens),
    )


def _true_log_likelihood(batches: list[Tensor | None], tokens: Tensor) -> float | None:
    known = [batch for batch in batches if batch is not None]
    return float((torch.cat(known) / tokens).mean()) if known else None


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def weights_hash(denoiser: Denoiser) -> str:
    """Twelve hex digits of the SHA-256 of a denoiser's weights: two records with the same one ran the same weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(denoiser.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:12]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def revision() -> str:
    """The version of unmask, and the commit where it runs from a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return unmask.__version__
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return unmask.__version__
    return f"{unmask.__version__}+{commit.stdout.strip()}"
