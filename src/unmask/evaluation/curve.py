"""Quality against mean steps: the learned order at every price against the best of all rules, each swept.

RUN/curve.json    a `Curve`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from unmask.decoding.policies import (
    Background,
    Learned,
    Policy,
    SelectorNetwork,
    own_blocks,
    parse_policy,
    trained_steps,
)
from unmask.evaluation.compare import NEAR, crossed_difference, rivals
from unmask.evaluation.records import Outcome, Record, grouped
from unmask.files import write_text
from unmask.jsonl import read_sealed, sealed

# --- what is evaluated ------------------------------------------------------------------------------------------------

# A strict rule that is cut off after few steps is better there than a lax one that ends by itself, so max_steps, the
# cap, is swept too.
CAPS = (2, 3, 4, 5, 6, 8, 16, 32)
ONE_PER_STEP = 128  # the longest response for which one token per step is swept too: the highest score may be there
AT_EVERY_CAP = (
    *("threshold:0.9", "threshold:0.95", "threshold:0.99"),
    *(f"threshold({c},paced)" for c in (0.8, 0.9, 0.95, 0.98)),
    *("factor:0.5", "eb:0.03", "klass(0.9,0.01,1)", "top-prob", "margin", "iid"),
)
# At every cap, where tokens are drawn at random.
WHERE_SAMPLED = (
    *("stochastic(top-prob,0.5)", "stochastic(entropy,1)", "random", "dus", "pc-sampler(0.25,10)"),
    *("entropy", "left-to-right", "credit(0.9,0.7,0.8,0.2)", "prophet(0,0)", "wino(0.6,0.9)", "wino(0.3,0.6)"),
    *("remdm-cap:0.1", "remdm-rescale:0.2", "remdm-conf"),
    # These look at the drawn tokens: often valid, with few different samples.  The first ranks as LLaDA does.  The best
    # threshold depends on the task: 0.3 to 0.5 on statements in few steps, 0.95 to 0.995 on Sudoku.
    *("top-prob(confidence=sampled)", "joint-threshold(0.7,0.5)", "p2", "rdm(linear,uncond)", "saber(2,8)"),
    *(f"threshold({c},confidence=sampled,paced)" for c in (0.3, 0.4, 0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 0.995)),
)
AT_THE_LARGEST = (
    *("threshold:0.5", "threshold:0.7", "threshold:0.8", "threshold:0.98", "threshold:0.995"),
    *("factor:1", "eb:0.001", "eb:0.003", "eb:0.01", "eb:0.1", "klass(0.9,0.01,2)"),
)
PRICES = 8


def sweep(
    selector: SelectorNetwork | None,
    policies: Sequence[str | Policy],
    caps: Sequence[int],
    longest: int,
    sampled: bool = False,
    background: Background | None = None,
    denoiser: object = None,
) -> list[tuple[Policy, int]]:
    """The rules and caps to evaluate.  `policies`: families (threshold, learned) or rules (threshold:0.97); none: all.

    sampled: where tokens are, so is the order, and rules draw positions too.  background: that of `parse_policy`; None:
    the frequencies of tokens are not known, and the rule that reads them is left out; so are those that the denoiser
    cannot serve.
    Caps end at the length of the longest response: only rules that re-mask could take more steps.
    denoiser: on a block-causal one, families run inside its blocks, and CAPS are those of each block.  `caps` and what
    is returned count the steps of the whole response, as everywhere.
    """
    size = getattr(denoiser, "block_size", 0)
    blocks = -(-longest // size) if size else 1
    usual = [*(blocks * cap for cap in CAPS), *([longest] if longest <= ONE_PER_STEP else [])]
    limits = sorted({min(cap, max(2, longest)) for cap in caps or usual})
    plan: list[tuple[Policy, int]] = []
    at_every_cap: tuple[str, ...] = (*AT_EVERY_CAP, *WHERE_SAMPLED) if sampled else AT_EVERY_CAP
    missing = {
        *(["pc-sampler"] if background is None else []),
        *([] if hasattr(denoiser, "hidden_with") else ["wino"]),
        *(["wino", "prophet"] if size else []),  # a block sees no shadows, and is not the whole response
    }
    at_every_cap = tuple(rule for rule in at_every_cap if _key(rule) not in missing)
    for given in policies or [*(["learned"] if selector is not None else []), *dict.fromkeys(map(_key, at_every_cap))]:
        if given == "learned" and selector is not None:
            plan += _learned_sweep(selector, limits, longest, sampled)
            continue
        every: list[str | Policy] = [own_blocks(rule, denoiser) for rule in at_every_cap if _key(rule) == given]
        for rule in every or [given]:
            parsed = rule if isinstance(rule, Policy) else parse_policy(rule, selector, background)
            plan += [(parsed, cap) for cap in limits]
        rest = [own_blocks(rule, denoiser) for rule in AT_THE_LARGEST if _key(rule) == given]
        plan += [(parse_policy(rule), limits[-1]) for rule in rest]
        if given == "top-prob" and not caps:  # in one step a block all rules are the same: the left end of their curve
            plan.append((parse_policy(own_blocks(given, denoiser)), blocks))
    return list({(rule.name, cap): (rule, cap) for rule, cap in plan}.values())


def _learned_sweep(
    selector: SelectorNetwork, caps: Sequence[int], longest: int, sampled: bool
) -> list[tuple[Policy, int]]:
    """Read greedily, at prices that are equally far apart in log price: all with T steps, half of them with fewer.

    Where `sampled`, with T steps also by sampling.  T counts the steps of all blocks of the longest response.
    """
    T = trained_steps(selector, longest) or caps[-1]
    if not selector.prices:
        return [(Learned(selector), T), (Learned(selector, deterministic=True), T)]
    low, high = selector.prices
    inner = [float(f"{price:.3g}") for price in np.geomspace(low, high, PRICES)[1:-1]]
    prices = (low, *inner, high)
    rules = [Learned(selector, price=price, deterministic=True) for price in prices]
    drawn = [Learned(selector, price=price) for price in prices] if sampled else []
    fewer = [(rule, cap) for rule in (rules[0], rules[2], rules[5], rules[7]) for cap in caps if cap < T]
    return [*((rule, T) for rule in (*rules, *drawn)), *fewer]


def _key(policy: str) -> str:
    return re.split(r"[:(]", policy)[0]


def family(policy: str) -> str:
    """The rule whatever its parameters; another one where it is paced, ranks by the sampled token or is in blocks."""
    if inside := re.fullmatch(r"(blocks\(\d+,)(.*)\)", policy):
        return f"{inside[1]}{family(inside[2])})"
    kinds = [kind for kind, word in (("paced", "paced"), ("sampled", "confidence=sampled")) if word in policy]
    return " ".join([*kinds, _key(policy)])


# --- the curve of one rule --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A rule with its parameters and its cap."""

    family: str
    policy: str
    cap: int
    seed: int | None  # that the order was learned with; null for rules
    mean_steps: float
    score: float
    ci_low: float
    ci_high: float
    key: str  # of the record
    diversity: float | None = None  # see `diversity`; None: nothing tells, or no answer was valid


