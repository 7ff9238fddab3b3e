"""Records to tables, plots and one page."""

import base64
import csv
import dataclasses
import gzip
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.evaluation.by_hand import LEARNED, changed, heuristic
from tests.test_display import HIDDEN
from unmask.errors import UserError
from unmask.evaluation.bound import BoundReport, read_bound
from unmask.evaluation.compare import compare
from unmask.evaluation.records import append_records, read_records, record_lines
from unmask.evaluation.verdicts import Verdicts
from unmask.jsonl import ResultsError, sealed
from unmask.recipe import load_recipe
from unmask.report.formats import spreadsheet, write_format
from unmask.report.html import Section, together, training_curves, write_html
from unmask.report.plots import COLOURS, ORDER_LOOKS, colours_of, order_picture, pictured, shared_plot, shared_series
from unmask.report.tables import (
    area_table,
    bound_table,
    bound_verdict,
    caption,
    columns,
    comparison_table,
    headline,
    notes,
    ordered,
    result_tables,
    verdict,
)
from unmask.report.tables import record_table as table

RECORDS = [
    heuristic("margin", 16, mean_steps=16.0, score=1.0, ci_low=0.996, ci_high=1.0),
    heuristic("iid", 2, score=0.012, ci_low=0.007, ci_high=0.021, distinct=12, distinct_low=12, distinct_high=12),
    LEARNED,
    heuristic("iid", 4, mean_steps=3.9, score=0.13, ci_low=0.11, ci_high=0.15, distinct=3),
]
LAYOUT = [[0, 2], [1, 3]]


def order(policy="learned", budget=2, steps=((0, 1, 1, 0), (1, 0, 0, 1))):
    """A record with the reveal steps of two sequences."""
    verdicts = Verdicts(np.ones(2, dtype=bool), np.full(2, budget), [list(row) for row in steps])
    return changed(LEARNED if policy == "learned" else heuristic(policy, budget), verdicts, budget=budget)


def printed(item, width=80):
    text = io.StringIO()
    Console(file=text, width=width).print(item)
    return text.getvalue()


def written(tmp_path, *sections):
    """The page of these sections."""
    write_html(tmp_path / "page.html", sections)
    return (tmp_path / "page.html").read_text(encoding="utf-8")


# --- files ------------------------------------------------------------------------------------------------------------


def test_records_round_trip(tmp_path):
    path = tmp_path / "results.jsonl"
    append_records(path, RECORDS[:2])
    append_records(path, RECORDS[2:])
    assert read_records(path) == RECORDS
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    line = json.loads(lines[2])
    assert list(line) == ["key", "spec", "outcome", "crc"]
    assert (line["key"], line["spec"]["policy"], line["outcome"]["score"]) == (LEARNED.key, "learned", 0.973)


def test_the_key_is_a_hash_of_what_was_asked():
    """Of its JSON with sorted keys, no spaces, no cache of none; where and when it ran does not matter."""
    asked = dataclasses.asdict(LEARNED.spec)
    assert asked.pop("cache") == "none"
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    assert LEARNED.key == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert changed(LEARNED, device="NVIDIA H200", compile=True, revision="later", score=0.5).key == LEARNED.key
    for field in dataclasses.fields(LEARNED.spec):
        value = getattr(LEARNED.spec, field.name)
        assert changed(LEARNED, **{field.name: f"{value}1" if isinstance(value, str) else 3}).key != LEARNED.key


def test_of_the_same_evaluation_the_last_stands(tmp_path):
    again = changed(LEARNED, score=0.5, seconds=9.0, revision="later")
    append_records(tmp_path / "results.jsonl", [*RECORDS, again])
    found = read_records(tmp_path / "results.jsonl")
    assert len(found) == len(RECORDS)
    assert [record.outcome.score for record in found if record.spec.policy == "learned"] == [0.5]


def line_with(**values):
    return json.dumps({**dataclasses.asdict(record_lines([LEARNED])[0]), **values})


SPEC = dataclasses.asdict(LEARNED.spec)
WITHOUT_SEED = {name: value for name, value in SPEC.items() if name != "seed"}


def test_a_damaged_line_is_named_by_its_number(tmp_path):
    for line, expected in [
        ('{"task": "gro', "not a JSON object"),
        ("", "not a JSON object"),
        ("[1, 2]", "must be a table"),
        (line_with(accuracy=1), "unknown key 'accuracy'"),
        (line_with(spec=WITHOUT_SEED), "'seed' is missing"),
        (line_with(spec={**SPEC, "seed": "0"}), "spec.seed must be a whole number"),
        (line_with(spec={**SPEC, "seed": 1}), "the key is not that of the spec"),
    ]:
        path = tmp_path / "results.jsonl"
        path.unlink(missing_ok=True)
        append_records(path, RECORDS[:2])
        with path.open("a") as file:
            file.write(line + "\n")
        append_records(path, RECORDS[2:])
        with pytest.raises(ResultsError) as caught:
            read_records(path)
        message = str(caught.value)
        assert f"{path}, line 3:" in message
        assert expected in message


