"""Records of studies -> a Markdown page with all their tables, and their plots in a folder beside it.

FOLDER/STUDY.jsonl and FOLDER/STUDY/ are what `unmask reproduce` leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unmask.display import visible
from unmask.evaluation.compare import PLAIN_RULES, SAME, Gain
from unmask.evaluation.evaluate import Record
from unmask.jsonl import ResultsError, read_jsonl
from unmask.report.plots import LEARNED_COLOURS, LINES, colours_of, svg
from unmask.report.tables import read_records, told_apart
from unmask.studies.study import Done, read_done

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEGIN = "<!-- Written by `unmask report --markdown`: do not edit. -->"
NAMES = {  # what the page calls them; other rules have their own names
    "iid": "IID",
    "top-prob": "top probability",
    "learned": "sampled",
    "learned(deterministic)": "greedy",
}
LEGEND = """\
Accuracy in percent, with Wilson's 95% interval.

- *Gain*: of an order over a rule at the same mean number of steps, the rule's score interpolated linearly between its
  own nearest numbers of steps. Where a rule takes fewer steps than the order even at its largest budget here, its score
  at that budget counts. The 95% interval is a bootstrap over problems and, where there are several, orders.
- *Best of three*: the best of IID, top probability and margin there, chosen after the fact, which favours it.
- *Greedy*, *sampled*: how positions are chosen from the selector (`learned(deterministic)` and `learned`).
- *Frozen*: every rule runs on the denoiser that the order was learned on. *Joint*: the denoiser was trained together
  with the order, and the rules run on the denoiser from before, trained further on as many sequences.
- *Flexible* takes the last number for the answer; everything else is strict, the number marked as the answer.
- The plots show IID, top probability, margin and the two best other rules, and the mean over seeds of each order, its
  budgets T from left to right."""
# One per kind of order: frozen and joint in colours of their own, greedy filled and sampled hollow.
ORDER_LOOKS: list[dict[str, Any]] = [
    {"color": LEARNED_COLOURS[0], "marker": "*", "markersize": 12},
    {"color": LEARNED_COLOURS[0], "marker": "^", "markersize": 7, "markerfacecolor": "white"},
    {"color": LEARNED_COLOURS[1], "marker": "D", "markersize": 6},
    {"color": LEARNED_COLOURS[1], "marker": "s", "markersize": 6, "markerfacecolor": "white"},
]


class Results(NamedTuple):
    """What is known of one study."""

    name: str
    records: list[Record]
    gains: list[Gain]
    done: list[Done]


def read_results(folder: Path) -> list[Results]:
    if not folder.is_dir():
        raise ResultsError(f"{folder}: no such folder; give the folder of a study's records, OUT/results")
    if (folder / "recipe.json").exists():
        raise ResultsError(
            f"{folder} is a run: give the folder of a study's records, OUT/results, or leave --markdown out"
        )
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        gains = folder / path.stem / "gains.jsonl"
        found.append(
            Results(
                path.stem,
                read_records(path),
                read_jsonl(gains, Gain) if gains.exists() else [],
                read_done(folder / path.stem / "stages.jsonl"),
            )
        )
    if not any(results.records for results in found):
        raise ResultsError(f"{folder} has no records: run `unmask reproduce` first and give its OUT/results")
    return found


def write_page(page: Path, folder: Path) -> None:
    """Write the tables to the page, and the plots to a folder of the page's name beside it."""
    studies = read_results(folder)
    if page.exists() and not page.read_text(encoding="utf-8", errors="replace").startswith(BEGIN):
        raise ResultsError(f"{page} was not written by this command: give another page, such as {folder / 'tables.md'}")
    plots = page.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    for results in studies:
        for part in _parts(results):
            (plots / part.plot).write_text(svg(plot(part.records)) + "\n", encoding="utf-8")
    page.write_text(tables(studies, plots.name), encoding="utf-8")