def frontier(points: Iterable[Point]) -> list[Point]:
    """The corners of the best score that is reached with at most m mean steps, from left to right:

        C(m) = max { sum_i w_i s_i :  w_i >= 0,  sum_i w_i = 1,  sum_i w_i m_i <= m }

    for points with mean steps m_i and scores s_i: the concave upper hull, flat behind the highest score, unknown before
    the first point.  It is what one can have: a coin that chooses between two neighbouring settings for each problem
    reaches the line between them.  And it is the most generous reading of few points; learned and rules have the same.
    """
    hull: list[Point] = []
    for point in sorted(points, key=lambda p: (p.mean_steps, -p.score, p.cap, p.policy)):
        if hull and point.score <= hull[-1].score + NEAR:
            continue  # no better, with as many steps or more
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point) + NEAR:
            hull.pop()
        hull.append(point)
    return hull


def _slope(left: Point, right: Point) -> float:
    return (right.score - left.score) / max(right.mean_steps - left.mean_steps, NEAR)


def weights_at(hull: Sequence[Point], m: float) -> np.ndarray:
    """w [K] of the corners in C(m): at most two are not 0."""
    steps = [point.mean_steps for point in hull]
    return np.array([np.interp(m, steps, corner) for corner in np.eye(len(hull))])


