"""A study with `curve = true`: what is run, what is kept, and its page."""

import shutil
from dataclasses import replace

import pytest

from tests.commands import exit_code
from tests.evaluation.test_curve import PRICED
from tests.training.small import json_lines
from unmask import files
from unmask.errors import UserError
from unmask.evaluation.compare import Gain
from unmask.evaluation.curve import Curve
from unmask.evaluation.records import read_records
from unmask.jsonl import read_jsonl
from unmask.runtime import process_settings
from unmask.studies.results_page import read_results, tables
from unmask.studies.study import Reproduction, load_study

GROUPS = 'name = "groups"\ngroups = 2\ngroup_size = 2\nsymbols = 3'
PRICED = PRICED.replace(GROUPS, 'name = "chain"\nlength = 5\nsymbols = 3')  # whose exact posterior is known
LATER = PRICED.index("[order]")
DENOISER = PRICED[:LATER] + PRICED[PRICED.index("[evaluate]") :]
ORDER = PRICED[: PRICED.index("[denoise]")].replace(
    "width = 16\nlayers = 1\nheads = 2\nintermediate = 16\nabsolute_positions = true\n", 'label = "tiny"\n'
)
EXACT = ORDER.replace('"tiny"', '"from exact, again"\ndenoiser = "exact"')
STUDY = """
policies = ["top-prob"]

[[train]]
name = "denoiser"
recipe = "denoiser.toml"

[[train]]
name = "order"
recipe = "order.toml"
start = "denoiser"
seeds = [0, 1]

[[train]]
name = "exact"
recipe = "exact.toml"
denoiser = "denoiser"
seeds = [0, 1]

[[evaluate]]
split = "test"
examples = 10
steps = [2, 3]
curve = true
"""


def whole(folder):
    return Reproduction(*load_study(str(folder / "study.toml")), folder / "runs", cpu=True)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The study done, in this process."""
    folder = tmp_path_factory.mktemp("study")
    orders = {"order": ORDER + PRICED[LATER:], "exact": EXACT + PRICED[LATER:]}
    for name, text in {"denoiser": DENOISER, "study": STUDY, **orders}.items():
        (folder / f"{name}.toml").write_text(text)

    def run_here(jobs, at_once, began, ended):
        for job in jobs:
            with process_settings():
                assert exit_code(*job.command[job.command.index("unmask") + 1 :]) == 0
            ended(job, 0, 0.0, 0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unmask.studies.study.run_jobs", run_here)
        whole(folder).run()
    return folder


def test_orders_sweep_their_prices_and_each_denoiser_the_rules_once(study):
    plan = whole(study)
    found = [" ".join(plan.command(stage)).partition("evaluate ")[2] for stage in plan.stages() if stage.split]
    assert ["--policy" in command for command in found] == [False, True, True, False, True]
    assert all("--steps 2 --steps 3 --curve" in command for command in found)
    assert "--policy learned --steps" in found[1]


def test_an_order_is_evaluated_on_the_denoiser_that_the_study_names(study, tmp_path):
    plan = whole(shutil.copytree(study, tmp_path / "study"))
    plan.study, runs = replace(plan.study, bf16=True), plan.out
    stages = {stage.name: stage for stage in plan.stages()}
    stage, plain = stages["test/exact-seed1"], stages["test/denoiser"]
    assert plan.command(stage)[-4:] == ["--denoiser", str(runs / "denoiser"), "--any-denoiser", "--cpu"]
    assert plan.command(plain)[-2:] == ["--bf16", "--cpu"], "which an order that is kept without a denoiser refuses"
    assert [plan._needs(stages[name]) for name in ("exact-seed1", stage.name)] == [set(), {"exact-seed1", "denoiser"}]
    before = plan._models(stage)
    config = runs / "denoiser" / "config.json"
    files.write_listed(config.parent, config.name, config.read_text() + "\n")
    assert plan._models(stage) != before, "evaluated anew"


def test_the_curves_of_both_seeds_are_kept(study):
    """Those of the order that was learned elsewhere by themselves, with rules on the same denoiser, each once."""
    results = study / "runs" / "results"
    records = read_records(results / "study.jsonl")
    curves = read_jsonl(results / "study" / "curve.jsonl", Curve)
    assert [curve.model for curve in curves] == ["tiny", "from exact, again"]
    for curve in curves:
        assert (curve.split, curve.seeds, curve.num_examples) == ("test", [0, 1], 10)
        (denoiser,) = {record.spec.denoiser for record in records if record.spec.model == curve.model}
        assert not denoiser.startswith("exact")
        own = {record.key for record in records if record.spec.denoiser == denoiser}
        assert {point.key for point in curve.points} == own
        assert {point.seed for point in curve.points if point.family == "learned"} == {0, 1}
        assert all(at.reading.low is not None and len(at.reading.seed_gains) == 2 for at in curve.at)
    assert len((results / "study.jsonl").read_text().splitlines()) == len(records)
    assert read_jsonl(results / "study" / "gains.jsonl", Gain) == [], "a point of the sweep is no order of its own"
    assert len(json_lines(results / "study" / "stages.jsonl")) == 10


def test_the_page_shows_the_curve_and_not_every_point(study, ok, tmp_path):
    results = study / "runs" / "results"
    text = tables(read_results(results), "plots")
    assert "**tiny, frozen:** learned (mean of 2 seeds) is " in text
    assert "(plots/study-test-tiny-curve.svg)" in text
    assert "learned(price" not in text
    assert text.count("\n| threshold(0.9,paced) |") == 2, "a row for each rule and denoiser"
    ok("report", results, "--markdown", tmp_path / "page.md")
    plots = {f"study-test-{model}-curve.svg" for model in ("tiny", "from-exact-again")}
    assert {path.name for path in (tmp_path / "page").iterdir()} == plots


def test_a_report_of_a_run_shows_its_curve(study, ok, tmp_path):
    """Beside the rules of the recipe; what else was swept has no row."""
    ok("report", study / "runs" / "denoiser", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "There is no learned order here; the best rule reaches" in page
    assert "top-prob @ 2" in page
    assert "threshold:0.99 @ 3</td><td>" not in page


def test_the_first_split_chooses_the_others(study, tmp_path):
    (tmp_path / "study.toml").write_text('others = ["margin"]\n' + STUDY)
    with pytest.raises(UserError, match="others are chosen on the first split, which must have no curve"):
        load_study(str(tmp_path / "study.toml"))


def test_an_order_with_its_own_denoiser_takes_no_other(study):
    (study / "other.toml").write_text(STUDY.replace("start = ", 'denoiser = "denoiser"\nstart = '))
    with pytest.raises(UserError, match="order-seed0 brings its own denoiser: leave out denoiser = 'denoiser'"):
        Reproduction(*load_study(str(study / "other.toml")), study / "nowhere")