def tables(studies: Sequence[Results], plots: str) -> str:
    """The whole page; `plots` is the folder that the pictures are in."""
    parts = [BEGIN, "# Results: all tables", LEGEND]
    for results in studies:
        for title, picture, records in _parts(results):
            first = records[0]
            overlong = max((record.overlong or 0) for record in records)
            note = f", of which {overlong} are too long for the model and count as wrong" if overlong else ""
            tokens = "greedy tokens" if first.temperature == 0 else f"tokens at temperature {first.temperature:g}"
            gains = [
                gain for gain in results.gains if all(getattr(gain, name) == getattr(first, name) for name in _SAID)
            ]
            said = f"{first.num_examples:,} problems{note}; {tokens}. Denoisers: {_denoisers(records)}."
            parts += [f"## {title}", said, f"![{title}: accuracy against mean steps]({plots}/{picture})"]
            parts += [_table(*rows) for rows in (_orders(records, gains), _rivals(gains)) if rows[1]]
            parts += [_table(*rows) for rows in _heuristics(records)]
        if results.done:
            parts += [f"## {results.name}: wall time", _times(results.done)]
    return visible("\n\n".join(parts) + "\n")


class Part(NamedTuple):
    """What was evaluated alike: a split, and where it was evaluated in several ways each of them by itself."""

    title: str
    plot: str  # its file
    records: list[Record]


_SAID = tuple(name for name in SAME if name in Gain.__dataclass_fields__)


def _parts(results: Results) -> list[Part]:
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in results.records:
        groups.setdefault(tuple(getattr(record, name) for name in SAME), []).append(record)
    found = []
    for records in groups.values():
        split = records[0].split
        ways = [group[0] for group in groups.values() if group[0].split == split]
        how = [way for way in told_apart(records[0], ways) if not way.startswith("order of seed")]
        models = ", ".join(sorted({record.model for record in records}))
        name = "-".join([results.name, split, *how]).replace(" ", "-")
        found.append(Part(f"{models}: {', '.join([split, *how])}", f"{name}.svg", records))
    return found


# --- tables -----------------------------------------------------------------------------------------------------------

Rows = tuple[list[str], list[list[str]]]


def _orders(records: Sequence[Record], gains: Sequence[Gain]) -> Rows:
    """Every seed of every order, and below the seeds of a group their mean with the gain."""
    headings = ["order", "T", "seed", "steps", "range", "strict", "95%", "flexible", "best of three", "gain"]
    rows = []
    best = {_group(gain): gain for gain in gains if gain.best}
    learned = sorted((r for r in records if r.trained_budget is not None), key=_place)
    for group in dict.fromkeys(map(_group, learned)):
        orders = [record for record in learned if _group(record) == group]
        gain = best.get(group)
        by_seed = dict(zip(gain.seeds, gain.seed_gains, strict=True)) if gain else {}
        for record in orders:
            own = f"{100 * by_seed[record.trained_seed]:+.1f}" if record.trained_seed in by_seed else "–"
            rows.append(
                [
                    _kind(record),
                    f"{record.trained_budget}",
                    f"{record.trained_seed}",
                    f"{record.mean_steps:.2f}",
                    f"{record.min_steps}–{record.max_steps}",
                    _percent(record.score),
                    f"{_percent(record.ci_low)}–{_percent(record.ci_high)}",
                    "–" if record.score_flexible is None else _percent(record.score_flexible),
                    "",
                    own,
                ]
            )
        if gain:
            rows.append(
                [
                    f"**{_kind(orders[0])}**",
                    f"**{gain.trained_budget}**",
                    f"**mean of {len(gain.seeds)}**",
                    f"**{gain.mean_steps:.2f}**",
                    "",
                    f"**{_percent(gain.score)}**",
                    "",
                    "",
                    f"{_percent(gain.rival_score)} {_called(gain.rival)}",
                    f"**{_gain(gain)}**",
                ]
            )
    return headings, rows


