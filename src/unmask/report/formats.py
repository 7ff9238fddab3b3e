"""What the page tells, for papers: the tables as Markdown, CSV or LaTeX, the plots as PNG or PDF."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from unmask.display import visible
from unmask.errors import UserError
from unmask.files import refuse_link, write_text
from unmask.report.html import Section, further_tables, together
from unmask.report.plots import curve_plot, order_picture, pictured, shared_plot
from unmask.report.tables import ResultTable, markdown_table, ordered, record_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("md", "png", "pdf", "csv", "tex")
_MARKS = {
    "md": "<!-- Written by unmask report. -->",
    "tex": "% Written by unmask report; needs booktabs.",
    "csv": "run,key,",
}


def write_format(path: Path, format: str, sections: Sequence[Section]) -> list[Path]:
    """The files that were written.  What unmask did not write is never overwritten, and a plot only by a plot."""
    if format in ("png", "pdf"):
        found = {path.with_name(f"{path.stem}-{name}.{format}"): figure for name, figure in figures(sections).items()}
        for file, figure in found.items():
            refuse_link(file)
            start = {"png": b"\x89PNG", "pdf": b"%PDF"}[format]
            if file.exists() and not file.read_bytes().startswith(start):
                raise UserError(f"{file} exists and is no {format.upper()}: give another --out")
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, dpi=200, format=format)
        return list(found)
    mark, text = _MARKS[format], {"md": markdown, "csv": spreadsheet, "tex": latex}[format](sections)
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(mark):
        raise UserError(f"{path} exists and was not written by `unmask report --format {format}`: give another --out")
    refuse_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text if format == "csv" else f"{mark}\n{text}")
    return [path]


def figures(sections: Sequence[Section]) -> dict[str, Figure]:
    """The plots by name: quality against steps, and which position is written when."""
    found = {}
    for group in together(sections):
        task = group[0].records[0].spec.task
        found[f"{task}-quality"] = shared_plot([(section.run, ordered(section.records)) for section in group])
    for section in sections:
        own = "" if len(sections) == 1 else re.sub(r"\W+", "-", section.run).strip("-") + "-"
        for curve in section.curve.by_measure if section.curve is not None else []:
            what = "" if curve is section.curve else "-diverse"
            found[f"{own}sweep{what}"] = curve_plot(curve, f"{curve.measure}, %")
        if scored := [record for record in ordered(section.records) if record.outcome.checked]:
            found[f"{own}quality"] = shared_plot([("", scored)])
        if chosen := pictured(section.records):
            found[f"{own}orders"] = order_picture(chosen, section.layout)
    return found


def tables(section: Section) -> list[ResultTable]:
    return [record_table(section.records, "", section.caption), *further_tables(section)]


def markdown(sections: Sequence[Section]) -> str:
    parts = []
    for section in sections:
        parts += [f"## {section.title}", section.verdict]
        for table in tables(section):
            parts += [f"### {table.title}"] if table.title else []
            parts += [markdown_table(table.headings, table.rows), table.legend(table.headings)]
    return visible("\n\n".join(filter(None, parts))) + "\n"


def spreadsheet(sections: Sequence[Section]) -> str:
    """A row per record, with every number as it is recorded."""
    rows = []
    for section in sections:
        for record in ordered(section.records):
            outcome = asdict(record.outcome)
            metrics = outcome.pop("metrics")
            rows.append({"run": section.run, "key": record.key, **asdict(record.spec), **outcome, **metrics})
    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: visible(value) if isinstance(value, str) else value for name, value in row.items()})
    return text.getvalue()


_TEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "–": "--", "±": r"$\pm$", "×": r"$\times$",
}  # fmt: skip


def latex(sections: Sequence[Section]) -> str:
    parts = []
    for section in sections:
        for table in tables(section):
            lines = [" & ".join(map(_tex, line)) + r" \\" for line in (table.headings, *table.rows)]
            columns = "l" + "r" * (len(table.headings) - 1)
            told = ". ".join(filter(None, [table.title or section.title, table.legend(table.headings)]))
            inside = [r"\begin{table}", rf"\caption{{{_tex(told)}}}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
            inside += [lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
            parts.append("\n".join(inside))
    return "\n".join(parts)


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in visible(text).replace("\n", " "))
