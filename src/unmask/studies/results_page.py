"""Records of studies -> a Markdown page with all their tables, and their plots in a folder beside it.

FOLDER/STUDY.jsonl and FOLDER/STUDY/ are what `unmask reproduce` leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from unmask.display import visible
from unmask.evaluation.compare import Gain
from unmask.evaluation.curve import Curve
from unmask.evaluation.records import COMPARED, EvaluationSpec, Record, grouped, read_records
from unmask.files import write_text
from unmask.jsonl import ResultsError, read_jsonl
from unmask.recipe import PLAIN_RULES
from unmask.report.plots import Series, curve_plot, plot, svg
from unmask.report.tables import curve_table, curve_verdict, distinctions, markdown_table, needed_table
from unmask.studies.study import Done, read_done

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
- Columns after the interval are the task's own metrics; one that is the same for all rules is given with the problems.
- The plots show IID, top probability, margin and the two best other rules, and the mean over seeds of each order, its
  budgets T from left to right."""


class Results(NamedTuple):
    """What is known of one study."""

    name: str
    records: list[Record]
    gains: list[Gain]
    curves: list[Curve]
    done: list[Done]


def read_results(folder: Path) -> list[Results]:
    if not folder.is_dir():
        raise ResultsError(f"{folder}: no such folder; give the folder of a study's records, OUT/results")
    if (folder / "recipe.json").exists():
        raise ResultsError(f"{folder} is a run: give a study's OUT/results, or leave --markdown out")
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        beside = folder / path.stem
        gains = read_jsonl(beside / "gains.jsonl", Gain) if (beside / "gains.jsonl").exists() else []
        curves = read_jsonl(beside / "curve.jsonl", Curve) if (beside / "curve.jsonl").exists() else []
        scored = [record for record in read_records(path) if record.outcome.checked]
        found.append(Results(path.stem, scored, gains, curves, read_done(beside / "stages.jsonl")))
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
            figures = {
                name: curve_plot(one, "solved, %" if one is curve else f"{one.measure}, %")
                for picture, curve in _curves(part, results).items()
                for name, one in _pictures(picture, curve)
            }
            lines = [] if figures else [*rule_series(part.records), *order_series(part.records)]
            for picture, figure in (figures or {part.plot: plot(lines, "solved, %")}).items():
                write_text(plots / picture, svg(figure) + "\n")
    write_text(page, tables(studies, plots.name))


def tables(studies: Sequence[Results], plots: str) -> str:
    """The whole page; `plots` is the folder that the pictures are in."""
    parts = [BEGIN, "# Results: all tables", LEGEND]
    for results in studies:
        for split, own in grouped(results.curves, lambda curve: curve.split).items():
            if (needed := needed_table(own)).rows:
                title = f"## {results.name}, {split}: steps needed"
                parts += [title, markdown_table(needed.headings, needed.rows), needed.caption]
        for part in _parts(results):
            title, picture, records = part
            spec, gains, curves = records[0].spec, _alike(part, results.gains), _curves(part, results)
            tokens = "greedy tokens" if spec.temperature == 0 else f"tokens at temperature {spec.temperature:g}"
            text = f"{spec.num_examples:,} problems{_constants(records)}; {tokens}. Denoisers: {_denoisers(records)}."
            parts += [f"## {title}", *(_curve(curve, f"{plots}/{drawn}") for drawn, curve in curves.items()), text]
            kept = records
            if curves:  # the points of a sweep are in the records
                single = {_group(gain) for gain in gains}
                kept = [record for record in records if not record.spec.learned or _group(record.spec) in single]
            else:
                parts += [f"![{title}: accuracy against mean steps]({plots}/{picture})"]
            parts += [markdown_table(*rows) for rows in (_orders(kept, gains), _rivals(gains)) if rows[1]]
            parts += [markdown_table(*rows) for rows in _heuristics(records)]
        if results.done:
            parts += [f"## {results.name}: wall time", _times(results.done)]
    return visible("\n\n".join(parts) + "\n")


