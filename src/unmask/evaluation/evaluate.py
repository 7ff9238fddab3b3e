"""Task x policy x budget -> records; and the held-out bound."""

from __future__ import annotations

import functools
import hashlib
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import unmask
from unmask.decoding.generate import Engine
from unmask.decoding.policies import NetworkPolicy, Policy, parse_policy
from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError
from unmask.evaluation.verdicts import IDENTITY, Chunk, EvaluationSpec, VerdictFile, Verdicts, joined, verdicts_in
from unmask.models.networks import Denoiser, Selector
from unmask.models.order_model import OrderModel, weights_hash
from unmask.rng import Purpose, uniforms
from unmask.runtime import Processes, process_settings
from unmask.tasks.diversity import distinct_range, sequence_codes
from unmask.tasks.task import Examples, Task
from unmask.training.objectives import OrderObjective
from unmask.training.reading import read_denoiser, with_layout
from unmask.variational.estimators import NoBaseline

BATCH = 250  # sequences a pass
CHUNK = 4 * BATCH  # sequences between two lines of verdicts: the most that a crash loses
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
    nothing_selected: float | None  # steps in which a selector chose nothing, as a fraction of its steps
    distinct: int | None  # different valid answers; null for tasks with a prompt
    distinct_low: int | None  # 99% range of that number for as many draws from the true distribution
    distinct_high: int | None
    # What records of older versions lack; the defaults are what they did.
    top_p: float = 1.0
    top_k: int = 0
    guidance: float = 0.0
    mean_passes: float | None = None  # denoiser passes a sequence, guidance included
    mean_revisions: float | None = None  # re-maskings a response position; null for rules that never re-mask
    trained_seed: int | None = None  # the seed that an order was learned with; null for heuristics
    plain_denoiser: str | None = None  # of a learned order: hash of the denoiser on which its rivals run
    precision: str = "no"  # bf16: the denoiser's trunk under autocast
    score_flexible: float | None = None  # by the task's second way to score, where it has one: the last number
    overlong: int | None = None  # examples that are too long for the model; they count as wrong

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


class Evaluation(NamedTuple):
    """What comes of a policy at a budget."""

    record: Record
    order: Order
    verdicts: Verdicts


def policy_named(text: str, model: OrderModel) -> Policy:
    """The rule that a string names; those that need a network take the selector of `model`."""
    return parse_policy(text, model.selector)


def response_sizes(task: Task, examples: int) -> Tensor:
    """N of the first examples, to check a rule by before anything is generated."""
    return task.examples(torch.arange(min(examples, BATCH)), "test").response.sum(-1)


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
    choice: TokenChoice,
    seed: int,
    label: str,
    trained_seed: int | None = None,
    plain: OrderModel | None = None,
    precision: str = "no",
    stream: VerdictFile | None = None,
    again: bool = False,
    compile: bool = False,
    advance: Callable[[int], None] = lambda sequences: None,
    processes: Processes | None = None,
) -> Evaluation:
    """Generate for the first `examples` of the held-out split with the denoiser of `model`, and check every answer.

    trained_seed, plain: of a learned order, the seed that it was learned with and the model whose denoiser its rivals
        run on; records say both, so that those of many runs can lie in one folder.
    precision: "bf16" runs the denoiser's trunk under autocast; logits and whatever a rule reads stay float32.

    Every chunk of examples is added to `stream` when it is done.  What is already there of this very evaluation is not
    done again, unless `again`: the record is the same as if it had never been interrupted, but for the seconds.
    Several `processes` share every chunk and come to the same record, each of them.
    """
    processes = processes or Processes(cpu=True)
    _check_examples(task, examples)
    policy.check(budget, response_sizes(task, examples))
    spec = _asked(model, task, policy, budget, examples, choice, seed, label, compile, trained_seed, plain, precision)
    chunks = stream.chunks(spec) if stream is not None and not again else []
    done = sum(len(chunk.valid) for chunk in chunks)
    if done:
        advance(done)
    denoiser = model.denoiser if precision == "no" else HalfTrunk(model.denoiser)
    engine = Engine(denoiser, policy, budget, choice, batch_size=min(BATCH, examples), compile=compile)
    for first in range(done, examples, CHUNK):
        ids = torch.arange(first, min(first + CHUNK, examples))
        mine, device = processes.share(ids), next(model.parameters()).device
        with process_settings(bf16=precision == "bf16"):
            part = _evaluate_chunk(engine, task, spec, mine, device, advance) if len(mine) else None
        chunk = joined([found for found in processes.gather(part) if found is not None])
        if len(mine) < len(ids):
            advance(len(ids) - len(mine))  # what the others did
        chunks.append(chunk)
        if stream is not None:
            stream.append(chunk)
    reveals = [row for chunk in chunks for row in chunk.reveal_step]
    order = Order(task.name, policy.name, budget, reveals, [list(group) for group in task.layout])
    return Evaluation(_record(spec, chunks, task, policy.remasks), order, verdicts_in(chunks))