def mean_weights(hull: Sequence[Point], start: float, stop: float) -> np.ndarray:
    """w [K] of the corners in 1 / (b - a) * integral of C(m) from a to b: exact, as w is linear between corners."""
    inside = [point.mean_steps for point in hull if start < point.mean_steps < stop]
    knots = [start, *inside, stop]
    parts = [(b - a) * (weights_at(hull, a) + weights_at(hull, b)) / 2 for a, b in pairwise(knots)]
    return np.sum(parts, axis=0) / (stop - start)


def height(hull: Sequence[Point], m: float) -> float:
    """C(m)."""
    return float(weights_at(hull, m) @ [point.score for point in hull])


def steps_for(hull: Sequence[Point], score: float) -> float | None:
    """The least m with C(m) >= score; None where no m has it."""
    if not hull or hull[-1].score < score - NEAR:
        return None
    return float(np.interp(score, [point.score for point in hull], [point.mean_steps for point in hull]))


# --- learned against the best rule ------------------------------------------------------------------------------------

STEPS = (1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0)  # where the curves are compared


@dataclass(frozen=True)
class Reading:
    """Both curves at a number of mean steps, or on average over a range; means over the orders of all seeds."""

    rule: float  # score of the best rule
    rule_steps: float  # that it takes
    settings: list[str]  # whose mixture it is: "threshold:0.95 @ 3"
    learned: float | None  # score; null without an order, as all that follows
    learned_steps: float | None
    gain: float | None  # learned - rule
    low: float | None  # 95% interval; null also where verdicts were not kept
    high: float | None
    seed_gains: list[float]
    held_out: list[float]  # the gain with corners chosen on other problems, and its interval; empty: no verdicts
    learned_diversity: float | None = None  # of the settings mixed, their mean; null where it is not known of one
    rule_diversity: float | None = None


@dataclass(frozen=True)
class At:
    steps: float  # at most, on average
    reading: Reading


@dataclass(frozen=True)
class Curve:
    """The learned order against the best of all rules: RUN/curve.json, and a line of a study's curve.jsonl.

    L_s is the frontier of the order of seed s, R_s that of all points of all rules on its denoiser together.

        gain at m  = 1/S sum_s [ L_s(m) - R_s(m) ]
        mean gain  = 1 / (b - a) * integral of the gain from a to b     (the area between the curves, over the width)

    a is the least m at which both are known, b the most steps that both were seen to take.  Both are weighted sums of
    verdicts on the same problems, d_se; the intervals resample problems and orders (`Gain` in compare.py), with the
    corners as they are.

    The corners are chosen after the fact, on these problems, and the best of many points is partly luck: that favours
    the side with more points near its frontier, be it the rules or the order.  So every gain is also given `held_out`:
    corners chosen on the problems with even numbers are read on those with odd numbers and the other way round, which
    favours neither.

    A rule can be valid and always write the same, so where the task scores what is valid and diverse, that is compared
    too (`diverse`); what an answer counts there depends on all others, also those of the other half.  A mixture of two
    settings is more diverse than the mean of both that C(m) has, on either side.
    """

    task: str
    split: str
    model: str
    joint: bool
    seeds: list[int | None]  # empty: no order
    num_examples: int
    temperature: float
    eos_policy: str
    precision: str
    start: float | None  # a
    stop: float | None  # b
    above: list[list[float]]  # from where to where in [a, b] the gain is above 0
    mean: Reading | None  # over [a, b]; null where they have a point in common at most
    at: list[At]
    highest: Reading  # at any number of steps
    points: list[Point]
    revision: str
    diversity: str = ""  # the name of the figure that tells a rule of few different answers; "": nothing does
    measure: str = "valid"  # what the scores are means of
    diverse: Curve | None = None  # the same with the scores of `Task.diverse`; null where one is not known
    asked: list[str] = field(default_factory=list)  # the options --policy and --steps of the command that swept

    @property
    def by_measure(self) -> list[Curve]:
        """What is valid and, if that is known, what is valid and diverse."""
        return [self] if self.diverse is None else [self, self.diverse]


