"""Records -> a table, two plots, one self-contained HTML page."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.table import Table

from unmask.evaluation import BoundReport, Order, Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNED_COLOUR, COLOURS = "#c2410c", {"iid": "#64748b", "top-prob": "#2563eb", "margin": "#059669"}
LINES = {"top-prob": "--"}  # where it coincides with margin, both stay visible
LEGEND = (
    "steps: mean over the sequences, and their range. valid: with its 95% interval. distinct: different valid samples, "
    "beside the 99% range of that number for as many samples of the true distribution; (!) marks one outside. passes: "
    "denoiser rows evaluated."
)


class ResultsError(ValueError):
    """A results file that cannot be read; the message says which line."""


def append_jsonl(path: Path, items: Sequence[Record | Order]) -> None:
    with path.open("a") as file:
        for item in items:
            file.write(json.dumps(asdict(item)) + "\n")


# What an evaluation was asked to do, as against what came out of it.
_ASKED = (
    *("task", "split", "model", "policy", "trained_budget", "budget", "num_examples"),
    *("temperature", "eos_policy", "selector", "denoiser", "seed"),
)


def read_records(path: Path) -> list[Record]:
    """The records of a results.jsonl; where the same evaluation was run again, the last one stands."""
    records = [Record(**values) for values in _read_jsonl(path, Record)]
    return list({tuple(getattr(record, field) for field in _ASKED): record for record in records}.values())


def read_bound(path: Path) -> BoundReport | None:
    """What `unmask evaluate --bound` left, if it was run."""
    if not path.exists():
        return None
    try:
        return BoundReport(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ResultsError(f"{path} is damaged or from another version: run `unmask evaluate --bound` again") from None


def read_orders(path: Path) -> list[Order]:
    return [Order(**values) for values in _read_jsonl(path, Order)] if path.exists() else []


def _read_jsonl(path: Path, kind: type[Any]) -> list[dict[str, Any]]:
    if not path.exists():
        raise ResultsError(f"{path} is missing: run `unmask evaluate {path.parent}` first")
    expected = {field.name for field in fields(kind)}
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            raise ResultsError(f"{path}, line {number}: not a JSON object; take the line out") from None
        if not isinstance(row, dict) or set(row) != expected:
            odd = ", ".join(sorted(expected ^ set(row))) if isinstance(row, dict) else "not an object"
            raise ResultsError(
                f"{path}, line {number}: other fields than this version writes ({odd}); "
                "move the file away and evaluate again"
            )
        rows.append(row)
    return rows


HEADINGS = ["policy", "steps", "range", "valid", "95%", "distinct", "true 99%", "passes", "denoiser"]


def name_of(record: Record, among: Sequence[Record]) -> str:
    """The rule, and whatever else tells the record apart from the others of its table."""
    told_apart = [
        f"{what} {getattr(record, field):g}"
        for field, what in (("temperature", "temperature"), ("seed", "seed"), ("num_examples", "examples"))
        if len({getattr(other, field) for other in among}) > 1
    ]
    return ", ".join([record.policy, *told_apart])


def columns(record: Record, among: Sequence[Record]) -> list[str]:
    """What a table of the records `among` shows of one of them, under HEADINGS."""
    distinct, true_range = "–", "–"
    if record.distinct is not None:
        distinct = f"{record.distinct}" + ("" if record.diverse else " (!)")
        true_range = f"{record.distinct_low}–{record.distinct_high}"
    learned, name = record.trained_budget is not None, name_of(record, among)
    return [
        f"{name}, T = {record.trained_budget}" if learned else f"{name} @ {record.budget}",
        f"{record.mean_steps:.2f}",
        f"{record.min_steps}–{record.max_steps}",
        f"{record.score:.3f}",
        f"{record.ci_low:.3f}–{record.ci_high:.3f}",
        distinct,
        true_range,
        f"{record.num_forwards:,}",
        record.denoiser[:6],
    ]


def ordered(records: Sequence[Record]) -> list[Record]:
    """The learned order first, then each rule by its budget."""
    return sorted(records, key=lambda r: (r.task, r.trained_budget is None, r.policy, r.budget, r.seed))


def table(records: Sequence[Record], title: str, caption: str) -> Table:
    """For the terminal, 80 columns wide: all but the denoiser's hash, of which the caption tells."""
    shown = _table(title, f"{caption} {LEGEND}")
    for heading in HEADINGS[:-1]:
        shown.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for record in ordered(records):
        style = f"bold {LEARNED_COLOUR}" if record.trained_budget is not None else ""
        shown.add_row(*columns(record, records)[:-1], style=style)
    return shown


def _table(title: str, caption: str = "") -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


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


def bound_table(bound: BoundReport, task: str) -> Table:
    shown = _table(f"{task}: held-out bounds, {bound.num_examples} sequences")
    for heading in BOUND_HEADINGS:
        shown.add_column(heading, justify="left" if heading == BOUND_HEADINGS[0] else "right")
    for row in bound_rows(bound):
        shown.add_row(*row)
    return shown