def _check_examples(task: Task, examples: int) -> None:
    """Raise UserError where a task has fewer."""
    if task.test_examples is not None and examples > task.test_examples:
        raise UserError(
            f"task {task.name} has {task.test_examples} {task.held_out} examples: ask for at most as many "
            f"(--examples), not for {examples}"
        )


def _asked(
    model: OrderModel,
    task: Task,
    policy: Policy,
    budget: int,
    examples: int,
    choice: TokenChoice,
    seed: int,
    label: str,
    compile: bool,
    trained_seed: int | None,
    plain: OrderModel | None,
    precision: str,
) -> EvaluationSpec:
    selector = policy.network if isinstance(policy, NetworkPolicy) else None
    learned = selector is not None
    return EvaluationSpec(
        task=task.name,
        split=task.held_out,
        model=label,
        policy=policy.name,
        trained_budget=budget if learned else None,
        budget=budget,
        num_examples=examples,
        temperature=choice.temperature,
        top_p=choice.top_p,
        top_k=choice.top_k,
        guidance=choice.guidance,
        eos_policy=choice.eos_policy,
        selector=selector.selection.name if isinstance(selector, Selector) else None,
        denoiser=weights_hash(model.denoiser),
        seed=seed,
        device=device_name(next(model.parameters()).device),
        compile=compile,
        selector_weights=weights_hash(selector) if isinstance(selector, nn.Module) else None,
        examples=_examples_hash(task.examples(torch.arange(min(examples, PICTURED)), "test")),
        trained_seed=trained_seed if learned else None,
        plain_denoiser=weights_hash(plain.denoiser) if learned and plain is not None else None,
        precision=precision,
    )


class HalfTrunk:
    """A denoiser whose trunk runs in bfloat16 under autocast; its head, and so every score, stays as it is."""

    keeps_no_tensors = True

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser, self.mask_token_id = denoiser, denoiser.mask_token_id

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return self.denoiser.hidden(tokens, attention_mask).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.denoiser.logits(hidden)


def _evaluate_chunk(
    engine: Engine, task: Task, spec: EvaluationSpec, ids: Tensor, device: torch.device, advance: Callable[[int], None]
) -> Chunk:
    """Generate for the test examples `ids`, which follow one another."""
    started = time.perf_counter()
    truth = task.examples(ids, "test")
    canvas = torch.where(truth.response, engine.denoiser.mask_token_id, truth.tokens).to(device)
    out = engine.generate(
        canvas, seed=spec.seed, ids=ids, attention_mask=truth.attention_mask.to(device), on_finished=advance
    )
    tokens = out.tokens.cpu()
    valid = task.valid(tokens, truth)
    flexible = task.metrics(tokens, truth).get("flexible")
    return Chunk(
        spec=spec,
        first=int(ids[0]),
        valid=_marks(valid),
        steps=out.num_steps.tolist(),
        answers=sequence_codes(tokens[valid]).tolist() if task.unconditional else None,
        reveal_step=out.reveal_step[: max(0, PICTURED - int(ids[0]))].tolist(),
        num_forwards=out.num_forwards,
        num_passes=int(out.num_passes.sum()),
        nothing_selected=int(out.nothing_selected.sum()),
        num_revisions=int(out.revisions.sum()),
        num_positions=int(truth.response.sum()),
        seconds=round(time.perf_counter() - started, 6),
        revision=revision(),
        flexible=None if flexible is None else _marks(flexible),
    )


