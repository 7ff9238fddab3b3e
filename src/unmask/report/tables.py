"""Records -> tables, plots, one self-contained HTML page."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from unmask.display import in_html, in_markup, visible
from unmask.evaluation.compare import Comparison, Result, area, curves
from unmask.evaluation.evaluate import BoundReport, Order, Record
from unmask.evaluation.verdicts import IDENTITY
from unmask.files import write_text
from unmask.jsonl import ResultsError, fits, read_jsonl, unsealed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNED_COLOURS = ("#c2410c", "#f97316", "#dc2626", "#7c2d12", "#fb923c")  # one a run; no other rule has them
LEARNED_COLOUR = LEARNED_COLOURS[0]
COLOURS = {"iid": "#64748b", "top-prob": "#2563eb", "margin": "#059669"}
MORE_COLOURS = (
    *("#7c3aed", "#db2777", "#0891b2", "#84cc16", "#a16207", "#1e3a8a", "#f472b6", "#14b8a6"),
    *("#4d7c0f", "#c084fc", "#0f172a", "#eab308", "#38bdf8", "#9f1239", "#a8a29e"),
)
LINES = {"top-prob": "--"}  # where it coincides with margin, both stay visible
MARKERS = "osD^vPXhp<>"  # of the runs that share a plot


def read_records(path: Path) -> list[Record]:
    """The records of a results.jsonl; where the same evaluation was run again, the last one stands."""
    if not path.exists():
        raise ResultsError(f"{path} is missing: run `unmask evaluate {path.parent}` first")
    records = [Record(**values) for values in read_jsonl(path, Record)]
    return list({tuple(getattr(record, name) for name in IDENTITY): record for record in records}.values())


def read_bound(path: Path) -> BoundReport | None:
    """What `unmask evaluate --bound` left, if it was run."""
    if not path.exists():
        return None
    try:
        values = unsealed(path.read_text(encoding="utf-8"))
        if not fits(values, BoundReport):
            raise ValueError
        return BoundReport(**values)
    except (ValueError, TypeError):
        raise ResultsError(f"{path} is damaged or from another version: run `unmask evaluate --bound` again") from None


def read_orders(path: Path) -> list[Order]:
    return [Order(**values) for values in read_jsonl(path, Order)] if path.exists() else []


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


def colours_of(policies: Sequence[str]) -> dict[str, str]:
    """A colour for each rule, the same in every plot unless two of this plot would have the same."""
    found = {policy: COLOURS[policy] for policy in policies if policy in COLOURS}
    for policy in sorted(set(policies) - set(found)):
        start = int(hashlib.sha256(policy.encode()).hexdigest(), 16)
        turns = [MORE_COLOURS[(start + i) % len(MORE_COLOURS)] for i in range(len(MORE_COLOURS))]
        found[policy] = next((colour for colour in turns if colour not in found.values()), turns[0])
    return found


class Line(NamedTuple):
    """What a plot shows of one rule."""

    label: str
    records: Sequence[Record]
    marker: str = "o"


def score_plot(records: Sequence[Record]) -> Figure:
    """Score against mean steps, with 95% intervals."""
    names = sorted({name_of(record, records) for record in records})
    return plot([Line(name, [r for r in records if name_of(r, records) == name]) for name in names])


def shared_plot(runs: Sequence[tuple[str, Sequence[Record]]]) -> Figure:
    """The same of several runs of one task, given with their names; a marker a run.

    A heuristic that ran on the same denoiser in several runs is one line, with all their names.
    """
    everything = [record for _, records in runs for record in records]
    lines: dict[tuple[str, ...], tuple[list[str], str, list[Record]]] = {}
    for (run, records), marker in zip(runs, _repeated(MARKERS, len(runs)), strict=True):
        for record in records:
            name = name_of(record, everything)
            own = run if record.trained_budget is not None else ""
            names, _, found = lines.setdefault((name, record.denoiser, own), ([], marker, []))
            if run not in names:
                names.append(run)
            if record not in found:
                found.append(record)
    by_rule = sorted(lines.items(), key=lambda item: item[0][0])
    return plot([Line(", ".join([*names, rule]), records, marker) for (rule, *_), (names, marker, records) in by_rule])


def _repeated(items: Sequence[str], count: int) -> list[str]:
    return [items[i % len(items)] for i in range(count)]


def plot(lines: Sequence[Line]) -> Figure:
    """Score against mean steps, with 95% intervals: rules as lines, learned orders as stars."""
    longest = max(len(line.label) for line in lines)  # the legend stands beside the plot
    figure, panels = _figure(max(7.2, 5.5 + 0.085 * longest), max(3.6, 0.8 + 0.19 * len(lines)))
    axes = panels[0, 0]
    colours = colours_of([line.records[0].policy for line in lines if line.records[0].trained_budget is None])
    shades = iter(_repeated(LEARNED_COLOURS, len(lines)))
    labelled = 0  # lines of learned orders
    for line in sorted(lines, key=lambda line: line.records[0].trained_budget is None):  # learned orders first
        own = sorted(line.records, key=lambda r: r.mean_steps)
        steps, scores = [r.mean_steps for r in own], [r.score for r in own]
        errors = [[max(0.0, r.score - r.ci_low) for r in own], [max(0.0, r.ci_high - r.score) for r in own]]
        learned = own[0].trained_budget is not None
        colour = next(shades) if learned else colours[own[0].policy]
        axes.errorbar(
            steps,
            scores,
            yerr=errors,
            label=visible(f" {line.label}" if line.label.startswith("_") else line.label),  # else matplotlib hides it
            color=colour,
            marker="*" if learned else line.marker,
            markersize=14 if learned else 5,
            linestyle="none" if learned else LINES.get(own[0].policy, "-"),
            capsize=3,
            zorder=3 if learned else 2,
        )
        # The seeds of one budget lie close together: one label for all, below the lowest.
        lowest = {r.trained_budget: r for r in sorted(own, key=lambda r: -r.score)} if learned else {}
        for budget, record in sorted(lowest.items(), key=lambda item: item[1].mean_steps):
            axes.annotate(
                f"T = {budget}",
                (record.mean_steps, record.score),
                xytext=(7, -11 - 9 * (labelled % 2)),  # frozen and joint orders do too
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
        labelled += learned
    axes.set_xlabel("mean steps a sequence")
    axes.set_ylabel("valid")
    axes.set_ylim(-0.03, 1.03)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    legend = axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)
    for text in legend.get_texts():
        text.set_parse_math(False)  # names of runs may hold a dollar sign
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def order_picture(orders: Sequence[Order]) -> Figure:
    """Which position is revealed when: a panel a rule, a row a sequence, a column a position, the colour the step."""
    import matplotlib as mpl
    from matplotlib.colors import BoundaryNorm

    columns = min(len(orders), 4)
    rows = -(-len(orders) // columns)
    figure, panels = _figure(2.6 * columns + 0.9, 3.1 * rows, rows, columns)
    budget = max(order.budget for order in orders)
    shades = max(256, budget)  # BoundaryNorm wants one for every step
    scale = BoundaryNorm([step - 0.5 for step in range(budget + 1)], shades)
    colours = mpl.colormaps["viridis_r"].resampled(shades).with_extremes(bad="#e5e7eb")
    for axes in panels.flat[len(orders) :]:
        axes.set_axis_off()
    for axes, order in zip(panels.flat[: len(orders)], orders, strict=True):
        arranged = [position for group in order.layout for position in group]
        pixels = [[float("nan") if row[n] < 0 else row[n] for n in arranged] for row in order.reveal_step]
        image = axes.imshow(pixels, aspect="auto", cmap=colours, norm=scale, interpolation="nearest")
        edge = -0.5
        for group in order.layout[:-1]:
            edge += len(group)
            axes.axvline(edge, color="white", linewidth=2.5)
        axes.set_title(visible(f"{order.policy}, {order.budget} steps"), fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("position" if len(order.layout) == 1 else "positions, grouped", fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("sequences", fontsize=9)
    ticks = range(budget) if budget <= 10 else None
    figure.colorbar(image, ax=panels, label="revealed at step", ticks=ticks, fraction=0.05, pad=0.02)
    return figure


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its panels [rows, columns], without pyplot: no window system, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


class Section(NamedTuple):
    """The part of a page that tells of one run."""

    title: str
    caption: str
    records: list[Record]
    orders: list[Order]
    bound: BoundReport | None = None
    comparisons: Sequence[Comparison] = ()
    run: str = ""  # the run's name
    task: str = ""  # what tells its task apart from others of the same name


def write_html(path: Path, sections: Sequence[Section]) -> None:
    """One self-contained page.  A file that is not such a page is never overwritten."""
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(
        _PAGE[: _PAGE.index("<style>")]
    ):
        raise ResultsError(f"{path} exists and is no report of unmask: give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join([*map(_shared, together(sections)), *map(_section, sections)])
    write_text(path, _PAGE.replace("{body}", body))


def together(sections: Sequence[Section]) -> list[list[Section]]:
    """The runs that share a task with another, by task."""
    found: dict[str, list[Section]] = {}
    for section in sections:
        if section.task:
            found.setdefault(section.task, []).append(section)
    return [group for group in found.values() if len(group) > 1]


def _shared(sections: Sequence[Section]) -> str:
    plot = _picture(
        shared_plot([(section.run, ordered(section.records)) for section in sections]),
        "Score against steps in all of these runs, with 95% intervals; which denoiser each rule ran on is said below.",
    )
    title = f"{sections[0].records[0].task}: {', '.join(section.run for section in sections)}"
    return f"<section><h2>{in_html(title)}</h2>{plot}</section>"


def _section(section: Section) -> str:
    records = ordered(section.records)
    pictures = _picture(score_plot(records), "Score against steps, with 95% intervals.")
    if chosen := pictured(section.orders):
        pictures += _picture(
            order_picture(chosen),
            "Which position is revealed when: a row is a sequence, a column a position, positions that belong together "
            "side by side.",
        )
    marked = [record.trained_budget is not None for record in records]
    headings, rows = rows_of(records)
    tables = _html_table(headings, rows, marked)
    tables += _legend(" ".join([*notes(records), legend(headings)]))
    for comparisons in by_learned(section.comparisons):
        tables += f"<h3>{in_html(comparison_title(comparisons[0], records))}</h3>"
        rows = [comparison_columns(comparison) for comparison in comparisons]
        tables += _html_table(comparison_headings(comparisons[0]), rows)
        tables += _legend(f"{not_comparable(comparisons)} {COMPARISON_LEGEND}".strip())
    if rows := area_rows(records):
        tables += _html_table(AREA_HEADINGS, rows) + _legend(AREA_LEGEND)
    if section.bound is not None:
        bounds = [list(row) for row in bound_rows(section.bound)]
        tables += _html_table(BOUND_HEADINGS, bounds, [row is bounds[0] for row in bounds])
    title, caption = in_html(section.title), in_html(section.caption)
    return f"<section><h2>{title}</h2><p>{caption}</p>{pictures}{tables}</section>"


def _legend(text: str) -> str:
    return f"<p class=legend>{in_html(text)}</p>"


def _picture(figure: Figure, caption: str) -> str:
    return f"<figure>{svg(figure)}<figcaption>{in_html(caption)}</figcaption></figure>"


def _html_table(headings: list[str], rows: list[list[str]], learned: Sequence[bool] = ()) -> str:
    heads = "".join(f"<th>{in_html(heading)}</th>" for heading in headings)
    body = ""
    for row, marked in zip(rows, learned or [False] * len(rows), strict=True):
        cells = "".join(f"<td>{in_html(cell)}</td>" for cell in row)
        body += f"<tr{' class=learned' if marked else ''}>{cells}</tr>"
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def pictured(orders: Sequence[Order]) -> list[Order]:
    """The learned order beside the heuristics at the same budget; without one, all at the smallest budget."""
    if not orders:
        return []
    budget = next((order.budget for order in orders if order.policy == "learned"), min(o.budget for o in orders))
    latest = {order.policy: order for order in orders if order.budget == budget}
    return sorted(latest.values(), key=lambda order: (order.policy != "learned", order.policy))


def svg(figure: Figure) -> str:
    """The same text for the same picture."""
    import matplotlib as mpl

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # what matplotlib adds links elsewhere
    with mpl.rc_context({"svg.hashsalt": "unmask"}):
        figure.savefig(text, format="svg", metadata=nothing)
    return text.getvalue()[text.getvalue().index("<svg") :]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>unmask report</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.15rem; margin-top: 2.5rem } h3 { font-size: 1rem; margin: 1.5rem 0 0 }
figure { margin: 1rem 0 } figure svg { max-width: 100%; height: auto } figcaption { color: #6b7280; font-size: .85rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid #e5e7eb }
th:first-child, td:first-child { text-align: left } .legend { color: #6b7280; font-size: .85rem }
.learned td { font-weight: 600; color: #c2410c }
</style></head><body><h1>unmask report</h1>{body}</body></html>
"""
