"""Records -> tables, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from unmask.display import in_markup
from unmask.evaluation.compare import Comparison, Result, area, curves
from unmask.evaluation.evaluate import BoundReport, Order, Record
from unmask.evaluation.verdicts import IDENTITY
from unmask.fields import build
from unmask.jsonl import ResultsError, read_jsonl, unsealed

LEARNED_COLOUR = "#c2410c"


def read_records(path: Path) -> list[Record]:
    """The records of a results.jsonl; where the same evaluation was run again, the last one stands."""
    if not path.exists():
        raise ResultsError(f"{path} is missing: run `unmask evaluate {path.parent}` first")
    records = read_jsonl(path, Record)
    return list({tuple(getattr(record, name) for name in IDENTITY): record for record in records}.values())


def read_bound(path: Path) -> BoundReport | None:
    """What `unmask evaluate --bound` left, if it was run."""
    if not path.exists():
        return None
    try:
        return build(BoundReport, unsealed(path.read_text(encoding="utf-8")))
    except ValueError:
        raise ResultsError(f"{path} is damaged or from another version: run `unmask evaluate --bound` again") from None


def read_orders(path: Path) -> list[Order]:
    return read_jsonl(path, Order) if path.exists() else []


# The columns of a table, with what the legend says of them; those that no record has are left out.
HEADINGS = {
    "policy": "",
    "steps": "mean over the sequences, and their range",
    "range": "",
    "valid": "with its 95% interval",
    "95%": "",
    "flexible": "the last number taken for the answer",
    "distinct": "different valid samples, beside the 99% range of that number for as many samples of the true "
    "distribution; (!) marks one outside",
    "true 99%": "",
    "passes": "denoiser rows evaluated",
    "denoiser": "",
}
NOTHING = "–"


# What may differ between the records of one table, and what it is called.
TOLD_APART = {
    "temperature": "temperature",
    "top_p": "top-p",
    "top_k": "top-k",
    "guidance": "guidance",
    "eos_policy": "EOS",
    "seed": "seed",
    "num_examples": "examples",
    "split": "split",
    "precision": "precision",
    "trained_seed": "order of seed",  # null for heuristics
}


def name_of(record: Record, among: Sequence[Record]) -> str:
    """The rule, and whatever else tells the record apart from the others of its table."""
    return ", ".join([record.policy, *told_apart(record, among)])


def told_apart(record: Record, among: Sequence[Record]) -> list[str]:
    """The settings of a record that others have otherwise."""
    return [
        f"{what} {value if isinstance(value, str) else f'{value:g}'}"
        for field, what in TOLD_APART.items()
        for value in [getattr(record, field)]
        if value is not None and len({getattr(other, field) for other in among} - {None}) > 1
    ]


def row_name(record: Record, among: Sequence[Record]) -> str:
    """The name with the budget."""
    name = name_of(record, among)
    return f"{name} @ {record.budget}" if record.trained_budget is None else f"{name}, T = {record.trained_budget}"


def columns(record: Record, among: Sequence[Record]) -> dict[str, str]:
    """What a table of the records `among` says of one of them, by its HEADINGS."""
    distinct, true_range = NOTHING, NOTHING
    if record.distinct is not None:
        distinct = f"{record.distinct}" + ("" if record.diverse else " (!)")
        true_range = f"{record.distinct_low}–{record.distinct_high}"
    return {
        "policy": row_name(record, among),
        "steps": f"{record.mean_steps:.2f}",
        "range": f"{record.min_steps}–{record.max_steps}",
        "valid": f"{record.score:.3f}",
        "95%": f"{record.ci_low:.3f}–{record.ci_high:.3f}",
        "flexible": NOTHING if record.score_flexible is None else f"{record.score_flexible:.3f}",
        "distinct": distinct,
        "true 99%": true_range,
        "passes": f"{record.num_forwards:,}",
        "denoiser": record.denoiser[:6],
    }


def rows_of(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of a table, without the columns that have nothing in any row."""
    rows = [columns(record, records) for record in records]
    headings = [heading for heading in HEADINGS if any(row[heading] != NOTHING for row in rows)]
    return headings, [[row[heading] for heading in headings] for row in rows]