def score_plot(records: Sequence[Record]) -> Figure:
    """Score against mean steps, with 95% intervals."""
    figure, axes = _figure(7.2, 3.6)
    for name in sorted({name_of(record, records) for record in records}):
        own = sorted((r for r in records if name_of(r, records) == name), key=lambda r: r.mean_steps)
        steps, scores = [r.mean_steps for r in own], [r.score for r in own]
        errors = [[max(0.0, r.score - r.ci_low) for r in own], [max(0.0, r.ci_high - r.score) for r in own]]
        learned = own[0].trained_budget is not None
        axes.errorbar(
            steps,
            scores,
            yerr=errors,
            label=name,
            color=LEARNED_COLOUR if learned else COLOURS.get(own[0].policy, "#7c3aed"),
            marker="*" if learned else "o",
            markersize=14 if learned else 5,
            linestyle="none" if learned else LINES.get(own[0].policy, "-"),
            capsize=3,
            zorder=3 if learned else 2,
        )
    axes.set_xlabel("mean steps (denoiser passes a sequence)")
    axes.set_ylabel("valid")
    axes.set_ylim(-0.03, 1.03)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def order_picture(orders: Sequence[Order]) -> Figure:
    """Which position is revealed when: a panel a rule, a row a sequence, a column a position, the colour the step."""
    import matplotlib as mpl
    from matplotlib.colors import BoundaryNorm

    figure, panels = _figure(2.6 * len(orders) + 0.9, 3.1, columns=len(orders))
    budget = max(order.budget for order in orders)
    shades = max(256, budget)  # BoundaryNorm wants one for every step
    scale = BoundaryNorm([step - 0.5 for step in range(budget + 1)], shades)
    colours = mpl.colormaps["viridis_r"].resampled(shades).with_extremes(bad="#e5e7eb")
    for axes, order in zip(panels if len(orders) > 1 else [panels], orders, strict=True):
        arranged = [position for group in order.layout for position in group]
        pixels = [[float("nan") if row[n] < 0 else row[n] for n in arranged] for row in order.reveal_step]
        image = axes.imshow(pixels, aspect="auto", cmap=colours, norm=scale, interpolation="nearest")
        edge = -0.5
        for group in order.layout[:-1]:
            edge += len(group)
            axes.axvline(edge, color="white", linewidth=2.5)
        axes.set_title(f"{order.policy}, {order.budget} steps", fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("position" if len(order.layout) == 1 else "positions, grouped", fontsize=9)
    (panels[0] if len(orders) > 1 else panels).set_ylabel("sequences", fontsize=9)
    ticks = range(budget) if budget <= 10 else None
    figure.colorbar(image, ax=panels, label="revealed at step", ticks=ticks, fraction=0.05, pad=0.02)
    return figure


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    """A figure without pyplot: no window system, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


class Section(NamedTuple):
    """The part of a page that tells of one run."""

    title: str
    caption: str
    records: list[Record]
    orders: list[Order]
    bound: BoundReport | None = None


def write_html(path: Path, sections: Sequence[Section]) -> None:
    """One self-contained page.  A file that is not such a page is never overwritten."""
    if path.exists() and not path.read_text(errors="replace").startswith(_PAGE[: _PAGE.index("<style>")]):
        raise ResultsError(f"{path} exists and is no report of unmask: give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_PAGE.replace("{body}", "".join(_section(section) for section in sections)))


def _section(section: Section) -> str:
    records = ordered(section.records)
    pictures = _picture(score_plot(records), "Score against steps, with 95% intervals.")
    if chosen := pictured(section.orders):
        pictures += _picture(
            order_picture(chosen),
            "Which position is revealed when: a row is a sequence, a column a position, positions that belong together "
            "side by side.",
        )
    tables = _html_table(
        HEADINGS,
        [columns(record, records) for record in records],
        [record.trained_budget is not None for record in records],
    )
    if section.bound is not None:
        rows = [list(row) for row in bound_rows(section.bound)]
        tables += _html_table(BOUND_HEADINGS, rows, [row is rows[0] for row in rows])
    title, caption = html.escape(section.title), html.escape(section.caption)
    legend = f"<p class=legend>{html.escape(LEGEND)}</p>"
    return f"<section><h2>{title}</h2><p>{caption}</p>{pictures}{tables}{legend}</section>"


def _picture(figure: Figure, caption: str) -> str:
    return f"<figure>{_svg(figure)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _html_table(headings: list[str], rows: list[list[str]], learned: list[bool]) -> str:
    heads = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = ""
    for row, marked in zip(rows, learned, strict=True):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        body += f"<tr{' class=learned' if marked else ''}>{cells}</tr>"
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def pictured(orders: Sequence[Order]) -> list[Order]:
    """The learned order beside the heuristics at the same budget; without one, all at the smallest budget."""
    if not orders:
        return []
    budget = next((order.budget for order in orders if order.policy == "learned"), min(o.budget for o in orders))
    latest = {order.policy: order for order in orders if order.budget == budget}
    return sorted(latest.values(), key=lambda order: (order.policy != "learned", order.policy))


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # what matplotlib adds links elsewhere
    figure.savefig(text, format="svg", metadata=nothing)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>unmask report</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.15rem; margin-top: 2.5rem }
figure { margin: 1rem 0 } figure svg { max-width: 100%; height: auto } figcaption { color: #6b7280; font-size: .85rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid #e5e7eb }
th:first-child, td:first-child { text-align: left } .legend { color: #6b7280; font-size: .85rem }
.learned td { font-weight: 600; color: #c2410c }
</style></head><body><h1>unmask report</h1>{body}</body></html>
"""