class Part(NamedTuple):
    """What was evaluated alike: a split, and where it was evaluated in several ways each of them by itself."""

    title: str
    plot: str  # its file
    records: list[Record]


_SHARED = tuple(name for name in COMPARED if name in Gain.__dataclass_fields__)


def _parts(results: Results) -> list[Part]:
    groups = grouped(results.records, lambda record: record.spec.setting).values()
    several = len({record.spec.task for record in results.records}) > 1
    found = []
    for records in groups:
        task, split = records[0].spec.task, records[0].spec.split
        ways = [group[0] for group in groups if (group[0].spec.task, group[0].spec.split) == (task, split)]
        how = [way for way in distinctions(records[0], ways) if not way.startswith("order of seed")]
        how += [task] if several else []
        models = "; ".join(sorted({record.spec.model for record in records}))
        name = _file_name("-".join([results.name, split, *how]))
        found.append(Part(f"{models}: {', '.join([split, *how])}", f"{name}.svg", records))
    return found


Compared = TypeVar("Compared", Gain, Curve)


def _alike(part: Part, found: Sequence[Compared]) -> list[Compared]:
    """Those of the part's setting, as far as they tell."""
    spec = part.records[0].spec
    return [one for one in found if all(getattr(one, name) == getattr(spec, name) for name in _SHARED)]


def _curves(part: Part, results: Results) -> dict[str, Curve]:
    """Each by the file of its plot."""
    own = _alike(part, results.curves)
    names = [f"-{curve.model}{'-joint' * curve.joint}" if len(own) > 1 else "" for curve in own]
    stem = part.plot.removesuffix(".svg")
    files = [f"{_file_name(stem + name)}-curve.svg" for name in names]
    return dict(zip(files, own, strict=True))


def _pictures(picture: str, curve: Curve) -> list[tuple[str, Curve]]:
    """The file of each measure's plot."""
    names = [picture, picture.replace("-curve.svg", "-diverse-curve.svg")]
    return list(zip(names, curve.by_measure, strict=False))


def _file_name(label: str) -> str:
    return re.sub(r"[ ,/]+", "-", label)


# --- tables -----------------------------------------------------------------------------------------------------------

Rows = tuple[list[str], list[list[str]]]


def _curve(curve: Curve, picture: str) -> str:
    """The verdict, the plot and the gains."""
    name, parts = f"{curve.model}, {'joint' if curve.joint else 'frozen'}", list[str]()
    for plotted, one in _pictures(picture, curve):
        table, what = curve_table(one), "quality" if one is curve else one.measure
        parts += [f"![{name}, {curve.split}: {what} against mean steps]({plotted})"]
        parts += [markdown_table(table.headings, table.rows), table.caption]
    return "\n\n".join([f"**{name}:** {curve_verdict(curve)}", *parts])


def _orders(records: Sequence[Record], gains: Sequence[Gain]) -> Rows:
    """Every seed of every order, and below the seeds of a group their mean with the gain."""
    metrics = [name for name, values in _metrics(records).items() if len(values) > 1]
    shares = {name: _are_shares(values) for name, values in _metrics(records).items()}
    headings = ["order", "T", "seed", "steps", "range", "solved", "95%", *metrics, "best of three", "gain"]
    rows = []
    best = {_group(gain): gain for gain in gains if gain.best}
    learned = sorted((r for r in records if r.spec.learned), key=lambda r: _place(r.spec))
    for group, orders in grouped(learned, lambda record: _group(record.spec)).items():
        gain = best.get(group)
        by_seed = dict(zip(gain.seeds, gain.seed_gains, strict=True)) if gain else {}
        for spec, outcome in [(record.spec, record.outcome) for record in orders]:
            own = [_figure(outcome.metrics[name], shares[name]) if name in outcome.metrics else "–" for name in metrics]
            steps = [f"{outcome.mean_steps:.2f}", f"{outcome.fewest_steps}–{outcome.most_steps}"]
            solved = [_percent(outcome.score), f"{_percent(outcome.ci_low)}–{_percent(outcome.ci_high)}"]
            difference = f"{100 * by_seed[spec.trained_seed]:+.1f}" if spec.trained_seed in by_seed else "–"
            order = [_kind(spec), f"{spec.trained_budget}", f"{spec.trained_seed}"]
            rows.append([*order, *steps, *solved, *own, "", difference])
        if gain:
            text = [_kind(gain), gain.trained_budget, f"mean of {len(gain.seeds)}", f"{gain.mean_steps:.2f}"]
            rival = f"{_percent(gain.rival_score)} {_called(gain.rival)}"
            empty = [""] * (1 + len(metrics))
            rows.append(
                [*(f"**{x}**" for x in text), "", f"**{_percent(gain.score)}**", *empty, rival, f"**{_gain(gain)}**"]
            )
    return headings, rows