Weigh = Callable[[Sequence[Point]], np.ndarray]
Sides = list[tuple[list[Point], list[Point]]]  # of each seed the frontiers of its order (empty: none) and its rules
Recorded = Sequence[tuple[Sequence[Record], Sequence[Record]]]  # of each seed the records of its order and its rules


def compared_curves(records: Sequence[Record]) -> list[Curve]:
    """One for the orders of each model and setting, seeds together; without orders, one of each denoiser's rules.

    Orders are those of the rule `learned`, whatever its parameters.
    """
    orders = [record for record in records if record.spec.learned and _key(record.spec.policy) == "learned"]
    if orders:
        groups = grouped(orders, lambda r: (r.spec.model, r.spec.joint, *r.spec.setting)).values()
        found = [_with_rivals(group, records) for group in groups]
        return [curve for curve in found if curve is not None]
    plain = [record for record in records if not record.spec.learned]
    rules = grouped(plain, lambda record: (record.spec.denoiser, *record.spec.setting))
    return [_curve([([], own)], [], own) for own in rules.values()]


def _with_rivals(orders: Sequence[Record], records: Sequence[Record]) -> Curve | None:
    """The orders of one group against their rivals; None where they have none."""
    by_seed = grouped(orders, lambda record: record.spec.trained_seed)
    sides = []
    for own in by_seed.values():
        met = {rival.key: rival for order in own for rival in rivals(order, records)}
        sides.append((own, list(met.values())))
    return _curve(sides, list(by_seed), orders) if all(rules for _, rules in sides) else None


# What the mean of `Task.diverse` is, by the figure of `diversity`; of others "valid and diverse".
MEASURES = {"TV": "overlap", "valid x unique": "valid x unique", "unique": "valid x unique"}


def _curve(recorded: Recorded, seeds: Sequence[int | None], shown: Sequence[Record]) -> Curve:
    """What is valid, and what is valid and diverse."""
    records = [record for sides in recorded for own in sides for record in own]
    figure = max(diversity(record.outcome)[0] for record in records)
    found = replace(_comparison(recorded, seeds, shown), diversity=figure)
    if any(record.verdicts is None or record.verdicts.diverse is None for record in records):
        return found
    measured = [([_by_diversity(r) for r in orders], [_by_diversity(r) for r in rules]) for orders, rules in recorded]
    measure = MEASURES.get(figure, "valid and diverse")
    return replace(found, diverse=replace(_comparison(measured, seeds, shown), measure=measure))


def _by_diversity(record: Record) -> Record:
    """With `Task.diverse` in the place of the verdicts."""
    verdicts = record.verdicts
    assert verdicts is not None
    assert verdicts.diverse is not None
    score, width = verdicts.diverse.mean(), 1.959964 * verdicts.diverse.std() / len(verdicts.diverse) ** 0.5
    low, high = _rounded(max(0.0, score - width)), _rounded(min(1.0, score + width))
    outcome = replace(record.outcome, score=_rounded(score), ci_low=low, ci_high=high)
    return replace(record, outcome=outcome, verdicts=verdicts._replace(valid=verdicts.diverse))


