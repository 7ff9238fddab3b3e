"""Records -> one self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unmask.display import in_html
from unmask.errors import UserError
from unmask.evaluation.bound import BoundReport, read_bound
from unmask.evaluation.curve import Curve, read_curve
from unmask.evaluation.perplexity import Perplexity, read_perplexities
from unmask.evaluation.records import Record, grouped, read_run
from unmask.files import refuse_link, write_text
from unmask.jsonl import ResultsError
from unmask.report.plots import curve_plot, order_picture, pictured, shared_plot, svg
from unmask.report.tables import (
    ResultTable,
    bound_table,
    bound_verdict,
    caption,
    curve_table,
    curve_verdict,
    ordered,
    perplexity_tables,
    result_tables,
    title,
    without_sweep,
)
from unmask.training.run import load_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Section(NamedTuple):
    """The part of a page that tells of one run."""

    title: str
    caption: str
    records: list[Record]
    layout: Sequence[Sequence[int]]  # the task's
    bound: BoundReport | None = None
    run: str = ""  # the run's name
    task: str = ""  # what distinguishes its task from others of the same name
    curve: Curve | None = None
    perplexities: Sequence[Perplexity] = ()


def write_report(runs: Sequence[Path], page: Path, trust_task: bool = False, pictures: bool = True) -> None:
    """Write the page of these runs and, with `pictures`, orders.png into each of them."""
    names = [run.resolve().name for run in runs]
    sections = []
    for run, name in zip(runs, names, strict=True):
        if not run.is_dir():
            raise UserError(f"{run}: no such folder; give the folder of an evaluated run")
        records = read_run(run)
        if not records:
            raise UserError(f"{run}/results.jsonl is empty: run `unmask evaluate {run}` first")
        recipe, task = load_task(run, trust_task)
        shown, bound = name if names.count(name) == 1 else str(run), read_bound(run / "bound.json")
        told, own = (title(run, task), caption(recipe, records)), json.dumps(recipe.task, sort_keys=True)
        curve = read_curve(run / "curve.json")
        records, read = without_sweep(records, curve, recipe), read_perplexities(run)
        sections.append(Section(*told, records, task.layout, bound, shown, own, curve, read))
    write_html(page, sections)
    for run, section in zip(runs, sections, strict=True):
        if pictures and (chosen := pictured(section.records)):
            refuse_link(run / "orders.png")
            order_picture(chosen, section.layout).savefig(run / "orders.png", dpi=110)


def write_html(path: Path, sections: Sequence[Section]) -> None:
    """One self-contained page.  A file that is not such a page is never overwritten."""
    head = _PAGE[: _PAGE.index("<style>")]
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(head):
        raise ResultsError(f"{path} exists and is no report of unmask: give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join([*map(_shared, together(sections)), *map(_section, sections)])
    write_text(path, _PAGE.replace("{body}", body))


def together(sections: Sequence[Section]) -> list[list[Section]]:
    """The runs that share a task with another, by task."""
    drawn = [section for section in sections if section.task and any(r.outcome.checked for r in section.records)]
    by_task = grouped(drawn, lambda section: section.task)
    return [group for group in by_task.values() if len(group) > 1]


def _shared(sections: Sequence[Section]) -> str:
    plot = _picture(
        shared_plot([(section.run, ordered(section.records)) for section in sections]),
        "Score against steps in all of these runs, with 95% intervals; which denoiser each rule ran on is said below.",
    )
    heading = f"{sections[0].records[0].spec.task}: {', '.join(section.run for section in sections)}"
    return f"<section><h2>{in_html(heading)}</h2>{plot}</section>"


def _section(section: Section) -> str:
    records = ordered(section.records)
    pictures, tables = "", list[ResultTable]()
    if section.curve is not None:
        pictures += _picture(curve_plot(section.curve, "valid, %"), curve_verdict(section.curve))
        tables.append(curve_table(section.curve))
    if scored := [record for record in records if record.outcome.checked]:
        pictures += _picture(shared_plot([("", scored)]), "Score against steps, with 95% intervals.")
    if records:
        tables += result_tables(records)
    if chosen := pictured(section.records):
        pictures += _picture(
            order_picture(chosen, section.layout),
            "Which position is revealed when: a row is a sequence, a column a position, positions that belong together "
            "side by side.",
        )
    tables += perplexity_tables(section.perplexities, records)
    if section.bound is not None:
        tables.append(bound_table(section.bound, section.run))
    verdict = bound_verdict(section.bound) if section.bound is not None else ""
    told = f"<h2>{in_html(section.title)}</h2><p>{in_html(' '.join([verdict, section.caption]).strip())}</p>"
    return f"<section>{told}{pictures}{''.join(map(_html_table, tables))}</section>"


def _picture(figure: Figure, caption: str) -> str:
    return f"<figure>{svg(figure)}<figcaption>{in_html(caption)}</figcaption></figure>"


def _html_table(table: ResultTable) -> str:
    heads = "".join(f"<th>{in_html(heading)}</th>" for heading in table.headings)
    body = ""
    for row, marked in zip_longest(table.rows, table.marked):
        cells = "".join(f"<td>{in_html(cell)}</td>" for cell in row)
        body += f"<tr{' class=learned' if marked else ''}>{cells}</tr>"
    heading = f"<h3>{in_html(table.title)}</h3>" if table.title else ""
    legend = f"<p class=legend>{in_html(table.legend(table.headings))}</p>"
    return f"{heading}<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{legend}"


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