def test_every_published_record_is_read():
    results = Path(__file__).parents[2] / "results"
    published = [*results.rglob("results.jsonl"), *results.rglob("records.jsonl"), *results.glob("gsm8k/*.jsonl")]
    assert len(published) >= 46
    for path in published:
        assert len(read_records(path)) == len(path.read_text().splitlines())


def test_no_results_yet(tmp_path):
    with pytest.raises(ResultsError, match="run `unmask evaluate"):
        read_records(tmp_path / "results.jsonl")


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_learned_order_comes_first():
    assert [(r.spec.policy, r.spec.budget) for r in ordered(RECORDS)] == [
        ("learned", 2),
        ("iid", 2),
        ("iid", 4),
        ("margin", 16),
    ]


def test_columns_of_a_record():
    assert columns(LEARNED, RECORDS) == {
        "policy": "learned, T = 2",
        "steps": "1.98",
        "range": "1–2",
        "valid": "0.973",
        "95%": "0.961–0.981",
        "distinct": "870",
        "true 99%": "850–890",
        "passes": "1,980",
        "denoiser": "012345",
    }
    shown = columns(RECORDS[3], RECORDS)
    assert shown["policy"] == "iid @ 4"
    assert shown["distinct"] == "3 (!)"
    assert columns(changed(LEARNED, denoiser="exact-996ede"), RECORDS)["denoiser"] == "exact-996ede", "never cut"


def test_no_distinct_samples_with_a_prompt():
    prompted = changed(LEARNED, distinct=None, distinct_low=None, distinct_high=None)
    assert not {"distinct", "true 99%"} & set(columns(prompted, [prompted]))
    mixed, alone = (printed(table(records, "title", "")) for records in ([LEARNED, prompted], [prompted]))
    assert "true 99%" in mixed
    assert "distinct" not in alone
    assert "true 99%" not in alone


def test_the_metrics_of_a_task_are_columns():
    scored = changed(LEARNED, metrics={"flexible": 0.9812, "overlong": 0.007})
    mixed = table([scored, LEARNED], "title", "")
    assert mixed.headings[4:8] == ["95%", "flexible", "overlong", "distinct"]
    assert [row[5:7] for row in mixed.rows] == [["0.981", "0.007"], ["–", "–"]]
    assert "flexible" not in printed(table(RECORDS, "title", ""))


def test_the_total_variation_is_explained_once():
    said = "TV: total variation of the random choice from uniform, 0 is best."
    for metrics, times in (({"TV remove-random": 0.03, "TV shuffle": 0.04}, 1), ({"TV": 0.03}, 1), ({}, 0)):
        shown = table([changed(LEARNED, metrics=metrics)], "", "")
        assert shown.legend(shown.headings).count(said) == times


def test_the_table_fits_in_80_columns():
    """With the widest numbers that the six puzzles give; nothing is cut off."""
    wide = heuristic(
        "top-prob",
        16,
        mean_steps=16.0,
        fewest_steps=10,
        most_steps=16,
        num_forwards=160_000,
        distinct=1000,
        distinct_low=999,
        distinct_high=1000,
    )
    records = [*RECORDS, wide]
    text = printed(table(records, "groups: " + "all that is known " * 6, "Which denoiser each rule ran on. " * 5))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    for record in records:
        cells = columns(record, RECORDS)
        row = next(line for line in lines if line.strip().startswith(cells["policy"] + " "))
        for heading in set(cells) - {"denoiser"}:
            assert cells[heading] in row


LONG = "blocks(32,stochastic(top-prob(confidence=sampled),0.5))"


