"""Records -> one self-contained HTML page.  Its markup, style and scripts are the files in the folder page/."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files as packaged
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import unmask
from unmask.decoding.policies import own_rules
from unmask.display import in_html, visible
from unmask.errors import UserError
from unmask.evaluation.bound import BoundReport, read_bound
from unmask.evaluation.compare import Comparison
from unmask.evaluation.curve import Curve, frontier, read_curve
from unmask.evaluation.perplexity import Perplexity, read_perplexities
from unmask.evaluation.records import EvaluationSpec, Record, grouped, read_run
from unmask.files import refuse_link, write_text
from unmask.jsonl import ResultsError, unsealed
from unmask.recipe import Recipe
from unmask.report.orders import orders_of
from unmask.report.plots import Series, shared_series
from unmask.report.tables import (
    ResultTable,
    bound_table,
    bound_verdict,
    caption,
    columns,
    curve_table,
    curve_verdict,
    headline,
    is_elsewhere,
    learned_on,
    notes,
    ordered,
    perplexity_tables,
    result_tables,
    row_name,
    title,
    verdict,
    without_sweep,
)
from unmask.rule_list import in_words
from unmask.training.run import load_task

PAGE_EXAMPLES = 12  # that are shown as they are written
MOST_UPDATES = 200  # points of a training curve


class Section(NamedTuple):
    """What is told of one run."""

    title: str
    caption: str
    records: list[Record]
    layout: Sequence[Sequence[int]]  # the task's
    bound: BoundReport | None = None
    run: str = ""  # the run's name
    task: str = ""  # what distinguishes its task from others of the same name
    curve: Curve | None = None
    perplexities: Sequence[Perplexity] = ()
    training: Mapping[str, list[tuple[int, float]]] = MappingProxyType({})  # by stage: (update, bound)
    recipe: str = ""  # as TOML
    commands: Sequence[str] = ()  # that made the records
    orders: dict[str, Any] | str = ""  # what `orders_of` says, or why there is nothing

    @property
    def verdict(self) -> str:
        """That of the curve, if there is one: its rival is the best of all rules, swept."""
        return verdict(self.records) if self.curve is None else curve_verdict(self.curve)

    @property
    def is_better(self) -> bool:
        """Whether the interval of its gain is above 0."""
        mean = self.curve.by_measure[-1].mean if self.curve else None
        if mean is not None and mean.gain is not None:
            return (mean.held_out[1] if mean.held_out else mean.low or 0.0) > 0
        return self.verdict.startswith("The learned order is better")


def read_sections(runs: Sequence[Path], trust_task: bool = False, examples: int = 0) -> list[Section]:
    """What is known of these runs; `examples` are written once more for the viewer."""
    names, sections = [run.resolve().name for run in runs], []
    for run, name in zip(runs, names, strict=True):
        if not run.is_dir():
            raise UserError(f"{run}: no such folder; give the folder of an evaluated run")
        records = read_run(run)
        if not records:
            raise UserError(f"{run}/results.jsonl is empty: run `unmask evaluate {run}` first")
        recipe, task = load_task(run, trust_task)
        curve, own = read_curve(run / "curve.json"), learned_on(run, recipe)
        told = caption(recipe, records, own)
        points = {point.key for point in curve.points} if curve else set()
        swept = [record for record in records if record.key in points]
        records = without_sweep(records, curve, recipe)
        orders: dict[str, Any] | str = "No example was asked for."
        if examples:
            try:
                orders = orders_of(run, records, examples, trust_task)
            except UserError as error:  # the model may be elsewhere: the records are here
                orders = f"The order viewer is left out: {error}."
        sections.append(
            Section(
                title(run, task),
                told,
                records,
                task.layout,
                bound=read_bound(run / "bound.json"),
                run=name if names.count(name) == 1 else str(run),
                task=json.dumps(recipe.task, sort_keys=True),
                curve=curve,
                perplexities=read_perplexities(run),
                training=training_curves(run / "metrics.jsonl"),
                recipe=recipe.to_toml(),
                commands=commands(name, records, swept, curve.asked if curve else [], recipe, task.held_out, own),
                orders=orders,
            )
        )
    return sections


def commands(
    run: str,
    records: Sequence[Record],
    swept: Sequence[Record],
    asked: Sequence[str],
    recipe: Recipe,
    split: str,
    own: str = "",
) -> list[str]:
    """What makes these records: rules that ran at the same budgets together, with what differs from the recipe.

    swept: those of a curve, which the options `asked` restricted.  own: see `learned_on`.
    """

    def setting(record: Record) -> tuple[object, bool]:
        return record.spec.setting, is_elsewhere(record, own)

    def options(record: Record, budgets: Sequence[int]) -> list[str]:
        other = ["--denoiser=FOLDER", "--any-denoiser"] * is_elsewhere(record, own)
        return [*_asked(record.spec, budgets, recipe, split), *other]

    by_rule = grouped(ordered(records), lambda record: (setting(record), record.spec.policy)).values()
    alike = grouped(by_rule, lambda same: (setting(same[0]), tuple(sorted({r.spec.budget for r in same}))))
    found = [
        [*(f"--policy={same[0].spec.policy}" for same in rules), *options(rules[0][0], budgets)]
        for (_, budgets), rules in alike.items()
    ]
    if swept:
        found.append(["--curve", *asked, *options(swept[0], [])])
    trust = recipe.own_code or any(own_rules(record.spec.policy) for record in records)
    return [shlex.join(["unmask", "evaluate", run, *words, *["--trust-task"] * bool(trust)]) for words in found]


def _asked(spec: EvaluationSpec, budgets: Sequence[int], recipe: Recipe, split: str) -> list[str]:
    """The options of `unmask evaluate` that a recipe does not give."""
    words = [f"--steps={budget}" for budget in budgets]
    for option, asked, left_out in (
        ("examples", spec.num_examples, recipe.evaluate.examples),
        ("temperature", spec.temperature, recipe.evaluate.temperature),
        ("top-p", spec.top_p, 1.0),
        ("top-k", spec.top_k, 0),
        ("guidance", spec.guidance, 0.0),
        ("seed", spec.seed, recipe.seed),
        ("split", spec.split, split),
        ("cache", spec.cache, "none"),
    ):
        words += [f"--{option}={asked}"] * (asked != left_out)
    ends = spec.eos_policy.replace("stop", "stop-at-eos").replace(":", "=")
    words += [f"--{end}" for end in ends.split(",") if end != "none"]
    return words + ["--bf16"] * (spec.precision == "bf16")


def training_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """The bound in nats per token against the update, by stage, in few points; damaged lines are left out."""
    stages: dict[str, list[tuple[int, float]]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            values = unsealed(line)
            stage, point = str(values["stage"]), (int(values["update"]), float(values["elbo"]))
        except (ValueError, KeyError, TypeError):
            continue
        stages.setdefault(stage, []).append(point)
    return {name: points[:: -(-len(points) // MOST_UPDATES)] for name, points in stages.items()}


def write_report(runs: Sequence[Path], page: Path, trust_task: bool = False, examples: int = PAGE_EXAMPLES) -> None:
    """Write the page of these runs."""
    write_html(page, read_sections(runs, trust_task, examples))


def write_html(path: Path, sections: Sequence[Section]) -> None:
    """One self-contained page.  A file that is not such a page is never overwritten."""
    page = _file("page.html")
    head = page[: page.index("<meta name")]
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(head):
        raise ResultsError(f"{path} exists and is no report of unmask: give another --out")
    refuse_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Any] = {}  # what the scripts draw, by the name that the markup gives it
    groups = together(sections)
    body = [_shared(group, drawn) for group in groups]
    body += [_section(section, drawn, alone=len(sections) == 1) for section in sections]
    parts = {
        "style": _file("page.css") + _file("viewer.css"),
        "script": "".join(map(_file, ("colours.js", "viewer.js", "page.js"))),
        "head": _head(sections),
        "body": "".join(body),
        "foot": f"Written by unmask {in_html(unmask.__version__)}. Nothing on this page comes from a network.",
        "data": base64.b64encode(gzip.compress(json.dumps(drawn, separators=(",", ":")).encode(), 6, mtime=0)).decode(),
    }
    write_text(path, re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page))


def _file(name: str) -> str:
    return (packaged("unmask.report") / "page" / name).read_text(encoding="utf-8")


def together(sections: Sequence[Section]) -> list[list[Section]]:
    """The runs that share a task with another, by task."""
    drawn = [section for section in sections if section.task and any(r.outcome.checked for r in section.records)]
    by_task = grouped(drawn, lambda section: section.task)
    return [group for group in by_task.values() if len(group) > 1]


# --- the parts of the page --------------------------------------------------------------------------------------------


def _head(sections: Sequence[Section]) -> str:
    """The verdict, and the numbers that it rests on."""
    if len(sections) > 1:
        better = sum(section.is_better for section in sections)
        told = f"In {better} of {len(sections)} runs the learned order is better than every rule at equal steps."
        return f"<h1>{told}</h1>"
    (section,) = sections
    learned, rival = headline(section.records)
    told = f"<h1>{in_html(section.verdict)}</h1>"
    if section.curve is not None or learned is None or rival is None:
        return told
    return told + _numbers(learned, rival)


def _numbers(learned: Record, rival: Comparison) -> str:
    score = rival.equal.score or 0.0
    gain = f"{100 * (learned.outcome.score - score):+.1f}"
    ends = [100 * end for end in rival.interval or ()]
    width = "points" + (" [{:+.1f}, {:+.1f}], 95%".format(*ends) if ends else "")
    shown = [
        ("learned", f"{100 * learned.outcome.score:.1f}%", "learned order, valid"),
        ("", f"{100 * score:.1f}%", f"{rival.policy}, at equal steps"),
        ("", gain, width),
        ("", f"{learned.mean_steps:.2f}", "steps per sequence, mean"),
        ("", f"{learned.spec.num_examples:,}", "held-out examples"),
    ]
    cells = "".join(
        f"<div{' class=' + kind if kind else ''}><dt>{in_html(name)}</dt><dd>{number}</dd></div>"
        for kind, number, name in shown
    )
    return f'<dl class="big">{cells}</dl>'


def _shared(sections: Sequence[Section], drawn: dict[str, Any]) -> str:
    heading = f"{sections[0].records[0].spec.task}: {', '.join(section.run for section in sections)}"
    series = shared_series([(section.run, ordered(section.records)) for section in sections])
    told = "All of these runs; which denoiser each rule ran on is said below."
    return f"<section><h2>{in_html(heading)}</h2>{_chart(_quality(series), told, drawn)}</section>"


def _section(section: Section, drawn: dict[str, Any], alone: bool) -> str:
    records = ordered(section.records)
    scored, parts = [record for record in records if record.outcome.checked], []
    below = bound_verdict(section.bound) if section.bound is not None else ""
    told = [] if alone else [section.verdict]
    parts.append(f"<h2>{in_html(section.title)}</h2>")
    parts.append(f'<p class="lead">{in_html(" ".join(filter(None, [*told, below, section.caption])))}</p>')
    parts.append(_watch(section.orders, drawn))
    if section.curve is not None:
        for curve in section.curve.by_measure:
            swept = "against mean steps: the order at its prices, rules over their parameters, several caps."
            parts.append(_chart(_swept(curve), f"Percent {curve.measure} {swept}", drawn))
    if scored:
        what = (
            "Points with 95% intervals; a line joins neighbouring numbers of steps only. Click a name to see it alone."
        )
        parts.append(_chart(_quality(shared_series([("", scored)])), what, drawn))
    if records:
        parts.append(_newcomers_table(records))
    parts.append(_heat(section.orders, drawn))
    parts.append(_training(section.training, drawn))
    if tables := further_tables(section):
        parts.append(f"<details><summary>More tables</summary>{''.join(map(_html_table, tables))}</details>")
    parts.append(_made(section))
    return f"<section>{''.join(parts)}</section>"


def further_tables(section: Section) -> list[ResultTable]:
    """All but the table of the records."""
    records = ordered(section.records)
    found = [curve_table(curve) for curve in section.curve.by_measure] if section.curve is not None else []
    found += [*result_tables(records)[1:], *perplexity_tables(section.perplexities, records)]
    return [*found, bound_table(section.bound, section.run)] if section.bound is not None else found


def _card(heading: str, inside: str) -> str:
    return f'<div class="card"><h3>{in_html(heading)}</h3>{inside}</div>'


def _watch(orders: dict[str, Any] | str, drawn: dict[str, Any]) -> str:
    if isinstance(orders, str):
        return f'<p class="note">{in_html(orders)}</p>' if orders else ""
    note = (
        "The same prompts and seed for every rule. Arrow keys change the step, space plays; point at a token for more."
    )
    inside = f'<div data-orders="{_named(orders["examples"], drawn)}"></div><p class="note">{note}</p>'
    return _card("Watch it write", inside)


def _heat(orders: dict[str, Any] | str, drawn: dict[str, Any]) -> str:
    if isinstance(orders, str):
        return ""
    heat = orders["heat"]
    in_groups = len(heat["groups"]) > 1 and not heat["grid"][0]
    so = ", positions that belong together side by side" if in_groups else ""
    note = f"Mean step of the reveal over {heat['examples']} examples{so}: light is early, dark is late."
    map_ = f'<div class="heat" data-heat="{_named(heat, drawn)}"></div><p class="note">{note}</p>'
    return _card("When each position is written", map_)


def _chart(chart: dict[str, Any], told: str, drawn: dict[str, Any]) -> str:
    figure = (
        f'<figure class="chart" data-chart="{_named(chart, drawn)}"><figcaption>{in_html(told)}</figcaption></figure>'
    )
    return _card(chart["title"], figure)


def _named(what: Any, drawn: dict[str, Any]) -> str:
    """A name for what the scripts draw."""
    name = f"d{len(drawn)}"
    drawn[name] = what
    return name


def _quality(series: Sequence[Series]) -> dict[str, Any]:
    lines = []
    for line in series:
        points = []
        values = [line.means(field) for field in ("mean_steps", "score", "ci_low", "ci_high")]
        for x, y, low, high, joined, (record, *_) in zip(*values, line.joined, line.points, strict=True):
            y, low, high = (round(100 * value, 2) for value in (y, low, high))
            said = f"{y:.1f}% valid [{low:.1f}, {high:.1f}] in {x:.2f} steps, at most {record.spec.budget}"
            points.append([x, y, low, high, said, joined])
        lines.append({"label": visible(line.label), "learned": line.first.spec.learned, "points": points})
    return _score_chart("Quality against steps", lines)


def _swept(curve: Curve) -> dict[str, Any]:
    """Every setting of every rule; those on the frontier of their family with intervals, the others small."""
    lines = []
    for family, points in sorted(grouped(curve.points, lambda point: point.family).items()):
        corners, found = {point.key for point in frontier(points)}, []
        for point in sorted(points, key=lambda point: point.mean_steps):
            y, low, high = (round(100 * value, 2) for value in (point.score, point.ci_low, point.ci_high))
            said = f"{point.policy} @ {point.cap}: {y:.1f}% [{low:.1f}, {high:.1f}] in {point.mean_steps:.2f} steps"
            is_corner = point.key in corners
            ends = [low, high] if is_corner else [None, None]
            found.append([point.mean_steps, y, *ends, visible(said), False, not is_corner])
        lines.append({"label": visible(family), "learned": family == "learned", "points": found})
    return _score_chart("Quality against steps, every setting swept", lines, curve.measure)


def _score_chart(name: str, lines: list[dict[str, Any]], measure: str = "valid") -> dict[str, Any]:
    axes = {"x": "mean steps per sequence", "y": f"{measure}, %", "log": True, "percent": True}
    return {"title": name, **axes, "series": sorted(lines, key=lambda line: not line["learned"])}


def _training(stages: Mapping[str, list[tuple[int, float]]], drawn: dict[str, Any]) -> str:
    cards = []
    for stage, points in stages.items():
        said = [
            [update, round(value, 4), None, None, f"update {update}: {value:.4f}", False] for update, value in points
        ]
        line = {"label": visible(stage), "learned": stage == "order", "line": True, "points": said}
        chart = {"title": visible(f"Training: {stage}"), "x": "update", "y": "bound, nats per token", "small": True}
        cards.append(_chart({**chart, "series": [line]}, "Higher is better.", drawn))
    return f'<div class="pair">{"".join(cards)}</div>' if cards else ""


def _newcomers_table(records: Sequence[Record]) -> str:
    """Rule, steps and score for everybody; all other columns behind a switch."""
    rows = [columns(record, records) for record in records]
    metrics = dict.fromkeys(name for record in records for name in record.outcome.metrics)
    more = ["range", *metrics, "distinct", "true 99%", "passes", "denoiser"]
    more = [heading for heading in more if any(heading in row for row in rows)]
    checked = any(record.outcome.checked for record in records)
    shown = ["rule", "mean steps", *(["valid", "95% interval"] if checked else [])]
    heads = "".join(f'<th scope="col">{in_html(heading)}</th>' for heading in shown)
    heads += "".join(f'<th scope="col" class="more">{in_html(heading)}</th>' for heading in more)
    body, told_of, explained = "", set[str](), in_words()
    for record, row in zip(records, rows, strict=True):
        outcome = record.outcome
        words = "" if record.spec.policy in told_of else explained.get(re.split(r"[:(]", record.spec.policy)[0], "")
        told_of.add(record.spec.policy)
        name = in_html(row_name(record, records)) + (f"<small>{words}</small>" if words else "")
        score = f"{100 * outcome.score:.1f}"
        cells = [name, f"{outcome.mean_steps:.2f}"]
        if checked:
            bar = f'<span class="bar" style="--value:{score}%">{score}%</span>'
            width = f"{100 * outcome.ci_low:.1f} to {100 * outcome.ci_high:.1f}%"
            cells += [bar, width] if outcome.checked else ["–", "–"]
        body += f"<tr{' class=learned' if record.spec.learned else ''}>"
        body += "".join(f'<td data-label="{label}">{cell}</td>' for label, cell in zip(shown, cells, strict=True))
        body += "".join(
            f'<td class="more" data-label="{in_html(label)}">{in_html(row.get(label, "–"))}</td>' for label in more
        )
        body += "</tr>"
    told = "A rule says which positions are written at a step; T and @ give the most steps that it may take. " + (
        "valid: how many answers are right. " if checked else ""
    )
    legend = ResultTable("", " ".join(notes(records)), [], []).legend(more)
    switch = '<label class="switch"><input type="checkbox" data-more>all columns</label>'
    table = _TABLE.format(heads=heads, body=body)
    return _card("All rules", f'{switch}{table}<p class="note">{in_html(told + legend)}</p>')


def _html_table(table: ResultTable) -> str:
    heads = "".join(f'<th scope="col">{in_html(heading)}</th>' for heading in table.headings)
    body = ""
    for row, marked in zip_longest(table.rows, table.marked):
        pairs = zip(table.headings, row, strict=True)
        cells = "".join(f'<td data-label="{in_html(heading)}">{in_html(cell)}</td>' for heading, cell in pairs)
        body += f"<tr{' class=learned' if marked else ''}>{cells}</tr>"
    note = f'<p class="note">{in_html(table.legend(table.headings))}</p>'
    return _card(table.title, _TABLE.format(heads=heads, body=body) + note)


_TABLE = """\
<div class="scroll" tabindex="0" role="region" aria-label="table">\
<table class="rows"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"""


def _made(section: Section) -> str:
    """The command, the version and the recipe."""
    versions = ", ".join(sorted({record.outcome.revision for record in section.records}))
    devices = ", ".join(sorted({record.outcome.device for record in section.records}))
    run = shlex.quote(section.run)
    lines = [f"unmask train recipe.toml --out {run}", *section.commands]
    lines += [f"unmask evaluate {run} --bound"] * (section.bound is not None)
    told = f"<pre>{in_html(chr(10).join([*lines, f'unmask report {run}']))}</pre>"
    told += f'<p class="note">Evaluated by unmask {in_html(versions)} on {in_html(devices)}.</p>'
    if section.recipe:
        told += f"<details><summary>recipe.toml</summary><pre>{in_html(section.recipe)}</pre></details>"
    return _card("How it was made", told)