def _comparison(recorded: Recorded, seeds: Sequence[int | None], shown: Sequence[Record]) -> Curve:
    points = [[_point(record) for record in own] for sides in recorded for own in sides if own]
    start = max(frontier(own)[0].mean_steps for own in points)
    stop = min(max(point.mean_steps for point in own) for own in points)
    most = max(point.mean_steps for own in points for point in own)
    steps = [m for m in STEPS if start - NEAR <= m <= most + NEAR]
    has_order, wide, spec = bool(recorded[0][0]), stop > start + NEAR, shown[0].spec
    steps = steps if wide and steps else sorted({start, *steps})
    records = [record for sides in recorded for own in sides for record in own]
    verdicts = {record.key: record.verdicts.valid for record in records if record.verdicts is not None}
    hulls = _frontiers(recorded)
    split = len(verdicts) == len({record.key for record in records}) and spec.num_examples > 1
    halves = [_frontiers(recorded, half) for half in (slice(0, None, 2), slice(1, None, 2))] if split else []

    def reading(weigh: Weigh) -> Reading:
        return _reading(hulls, halves, weigh, verdicts)

    shared: dict[str, Any] = {f.name: getattr(spec, f.name) for f in fields(Curve) if hasattr(spec, f.name)}
    return Curve(
        **shared,
        seeds=list(seeds),
        start=start if has_order else None,
        stop=stop if has_order and wide else None,
        above=_above(hulls, start, stop) if has_order and wide else [],
        mean=reading(lambda hull: mean_weights(hull, start, stop)) if has_order and wide else None,
        at=[At(m, reading(partial(weights_at, m=m))) for m in steps],
        highest=reading(lambda hull: np.eye(len(hull))[-1]),
        points=list({point.key: point for own in points for point in own}.values()),
        revision=shown[0].outcome.revision,
    )


def diversity(outcome: Outcome) -> tuple[str, float | None]:
    """The figure of a record that tells a rule of few different answers, and its name; TV: the mean of all.

    A rule may be valid and always write the same.
    """
    for name in ("valid x unique", "unique", "TV"):
        if found := [value for metric, value in outcome.metrics.items() if f"{metric} ".startswith(f"{name} ")]:
            return name, fmean(found)
    return "" if outcome.distinct is None else "different", outcome.distinct


def _point(record: Record, among: slice | None = None) -> Point:
    """`among`: as it is on these problems."""
    spec, outcome, verdicts = record.spec, record.outcome, record.verdicts
    steps, score = record.mean_steps, outcome.score
    if among is not None and verdicts is not None:
        steps, score = float(verdicts.steps[among].mean()), float(verdicts.valid[among].mean())
    named = family(spec.policy), spec.policy, spec.budget, spec.trained_seed
    return Point(*named, steps, score, outcome.ci_low, outcome.ci_high, record.key, diversity(outcome)[1])


def _frontiers(recorded: Recorded, among: slice | None = None) -> Sides:
    first, second = ([frontier(_point(r, among) for r in sides[i]) for sides in recorded] for i in (0, 1))
    return list(zip(first, second, strict=True))


def _reading(hulls: Sides, halves: Sequence[Sides], weigh: Weigh, verdicts: dict[str, np.ndarray]) -> Reading:
    """S orders against their rules, with the weights that `weigh` gives the corners of a frontier."""
    read_off, varied = [], []  # [S]: score and steps of the order, then of the rules; the diversity of both
    settings: dict[str, None] = {}
    for sides in hulls:
        weights = [weigh(hull) if hull else np.zeros(0) for hull in sides]
        ours = [[(p.score, p.mean_steps) for p in hull] or np.zeros((0, 2)) for hull in sides]  # [K, 2] each
        read_off.append([w @ np.array(values) for w, values in zip(weights, ours, strict=True)])
        varied.append([_average([p.diversity for p in hull], w) for w, hull in zip(weights, sides, strict=True)])
        rules = zip(weights[1], sides[1], strict=True)
        settings |= {f"{point.policy} @ {point.cap}": None for w, point in rules if w > NEAR}
    (learned, learned_steps), (rule, rule_steps) = np.transpose(read_off, (1, 2, 0))  # [S] each
    has_order, d = bool(hulls[0][0]), _differences(hulls, weigh, verdicts)
    interval = None if d is None else crossed_difference(d)
    held_out: list[float] = []
    chosen = [found for half in halves if (found := _differences(half, weigh, verdicts)) is not None]
    if len(chosen) == 2:
        on_even, on_odd = chosen  # where their corners were chosen
        read = np.where(np.arange(on_even.shape[1]) % 2 == 0, on_odd, on_even)
        held_out = [_rounded(value) for value in crossed_difference(read)]
    return Reading(
        rule=_rounded(rule.mean()),
        rule_steps=_rounded(rule_steps.mean()),
        settings=list(settings),
        learned=_rounded(learned.mean()) if has_order else None,
        learned_steps=_rounded(learned_steps.mean()) if has_order else None,
        gain=_rounded((learned - rule).mean()) if has_order else None,
        low=_rounded(interval.low) if interval else None,
        high=_rounded(interval.high) if interval else None,
        seed_gains=[_rounded(gain) for gain in learned - rule] if has_order else [],
        held_out=held_out,
        learned_diversity=_average([learned for learned, _ in varied], np.ones(len(varied))),
        rule_diversity=_average([rule for _, rule in varied], np.ones(len(varied))),
    )