def _metrics(records: Sequence[Record]) -> dict[str, set[float | None]]:
    """The different values of each metric."""
    names = dict.fromkeys(name for record in records for name in record.outcome.metrics)
    return {name: {record.outcome.metrics.get(name) for record in records} for name in names}


def _are_shares(values: set[float | None]) -> bool:
    """Whether these are parts of all problems or samples; a length or a distance is above 1 somewhere."""
    return all(value is None or 0 <= value <= 1 for value in values)


def _figure(value: float, is_share: bool) -> str:
    return _percent(value) if is_share else f"{value:.2f}"


def _constants(records: Sequence[Record]) -> str:
    """The metrics that are the same for all rules, as numbers of problems: properties of the problems themselves."""
    number = records[0].spec.num_examples
    constant = {name: values.pop() for name, values in _metrics(records).items() if len(values) == 1}
    shares = {name: value or 0 for name, value in constant.items() if _are_shares({value})}
    text = [f"{name}: {round(number * share):,}" for name, share in shares.items()]
    return f" ({', '.join(text)})" if text else ""


def _rivals(gains: Sequence[Gain]) -> Rows:
    """The orders of each group against every rule."""
    headings = ["order", "T", "steps", "against", "its score", "its steps", "gain, 95%"]
    rows = []
    for g in sorted(gains, key=lambda g: (*_place(g), g.rival not in PLAIN_RULES, -g.rival_score, g.rival)):
        steps = "the same" if g.rival_steps > g.mean_steps - 0.005 else f"{g.rival_steps:.2f}"
        order = [_kind(g), f"{g.trained_budget}", f"{g.mean_steps:.2f}"]
        rows.append([*order, _called(g.rival), _percent(g.rival_score), steps, _gain(g)])
    return headings, rows


def _heuristics(records: Sequence[Record]) -> Iterable[Rows]:
    """The rules on each denoiser, one column per budget."""
    plain = [record for record in records if not record.spec.learned]
    for denoiser, own in grouped(plain, lambda record: record.spec.denoiser).items():
        cells: dict[str, dict[int, str]] = {}  # the score, with the steps where a rule took fewer than it was given
        for spec, outcome in [(record.spec, record.outcome) for record in own]:
            fewer = f" ({outcome.mean_steps:.1f})" if outcome.mean_steps < spec.budget - 0.05 else ""
            cells.setdefault(spec.policy, {})[spec.budget] = _percent(outcome.score) + fewer
        budgets = sorted({record.spec.budget for record in own})
        rules = [*(rule for rule in PLAIN_RULES if rule in cells), *sorted(set(cells) - set(PLAIN_RULES))]
        rows = [[_called(rule), *(cells[rule].get(budget, "") for budget in budgets)] for rule in rules]
        yield [f"`{denoiser[:6]}`, steps:", *map(str, budgets)], rows


