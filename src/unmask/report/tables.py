"""Records -> tables, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from unmask.display import in_markup
from unmask.evaluation.compare import NEAR, Comparison, area, compare, curves, rivals, whole_steps
from unmask.evaluation.curve import Curve, Point, Reading, frontier, height, steps_for
from unmask.evaluation.perplexity import HELD_OUT, Perplexity
from unmask.evaluation.records import LABELS, Record, grouped
from unmask.recipe import Recipe, continued
from unmask.tasks.exact import EXACT
from unmask.tasks.task import Task

if TYPE_CHECKING:
    from unmask.evaluation.bound import BoundReport

LEARNED_COLOUR = "#c2410c"

# What the legend says of the columns of a table.
MEANINGS = {
    "steps": "mean over the sequences, and their range",
    "valid": "with its 95% interval",
    "distinct": "different valid samples, beside the 99% range of that number for as many samples of the true "
    "distribution; (!) marks one outside",
    "passes": "denoiser rows evaluated",
    "distinct-2": "different pairs of neighbouring words, as a fraction of all pairs",
    "entropy": "of the words of all responses, in nats",
    "TV": "total variation of the random choice from uniform, 0 is best",
}


def name_of(record: Record, among: Sequence[Record]) -> str:
    """The rule, and whatever else distinguishes the record from the others of its table."""
    return ", ".join([record.spec.policy, *distinctions(record, among)])


def distinctions(record: Record, among: Sequence[Record]) -> list[str]:
    """The settings of a record that differ among these."""
    return [
        f"{label} {value if isinstance(value, str) else f'{value:g}'}"
        for field, label in LABELS.items()
        for value in [getattr(record.spec, field)]
        if value is not None and len({getattr(other.spec, field) for other in among} - {None}) > 1
    ]


def row_name(record: Record, among: Sequence[Record]) -> str:
    """The name with the budget."""
    name, spec = name_of(record, among), record.spec
    return f"{name}, T = {spec.trained_budget}" if spec.learned else f"{name} @ {spec.budget}"


def columns(record: Record, among: Sequence[Record]) -> dict[str, str]:
    """What a table of the records `among` says of one of them, by heading; nothing that does not apply to it."""
    outcome = record.outcome
    distinct = {
        "distinct": f"{outcome.distinct}" + ("" if outcome.is_varied else " (!)"),
        "true 99%": f"{outcome.distinct_low}–{outcome.distinct_high}",
    }
    valid = {"valid": f"{outcome.score:.3f}", "95%": f"{outcome.ci_low:.3f}–{outcome.ci_high:.3f}"}
    return {
        "policy": row_name(record, among),
        "steps": f"{outcome.mean_steps:.2f}",
        "range": f"{outcome.fewest_steps}–{outcome.most_steps}",
        **(valid if outcome.checked else {}),
        **{name: f"{value:.3f}" for name, value in outcome.metrics.items()},
        **(distinct if outcome.distinct is not None else {}),
        "passes": f"{outcome.num_forwards:,}",
        "denoiser": _short(record.spec.denoiser),
    }


def _short(denoiser: str) -> str:
    return denoiser if denoiser.startswith(f"{EXACT}-") else denoiser[:6]


def ordered(records: Sequence[Record]) -> list[Record]:
    """The learned orders first, then each rule by its budget."""
    return sorted(records, key=lambda r: (r.spec.task, not r.spec.learned, r.spec.policy, r.spec.budget, r.spec.seed))


def title(run: Path, task: Task) -> str:
    """The task of a run with all that is known about it."""
    facts = [f"{task.length} tokens"]
    if task.min_steps is not None:
        facts.append(f"{task.min_steps} {'step' if task.min_steps == 1 else 'steps'} for exact samples")
    if task.entropy is not None:
        facts.append(f"true entropy {task.entropy:.3f} nats")
    return f"{run.resolve().name}, {task.name}: {', '.join(facts)}"


def learned_on(run: Path, recipe: Recipe) -> str:
    """What records call the denoiser of the user's that the order was learned on; "" where the run has its own."""
    noted = run / "start.txt"
    return noted.read_text(encoding="utf-8").strip() if recipe.model.denoiser and noted.exists() else ""


