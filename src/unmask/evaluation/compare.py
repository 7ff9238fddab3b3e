"""A learned order against heuristics at equal steps, and the area under score against steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from unmask.evaluation.records import Record, grouped
from unmask.recipe import PLAIN_RULES

RESAMPLES = 10_000
NEAR = 1e-9  # means of whole numbers that differ by less are the same


class Difference(NamedTuple):
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class AtEqualSteps:
    """What a heuristic comes to at a given mean number of steps, or why that is not known."""

    score: float | None
    by_example: np.ndarray | None = None  # [E]; None also where verdicts were not kept
    missing: str = ""


class Comparison(NamedTuple):
    """A learned order against one heuristic."""

    learned: Record
    policy: str
    equal: AtEqualSteps  # the heuristic at as many steps as the learned order takes on average, or at fewer ...
    steps: float  # ... which are these, where it never takes as many
    interval: tuple[float, float] | None  # of the difference: 95%, paired bootstrap; None where verdicts were not kept
    at_floor: Record | None  # the paper's way: the heuristic with a budget of floor(mean steps) ...
    at_maximum: Record | None  # ... and with the most steps that the learned order took


def at_equal_steps(mean_steps: float, curve: Sequence[Record]) -> AtEqualSteps:
    """The score of one heuristic at a mean number of steps m, interpolated between its own nearest points.

    (1 - w) s_a + w s_b  with  w = (m - m_a) / (m_b - m_a),  m_a <= m <= m_b,  one step or one budget apart at most.

    For rules that take as many steps as their budget, a and b are the floor and the ceiling of m.  Some (iid) take a
    little less, so that neighbouring budgets may be slightly more than a step apart.  Of points with the same mean, the
    one with the smallest budget counts.
    """
    points = sorted(curve, key=lambda point: (point.mean_steps, point.spec.budget))
    below = max((p for p in points if p.mean_steps <= mean_steps + NEAR), key=lambda p: p.mean_steps, default=None)
    above = min((p for p in points if p.mean_steps >= mean_steps - NEAR), key=lambda p: p.mean_steps, default=None)
    if below is None or above is None or not are_neighbours(below, above):
        return AtEqualSteps(None, missing=_what_is_missing(mean_steps, points))
    width = above.mean_steps - below.mean_steps
    w = (mean_steps - below.mean_steps) / width if width > NEAR else 0.0
    score = (1 - w) * below.outcome.score + w * above.outcome.score
    if below.verdicts is None or above.verdicts is None:
        return AtEqualSteps(score)
    return AtEqualSteps(score, (1 - w) * below.verdicts.valid + w * above.verdicts.valid)


def are_neighbours(below: Record, above: Record) -> bool:
    """Whether two points of a rule are one step or one budget apart at most, so that something is known between."""
    return above.mean_steps - below.mean_steps <= 1 + NEAR or above.spec.budget - below.spec.budget == 1


def at_most_steps(mean_steps: float, curve: Sequence[Record]) -> tuple[AtEqualSteps, float]:
    """At equal steps, or where the rule takes fewer though it had more, at what it takes with its largest budget."""
    equal, last = at_equal_steps(mean_steps, curve), _ends_before(mean_steps, curve)
    if equal.score is None and last:
        return AtEqualSteps(last.outcome.score, 1.0 * last.verdicts.valid if last.verdicts else None), last.mean_steps
    return equal, mean_steps


def _ends_before(mean_steps: float, curve: Sequence[Record]) -> Record | None:
    """The rule at its largest budget, if it may take more steps than these there and takes fewer."""
    most = max(curve, key=lambda point: point.spec.budget)
    return most if most.mean_steps < mean_steps and most.spec.budget > math.ceil(mean_steps - NEAR) else None


def whole_steps(mean_steps: float) -> int:
    return math.floor(mean_steps + NEAR)


def _what_is_missing(mean_steps: float, points: Sequence[Record]) -> str:
    if last := _ends_before(mean_steps, points):
        return f"takes {last.mean_steps:.2f} steps at a budget of {last.spec.budget}"
    # A rule that takes a little less than its budget (iid) may need one step more.
    close = [p.spec.budget for p in points if mean_steps - 1 <= p.mean_steps <= mean_steps + NEAR]
    first = max([whole_steps(mean_steps), *close])
    return f"evaluate it at {first} and {first + 1} steps, if it can run there"


def next_budget(mean_steps: float, curve: Sequence[Record]) -> int | None:
    """The budget that a comparison of a rule at these steps lacks, where it takes fewer steps than its budgets.

    iid takes a little less than them; a threshold may need a budget of 16 for 5.4 steps.
    """
    below = [point.spec.budget for point in curve if point.mean_steps < mean_steps]
    if not below or _ends_before(mean_steps, curve) or at_equal_steps(mean_steps, curve).score is not None:
        return None
    return max(below) + 1 if max(below) >= whole_steps(mean_steps) else None


def compare(records: Sequence[Record]) -> list[Comparison]:
    """Every learned order against every heuristic with which it can be compared."""
    found = []
    for learned in [record for record in records if record.spec.learned and record.outcome.checked]:
        for curve in curves(rivals(learned, records)):
            equal, steps = at_most_steps(learned.mean_steps, curve)
            interval = None
            if learned.verdicts is not None and equal.by_example is not None:
                interval = crossed_difference(learned.verdicts.valid[None] - equal.by_example)[1:]
            by_budget = {record.spec.budget: record for record in curve}
            paper = (by_budget.get(cap) for cap in (whole_steps(learned.mean_steps), learned.outcome.most_steps))
            found.append(Comparison(learned, curve[0].spec.policy, equal, steps, interval, *paper))
    return found


def rivals(learned: Record, records: Iterable[Record]) -> list[Record]:
    """The heuristics that a learned order can be compared with: on the denoiser and the examples that it names."""
    return [
        record
        for record in records
        if not record.spec.learned
        and record.spec.setting == learned.spec.setting
        and learned.spec.plain_denoiser in (None, record.spec.denoiser)
        and len({learned.spec.examples, record.spec.examples} - {None}) < 2
    ]


def curves(records: Iterable[Record]) -> list[list[Record]]:
    """The records of each rule on each denoiser, one list for each setting that forbids a comparison."""

    def rule(record: Record) -> tuple[object, ...]:
        spec = record.spec
        return spec.policy, spec.denoiser, spec.learned, spec.trained_seed, *spec.setting

    return list(grouped(records, rule).values())


@dataclass(frozen=True)
class Gain:
    """Orders that differ in nothing but their seed against one heuristic, at equal mean steps: a line of gains.jsonl.

    With S orders and E examples, v_se the verdict on example e under order s, and h_se the heuristic's at the mean
    steps of order s, or at fewer where it never takes as many (`at_most_steps`),

        gain = 1/S sum_s g_s,    g_s = 1/E sum_e d_se,    d_se = v_se - h_se.

    The examples are the same for every order, so d is a table with two random factors, and both are resampled: a draw
    takes E examples and S orders with replacement, each example and each order with all that belongs to it (the
    pigeonhole bootstrap, Owen 2007).  The interval is the 95% percentiles of the gain over such draws.  With one order
    it is the paired bootstrap over examples.
    """

    task: str
    split: str
    model: str
    policy: str  # the learned rule
    trained_budget: int
    joint: bool  # the denoiser was trained too; the heuristic runs on one that was trained further without an order
    rival: str
    best: bool  # the rival with the highest score among iid, top-prob and margin
    seeds: list[int | None]
    num_examples: int
    mean_steps: float  # of the orders, as all that follows
    score: float
    rival_score: float
    rival_steps: float  # below `mean_steps` where the rival never takes as many
    gain: float
    low: float
    high: float
    seed_gains: list[float]
    temperature: float
    eos_policy: str
    precision: str
    revision: str


def gains(records: Sequence[Record]) -> list[Gain]:
    """Every group of learned orders against every heuristic that all of them can be compared with; verdicts needed."""

    def all_but_seed(record: Record) -> tuple[object, ...]:
        spec = record.spec
        return spec.model, spec.policy, spec.trained_budget, spec.joint, *spec.setting

    scored = [record for record in records if record.spec.learned and record.outcome.checked]
    learned = [record for record in scored if record.verdicts is not None]
    return [gain for orders in grouped(learned, all_but_seed).values() for gain in _gains(orders, records)]


def _gains(orders: Sequence[Record], records: Sequence[Record]) -> list[Gain]:
    """Of orders that differ in their seeds only."""
    tables: dict[str, list[np.ndarray]] = {}  # by rival: h_se, one order at a time
    steps: dict[str, list[float]] = {}  # by rival
    for learned in orders:
        for curve in curves(rivals(learned, records)):
            equal, taken = at_most_steps(learned.mean_steps, curve)
            if equal.by_example is not None:
                tables.setdefault(curve[0].spec.policy, []).append(equal.by_example)
                steps.setdefault(curve[0].spec.policy, []).append(taken)
    known = {rival: np.stack(rows) for rival, rows in tables.items() if len(rows) == len(orders)}  # [S, E] each
    valid = np.stack([learned.verdicts.valid for learned in orders if learned.verdicts is not None])  # [S, E]
    best = max((rival for rival in known if rival in PLAIN_RULES), key=lambda rival: known[rival].mean(), default="")
    spec = orders[0].spec
    shared: dict[str, Any] = {f.name: getattr(spec, f.name) for f in fields(Gain) if hasattr(spec, f.name)}
    found = []
    for rival, scores in known.items():
        difference = crossed_difference(valid - scores)
        found.append(
            Gain(
                **shared,
                rival=rival,
                best=rival == best,
                seeds=[learned.spec.trained_seed for learned in orders],
                mean_steps=round(float(np.mean([learned.mean_steps for learned in orders])), 4),
                score=round(float(valid.mean()), 6),
                rival_score=round(float(scores.mean()), 6),
                rival_steps=round(float(np.mean(steps[rival])), 4),
                gain=round(difference.mean, 6),
                low=round(difference.low, 6),
                high=round(difference.high, 6),
                seed_gains=[round(float(row.mean()), 6) for row in valid - scores],
                revision=orders[0].outcome.revision,
            )
        )
    return found


def crossed_difference(differences: np.ndarray, seed: int = 0) -> Difference:
    """The mean of d [S, E] with its 95% interval over orders and examples; see `Gain`.

    A resample of the examples is a multinomial draw of how often each distinct column of d occurs.
    """
    S, E = differences.shape
    columns, counts = np.unique(np.round(differences, 9), axis=1, return_counts=True)  # [S, U], [U]
    draws = np.random.default_rng(seed)
    at_once = max(1, 2**22 // len(counts))
    by_order = np.concatenate(
        [
            draws.multinomial(E, counts / E, size=min(at_once, RESAMPLES - start)) @ columns.T / E
            for start in range(0, RESAMPLES, at_once)
        ]
    )  # [resamples, S]
    means = (by_order * draws.multinomial(S, [1 / S] * S, size=RESAMPLES)).sum(-1) / S
    low, high = np.percentile(means, [2.5, 97.5])
    return Difference(float(differences.mean()), float(low), float(high))


def area(curve: Iterable[Record]) -> tuple[float, float, float] | None:
    """The area under a rule's score against mean steps, by trapezoids, over the width of its range: a mean score.

    Returned with the range.  None with fewer than two different points; of points with the same mean, the one with the
    smallest budget counts.
    """
    points: dict[float, float] = {}
    for record in sorted(curve, key=lambda record: record.spec.budget):
        points.setdefault(round(record.mean_steps, 9), record.outcome.score)
    if len(points) < 2:
        return None
    total = sum((right - left) * (a + b) / 2 for (left, a), (right, b) in pairwise(sorted(points.items())))
    low, high = min(points), max(points)
    return total / (high - low), low, high


def why_not_won(records: Sequence[Record]) -> list[str]:
    """Why the learned order does not win: empty if it does.

    It wins if its 95% interval lies above that of every heuristic at the same budget, and its valid samples are as
    varied as true ones.
    """
    learned = [record for record in records if record.spec.learned]
    reasons = [] if learned else ["no learned order was evaluated"]
    for record in learned:
        own, budget = record.outcome, record.spec.budget
        others = [(r.spec.policy, r.outcome) for r in records if not r.spec.learned and r.spec.budget == budget]
        if not others:
            reasons.append(f"no heuristic was evaluated at {budget} steps")
        for policy, rival in others:
            if rival.ci_high >= own.ci_low:
                reached = f"{policy} is valid in [{rival.ci_low:.3f}, {rival.ci_high:.3f}] at {budget} steps"
                reasons.append(f"{reached}, learned in [{own.ci_low:.3f}, {own.ci_high:.3f}]")
        if not own.is_varied:
            reasons.append(
                f"{own.distinct} distinct valid samples, outside the true distribution's 99% range "
                f"[{own.distinct_low}, {own.distinct_high}]"
            )
    return reasons