def legend(headings: Sequence[str]) -> str:
    return " ".join(f"{heading}: {HEADINGS[heading]}." for heading in headings if HEADINGS.get(heading))


def ordered(records: Sequence[Record]) -> list[Record]:
    """The learned order first, then each rule by its budget."""
    return sorted(records, key=lambda r: (r.task, r.trained_budget is None, r.policy, r.budget, r.seed))


@dataclass(frozen=True)
class TextTable:
    """A table for the terminal: names to the left, which may take several lines, numbers to the right.

    Where it is too wide, whole columns are left out, the first of `minor` first, and the caption says which: no number
    is cut, and names have 16 characters at least if they need them.
    """

    title: str
    caption: str
    headings: list[str]
    rows: list[list[str]]
    minor: Sequence[str] = ()
    marked: Sequence[bool] = ()  # the rows of learned orders

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {heading: column for heading, *column in zip(self.headings, *self.rows, strict=True)}
        widths = {heading: max(map(len, (heading, *column))) for heading, column in cells.items()}
        widths[self.headings[0]] = min(16, widths[self.headings[0]])
        for heading in self.minor:
            if heading in widths and sum(widths.values()) + 2 * len(widths) > options.max_width:
                del widths[heading]
        left_out = [heading for heading in cells if heading not in widths]
        note = f"No room for: {', '.join(left_out)}." if left_out else ""
        shown = Table(
            title=in_markup(self.title),
            title_justify="left",
            caption=in_markup(" ".join(filter(None, (self.caption, legend(list(widths)), note)))),
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


MINOR = ("passes", "true 99%", "range", "flexible", "distinct", "95%")


def table(records: Sequence[Record], title: str, caption: str) -> TextTable:
    """For the terminal: all but the denoiser's hash, of which the caption tells."""
    records = ordered(records)
    headings, rows = rows_of(records)
    return TextTable(
        title,
        " ".join([caption, *notes(records)]),
        headings[:-1],
        [row[:-1] for row in rows],
        MINOR,
        [record.trained_budget is not None for record in records],
    )


def notes(records: Sequence[Record]) -> list[str]:
    """Sentences on examples that are too long, and on rules that select nothing or take back what they wrote."""
    said = [
        f"{overlong} of {examples} examples are too long for the model and count as wrong."
        for overlong, examples in sorted({(record.overlong or 0, record.num_examples) for record in records})
        if overlong
    ]
    for record in ordered(records):
        can_be_empty = record.selector == "bernoulli" and not record.policy.startswith("lo-arm")
        if record.nothing_selected or (can_be_empty and record.nothing_selected is not None):
            said.append(
                f"{row_name(record, records)} selected nothing in {100 * record.nothing_selected:.2f}% of its steps "
                "and revealed the most probable position instead."
            )
        if record.mean_revisions is not None:
            said.append(
                f"{row_name(record, records)} re-masked a position {record.mean_revisions:.3f} times on average."
            )
    return said


COMPARISON_LEGEND = (
    "equal steps: the rule's score at the learned order's mean steps, interpolated linearly between its own nearest "
    "numbers of steps. difference: learned less that, with a 95% interval from a paired bootstrap over examples (of no "
    "width where all examples agree: look at the 95% intervals of the scores there). "
    "floor, max: the rule's score at the learned order's mean steps rounded down, and at the most steps that it took."
)


def comparison_title(comparison: Comparison, among: Sequence[Record]) -> str:
    learned = comparison.learned
    return f"{row_name(learned, among)}: {learned.score:.3f} valid in {comparison.mean_steps:.2f} steps"


def comparison_headings(comparison: Comparison) -> list[str]:
    paper = [f"floor {comparison.floor}", f"max {comparison.learned.max_steps}"]
    return ["against", "equal steps", "difference", "95%", *paper]


def comparison_columns(comparison: Comparison) -> list[str]:
    """What is shown of a comparison under its headings."""
    middle = ["not comparable", "–", "–"]
    if comparison.score is not None and comparison.difference is not None:
        interval = "–"
        if comparison.interval is not None:
            low, high = comparison.interval
            interval = f"{low:+.3f} to {high:+.3f}"
        middle = [f"{comparison.score:.3f}", f"{comparison.difference:+.3f}", interval]
    paper = [
        "–" if record is None else f"{record.score:.3f}" for record in (comparison.at_floor, comparison.at_maximum)
    ]
    return [comparison.policy, *middle, *paper]


def not_comparable(comparisons: Sequence[Comparison]) -> str:
    """Why, and what to do about it: a sentence, empty where all are comparable."""
    reasons = [f"{comparison.policy}: {comparison.missing}" for comparison in comparisons if comparison.missing]
    return f"Not comparable: {'; '.join(reasons)}." if reasons else ""


def by_learned(comparisons: Sequence[Comparison]) -> list[list[Comparison]]:
    """The comparisons of each learned order."""
    found: dict[Record, list[Comparison]] = {}
    for comparison in comparisons:
        found.setdefault(comparison.learned, []).append(comparison)
    return list(found.values())


def comparison_table(comparisons: Sequence[Comparison], among: Sequence[Record]) -> TextTable:
    """One learned order against each heuristic, for the terminal."""
    headings = comparison_headings(comparisons[0])
    return TextTable(
        comparison_title(comparisons[0], among),
        f"{not_comparable(comparisons)} {COMPARISON_LEGEND}".strip(),
        headings,
        [comparison_columns(comparison) for comparison in comparisons],
        minor=headings[:2:-1],
    )


AREA_HEADINGS = ["rule", "mean score", "over steps"]
AREA_LEGEND = (
    "mean score: the area under score against mean steps, divided by the width of the range. Two rules can be compared "
    "by it only where their ranges are the same."
)


def area_rows(records: Sequence[Record]) -> list[list[str]]:
    """Under AREA_HEADINGS, rules with the same range side by side."""
    rows = []
    for curve in curves(Result(record, None) for record in ordered(records)):
        found = area(curve)
        if found is not None:
            name = name_of(curve[0].record, records)
            rows.append((found.low, found.high, [name, f"{found.score:.3f}", f"{found.low:.2f}–{found.high:.2f}"]))
    return [row for _, _, row in sorted(rows, key=lambda item: item[:2])]


def area_table(rows: list[list[str]]) -> TextTable:
    return TextTable("area under score against steps", AREA_LEGEND, AREA_HEADINGS, rows)


def bound_rows(bound: BoundReport) -> list[tuple[str, str, str]]:
    """Name, value and standard error of everything that a bound is to be compared with, in nats a token."""
    rows = [(f"learned order, T = {bound.budget}", f"{bound.order_bound:.4f}", f"{bound.order_bound_se:.4f}")]
    for t, (reconstruction, kl) in enumerate(zip(bound.reconstruction, bound.order_kl, strict=True)):
        step = bound.budget - 1 - t
        rows.append((f"  step {step} (t = {t}): reconstruction, order KL", f"{reconstruction:.4f}, {kl:.4f}", ""))
    name = f"plain denoiser, IID order, {bound.budget} steps"
    rows.append((name, f"{bound.mdm_bound:.4f}", f"{bound.mdm_bound_se:.4f}"))
    if bound.true_log_likelihood is not None:
        rows.append(("true log-likelihood of the same sequences", f"{bound.true_log_likelihood:.4f}", "exact"))
    if bound.entropy is not None:
        rows.append(("minus the true entropy, the limit", f"{-bound.entropy:.4f}", "exact"))
    return rows


BOUND_HEADINGS = ["bound, nats a token", "value", "standard error"]


def bound_table(bound: BoundReport, task: str) -> TextTable:
    title = f"{task}: held-out bounds, {bound.num_examples} sequences"
    return TextTable(title, "", BOUND_HEADINGS, [list(row) for row in bound_rows(bound)])