def _average(figures: Sequence[float | None], weights: Iterable[float]) -> float | None:
    """None where one that counts is not known, or none counts."""
    counted = [(figure, w) for figure, w in zip(figures, weights, strict=True) if w > NEAR]
    known = [(figure, w) for figure, w in counted if figure is not None]
    if not known or len(known) < len(counted):
        return None
    return _rounded(sum(figure * w for figure, w in known) / sum(w for _, w in known))


def _differences(hulls: Sides, weigh: Weigh, verdicts: dict[str, np.ndarray]) -> np.ndarray | None:
    """d [S, E]: the weighted verdicts on the order's corners less those on the rules'; None where some are missing.

    The weights are those of the mean steps as measured: their noise is not in the interval, which is too narrow by it.
    """
    rows = []
    for learned, rules in hulls:
        if not learned:
            return None
        weighed = [(w, p.key) for w, p in zip(weigh(learned), learned, strict=True) if w > NEAR]
        weighed += [(-w, p.key) for w, p in zip(weigh(rules), rules, strict=True) if w > NEAR]
        if any(key not in verdicts for _, key in weighed):
            return None
        rows.append(sum(w * verdicts[key] for w, key in weighed))
    return np.stack(rows)


def _above(hulls: Sides, start: float, stop: float) -> list[list[float]]:
    """Where in [start, stop] the gain is above 0: it is linear between corners, so a change of sign is solved for."""

    def gain(m: float) -> float:
        return sum(height(learned, m) - height(rules, m) for learned, rules in hulls) / len(hulls)

    corners = {point.mean_steps for side in hulls for hull in side for point in hull}
    knots = sorted({start, stop, *(m for m in corners if start < m < stop)})
    found: list[list[float]] = []
    for left, right in pairwise(knots):
        a, b = gain(left), gain(right)
        if max(a, b) <= NEAR:
            continue
        zero = left + (right - left) * a / (a - b) if min(a, b) < 0 else left
        piece = [zero if a < 0 else left, zero if b < 0 else right]
        if found and abs(found[-1][1] - piece[0]) < NEAR:
            found[-1][1] = piece[1]
        else:
            found.append(piece)
    return [[_rounded(left), _rounded(right)] for left, right in found]


def _rounded(value: float) -> float:
    return round(float(value), 6)


def write_curve(run: Path, found: Sequence[Curve], asked: Sequence[str] = ()) -> None:
    """RUN/curve.json: the records of one sweep have one setting, and so one curve, or none without a rule."""
    (run / "curve.json").unlink(missing_ok=True)
    for curve in found:
        write_text(run / "curve.json", sealed(asdict(replace(curve, asked=list(asked)))) + "\n")


def read_curve(path: Path) -> Curve | None:
    """What `unmask evaluate --curve` wrote, if it was run."""
    return read_sealed(path, Curve, "unmask evaluate --curve")