def is_elsewhere(record: Record, own: str) -> bool:
    """Whether it ran on another denoiser than `own`, that of `learned_on`."""
    return own not in ("", record.spec.denoiser.partition("+")[0])  # adapters are told behind the +


def caption(recipe: Recipe, records: Sequence[Record], own: str = "") -> str:
    """Which denoiser each rule ran on, and how tokens were chosen; `own`: see `learned_on`."""

    def values(field: str) -> str:
        return " and ".join(f"{value:g}" for value in sorted({getattr(record.spec, field) for record in records}))

    tokens = f"Tokens sampled at temperature {values('temperature')}"
    for field, off in (("top_p", 1.0), ("top_k", 0), ("guidance", 0.0)):
        if any(getattr(record.spec, field) != off for record in records):
            tokens += f", {LABELS[field]} {values(field)}"
    if any(record.spec.eos_policy != "none" for record in records):
        tokens += f", end of sequence: {' and '.join(sorted({record.spec.eos_policy for record in records}))}"
    tokens += f"; {' and '.join(f'{number:,}' for number in sorted({r.spec.num_examples for r in records}))} examples"
    unpriced = any(record.spec.learned and "price" not in record.spec.policy for record in records)
    if recipe.order is not None and recipe.order.prices and unpriced:
        tokens += f". learned without a price is at the lowest, {recipe.order.prices[0]:g}; at all: `--curve`"
    if records and all(record.spec.denoiser.startswith(f"{EXACT}-") for record in records):
        return f"Every rule runs on the exact posterior of the task, in the place of a denoiser. {tokens}."
    if recipe.order is None:
        return f"Every rule runs on the same denoiser, trained without an order. {tokens}."
    if recipe.order.denoiser_rate == 0:
        moved = {is_elsewhere(record, own) for record in records}
        told = "The order was learned on a frozen denoiser; every rule runs on those very weights."
        if moved == {True}:
            told = "The order was learned on another denoiser (`--any-denoiser`); every rule runs on the same weights "
            told += "as the order here."
        elif True in moved:
            told = f"The order was learned on the denoiser {_short(own)}; those on others ran by `--any-denoiser`."
        return f"{told} {tokens}."
    plain = continued(recipe)
    return (
        "The order was learned jointly with the denoiser. The heuristics run on the denoiser as it was before order "
        f"learning, given as many further plain updates: {plain.updates} of {plain.batch} sequences. {tokens}."
    )


