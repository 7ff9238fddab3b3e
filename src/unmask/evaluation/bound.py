"""The held-out bounds of a run: each is a lower bound of log P(x_0), in nats per response token.

the paper's    sum_t E_Q[F_t],   Q the scorer's posterior                         (runs with a scorer only)
J              E_P[sum_t g_t],   the selector orders the true tokens itself       (`variational.self_posterior`)
k samples      E[log mean_i exp(sum_t g_t^i)],   i = 1..k of the same walks       (grows with k to log P)
IID            the plain denoiser's, every mask revealed with probability 1 / (t + 1)

Where the tokens are text, they are told in bits per character too, so that tokenizers can be compared:

    - sum_e (bound of response e in nats) / (ln 2 sum_e C_e)

C_e: the Unicode characters of response e, decoded up to its end; bytes that are no character count as the decoder shows
them.  The nats are those of the whole response, of EOS too.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.decoding.policies import Learned
from unmask.errors import UserError
from unmask.evaluation.evaluate import BATCH, check_examples, examples_of
from unmask.evaluation.plan import open_run
from unmask.files import write_text
from unmask.jsonl import read_sealed, sealed
from unmask.models.order_model import OrderModel
from unmask.progress import progress
from unmask.rng import Purpose, uniforms
from unmask.runtime import Processes
from unmask.tasks.task import Examples, Task
from unmask.training.lo_arm import scored_objective
from unmask.training.objectives import OrderObjective
from unmask.training.reading import each_block, read_denoiser, with_layout
from unmask.training.self_posterior import SelfObjective
from unmask.variational.estimators import NoBaseline
from unmask.variational.self_posterior import many_sample_bound


@dataclass(frozen=True)
class BoundReport:
    """Held-out bounds in nats per response token, each the mean over sequences with its standard error."""

    budget: int
    num_examples: int
    samples: int  # k: trajectories of each sequence
    price: float | None  # of a step, at which the selector was asked for J; None: it knows no prices
    order_bound: float | None  # with the scorer's posterior, all T terms; None: the run has no scorer
    order_bound_se: float | None
    reconstruction: list[float]  # by t = 0..T-1; sums to order_bound with the KLs subtracted
    order_kl: list[float]
    self_bound: float  # J
    self_bound_se: float
    many_sample_bound: float  # from the k walks of J
    many_sample_bound_se: float
    steps: float  # mean number of steps of these walks
    mdm_bound: float  # the plain denoiser's, with the IID order of the same number of steps
    mdm_bound_se: float
    entropy: float | None  # of the true distribution: minus it is the most that a bound can be on average
    true_log_likelihood: float | None  # the exact one of these very sequences
    gain: float | None = None  # over mdm_bound, of the larger of order_bound and self_bound; its error is paired
    gain_se: float | None = None
    characters: int = 0  # of all responses; 0: the tokens are no text
    bits: dict[str, list[float]] = field(default_factory=dict)  # of order, self, many_sample, mdm: with standard error


def evaluate_run_bound(
    run: Path,
    examples: int | None = None,
    samples: int = 8,
    price: float = 0.0,
    seed: int | None = None,
    split: str | None = None,
    trust_task: bool = False,
    denoiser: Any = None,
    any_denoiser: bool = False,
    cpu: bool = False,
) -> BoundReport:
    """The bounds of a run, written to RUN/bound.json; what is not given is the recipe's.

    samples: trajectories of each sequence.  price: of a step, for a selector that knows prices; 0: the lowest.
    """
    model, plain, task, recipe = open_run(run, Processes(cpu).device, split, trust_task, denoiser, any_denoiser)
    seed, number = recipe.seed if seed is None else seed, examples_of(task, examples, recipe.evaluate.examples)
    bound = evaluate_bound(model, plain, task, number, samples, seed, price)
    write_text(run / "bound.json", sealed(asdict(bound)) + "\n")
    return bound


def read_bound(path: Path) -> BoundReport | None:
    """What `unmask evaluate --bound` wrote, if it was run."""
    return read_sealed(path, BoundReport, "unmask evaluate --bound")


@torch.no_grad()
def evaluate_bound(
    model: OrderModel, plain: OrderModel, task: Task, examples: int, samples: int, seed: int, price: float = 0.0
) -> BoundReport:
    """The bounds on held-out sequences: all T terms of every sequence, each from `samples` trajectories."""
    selector = model.selector
    if selector is None:
        raise UserError("this run has no learned order, so it has no order bound: train one with an [order] section")
    if selector.drawn:
        raise UserError("the order looks at the tokens that are drawn (model.selector.drawn), so it has no bound")
    if examples < 2:
        raise UserError(f"a bound with its standard error needs at least 2 examples, got {examples}")
    check_examples(task, examples)
    budget, device = selector.budget, next(model.parameters()).device
    Learned(selector, price=price).check(budget, torch.empty(0))
    nearest = min(max(price, selector.prices[0]), selector.prices[1]) if selector.prices else None
    own = SelfObjective(model, samples, budget, seed)
    scored = scored_objective(model)(model, samples, NoBaseline(), seed) if model.scorer is not None else None
    batches, lengths, exact, characters = [], [], [], list[int]()
    with progress("bound", examples) as advance:
        for ids in torch.arange(examples).split(max(1, BATCH * 8 // max(8, samples))):
            truth, ids = task.examples(ids, "test"), ids.to(device)
            prices = torch.full(ids.shape, nearest or 0.0, device=device)
            summed = torch.zeros(4 if scored is None else 4 + 2 * budget, len(ids), dtype=torch.float64)
            # log P(x_0) = sum_b log P(x_b | x_<b) of a block-causal model, and so are its bounds
            cuts = each_block(truth, size) if (size := model.block_size) else [(torch.arange(len(ids)), truth)]
            for rows, cut in cuts:
                names = ids[rows.to(device)]
                walks = own.orders(cut.to(device), names, torch.full_like(names, budget), prices[: len(rows)])
                total = walks.gain.sum(0)  # [R, k]
                steps = walks.holds_mask.sum(0).double()  # [R, k]
                parts = [total.mean(-1), many_sample_bound(total), steps.mean(-1)]
                parts += [_plain_bound(plain, cut, names, budget, seed), *_scored_terms(scored, cut, names)]
                summed[:, rows] += torch.stack([part.cpu().double() for part in parts])
            batches.append(summed)  # [4, B]; with a scorer [4 + 2T, B]
            lengths.append(truth.num_response)
            exact.append(task.log_likelihood(truth.tokens, truth))
            if task.text_tokenizer is not None:
                responses = zip(truth.tokens, truth.response, strict=True)
                characters += [len(task.text(row[here].tolist())) for row, here in responses]
            advance(len(ids))
    tokens, values = torch.cat(lengths).double(), torch.cat(batches, dim=1)  # [E], [4 or 4 + 2T, E]
    J, many, mdm = (_mean_and_error(values[row] / tokens) for row in (0, 1, 3))
    F1, KL = (values[4:] / tokens).unflatten(0, (2, -1))  # [T, E] each
    order = (F1 - KL).sum(0)  # [E]
    order_bound, order_bound_se = _mean_and_error(order) if scored is not None else (None, None)
    best = order if order_bound is not None and order_bound > J[0] else values[0] / tokens
    gain, gain_se = _mean_and_error(best - values[3] / tokens)
    C = torch.tensor(characters).double()  # [E]
    nats = {"self": values[0], "many_sample": values[1], "mdm": values[3]}
    nats |= {"order": order * tokens} if scored is not None else {}
    known = [log_likelihood for log_likelihood in exact if log_likelihood is not None]
    return BoundReport(
        budget=budget,
        num_examples=examples,
        samples=samples,
        price=nearest,
        order_bound=order_bound,
        order_bound_se=order_bound_se,
        reconstruction=F1.mean(1).tolist(),
        order_kl=KL.mean(1).tolist(),
        self_bound=J[0],
        self_bound_se=J[1],
        many_sample_bound=many[0],
        many_sample_bound_se=many[1],
        steps=float(values[2].mean()),
        mdm_bound=mdm[0],
        mdm_bound_se=mdm[1],
        entropy=None if task.entropy is None else task.entropy / float(tokens.mean()),
        true_log_likelihood=float((torch.cat(known) / tokens).mean()) if known else None,
        gain=gain,
        gain_se=gain_se,
        characters=sum(characters),
        bits={name: _bits(whole, C) for name, whole in nats.items()} if sum(characters) else {},
    )


def _scored_terms(objective: OrderObjective | None, truth: Examples, ids: Tensor) -> list[Tensor]:
    """E_Q[F1] by t = 0..T-1 and then E_Q[KL], 2T of [B]; without a scorer nothing."""
    if objective is None:
        return []
    scores = objective.scores(truth)
    terms = [objective.terms(truth, ids, torch.full_like(ids, t), scores)[0] for t in range(objective.budget)]
    return [*(term.reconstruction.mean(-1) for term in terms), *(term.order_kl.mean(-1) for term in terms)]


def _plain_bound(plain: OrderModel, truth: Examples, ids: Tensor, budget: int, seed: int) -> Tensor:
    """[B]: sum_t 1 / (t+1) sum over masks of log mu, every position masked with probability (t+1) / T."""
    batch, layout = with_layout(truth, plain.denoiser)
    terms = []
    for t in range(budget):
        drawn = uniforms(seed, Purpose.MASKING, t, ids[:, None], batch.position)
        masked = batch.response & (drawn < (t + 1) / budget)
        terms.append(read_denoiser(plain.denoiser, batch.tokens, masked, layout).log_mu.sum(-1).double() / (t + 1))
    return torch.stack(terms).sum(0)


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def _bits(nats: Tensor, characters: Tensor) -> list[float]:
    """Per character, R = sum_e b_e / sum_e C_e with b_e = -nats_e / ln 2, and its standard error.

    That is std(b_e - R C_e) / (sqrt(E) mean C), of the first order.
    """
    bits = -nats / math.log(2)
    ratio = float(bits.sum() / characters.sum())
    return [ratio, _mean_and_error(bits - ratio * characters)[1] / float(characters.mean())]