def _times(done: Sequence[Done]) -> str:
    """The stages by what one asks for: all seeds of an order, or all evaluations on a split."""

    def total(attempt: Done) -> str:
        run, split, _ = attempt.stage.partition("/")
        return f"evaluate {run}" if split else f"train {run.partition('-seed')[0]}"

    rows = []
    for name, attempts in grouped(done, total).items():
        commands, at_once = len({attempt.stage for attempt in attempts}), max(attempt.jobs for attempt in attempts)
        devices = ", ".join(sorted({attempt.device for attempt in attempts}))
        rows.append([name, f"{commands}", f"{at_once}", f"{wall_seconds(attempts) / 60:.1f}", devices])
    rows.append(["**all**", "", "", f"**{wall_seconds(done) / 60:.1f}**", ""])
    note = "Wall time. Where several commands ran at once, the rows overlap and add up to more than the last one."
    table = markdown_table(["stage", "commands", "at once, at most", "minutes", "hardware"], rows)
    return f"{note}\n\n{table}" if any(attempt.jobs > 1 for attempt in done) else table


def wall_seconds(done: Iterable[Done]) -> float:
    """The time in which at least one of the attempts was under way: the length of the union of their intervals."""
    total, until = 0.0, float("-inf")
    for started, ended in sorted((attempt.started, attempt.started + attempt.seconds) for attempt in done):
        total += max(0.0, ended - max(started, until))
        until = max(until, ended)
    return total


def _percent(score: float) -> str:
    return f"{100 * score:.1f}"


def _gain(gain: Gain) -> str:
    return f"{100 * gain.gain:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"


def _called(rule: str) -> str:
    return NAMES.get(rule, rule)


def _kind(order: EvaluationSpec | Gain) -> str:
    return f"{'joint' if order.joint else 'frozen'}, {_called(order.policy)}"


def _group(order: EvaluationSpec | Gain) -> tuple[object, ...]:
    """What the orders that differ in their seed only have in common on one split."""
    same = (order.task, order.model, order.policy, order.trained_budget, order.num_examples)
    return (*same, order.joint, order.temperature, order.eos_policy, order.precision)


def _place(order: EvaluationSpec | Gain) -> tuple[int | str, ...]:
    seed = order.trained_seed if isinstance(order, EvaluationSpec) else 0
    return (order.model, order.policy, int(order.joint), order.trained_budget or 0, seed or 0)


def _denoisers(records: Sequence[Record]) -> str:
    """Which weights the rules ran on, and which ones the joint orders use."""
    rules = dict.fromkeys(record.spec.denoiser for record in records if not record.spec.learned)
    joint = dict.fromkeys(record.spec.denoiser for record in records if record.spec.joint)
    text = f"rules on {', '.join(f'`{name[:6]}`' for name in rules)}" if rules else "no rule was evaluated"
    return text + (f"; joint orders use {', '.join(f'`{name[:6]}`' for name in joint)}" if joint else "")


# --- plots ------------------------------------------------------------------------------------------------------------


def rule_series(records: Sequence[Record]) -> list[Series]:
    """The paper's three rules and the two others with the highest score, on the denoiser that most orders share."""
    learned = {record.spec.denoiser for record in records if record.spec.learned}
    plain = sorted((record for record in records if not record.spec.learned), key=lambda r: r.mean_steps)
    shared = [record for record in plain if record.spec.denoiser in learned] or plain
    curves = grouped(shared, lambda record: record.spec.policy)
    best = {rule: max(record.outcome.score for record in curve) for rule, curve in curves.items()}
    others = sorted(set(best) - set(PLAIN_RULES), key=lambda rule: (-best[rule], rule))[:2]
    rules = [rule for rule in (*PLAIN_RULES, *others) if rule in best]
    return [Series(_called(rule), [[record] for record in curves[rule]]) for rule in rules]


def order_series(records: Sequence[Record]) -> list[Series]:
    """One per kind of order, one point per budget."""
    learned = sorted((r for r in records if r.spec.learned), key=lambda r: (_kind(r.spec), *_place(r.spec)))
    return [
        Series(f"learned, {kind}", list(grouped(own, lambda record: _group(record.spec)).values()))
        for kind, own in grouped(learned, lambda record: _kind(record.spec)).items()
    ]
