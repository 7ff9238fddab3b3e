"""Records -> plots."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from itertools import cycle, pairwise
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unmask.display import visible
from unmask.evaluation.compare import are_neighbours
from unmask.evaluation.curve import Curve, frontier
from unmask.evaluation.records import Record, grouped
from unmask.report.tables import LEARNED_COLOUR, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"iid": "#64748b", "top-prob": "#2563eb", "margin": "#059669"}
MORE_COLOURS = (
    *("#7c3aed", "#db2777", "#0891b2", "#84cc16", "#a16207", "#1e3a8a", "#f472b6", "#14b8a6"),
    *("#4d7c0f", "#c084fc", "#0f172a", "#eab308", "#38bdf8", "#9f1239", "#a8a29e"),
)
DASHED = ("top-prob",)  # where it coincides with margin, both stay visible
MARKERS = "osD^vPXhp<>"  # of the runs that share a plot
# Of learned orders: colours that no other rule has, filled and hollow, so that those close together can be told apart.
ORDER_LOOKS: list[dict[str, Any]] = [
    {"color": LEARNED_COLOUR, "marker": "*", "markersize": 12},
    {"color": LEARNED_COLOUR, "marker": "^", "markersize": 7, "markerfacecolor": "white"},
    {"color": "#f97316", "marker": "D", "markersize": 6},
    {"color": "#f97316", "marker": "s", "markersize": 6, "markerfacecolor": "white"},
    {"color": "#dc2626", "marker": "P", "markersize": 8},
    {"color": "#7c2d12", "marker": "o", "markersize": 7, "markerfacecolor": "white"},
]


def colours_of(policies: Sequence[str]) -> dict[str, str]:
    """A colour for each rule, the same in every plot unless two of this plot would have the same."""
    found = {policy: COLOURS[policy] for policy in policies if policy in COLOURS}
    for policy in sorted(set(policies) - set(found)):
        start = int(hashlib.sha256(policy.encode()).hexdigest(), 16)
        turns = [MORE_COLOURS[(start + i) % len(MORE_COLOURS)] for i in range(len(MORE_COLOURS))]
        found[policy] = next((colour for colour in turns if colour not in found.values()), turns[0])
    return found


class Series(NamedTuple):
    """What a plot shows of one rule or one kind of order: points of one record per seed."""

    label: str
    points: list[list[Record]]
    marker: str = "o"

    @property
    def first(self) -> Record:
        return self.points[0][0]

    def means(self, field: str) -> list[float]:
        """The mean over seeds at each point."""
        return [mean(getattr(record.outcome, field) for record in point) for point in self.points]

    @property
    def joined(self) -> list[bool]:
        """Whether a line leads to each point from the one before: of a rule, where no step between them is left out."""
        pairs = pairwise(point[0] for point in self.points)
        return [False, *(not self.first.spec.learned and are_neighbours(*pair) for pair in pairs)]


def shared_plot(runs: Sequence[tuple[str, Sequence[Record]]]) -> Figure:
    """The records of runs of one task, given with their names."""
    return plot(shared_series(runs), "valid, %")


def shared_series(runs: Sequence[tuple[str, Sequence[Record]]]) -> list[Series]:
    """The same as series; one marker per run.

    A heuristic that ran on the same denoiser in several runs is one line, with all their names.
    """
    everything = [record for _, records in runs for record in records]
    lines: dict[tuple[bool, str, int, str, str], tuple[list[str], str, list[Record]]] = {}
    for (run, records), marker in zip(runs, cycle(MARKERS), strict=False):
        for record in records:
            spec = record.spec
            rule = (spec.learned, name_of(record, everything), spec.trained_budget or 0)
            names, _, found = lines.setdefault((*rule, spec.denoiser, run if spec.learned else ""), ([], marker, []))
            names += [run] if run and run not in names else []
            found += [record] if record not in found else []
    series = []
    for (learned, name, budget, *_), (names, marker, own) in sorted(lines.items(), key=lambda item: item[0][:3]):
        label = ", ".join([*names, f"{name}, T = {budget}" if learned else name])
        series.append(Series(label, [[record] for record in sorted(own, key=lambda r: r.mean_steps)], marker))
    return series


def plot(lines: Sequence[Series], what: str) -> Figure:
    """Scores in percent against mean steps, with 95% intervals; the points of a rule that are neighbours are joined.

    The legend is beside the plot, and nothing is written inside, where it would overprint the points.
    """
    from matplotlib.colors import to_rgba

    longest = max(len(line.label) for line in lines)
    figure, panels = _figure(max(9.0, 5.5 + 0.09 * longest), max(4.8, 0.8 + 0.24 * len(lines)))
    axes = panels[0, 0]
    colours = colours_of([line.first.spec.policy for line in lines if not line.first.spec.learned])
    looks = cycle(ORDER_LOOKS)
    for line in lines:
        spec = line.first.spec
        dashes = "--" if spec.policy in DASHED else "-"
        if spec.learned:
            look = {"linestyle": "none", "zorder": 3, **next(looks)}
        else:
            look = {"color": colours[spec.policy], "linestyle": "none", "marker": line.marker, "markersize": 3.5}
        steps = line.means("mean_steps")
        scores, low, high = (100 * np.array(line.means(field)) for field in ("score", "ci_low", "ci_high"))
        for i in np.flatnonzero(line.joined):
            ends = slice(i - 1, i + 1)
            axes.plot(steps[ends], scores[ends], color=look["color"], linestyle=dashes, linewidth=1.2)
        axes.errorbar(
            *(steps, scores, np.maximum(0.0, [scores - low, high - scores])),
            label=visible(f" {line.label}" if line.label.startswith("_") else line.label),  # else matplotlib hides it
            ecolor=to_rgba(look["color"], 0.35),
            **look,
        )
    _finish(axes, what)
    return figure


def curve_plot(curve: Curve, what: str) -> Figure:
    """The frontier of each family of rules as a thin line, that of each order as a thick one, with all their points.

    95% intervals at the corners of the orders and of the best rule.
    """
    figure, panels = _figure(9.0, 5.2)
    axes = panels[0, 0]
    families = grouped(curve.points, lambda point: (point.family == "learned", point.family, point.seed))
    colours = colours_of([name for learned, name, _ in families if not learned])
    best = {point.key for point in frontier(p for p in curve.points if p.family != "learned")}
    for (learned, name, seed), points in sorted(families.items(), key=lambda item: (item[0][:2], item[0][2] or 0)):
        colour = LEARNED_COLOUR if learned else colours[name]
        hull = frontier(points)
        steps, scores = [p.mean_steps for p in hull], [100 * p.score for p in hull]
        label = f"{name}, {len(curve.seeds)} seeds" if learned and len(curve.seeds) > 1 else name
        shown_before = learned and seed != curve.seeds[0]  # one entry for all seeds
        dashes, width = "--" if name in DASHED else "-", 2.0 if learned else 0.9
        look = {"color": colour, "linestyle": dashes, "linewidth": width}
        axes.plot(steps, scores, label=None if shown_before else visible(label), **look)
        axes.scatter([p.mean_steps for p in points], [100 * p.score for p in points], s=7, color=colour, alpha=0.35)
        shown = [p for p in hull if learned or p.key in best]
        middle, low, high = (100 * np.array([getattr(p, f) for p in shown]) for f in ("score", "ci_low", "ci_high"))
        widths = np.maximum(0.0, [middle - low, high - middle])
        axes.errorbar([p.mean_steps for p in shown], middle, widths, fmt="none", ecolor=colour, elinewidth=0.9)
    _finish(axes, what)
    return figure


def _finish(axes: Any, what: str) -> None:
    """Steps on a logarithmic axis, the legend beside the plot."""
    from matplotlib.ticker import FixedLocator

    axes.set_xlabel("mean steps per sequence")
    axes.set_ylabel(what)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 36, 72]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(color="#e5e7eb", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for text in legend.get_texts():
        text.set_parse_math(False)  # names of runs may hold a dollar sign


def order_picture(records: Sequence[Record], layout: Sequence[Sequence[int]]) -> Figure:
    """When each position is revealed: a panel per rule, a row per sequence, a column per position.

    layout: the positions in groups that belong together, which are drawn side by side.
    """
    import matplotlib as mpl
    from matplotlib.colors import BoundaryNorm
    from matplotlib.ticker import FuncFormatter

    columns = min(len(records), 4)
    rows = -(-len(records) // columns)
    figure, panels = _figure(2.6 * columns + 0.9, 3.1 * rows, rows, columns)
    budget = max(record.spec.budget for record in records)
    shades = max(256, budget)  # BoundaryNorm wants one for every step
    scale = BoundaryNorm([step - 0.5 for step in range(budget + 1)], shades)
    colours = mpl.colormaps["viridis_r"].resampled(shades).with_extremes(bad="#e5e7eb")
    for axes in panels.flat[len(records) :]:
        axes.set_axis_off()
    for axes, record in zip(panels.flat[: len(records)], records, strict=True):
        assert record.verdicts is not None
        arranged = [position for group in layout for position in group]
        pixels = [[float("nan") if row[n] < 0 else row[n] for n in arranged] for row in record.verdicts.reveal_step]
        image = axes.imshow(pixels, aspect="auto", cmap=colours, norm=scale, interpolation="nearest")
        edge = -0.5
        for group in layout[:-1]:
            edge += len(group)
            axes.axvline(edge, color="white", linewidth=2.5)
        axes.set_title(visible(f"{record.spec.policy}, {record.spec.budget} steps"), fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("position" if len(layout) == 1 else "positions, grouped", fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("sequences", fontsize=9)
    ticks = range(budget) if budget <= 10 else None
    from_one = FuncFormatter(lambda step, _: f"{step + 1:g}")
    figure.colorbar(image, ax=panels, label="revealed at step", ticks=ticks, format=from_one, fraction=0.05, pad=0.02)
    return figure


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its panels [rows, columns], without pyplot: no window system, no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def pictured(records: Sequence[Record]) -> list[Record]:
    """The learned order beside the heuristics at the same budget; without one, all at the smallest budget."""
    kept = [record for record in records if record.verdicts is not None]
    if not kept:
        return []
    learned = [record for record in kept if record.spec.policy == "learned"]
    budget = learned[0].spec.budget if learned else min(record.spec.budget for record in kept)
    latest = {record.spec.policy: record for record in kept if record.spec.budget == budget}
    return sorted(latest.values(), key=lambda record: (record.spec.policy != "learned", record.spec.policy))


def svg(figure: Figure) -> str:
    """The same text for the same picture."""
    import matplotlib as mpl

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # what matplotlib adds links elsewhere
    with mpl.rc_context({"svg.hashsalt": "unmask"}):
        figure.savefig(text, format="svg", metadata=nothing)
    return text.getvalue()[text.getvalue().index("<svg") :]