def _rivals(gains: Sequence[Gain]) -> Rows:
    """The orders of each group against every rule."""
    headings = ["order", "T", "steps", "against", "its score", "its steps", "gain, 95%"]
    ordered = sorted(gains, key=lambda g: (*_place(g), g.rival not in PLAIN_RULES, -g.rival_score, g.rival))
    return headings, [
        [
            _kind(g),
            f"{g.trained_budget}",
            f"{g.mean_steps:.2f}",
            _called(g.rival),
            _percent(g.rival_score),
            "the same" if g.rival_steps > g.mean_steps - 0.005 else f"{g.rival_steps:.2f}",
            _gain(g),
        ]
        for g in ordered
    ]


def _heuristics(records: Sequence[Record]) -> Iterable[Rows]:
    """The rules on each denoiser, one column per budget."""
    plain = [record for record in records if record.trained_budget is None]
    for denoiser in dict.fromkeys(record.denoiser for record in plain):
        own = [record for record in plain if record.denoiser == denoiser]
        budgets = sorted({record.budget for record in own})
        rules = sorted({record.policy for record in own}, key=lambda rule: (_rule_place(rule), rule))
        rows = []
        for rule in rules:
            by_budget = {record.budget: record for record in own if record.policy == rule}
            shown = [by_budget.get(budget) for budget in budgets]
            rows.append([_called(rule), *("" if r is None else _reached(r) for r in shown)])
        yield [f"`{denoiser[:6]}`, steps:", *map(str, budgets)], rows


def _reached(record: Record) -> str:
    """The score, with the steps where a rule took fewer than it was given."""
    fewer = record.mean_steps < record.budget - 0.05
    return _percent(record.score) + (f" ({record.mean_steps:.1f})" if fewer else "")


def _times(done: Sequence[Done]) -> str:
    """The stages by what one asks for: all seeds of an order, or all evaluations on a split."""
    totals: dict[str, list[Done]] = {}
    for attempt in done:
        run = attempt.stage.partition("/")[0]
        name = f"evaluate {run}" if "/" in attempt.stage else f"train {run.partition('-seed')[0]}"
        totals.setdefault(name, []).append(attempt)
    rows = [
        [
            name,
            f"{len({attempt.stage for attempt in attempts})}",
            f"{max(attempt.jobs for attempt in attempts)}",
            f"{wall_seconds(attempts) / 60:.1f}",
            ", ".join(sorted({attempt.device for attempt in attempts})),
        ]
        for name, attempts in totals.items()
    ]
    rows.append(["**all**", "", "", f"**{wall_seconds(done) / 60:.1f}**", ""])
    note = "Wall time. Where several commands ran at once, the rows overlap and add up to more than the last one."
    table = _table(["stage", "commands", "at once, at most", "minutes", "hardware"], rows)
    return f"{note}\n\n{table}" if any(attempt.jobs > 1 for attempt in done) else table


def wall_seconds(done: Iterable[Done]) -> float:
    """The time in which at least one of the attempts was under way: the length of the union of their intervals."""
    total, until = 0.0, float("-inf")
    for started, ended in sorted((attempt.started, attempt.started + attempt.seconds) for attempt in done):
        total += max(0.0, ended - max(started, until))
        until = max(until, ended)
    return total


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(score: float) -> str:
    return f"{100 * score:.1f}"


def _gain(gain: Gain) -> str:
    return f"{100 * gain.gain:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"


def _called(rule: str) -> str:
    return NAMES.get(rule, rule)


def _rule_place(rule: str) -> int:
    return PLAIN_RULES.index(rule) if rule in PLAIN_RULES else len(PLAIN_RULES)


def _is_joint(order: Record | Gain) -> bool:
    if isinstance(order, Gain):
        return order.joint
    return order.plain_denoiser not in (None, order.denoiser)


def _kind(order: Record | Gain) -> str:
    return f"{'joint' if _is_joint(order) else 'frozen'}, {_called(order.policy)}"


