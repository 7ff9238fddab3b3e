"""Records -> plots."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unmask.display import visible
from unmask.evaluation.evaluate import Order, Record
from unmask.report.tables import LEARNED_COLOUR, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNED_COLOURS = (LEARNED_COLOUR, "#f97316", "#dc2626", "#7c2d12", "#fb923c")  # one a run; no other rule has them
COLOURS = {"iid": "#64748b", "top-prob": "#2563eb", "margin": "#059669"}
MORE_COLOURS = (
    *("#7c3aed", "#db2777", "#0891b2", "#84cc16", "#a16207", "#1e3a8a", "#f472b6", "#14b8a6"),
    *("#4d7c0f", "#c084fc", "#0f172a", "#eab308", "#38bdf8", "#9f1239", "#a8a29e"),
)
LINES = {"top-prob": "--"}  # where it coincides with margin, both stay visible
MARKERS = "osD^vPXhp<>"  # of the runs that share a plot


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