def _marks(valid: Tensor) -> str:
    """A 0 or a 1 for each example."""
    return "".join("1" if right else "0" for right in valid.tolist())


def _record(spec: EvaluationSpec, chunks: list[Chunk], task: Task, remasks: bool) -> Record:
    """What the chunks of a whole evaluation come to."""
    verdicts, examples = verdicts_in(chunks), spec.num_examples
    num_valid, num_steps = int(verdicts.valid.sum()), int(verdicts.steps.sum())
    low, high = wilson_interval(num_valid, examples)
    revisions = sum(chunk.num_revisions or 0 for chunk in chunks)
    distinct = distinct_low = distinct_high = None
    if task.unconditional:
        distinct = len({answer for chunk in chunks for answer in chunk.answers or []})
        distinct_low, distinct_high = distinct_range(task, num_valid) if num_valid else (0, 0)
    return Record(
        **{name: getattr(spec, name) for name in IDENTITY},
        mean_steps=round(num_steps / examples, 4),
        min_steps=int(verdicts.steps.min()),
        max_steps=int(verdicts.steps.max()),
        score=num_valid / examples,
        ci_low=round(low, 6),
        ci_high=round(high, 6),
        num_forwards=sum(chunk.num_forwards for chunk in chunks),
        seconds=round(sum(chunk.seconds for chunk in chunks), 3),
        device=spec.device,
        revision=chunks[-1].revision,
        nothing_selected=(
            round(sum(chunk.nothing_selected for chunk in chunks) / num_steps, 6) if spec.selector else None
        ),
        distinct=distinct,
        distinct_low=distinct_low,
        distinct_high=distinct_high,
        mean_passes=round(sum(chunk.num_passes for chunk in chunks) / examples, 4),
        mean_revisions=round(revisions / sum(chunk.num_positions for chunk in chunks), 6) if remasks else None,
        score_flexible=_flexible(chunks),
        overlong=_overlong(task, examples),
    )


def _overlong(task: Task, examples: int) -> int | None:
    truth = task.examples(torch.arange(examples), "test")
    marks = task.metrics(truth.tokens, truth).get("overlong")
    return None if marks is None else int(marks.sum())


def _flexible(chunks: list[Chunk]) -> float | None:
    marks = [chunk.flexible for chunk in chunks if chunk.flexible is not None]
    if len(marks) < len(chunks):
        return None
    return "".join(marks).count("1") / sum(map(len, marks))


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
        raise UserError("this run has no learned order, so it has no order bound: train one with an [order] section")
    if examples < 2:
        raise UserError(f"a bound with its standard error needs at least 2 examples, got {examples}")
    _check_examples(task, examples)
    budget = model.selector.budget
    device = next(model.parameters()).device
    objective = OrderObjective(model, trajectories, NoBaseline(), seed)
    reconstruction, order_kl, mdm, lengths, exact = [], [], [], [], []
    for ids in torch.arange(examples).split(BATCH):
        truth = task.examples(ids, "test")
        batch, layout = with_layout(truth, plain.denoiser)
        ids, scores = ids.to(device), objective.scores(truth)
        for t in range(budget):
            times = torch.full_like(ids, t)
            terms, _, _ = objective.terms(truth, ids, times, scores)
            reconstruction.append(terms.reconstruction.mean(-1).cpu())
            order_kl.append(terms.order_kl.mean(-1).cpu())
            masked = batch.response & (
                uniforms(seed, Purpose.MASKING, t, ids[:, None], batch.position) < (t + 1) / budget
            )
            log_mu = read_denoiser(plain.denoiser, batch.tokens, masked, layout).log_mu
            mdm.append(log_mu.sum(-1).cpu() / (t + 1))
        lengths.append(batch.response.sum(-1).cpu())
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


def _examples_hash(examples: Examples) -> str:
    digest = hashlib.sha256()
    for tensor in (examples.tokens, examples.response, examples.attention_mask):
        digest.update(tensor.long().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def revision() -> str:
    """The version of unmask, and the commit where it runs from a checkout."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return unmask.__version__
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return unmask.__version__
    return f"{unmask.__version__}+{commit.stdout.strip()}"