def _group(order: Record | Gain) -> tuple[object, ...]:
    """What the orders that differ in their seed only have in common on one split."""
    same = (order.task, order.model, order.policy, order.trained_budget, order.num_examples)
    return (*same, _is_joint(order), order.temperature, order.eos_policy, order.precision)


def _place(order: Record | Gain) -> tuple[int | str, ...]:
    seed = order.trained_seed if isinstance(order, Record) else 0
    return (order.model, order.policy, int(_is_joint(order)), order.trained_budget or 0, seed or 0)


def _denoisers(records: Sequence[Record]) -> str:
    """Which weights the rules ran on, and which ones the joint orders use."""
    rules = dict.fromkeys(record.denoiser for record in records if record.trained_budget is None)
    joint = dict.fromkeys(r.denoiser for r in records if r.trained_budget is not None and _is_joint(r))
    said = f"rules on {', '.join(f'`{name[:6]}`' for name in rules)}" if rules else "no rule was evaluated"
    return said + (f"; joint orders use {', '.join(f'`{name[:6]}`' for name in joint)}" if joint else "")


# --- plots ------------------------------------------------------------------------------------------------------------


class Series(NamedTuple):
    """What a plot shows of one rule or one kind of order: points of one record per seed."""

    label: str
    points: list[list[Record]]

    def means(self, field: str) -> list[float]:
        """The mean over seeds at each point."""
        return [mean(getattr(record, field) for record in point) for point in self.points]


def rule_series(records: Sequence[Record]) -> list[Series]:
    """The paper's three rules and the two others with the highest score, on the denoiser that most orders share."""
    learned = {record.denoiser for record in records if record.trained_budget is not None}
    plain = sorted((record for record in records if record.trained_budget is None), key=lambda r: r.mean_steps)
    shared = [record for record in plain if record.denoiser in learned] or plain
    best = {rule: max(r.score for r in shared if r.policy == rule) for rule in {r.policy for r in shared}}
    others = sorted(set(best) - set(PLAIN_RULES), key=lambda rule: (-best[rule], rule))[:2]
    rules = [rule for rule in (*PLAIN_RULES, *others) if rule in best]
    return [Series(_called(rule), [[r] for r in shared if r.policy == rule]) for rule in rules]


def order_series(records: Sequence[Record]) -> list[Series]:
    """One per kind of order, one point per budget."""
    points: dict[str, dict[object, list[Record]]] = {}
    for record in sorted((r for r in records if r.trained_budget is not None), key=lambda r: (_kind(r), *_place(r))):
        points.setdefault(_kind(record), {}).setdefault(_group(record), []).append(record)
    return [Series(f"learned, {kind}", list(groups.values())) for kind, groups in points.items()]


def plot(records: Sequence[Record]) -> Figure:
    """Accuracy against mean steps: rules as lines, orders as large marks, the legend beside them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator

    figure = Figure(figsize=(9.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()

    def draw(series: Series, color: str, **look: Any) -> None:
        scores, low, high = (100 * np.array(series.means(field)) for field in ("score", "ci_low", "ci_high"))
        errors = np.maximum(0.0, [scores - low, high - scores])
        axes.errorbar(
            *(series.means("mean_steps"), scores, errors),
            label=series.label,
            color=color,
            ecolor=to_rgba(color, 0.35),
            **look,
        )

    rules = {series.points[0][0].policy: series for series in rule_series(records)}
    colours = colours_of(list(rules))
    for policy, series in rules.items():
        draw(series, colours[policy], linestyle=LINES.get(policy, "-"), marker="o", markersize=3.5)
    for series, look in zip(order_series(records), cycle(ORDER_LOOKS), strict=False):
        draw(series, linestyle="none", zorder=3, **look)
    axes.set_xlabel("mean steps per sequence")
    axes.set_ylabel("solved, %")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 36, 72]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(color="#e5e7eb", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