def test_a_narrow_table_leaves_columns_out():
    """Whole ones, which the caption names; rules and scores stay readable."""
    for width in (60, 40):
        records = [*RECORDS, heuristic(LONG, 4, mean_steps=4.0, score=0.123, num_forwards=160_000)]
        text = printed(table(records, "title", ""), width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        lines = text.splitlines()
        edge = lines[2].index("steps")
        assert f"learned, T = 2{LONG} @ 4iid @ 2" in "".join(line[:edge].strip() for line in lines[4:])
        for record in records:
            assert re.search(rf" {record.mean_steps:.2f}  .*{record.outcome.score:.3f} ", text)
        assert "true 99%, passes." in " ".join(text.split()).partition("No room for: ")[2]
        assert "true 99%  " not in text


def test_square_brackets_are_no_markup():
    """In the name of a run, as in all that is told below a table."""
    text = " ".join(printed(table(RECORDS, "de[red]mo [/], groups", "By [bold]others[/bold].")).split())
    assert "de[red]mo [/], groups" in text
    assert "By [bold]others[/bold]." in text


BOUND = BoundReport(
    budget=2,
    num_examples=100,
    samples=8,
    price=None,
    order_bound=-0.61,
    order_bound_se=0.0123,
    reconstruction=[-0.3, -0.25],
    order_kl=[0.0, 0.06],
    self_bound=-0.58,
    self_bound_se=0.0789,
    many_sample_bound=-0.57,
    many_sample_bound_se=0.0777,
    steps=1.97,
    mdm_bound=-1.5,
    mdm_bound_se=0.0456,
    entropy=0.52,
    true_log_likelihood=-0.53,
)


def test_the_bound_table():
    text = printed(bound_table(BOUND, "groups"))
    for part in (
        "T = 2",
        "-0.6100",
        "0.0123",
        "-0.2500, 0.0600",
        "(J), T = 2, 1.97 steps",
        "-0.5800",
        "0.0789",
        "from 8 samples",
        "-0.5700",
        "0.0777",
        "-1.5000",
        "0.0456",
        "-0.5200",
        "-0.5300",
        "nats per token",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80
    unknown = printed(bound_table(dataclasses.replace(BOUND, entropy=None, true_log_likelihood=None), "groups"))
    assert "exact" not in unknown
    assert "entropy" not in unknown
    own = dataclasses.replace(BOUND, order_bound=None, order_bound_se=None, reconstruction=[], order_kl=[], price=0.25)
    assert "order KL" not in (text := printed(bound_table(own, "groups")))
    assert "(J), T = 2, price 0.25, 1.97 steps" in text


def test_the_bound_table_of_text():
    bits = {"order": [1.234, 0.056], "self": [1.2, 0.05], "many_sample": [1.1, 0.04], "mdm": [2.5, 0.03]}
    told = dataclasses.replace(BOUND, bits=bits, characters=4321, gain=0.9, gain_se=0.1)
    text = " ".join(printed(bound_table(told, "mine")).split())
    for part in ("bits/char", "1.234 ± 0.056", "1.100 ± 0.040", "2.500 ± 0.030", "4,321 Unicode characters"):
        assert part in text
    assert "bits/char" not in printed(bound_table(BOUND, "groups"))


def test_an_order_that_is_worse_than_iid_is_called_so(tmp_path):
    for gain, error, words in (
        (-0.9, 0.1, "WORSE than IID, by 0.9000 nats per token (standard error 0.1000)."),
        (-0.1, 0.1, "no better than IID: it is 0.1000 nats per token (standard error 0.1000) below"),
    ):
        worse = dataclasses.replace(BOUND, gain=gain, gain_se=error)
        assert words in bound_verdict(worse)
        assert words in written(tmp_path, Section("groups", "", [LEARNED], [[0]], worse))
    faster = dataclasses.replace(worse, budget=8, steps=2.5)
    assert bound_verdict(faster).endswith("below IID, in 2.50 steps; IID takes 8.")
    assert bound_verdict(dataclasses.replace(BOUND, gain=0.1, gain_se=0.1)) == bound_verdict(BOUND) == ""


# --- comparisons ------------------------------------------------------------------------------------------------------

ONE, TWO = heuristic("iid", 1, mean_steps=1.0, score=0.1), heuristic("iid", 2, mean_steps=2.0, score=0.3)
COMPARED = [*compare([LEARNED, ONE, TWO])]
FAR = [*compare([LEARNED, heuristic("margin", 16, mean_steps=16.0)])]


def test_a_rule_that_never_takes_as_many_steps_is_compared_where_it_ends():
    early = heuristic("dus", 15, mean_steps=1.0, score=0.99)
    (found,) = compare([LEARNED, early])
    table = comparison_table([found], [LEARNED])
    assert table.rows[0][:3] == ["dus", "0.990 @ 1.00", "-0.017"]
    assert verdict([LEARNED, ONE, TWO, early]).endswith("against 99.0% with the best rule in 1.00 steps (dus).")


def test_columns_of_a_comparison():
    """0.02 x 0.1 + 0.98 x 0.3 = 0.296 at 1.98 steps; without verdicts there is no interval."""
    (found,) = COMPARED
    shown = comparison_table([found], [LEARNED])
    assert dict(zip(shown.headings, shown.rows[0], strict=True)) == {
        "against": "iid",
        "equal steps": "0.296",
        "difference": "+0.677",
        "95%": "–",
        "floor 1": "0.100",
        "max 2": "0.300",
    }
    certain = found._replace(interval=(-0.0201, 0.0049))
    assert comparison_table([certain], [LEARNED]).rows[0][2:4] == ["+0.677", "-0.020 to +0.005"]


def test_what_cannot_be_compared_is_said_instead_of_a_number():
    text = printed(comparison_table([*COMPARED, *FAR], [LEARNED]))
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("margin"))
    assert row == ["margin", "not", "comparable", "–", "–", "–", "–"]
    assert "Not comparable: margin: evaluate it at 1 and 2 steps, if it can run there." in " ".join(text.split())
    assert "not comparable" not in printed(comparison_table(COMPARED, [LEARNED])).lower()


def test_the_comparison_table_fits_in_80_columns():
    long = [c._replace(policy="blocks(32,threshold:0.95)", interval=(-0.1, 0.1)) for c in COMPARED]
    text = printed(comparison_table([*COMPARED, *long, *FAR], [LEARNED]))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "learned, T = 2: 0.973 valid in 1.98 steps" in text
    assert "-0.100 to +0.100" in text


def test_every_learned_order_has_a_table_of_comparisons():
    other = changed(LEARNED, budget=5, trained_budget=5)
    titles = [shown.title for shown in result_tables([LEARNED, ONE, other, TWO], "records")]
    assert titles == [
        "records",
        "learned, T = 2: 0.973 valid in 1.98 steps",
        "learned, T = 5: 0.973 valid in 1.98 steps",
        "area under score against steps",
    ]


def test_areas_are_told_with_their_range():
    """Two rules over the same steps side by side, one over other steps apart, none for a single point."""
    rules = [
        *(heuristic("b", steps, mean_steps=float(steps), score=steps / 4) for steps in (1, 2, 4)),
        *(heuristic("a", steps, mean_steps=float(steps), score=0.5) for steps in (2, 3)),
        *(heuristic("c", steps, mean_steps=float(steps), score=1.0) for steps in (4, 1)),
    ]
    assert area_table([LEARNED, *rules]).rows == [
        ["b", "0.625", "1.00–4.00"],
        ["c", "1.000", "1.00–4.00"],
        ["a", "0.500", "2.00–3.00"],
    ]


def test_where_a_selector_chose_nothing_is_said_only_of_it():
    assert notes(RECORDS) == []
    paper = changed(LEARNED, selector="bernoulli", nothing_selected=0.0123)
    (sentence,) = notes([paper, *RECORDS])
    assert sentence.startswith("learned, T = 2 selected nothing in 1.23% of its steps")
    reward = changed(LEARNED, policy="reward:1", selector="nonempty", nothing_selected=0.5)
    (sentence,) = notes([reward])
    assert sentence.startswith("reward:1, T = 2 selected nothing in 50.00% of its steps"), (
        "whatever the selector's form"
    )
    never = changed(LEARNED, selector="bernoulli", nothing_selected=0.0)
    (sentence,) = notes([never])
    assert sentence.startswith("learned, T = 2 selected nothing in 0.00% of its steps"), "it could have"
    one_at_a_time = changed(LEARNED, policy="lo-arm", selector="bernoulli", nothing_selected=0.0)
    assert notes([one_at_a_time]) == [], "it always selects something"
    assert "selected nothing in 1.23%" in " ".join(printed(table([paper], "", "")).split())


def test_revisions_are_said_only_of_rules_that_re_mask():
    (sentence,) = notes([*RECORDS, heuristic("remasking", 8, mean_revisions=0.25)])
    assert sentence == "remasking @ 8 re-masked a position 0.250 times on average."


# --- the pictures -----------------------------------------------------------------------------------------------------


def test_pictured_are_the_rules_at_the_learned_budget():
    orders = [order("margin"), order("iid", 2), order("iid", 4), order("learned", 2), order("top-prob", 16)]
    assert [(o.spec.policy, o.spec.budget) for o in pictured(orders)] == [("learned", 2), ("iid", 2), ("margin", 2)]


def test_pictured_without_a_learned_order_is_the_smallest_budget():
    orders = [order("margin", 4), order("iid", 2), order("margin", 2), order("iid", 16)]
    assert [(o.spec.policy, o.spec.budget) for o in pictured(orders)] == [("iid", 2), ("margin", 2)]
    assert pictured([LEARNED]) == [], "its verdicts were not kept"
    latest = order("iid", steps=((1, 1, 1, 1),))
    assert pictured([order("iid"), order(), latest])[1] is latest, "of two of a rule"


def test_order_pictures():
    for count in (1, 6):
        orders = [order(policy) for policy in ("learned", "iid", "margin", "top-prob", "a", "b")[:count]]
        figure = order_picture(orders, LAYOUT)
        panels = [axes for axes in figure.axes if axes.images]
        assert len(panels) == count
        assert [panel.get_title() for panel in panels] == [f"{o.spec.policy}, 2 steps" for o in orders]
        # Row 0 reveals positions 0 and 3 first; the columns are the groups' positions 0, 2, 1, 3.
        assert panels[0].images[0].get_array().tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
        assert len(panels[0].lines) == 1, "a line between the two groups"
        figure.savefig(io.BytesIO(), format="png")


def test_a_prompt_has_no_step():
    figure = order_picture([order(steps=((-1, 0, 1, 1),))], LAYOUT)
    pixels = figure.axes[0].images[0].get_array()
    assert pixels.mask.tolist() == [[True, False, False, False]]


def test_order_pictures_of_any_budget():
    for budget in (1, 300):
        steps = ((0, budget - 1, budget // 2, 0),)
        figure = order_picture([order("iid", budget, steps)], LAYOUT)
        figure.savefig(io.BytesIO(), format="svg")
        image = figure.axes[0].images[0]
        first, last = image.cmap(image.norm(0)), image.cmap(image.norm(budget - 1))
        assert (first == last) == (budget == 1)


def test_score_plots():
    for records in (RECORDS[:1], [LEARNED], RECORDS):
        figure = shared_plot([("", records)])
        labels = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
        assert labels == {record.spec.policy + (", T = 2" if record.spec.learned else "") for record in records}
        figure.savefig(io.BytesIO(), format="png")


def test_a_score_plot_shows_every_record():
    axes = shared_plot([("", RECORDS)]).axes[0]
    points = {
        (round(x, 4), round(y, 4))
        for container in axes.containers
        for x, y in zip(*container.lines[0].get_data(), strict=True)
    }
    assert points == {(record.mean_steps, round(100 * record.outcome.score, 4)) for record in RECORDS}


def labels_of(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_orders_of_several_runs_look_different():
    """T = 5, 10 and 15, each with its run and its T in the legend, and nothing written over the points."""
    orders = [changed(LEARNED, trained_budget=T, budget=T, mean_steps=T - 0.5, score=T / 20) for T in (5, 10, 15)]
    figure = shared_plot([(f"run-{record.spec.budget}", [record]) for record in orders])
    assert labels_of(figure) == ["run-5, learned, T = 5", "run-10, learned, T = 10", "run-15, learned, T = 15"]
    lines = [container.lines[0] for container in figure.axes[0].containers]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in lines] == [(4.5, 25), (9.5, 50), (14.5, 75)]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 3
    assert not figure.axes[0].texts


def test_a_rule_on_the_same_denoiser_is_one_line_and_on_others_several():
    same, other = heuristic("iid", 4, mean_steps=3.9), heuristic("iid", 4, mean_steps=3.9, denoiser="ba9876543210")
    figure = shared_plot([("a", [heuristic("iid", 2), same]), ("b", [same]), ("c", [other])])
    assert labels_of(figure) == ["a, b, iid", "c, iid"]
    lines = [container.lines[0] for container in figure.axes[0].containers]
    assert [len(line.get_xdata()) for line in lines] == [2, 1]
    assert lines[0].get_color() == lines[1].get_color(), "a colour per rule"
    assert lines[0].get_marker() != lines[1].get_marker(), "a marker per run"


def test_any_name_can_be_drawn():
    names = ["_hidden", "a $ b $", r"$\frac$", "<b>&", "x" * 150]
    figure = shared_plot([(name, [changed(LEARNED, score=0.5)]) for name in names])
    assert [label.strip() for label in labels_of(figure)] == [f"{name}, learned, T = 2" for name in names]
    figure.savefig(io.BytesIO(), format="svg")
    assert figure.axes[0].get_window_extent().width > 300, "the legend leaves room for the plot"


def test_fifteen_rules_have_fifteen_colours():
    rules = ["iid", "top-prob", "margin", *(f"rule-{i}" for i in range(12))]
    found = colours_of(rules)
    assert len(set(found.values())) == 15
    assert not set(found.values()) & {look["color"] for look in ORDER_LOOKS}
    assert {name: found[name] for name in COLOURS} == COLOURS


def test_a_colour_does_not_depend_on_the_other_rules():
    """Unless two would have the same: then one of them moves on."""
    alone = {name: colours_of([name])[name] for name in ("entropy", "threshold:0.9", "left-to-right")}
    assert len(set(alone.values())) == 3, "no two of these meet"
    assert colours_of([*alone, "iid"]) == {**alone, "iid": COLOURS["iid"]}
    assert colours_of(["left-to-right", "iid", "threshold:0.9"]) == {
        **{name: alone[name] for name in ("left-to-right", "threshold:0.9")},
        "iid": COLOURS["iid"],
    }
    assert len(colours_of([f"rule-{i}" for i in range(50)])) == 50


# --- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would fetch, the cells of the tables, the number of each element, and what the scripts draw."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.cells, self.count, self.inside = [], [], {}, ""
        self.packed = ""
        self.feed(text)
        self.drawn = json.loads(gzip.decompress(base64.b64decode(self.packed)))

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.inside = "data" if ("id", "data") in attributes else tag
        if tag in ("td", "th"):
            self.cells.append("")
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.fetched.append(value)

    def handle_data(self, data):
        if self.inside in ("td", "th", "span") and self.cells:
            self.cells[-1] += data
        if self.inside == "data":
            self.packed += data

    def handle_endtag(self, tag):
        self.inside = ""

    @property
    def charts(self):
        return [drawn for drawn in self.drawn.values() if "series" in drawn]


PICTURED = [order(), *RECORDS[:2], RECORDS[3]]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    section = Section("groups: <16> tokens & more", 'a "caption" <b>', PICTURED, LAYOUT)
    return written(tmp_path_factory.mktemp("page"), section)


def test_the_page_is_self_contained(page):
    """Nothing is fetched, and the browser is told to refuse what would be; the one address names a namespace."""
    assert Page(page).fetched == []
    assert not {"link", "img", "iframe", "object"} & Page(page).count.keys()
    assert Page(page).count["script"] == 2, "the data and our own"
    assert "default-src 'none'" in page
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[^\"']*", page)) == {"http://www.w3.org/2000/svg"}


def test_the_verdict_comes_first(page, tmp_path):
    assert page.index("The learned order is 97.3% valid in 2.00 steps; no rule was") < page.index("groups: &lt;16&gt;")
    told = "better than every rule: 97.3% valid in 1.98 steps, against 29.6% with the best rule at equal steps (iid)."
    one, two = (Section(name, "", [LEARNED, ONE, TWO], LAYOUT) for name in "ab")
    assert f"<h1>The learned order is {told}</h1>" in written(tmp_path, one)
    assert "<h1>In 2 of 2 runs the learned order is better" in written(tmp_path, one, two)


def test_verdicts():
    """Better and worse only where the interval says so."""
    valid = np.arange(100) < 50
    sure = Verdicts(valid, np.full(100, 2), [])
    for score, words in (
        (0.9, "worse than the best rule"),
        (0.55, "not clearly better than"),
        (0.1, "better than every"),
    ):
        rivals = [
            changed(
                heuristic("iid", T, mean_steps=T, score=score),
                Verdicts(np.arange(100) >= 100 - 100 * score, sure.steps, []),
            )
            for T in (1, 2, 3)
        ]
        assert words in verdict([changed(LEARNED, sure, mean_steps=2.0, score=0.5), *rivals])
    assert verdict([ONE, TWO]) == "No order was learned here; the best rule, iid @ 2, is 30.0% valid in 2.00 steps."
    assert "no verdict" in verdict([changed(LEARNED, checked=False)])


def test_the_verdict_is_on_what_can_be_compared_and_on_the_most_examples():
    rules = [ONE, TWO]
    few = [changed(record, num_examples=50, split="other", score=1.0) for record in (LEARNED, *rules)]
    alone = changed(LEARNED, num_examples=2000, score=1.0)
    elsewhere = changed(LEARNED, plain_denoiser="another", score=1.0)
    expected = verdict([LEARNED, *rules])
    assert "97.3%" in expected
    for other in (few, [alone], [elsewhere]):
        assert verdict([*other, LEARNED, *rules]) == expected
    assert headline([LEARNED, alone])[0] == alone
    assert "is 30.0% valid in 2.00 steps" in verdict([*few[1:], *rules])


def test_the_caption_tells_of_another_denoiser():
    """By the hash that the run noted; that of adapters stands behind it."""
    recipe = load_recipe("remove-random-exact")
    adapted = changed(LEARNED, denoiser="0123456789ab+fff")
    for own in ("", LEARNED.spec.denoiser):
        assert "on a frozen denoiser; every rule runs on those very" in caption(recipe, [LEARNED, adapted], own)
    told = caption(recipe, [LEARNED, changed(ONE, num_examples=20)], "exact-996ede")
    there = "every rule runs on the same weights as the order here."
    assert told.startswith(f"The order was learned on another denoiser (`--any-denoiser`); {there} Tokens")
    assert told.endswith("at temperature 1; 20 and 1,000 examples.")
    both = caption(recipe, [LEARNED, changed(LEARNED, denoiser="exact-996ede")], "exact-996ede")
    assert "learned on the denoiser exact-996ede; those on others ran by `--any-denoiser`." in both


def test_the_page_holds_the_plot_and_the_table(page):
    parsed = Page(page)
    (chart,) = parsed.charts
    assert {line["label"]: [point[:4] for point in line["points"]] for line in chart["series"]} == {
        "learned, T = 2": [[1.98, 97.3, 96.1, 98.1]],
        "iid": [[1.98, 1.2, 0.7, 2.1], [3.9, 13.0, 11.0, 15.0]],
        "margin": [[16.0, 100.0, 99.6, 100.0]],
    }
    assert parsed.cells[:5] == ["rule", "mean steps", "valid", "95% interval", "range"]
    first = parsed.cells.index("learned, T = 2")
    assert parsed.cells[first : first + 5] == ["learned, T = 2", "1.98", "97.3%", "96.1 to 98.1%", "1–2"]
    # iid runs from 2 to 4 in this table: (0.012 + 0.13) / 2
    assert parsed.cells[-6:] == ["rule", "mean score", "over steps", "iid", "0.071", "1.98–3.90"]
    assert "groups: &lt;16&gt; tokens &amp; more" in page
    assert "<16>" not in page
    assert "<b>" not in page
    assert page.count("<tr class=learned>") == 1


def test_no_line_leads_across_a_gap(tmp_path):
    """Neighbouring numbers of steps are joined; 4 and 16 are not, in the page as in the plots for papers."""
    rules = [heuristic("iid", T, mean_steps=float(T), score=T / 20) for T in (2, 3, 4, 16)]
    (series,) = shared_series([("", rules)])
    assert series.joined == [False, True, True, False]
    (chart,) = Page(written(tmp_path, Section("one", "", rules, LAYOUT))).charts
    assert [point[5] for point in chart["series"][0]["points"]] == [False, True, True, False]
    lines = [
        line.get_xdata().tolist() for line in shared_plot([("", rules)]).axes[0].lines if len(line.get_xdata()) == 2
    ]
    assert lines == [[2, 3], [3, 4]]


def test_a_page_of_several_runs(tmp_path):
    one, two = Section("one", "", RECORDS, LAYOUT), Section("two", "", [order()], LAYOUT, BOUND)
    parsed = Page(written(tmp_path, one, two))
    assert parsed.count["section"] == 2
    assert len(parsed.charts) == 2
    assert {"true log-likelihood of the same sequences", "-0.5300", "-0.6100"} <= set(parsed.cells)


def test_the_page_tells_the_comparison(tmp_path):
    paper = changed(LEARNED, selector="bernoulli", nothing_selected=0.0123)
    far = heuristic("margin", 16, mean_steps=16.0)
    text = written(tmp_path, Section("one", "which denoiser", [paper, ONE, TWO, far], LAYOUT))
    cells = Page(text).cells
    compared = comparison_table(COMPARED, [LEARNED])
    for part in (*compared.headings, *compared.rows[0], "mean score", "1.00–2.00"):
        assert part in cells
    assert "Not comparable: margin: evaluate it at 1 and 2 steps, if it can run there." in text
    assert "selected nothing in 1.23% of its steps" in text
    assert text.index("which denoiser") < text.index("equal steps</th>")


def test_training_curves(tmp_path):
    """Few points however long the run; damaged lines and those of other things are left out."""
    lines = [sealed({"stage": "order", "update": i, "elbo": -1 / (i + 1)}) for i in range(1000)]
    other = {"stage": "order", "saved": 1}, {"update": 1, "elbo": -1.0}
    (tmp_path / "metrics.jsonl").write_text("\n".join(["{", *map(sealed, other), *lines]))
    (stage, points), *others = training_curves(tmp_path / "metrics.jsonl").items()
    assert (stage, others, points[:2]) == ("order", [], [(0, -1.0), (5, -1 / 6)])
    assert len(points) == 200
    section = Section("one", "", [LEARNED], LAYOUT, training={"order": points}, recipe="a = '<script>'")
    text = written(tmp_path, section)
    assert [chart["title"] for chart in Page(text).charts] == ["Quality against steps", "Training: order"]
    assert "a = &#x27;&lt;script&gt;&#x27;" in text


EVIL = "\x1b[2J\u202e<script>alert('&')</script>"


def test_the_page_escapes_the_names_of_runs_and_rules(tmp_path):
    evil = changed(LEARNED, policy=f"{EVIL}, learned")
    one, rule = heuristic(EVIL, 1, mean_steps=1.0), heuristic(EVIL, 2, mean_steps=2.0)
    compared = compare([evil, rule, one])
    section = Section(EVIL, EVIL, [evil, rule, one, order(EVIL)], LAYOUT, None, EVIL, EVIL, training={EVIL: [(0, 1.0)]})
    text = written(tmp_path, section._replace(recipe=EVIL, orders=EVIL), section)
    assert text.count("<script") == 2, "ours"
    assert text.count("&lt;script&gt;") > 6
    assert "b" not in Page(text).count
    assert not re.search(HIDDEN, text)
    assert EVIL not in json.dumps(Page(text).drawn, ensure_ascii=False)
    assert "alert" in json.dumps(Page(text).drawn)
    for shown in (table([evil, rule, one], EVIL, EVIL), comparison_table(compared, [evil]), bound_table(BOUND, EVIL)):
        assert not re.search(HIDDEN, printed(shown))


def test_runs_of_the_same_task_share_a_plot(tmp_path):
    one, two, three = (Section(name, "", [LEARNED], LAYOUT, run=name, task="groups 1") for name in "abc")
    alone = Section("d", "", [LEARNED], LAYOUT, run="d", task="groups 2")
    assert together([one, alone, two, three]) == [[one, two, three]]
    assert together([one, alone]) == []
    text = written(tmp_path, one, alone, two)
    parsed = Page(text)
    assert parsed.count["section"] == 1 + 3
    assert len(parsed.charts) == 1 + 3
    assert text.index("<h2>groups: a, b</h2>") < text.index("<h2>a</h2>"), "the shared plot comes first"


# --- for papers -------------------------------------------------------------------------------------------------------


def test_formats_for_papers(tmp_path):
    section = Section("one & two", "a_b", [order(), ONE, TWO], LAYOUT, BOUND, run="x")
    for name, start, parts in (
        (
            "md",
            "<!-- Written by unmask",
            ["## one & two", "| learned, T = 2 | 1.98 |", "against 30.0%", "held-out bounds"],
        ),
        (
            "tex",
            "% Written by unmask",
            [r"\caption{one \& two. a\_b", r"learned, T = 2 & 1.98 & 1--2 & 0.973", r"95\%"],
        ),
        ("csv", "run,key,task", [f"x,{order().key},groups,", ",0.973,0.961,0.981,"]),
    ):
        path = tmp_path / f"report.{name}"
        assert write_format(path, name, [section]) == write_format(path, name, [section]) == [path]
        assert path.read_text().startswith(start)
        assert all(part in path.read_text() for part in parts)
        path.write_text("a letter to my mother")
        with pytest.raises(UserError, match="give another --out"):
            write_format(path, name, [section])
    rows = list(csv.DictReader(io.StringIO(spreadsheet([section]))))
    assert [(row["policy"], row["budget"], row["score"]) for row in rows] == [
        ("learned", "2", "0.973"),
        ("iid", "1", "0.1"),
        ("iid", "2", "0.3"),
    ]
    for name, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        written = write_format(tmp_path / f"report.{name}", name, [section])
        assert [path.name for path in written] == [f"report-quality.{name}", f"report-orders.{name}"]
        assert all(path.read_bytes().startswith(start) for path in written)


def test_a_bound_round_trip(tmp_path):
    path = tmp_path / "bound.json"
    assert read_bound(path) is None
    path.write_text(json.dumps(dataclasses.asdict(BOUND)))
    assert read_bound(path) == BOUND
    path.write_text('{"budget": 2}')
    with pytest.raises(ResultsError, match="run `unmask evaluate --bound` again"):
        read_bound(path)


def test_a_page_replaces_only_a_page(tmp_path):
    path = tmp_path / "report.html"
    section = Section("one", "", [LEARNED], LAYOUT)
    write_html(path, [section])
    write_html(path, [section, section])
    path.write_text("a letter to my mother")
    with pytest.raises(ResultsError, match="no report of unmask"):
        write_html(path, [section])
    assert path.read_text() == "a letter to my mother"


def test_what_differs_between_records_is_in_their_names():
    greedy = changed(heuristic("iid", 2), temperature=0.0)
    sampled = heuristic("iid", 2)
    names = [columns(record, [greedy, sampled])["policy"] for record in (greedy, sampled)]
    assert names == ["iid, temperature 0 @ 2", "iid, temperature 1 @ 2"]
    figure = shared_plot([("", [greedy, sampled])])
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "iid, temperature 0",
        "iid, temperature 1",
    ]