@dataclass(frozen=True)
class ResultTable:
    """A table, which rich prints: names to the left, which may take several lines, numbers to the right.

    Where it is too wide, whole columns are left out, the first of `minor` first, and the caption says which: no number
    is cut, and names have 16 characters at least if they need them.
    """

    title: str
    caption: str
    headings: list[str]
    rows: list[list[str]]
    minor: Sequence[str] = ()
    marked: Sequence[bool] = ()  # the rows of learned orders; those that follow are not
    hidden: Sequence[str] = ()  # columns for pages only

    def legend(self, headings: Iterable[str]) -> str:
        """The caption and the meaning of these columns."""
        known = dict.fromkeys("TV" if h.startswith("TV") else h for h in headings if f"{h}:" not in self.caption)
        return " ".join(filter(None, [self.caption, *(f"{h}: {MEANINGS[h]}." for h in known if h in MEANINGS)]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {heading: column for heading, *column in zip(self.headings, *self.rows, strict=True)}
        widths = {h: max(map(len, (h, *column))) for h, column in cells.items() if h not in self.hidden}
        widths[self.headings[0]] = min(16, widths[self.headings[0]])
        for heading in self.minor:
            if heading in widths and sum(widths.values()) + 2 * len(widths) > options.max_width:
                del widths[heading]
        left_out = [heading for heading in cells if heading not in widths and heading not in self.hidden]
        note = f" No room for: {', '.join(left_out)}." if left_out else ""
        shown = Table(
            title=in_markup(self.title),
            title_justify="left",
            caption=in_markup((self.legend(widths) + note).strip()),
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for heading in widths:
            if heading == self.headings[0]:
                shown.add_column(heading, overflow="fold")
            else:
                shown.add_column(heading, justify="right", no_wrap=True)
        for row, marked in zip_longest(zip(*(cells[heading] for heading in widths), strict=True), self.marked):
            shown.add_row(*map(in_markup, row), style=f"bold {LEARNED_COLOUR}" if marked else "")
        yield shown


def result_tables(records: Sequence[Record], title: str = "", caption: str = "") -> list[ResultTable]:
    """The records, every learned order against the heuristics, and the areas under score against steps."""
    by_order = groupby(compare(records), lambda comparison: comparison.learned.key)
    shown = [record_table(records, title, caption)]
    shown += [comparison_table(list(comparisons), records) for _, comparisons in by_order]
    areas = area_table([record for record in records if record.outcome.checked])
    return [*shown, areas] if areas.rows else shown


def record_table(records: Sequence[Record], title: str, caption: str) -> ResultTable:
    records = ordered(records)
    rows = [columns(record, records) for record in records]
    metrics = dict.fromkeys(name for record in records for name in record.outcome.metrics)
    order = ["policy", "steps", "range", "valid", "95%", *metrics, "distinct", "true 99%", "passes", "denoiser"]
    headings = [heading for heading in order if any(heading in row for row in rows)]
    legend = " ".join(filter(None, [caption, *notes(records)]))
    cells = [[row.get(heading, "–") for heading in headings] for row in rows]
    minor, marked = ("passes", "true 99%", "range", *metrics, "distinct", "95%"), [r.spec.learned for r in records]
    return ResultTable(title, legend, headings, cells, minor, marked, hidden=("denoiser",))  # the caption tells of it


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def without_sweep(records: Sequence[Record], curve: Curve | None, recipe: Recipe) -> list[Record]:
    """The points of a sweep are in its plot: hundreds of rows would bury the rest."""
    swept = {point.key for point in curve.points} if curve else set()
    usual = ("learned", *recipe.evaluate.policies)
    return [record for record in records if record.key not in swept or record.spec.policy in usual]


def notes(records: Sequence[Record]) -> list[str]:
    """Sentences on tasks without a checker, and on rules that select nothing, or mask again what they wrote."""
    checked = all(record.outcome.checked for record in records)
    sentences = [] if checked else ["Nothing says which answers are right: the recipe's task.checker can."]
    for record in ordered(records):
        spec, outcome, name = record.spec, record.outcome, row_name(record, records)
        can_be_empty = spec.selector == "bernoulli" and not spec.policy.startswith("lo-arm")
        if outcome.nothing_selected or (can_be_empty and outcome.nothing_selected is not None):
            sentences.append(
                f"{name} selected nothing in {100 * outcome.nothing_selected:.2f}% of its steps and revealed the most "
                "probable position instead."
            )
        if outcome.mean_revisions is not None:
            sentences.append(f"{name} re-masked a position {outcome.mean_revisions:.3f} times on average.")
    return sentences


COMPARISON_LEGEND = (
    "equal steps: the rule's score at the learned order's mean steps, interpolated linearly between its own nearest "
    "numbers of steps; @: in so many, where it never takes as many. difference: learned less that, with a 95% interval "
    "from a paired bootstrap over examples (of no width where all examples agree: look at the 95% intervals of the "
    "scores there). floor, max: the rule's score at the learned order's mean steps rounded down, and at the most steps "
    "that it took."
)


def comparison_table(comparisons: Sequence[Comparison], among: Sequence[Record]) -> ResultTable:
    """One learned order against each heuristic; `among`: all records that are shown."""
    learned = comparisons[0].learned
    outcome, floor = learned.outcome, whole_steps(learned.mean_steps)
    headings = ["against", "equal steps", "difference", "95%", f"floor {floor}", f"max {outcome.most_steps}"]
    rows = []
    for _, policy, equal, steps, interval, *paper in comparisons:
        middle = ["not comparable", "–", "–"]
        if equal.score is not None:
            width = "{:+.3f} to {:+.3f}".format(*interval) if interval else "–"
            score = f"{equal.score:.3f}" + (f" @ {steps:.2f}" if steps < learned.mean_steps - NEAR else "")
            middle = [score, f"{outcome.score - equal.score:+.3f}", width]
        rows.append([policy, *middle, *("–" if r is None else f"{r.outcome.score:.3f}" for r in paper)])
    missing = "; ".join(f"{found.policy}: {found.equal.missing}" for found in comparisons if found.equal.missing)
    title = f"{row_name(learned, among)}: {outcome.score:.3f} valid in {learned.mean_steps:.2f} steps"
    legend = (f"Not comparable: {missing}. " if missing else "") + COMPARISON_LEGEND
    return ResultTable(title, legend, headings, rows, minor=headings[:2:-1])


AREA_LEGEND = (
    "mean score: the area under score against mean steps, divided by the width of the range. Two rules can be compared "
    "by it only where their ranges are the same."
)


def area_table(records: Sequence[Record]) -> ResultTable:
    """Rules with the same range are next to each other."""
    areas = [(*found, name_of(curve[0], records)) for curve in curves(ordered(records)) if (found := area(curve))]
    by_range = sorted(areas, key=lambda known: known[1:3])
    rows = [[name, f"{score:.3f}", f"{low:.2f}–{high:.2f}"] for score, low, high, name in by_range]
    return ResultTable("area under score against steps", AREA_LEGEND, ["rule", "mean score", "over steps"], rows)


PERPLEXITY_LEGEND = (
    "perplexity: of the decoded samples, split again by the tokenizer of {}; less is better, if the other columns are "
    "near those of the held-out texts: what repeats itself is easy to predict. token entropy: in nats, mean over the "
    "samples. distinct: different tokens, pairs and triples, as fractions of all. tokens: that were predicted."
)


def perplexity_tables(lines: Sequence[Perplexity], records: Sequence[Record]) -> list[ResultTable]:
    """What each causal model says of the samples of these records."""
    headings = ["policy", "perplexity", "token entropy", "distinct 1", "distinct 2", "distinct 3", "tokens"]
    tables = []
    for causal, found in grouped(lines, lambda line: line.causal).items():
        said, known, rows = {line.key: line for line in found}, ordered(records), []
        names = {HELD_OUT: "held-out texts"} | {record.key: row_name(record, known) for record in known}
        for key in [*(record.key for record in known), HELD_OUT]:
            if key in said:
                line = said[key]
                perplexity = "–" if line.perplexity is None else f"{line.perplexity:.2f}"
                cells = [f"{value:.3f}" for value in (line.token_entropy, *line.distinct)]
                rows.append([names[key], perplexity, *cells, f"{line.tokens:,}"])
        marked = [record.spec.learned for record in known if record.key in said]
        legend, title = PERPLEXITY_LEGEND.format(causal), f"samples as read by {causal}"
        tables.append(ResultTable(title, legend, headings, rows, ("tokens", "distinct 1", "distinct 3"), marked))
    return tables


CHARACTERS_LEGEND = (
    "bits/char: the bits of all responses, EOS included, divided by their {:,} Unicode characters once decoded; less "
    "is better."
)


def bound_verdict(bound: BoundReport) -> str:
    """What is said of an order that is no better than IID; else nothing."""
    if bound.gain is None or bound.gain_se is None or bound.gain >= 0:
        return ""
    amount = f"{-bound.gain:.4f} nats per token (standard error {bound.gain_se:.4f})"
    if bound.steps < 0.9 * bound.budget:
        steps = f"in {bound.steps:.2f} steps; IID takes {bound.budget}"
        return f"By the bound the learned order is {amount} below IID, {steps}."
    if bound.gain > -2 * bound.gain_se:
        return f"By the bound the learned order is no better than IID: it is {amount} below, which may be chance."
    return f"By the bound the learned order is WORSE than IID, by {amount}."


def bound_table(bound: BoundReport, run: str) -> ResultTable:
    """The learned order's bounds, and what they are to be compared with."""
    rows = list[list[str]]()

    def add(name: str, value: float, error: float | str | None, bits: str = "") -> None:
        told = "{:.3f} ± {:.3f}".format(*bound.bits[bits]) if bits in bound.bits else ""
        rows.append([name, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else error or "", told])

    if bound.order_bound is not None:
        add(f"learned order, T = {bound.budget}", bound.order_bound, bound.order_bound_se, "order")
        for t, (reconstruction, kl) in enumerate(zip(bound.reconstruction, bound.order_kl, strict=True)):
            step = bound.budget - 1 - t
            name = f"  step {step + 1} (t = {t}): reconstruction, order KL"
            rows.append([name, f"{reconstruction:.4f}, {kl:.4f}", "", ""])
    at = f"T = {bound.budget}" + ("" if bound.price is None else f", price {bound.price:g}")
    whose = "learned order" if bound.order_bound is None else "its selector alone"
    add(f"{whose} (J), {at}, {bound.steps:.2f} steps", bound.self_bound, bound.self_bound_se, "self")
    add(f"  the same from {bound.samples} samples", bound.many_sample_bound, bound.many_sample_bound_se, "many_sample")
    add(f"plain denoiser, IID order, {bound.budget} steps", bound.mdm_bound, bound.mdm_bound_se, "mdm")
    if bound.true_log_likelihood is not None:
        add("true log-likelihood of the same sequences", bound.true_log_likelihood, "exact")
    if bound.entropy is not None:
        add("minus the true entropy, the limit", -bound.entropy, "exact")
    headings, title = ["bound, nats per token", "value", "standard error", "bits/char"], f"{run}: held-out bounds"
    legend = CHARACTERS_LEGEND.format(bound.characters)
    if not bound.bits:
        headings, rows, legend = headings[:3], [row[:3] for row in rows], ""
    return ResultTable(f"{title}, {bound.num_examples} sequences", legend, headings, rows, marked=[True])


def headline(records: Sequence[Record]) -> tuple[Record | None, Comparison | None]:
    """The best learned order, and against the best of the rules at its mean steps if one is known.

    The best is one with rivals if any has, on the most examples, with the highest score.
    """
    orders = [record for record in records if record.spec.learned and record.outcome.checked]
    if not orders:
        return next((record for record in records if record.spec.learned), None), None
    best = max(orders, key=lambda record: (bool(rivals(record, records)), *_rank(record)))
    known = [found for found in compare([best, *rivals(best, records)]) if found.equal.score is not None]
    return best, max(known, key=lambda found: found.equal.score or 0.0, default=None)


def _rank(record: Record) -> tuple[float, ...]:
    """Higher is better: a score on few examples must not win by luck."""
    return record.spec.num_examples, record.outcome.score, -record.mean_steps


def verdict(records: Sequence[Record]) -> str:
    """Whether the learned order is better than the best rule at equal steps, in one sentence."""
    learned, rival = headline(records)
    checked = [record for record in records if record.outcome.checked]
    if not checked:
        return "There is no verdict: nothing says which answers of this task are right."
    best = max(checked, key=_rank)
    if learned is None:
        score = f"{_score(best.outcome.score)}% valid in {best.mean_steps:.2f} steps"
        return f"No order was learned here; the best rule, {row_name(best, records)}, is {score}."
    own = f"{_score(learned.outcome.score)}% valid in {learned.mean_steps:.2f} steps"
    if rival is None:
        return f"The learned order is {own}; no rule was evaluated at as many steps."
    assert rival.equal.score is not None
    gain = learned.outcome.score - rival.equal.score
    low, high = rival.interval or (gain, gain)
    how = "better than every" if low > 0 else "worse than the best" if high < 0 else "not clearly better than the best"
    there = f"in {rival.steps:.2f}" if rival.steps < learned.mean_steps - NEAR else "at equal"
    against = f"against {_score(rival.equal.score)}% with the best rule {there} steps ({rival.policy})"
    return f"The learned order is {how} rule: {own}, {against}."


CURVE_LEGEND = (
    "mean steps: at most these. best rule, learned: the best mixture of settings of all rules, and of the order. "
    "95%: paired bootstrap over problems and orders, of the gain with the settings as they are. Settings are chosen "
    "after the fact, and the best of many is partly luck; held out: the gain and its 95% interval with settings chosen "
    "on the other half of the problems. no cap: the best rule with the most steps of the sweep."
)
# The figures of `curve.diversity`.
DIVERSITY = {
    "valid x unique": "valid and different samples, as a fraction of all, 1 is best",
    "unique": "different samples, as a fraction of the valid ones, 1 is best",
    "TV": "total variation of random choices from uniform, 0 is best, which only many samples come near",
    "different": "different valid samples, which a higher score has more of",
}


# The measures of `Curve.by_measure`.
MEASURE = {
    "valid": "",
    "valid x unique": "valid x unique: valid and different samples, as a fraction of all; copies count once together. ",
    "overlap": "overlap: 1 less the total variation between random choices and uniform ones, with wrong answers as one "
    "more outcome; of choices that are too frequent only as many count. ",
    "valid and diverse": "valid and diverse: as the task scores it. ",
}


def curve_verdict(curve: Curve) -> str:
    """Whether the learned order is better than every rule, and where, by every measure."""
    first, *more = curve.by_measure
    return " ".join([_verdict(first), *(f"By {other.measure}: {_verdict(other)}" for other in more)])


def _verdict(curve: Curve) -> str:
    best = curve.highest
    rule = f"{_score(best.rule)}% in {best.rule_steps:.2f} steps"
    if curve.start is None:
        return f"There is no learned order here; the best rule reaches {rule}."
    seeds = f" (mean of {len(curve.seeds)} seeds)" if len(curve.seeds) > 1 else ""
    mean, where = curve.mean or curve.at[0].reading, f"at {curve.start:.2f} steps"
    gain = mean.gain or 0.0
    side, parts = "above" if gain > 0 else "below" if gain < 0 else "equal to", ""
    if curve.stop is not None:
        where = f"from {curve.start:.2f} to {curve.stop:.2f} steps"
        if curve.above and curve.above != [[round(curve.start, 6), round(curve.stop, 6)]]:
            side, parts = f"on average {side}", " and ".join(f"from {a:.2f} to {b:.2f}" for a, b in curve.above)
            parts = f" It is above {parts} steps."
    low, high = mean.held_out[1:] if mean.held_out else (mean.low, mean.high)
    chance = low is not None and high is not None and low <= 0 <= high
    held_out = f", held out {_points(mean.held_out[0])} {_interval(*mean.held_out[1:])}" if mean.held_out else ""
    average = " on average" if curve.mean and not parts else ""
    amount = f"by {_points(gain)} points{average} {_interval(mean.low, mean.high) or '(no interval)'}"
    highest = f" The highest scores are {_score(best.learned or 0)}% in {best.learned_steps:.2f} steps and {rule}."
    unsure = ", which may be chance" if chance else ""
    figures = (mean.learned_diversity, mean.rule_diversity)
    known = curve.diversity and figures != (None, None)
    varied = " Diversity, {}: {}; of the rules {}.".format(curve.diversity, *_diversities(curve, mean)) if known else ""
    rivals = f"the best rule ({len(_rules(curve))} settings)"
    return f"learned{seeds} is {side} {rivals} {where}, {amount}{held_out}{unsure}.{parts}{varied}{highest}"


def curve_table(curve: Curve) -> ResultTable:
    """The learned order against the best rule at equal mean steps."""
    rules = _rules(curve)
    largest = max(point.cap for point in rules)
    free = frontier(point for point in rules if point.cap == largest)
    readings = [(f"{at.steps:.2f}", at.steps, at.reading) for at in curve.at]
    readings += [(f"mean, {curve.start:.2f} to {curve.stop:.2f}", -inf, curve.mean)] if curve.mean else []
    rows = []
    for name, steps, reading in [*readings, ("highest", inf, curve.highest)]:
        rule, learned = _score(reading.rule), "–" if reading.learned is None else _score(reading.learned)
        if name == "highest":
            rule += f" @ {reading.rule_steps:.2f}"
            learned += "" if reading.learned_steps is None else f" @ {reading.learned_steps:.2f}"
        gain = "–" if reading.gain is None else _points(reading.gain)
        apart = f"{_points(reading.held_out[0])} {_interval(*reading.held_out[1:])}" if reading.held_out else "–"
        settings = "" if name.startswith("mean") else ", ".join(reading.settings)
        alone = _score(height(free, steps)) if steps >= free[0].mean_steps - NEAR else "–"
        interval = _interval(reading.low, reading.high) or "–"
        varied = [", ".join(_diversities(curve, reading))] if curve.diversity else []
        rows.append([name, learned, rule, gain, *varied, interval, apart, alone, settings])
    counts = [sum((point.family == "learned") == learned for point in curve.points) for learned in (False, True)]
    legend = f"{MEASURE[curve.measure]}{counts[0]} points of rules, {counts[1]} of the order. {CURVE_LEGEND}"
    if curve.diversity:
        mixed = "of the order, of the rule, the mean of the settings mixed"
        legend += f" {curve.diversity}: {DIVERSITY[curve.diversity]}; {mixed}."
    varied = [curve.diversity] if curve.diversity else []
    headings = ["mean steps", "learned", "best rule", "gain", *varied, "95%", "held out", "no cap", "which"]
    minor = ("no cap", "which", "95%", "held out")
    title = "learned against the best rule" + (f", {curve.measure}" if curve.measure != "valid" else "")
    return ResultTable(title, legend, headings, rows, minor)


def _diversities(curve: Curve, reading: Reading) -> list[str]:
    """Of the order, of the rule."""
    places = 0 if curve.diversity == "different" else 2
    figures = (reading.learned_diversity, reading.rule_diversity)
    return ["–" if figure is None else f"{figure:.{places}f}" for figure in figures]


def _score(score: float) -> str:
    return f"{100 * score:.1f}"


def _points(gain: float) -> str:
    return f"{100 * gain:+.1f}"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{_points(low)}, {_points(high)}]"


def needed_table(compared: Sequence[Curve], share: float = 0.95) -> ResultTable:
    """Mean steps that the best rule and the order need for a share of the highest score with the most steps."""
    settings = ("temperature", "eos_policy", "precision", "num_examples")
    told_apart = [name for name in settings if len({getattr(curve, name) for curve in compared}) > 1]
    rows = []
    for curve in (compared_by.by_measure[-1] for compared_by in compared):
        rules = _rules(curve)
        largest = max(point.cap for point in rules)
        best = max(point.score for point in rules if point.cap == largest)
        if not best:
            continue
        target = share * best
        orders = [frontier(p for p in curve.points if p.family == "learned" and p.seed == s) for s in curve.seeds]
        learned = [steps_for(hull, target) for hull in orders]
        reached = [steps for steps in learned if steps is not None]
        told = f"{sum(reached) / len(reached):.2f}" if reached and len(reached) == len(learned) else "not reached"
        each = ", ".join("–" if steps is None else f"{steps:.2f}" for steps in learned)
        rule = steps_for(frontier(rules), target)
        names = [curve.task, curve.model, *(["joint"] if curve.joint else [])]
        names += [curve.measure] if curve.measure != "valid" else []
        names += [f"{LABELS[name]} {getattr(curve, name)}" for name in told_apart]
        cells = [_score(best), "not reached" if rule is None else f"{rule:.2f}"]
        rows.append([", ".join(names), f"{largest}", *cells, f"{told} ({each})" if learned else "–"])
    headings = ["task", "most steps", "score", "best rule", "learned"]
    legend = (
        f"Mean steps for {share:.0%} of the highest score of a rule that may take the most steps; of the order the "
        "mean over seeds, and each."
    )
    return ResultTable("steps needed", legend, headings, rows)


def _rules(curve: Curve) -> list[Point]:
    """The points of the rules; of a rule on several denoisers, those of the seeds, the mean over them."""
    found = grouped((p for p in curve.points if p.family != "learned"), lambda p: (p.policy, p.cap)).values()
    return [
        replace(same[0], mean_steps=fmean(p.mean_steps for p in same), score=fmean(p.score for p in same))
        for same in found
    ]
