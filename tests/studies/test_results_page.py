"""The tables and plots of a Markdown page, from records made by hand; and the committed page from its records."""

from pathlib import Path

import pytest

from tests.evaluation.by_hand import LEARNED, changed
from unmask.evaluation.compare import Gain
from unmask.evaluation.records import append_records
from unmask.jsonl import append_jsonl
from unmask.report.plots import plot
from unmask.studies.results_page import BEGIN, order_series, read_results, rule_series, tables, wall_seconds, write_page
from unmask.studies.study import Done

ROOT = Path(__file__).parents[2]
PLAIN, ALONG, FURTHER = "0123456789ab", "ba9876543210", "feedfeedfeed"
COMMON = {
    "denoiser": PLAIN,
    "task": "gsm8k",
    "model": "30m",
    "split": "new-numbers",
    "num_examples": 6000,
    "temperature": 0.0,
}


def record(policy="learned", T=5, seed=0, **values):
    """A learned order, or with T = None a rule."""
    own = {
        "trained_budget": T,
        "trained_seed": None if T is None else seed,
        "budget": T or 5,
        "metrics": {"overlong": 0.0005},
    }
    own |= {"plain_denoiser": None if T is None else PLAIN, "mean_steps": float(T or 5), "most_steps": T or 5}
    return changed(LEARNED, policy=policy, **(COMMON | own | values))


RECORDS = [
    record(
        score=0.4841,
        ci_low=0.47,
        ci_high=0.5,
        metrics={"overlong": 0.0005, "flexible": 0.49, "characters": 6.1667},
        mean_steps=4.97,
        fewest_steps=3,
    ),
    record(seed=1, score=0.4639),
    record(seed=0, T=10, score=0.575),
    record(denoiser=ALONG, plain_denoiser=FURTHER, score=0.3),
    *(record("top-prob", None, budget=steps, mean_steps=float(steps), score=0.4 + steps / 100) for steps in (4, 5, 10)),
    record("iid", None, budget=5, mean_steps=4.84, score=0.311),
    record("top-prob", None, denoiser=FURTHER, score=0.45),
    record("top-prob", None, split="test", num_examples=1319, score=0.01, metrics={"overlong": 0.0}),
]


def gain(rival="top-prob", best=True, T=5, joint=False, **values):
    given = {
        **{key: COMMON[key] for key in ("task", "split", "model", "num_examples", "temperature")},
        "policy": "learned",
        "trained_budget": T,
        "joint": joint,
        "rival": rival,
        "best": best,
        "seeds": [0, 1],
        "mean_steps": 4.988,
        "score": 0.474,
        "rival_score": 0.4498,
        "rival_steps": 4.988,
        "gain": 0.0242,
        "low": 0.011,
        "high": 0.0371,
        "seed_gains": [0.0343, 0.0141],
        "eos_policy": "none",
        "precision": "no",
        "revision": "",
    }
    return Gain(**(given | values))


GAINS = [
    gain(),
    gain("entropy", best=False, gain=-0.01, low=-0.02, high=0.0),
    gain("factor:1", best=False, rival_steps=3.1, gain=-0.2, low=-0.3, high=-0.1),
]


def done(stage, started, seconds, finished=True, jobs=1):
    return Done(stage, "unmask ...", finished, started, seconds, jobs, "H200", "2", "", "")


DONE = [
    done("denoiser", 1000.0, 600.0),
    done("frozen-t5-seed0", 1600.0, 30.0, finished=False, jobs=2),
    done("frozen-t5-seed0", 9000.0, 90.0, jobs=2),
    done("frozen-t5-seed1", 9030.0, 120.0, jobs=2),  # 60 seconds of it beside the one before
    done("frozen-t10-seed0", 9120.0, 60.0, jobs=2),  # 30 beside the one before
    done("new-numbers/denoiser", 9180.0, 60.0),
]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "gsm8k"
    (folder / "small").mkdir(parents=True)
    append_records(folder / "small.jsonl", RECORDS)
    append_jsonl(folder / "small" / "gains.jsonl", GAINS)
    append_jsonl(folder / "small" / "stages.jsonl", DONE)
    return folder


def rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]


def test_every_seed_has_a_row_and_their_mean_a_gain(folder):
    text = tables(read_results(folder), "plots")
    found = rows(text)
    assert ["frozen, sampled", "5", "0", "4.97", "3–5", "48.4", "47.0–50.0", "49.0", "6.17", "", "+3.4"] in found
    assert [row[-1] for row in found if row[:3] == ["frozen, sampled", "5", "1"]] == ["+1.4"]
    (mean,) = [row for row in found if row[2:3] == ["**mean of 2**"]]
    assert mean[:2] == ["**frozen, sampled**", "**5**"]
    assert mean[3:] == ["**4.99**", "", "**47.4**", "", "", "", "45.0 top probability", "**+2.4 [+1.1, +3.7]**"]
    assert [row[-1] for row in found if row[:2] == ["frozen, sampled", "10"]] == ["–"], "nothing was compared with it"
    assert [row[:2] for row in found if row[0] == "joint, sampled"] == [["joint, sampled", "5"]]
    assert ["frozen, sampled", "5", "4.99", "entropy", "45.0", "the same", "-1.0 [-2.0, +0.0]"] in found
    assert ["frozen, sampled", "5", "4.99", "factor:1", "45.0", "3.10", "-20.0 [-30.0, -10.0]"] in found


def test_the_rules_stand_by_denoiser_and_budget(folder):
    found = rows(tables(read_results(folder), "plots"))
    assert ["`012345`, steps:", "4", "5", "10"] in found
    assert ["top probability", "44.0", "45.0", "50.0"] in found
    assert ["IID", "", "31.1 (4.8)", ""] in found, "the steps that it took, where they are fewer"
    assert found.index(["`feedfe`, steps:", "5"]) + 2 == found.index(["top probability", "45.0"])


def test_splits_have_parts_of_their_own(folder):
    text = tables(read_results(folder), "plots")
    numbers, test = text.split("## 30m: test")
    assert "6,000 problems (overlong: 3); greedy tokens." in numbers
    assert "1,319 problems (overlong: 0); greedy tokens." in test
    assert "![30m: new-numbers: accuracy against mean steps](plots/small-new-numbers.svg)" in numbers
    assert "joint orders use `ba9876`" in numbers
    assert "entropy" in numbers
    assert "entropy" not in test, "the gains of the other split"


def test_tasks_have_parts_of_their_own(folder, tmp_path):
    append_records(folder / "small.jsonl", [record("top-prob", None, task="chain", score=0.97)])
    write_page(tmp_path / "page.md", folder)
    text = (tmp_path / "page.md").read_text()
    chain = text.split("## 30m: new-numbers, chain\n")[1].split("\n## ")[0]
    assert "97.0" in chain
    assert "entropy" not in chain, "the gains of the other task"
    assert "(page/small-new-numbers-gsm8k.svg)" in text
    assert "(page/small-new-numbers-chain.svg)" in chain


def test_what_was_evaluated_otherwise_is_not_mixed_in(folder, tmp_path):
    """A rule on 1,000 problems, or at another temperature, is in a part of its own, beside no gain of the others."""
    few = record("top-prob", None, num_examples=1000, score=0.99)
    warm = record("top-prob", None, temperature=1.0, score=0.98)
    append_records(folder / "small.jsonl", [few, warm])
    text = tables(read_results(folder), "plots")
    titles = ["temperature 0, examples 6000", "temperature 0, examples 1000", "temperature 1, examples 6000"]
    parts = [text.split(f"## 30m: new-numbers, {title}\n")[1].split("\n## ")[0] for title in titles]
    assert [["99.0" in part, "98.0" in part, "45.0" in part, "entropy" in part] for part in parts] == [
        [False, False, True, True],
        [True, False, False, False],
        [False, True, False, False],
    ]
    assert ["greedy tokens." in part for part in parts] == [True, True, False]
    assert "1,000 problems" in parts[1]
    assert "tokens at temperature 1." in parts[2]
    write_page(tmp_path / "page.md", folder)
    drawn = sorted(path.name for path in (tmp_path / "page").iterdir())
    assert len(drawn) == 4
    assert all(f"(page/{name})" in (tmp_path / "page.md").read_text() for name in drawn)


def test_a_run_is_no_folder_of_records(folder, refused, tmp_path):
    (folder / "recipe.json").write_text("{}")
    assert "is a run: give a study's OUT/results" in refused("report", folder, "--markdown", tmp_path / "page.md")


def test_the_wall_time_of_all_attempts(folder):
    """Nothing that overlaps counts twice, and nothing in which nothing ran counts at all."""
    text = tables(read_results(folder), "plots").split("wall time")[1]
    assert rows(text)[2:] == [
        ["train denoiser", "1", "1", "10.0", "H200"],
        ["train frozen-t5", "2", "2", "3.0", "H200"],
        ["train frozen-t10", "1", "2", "1.0", "H200"],
        ["evaluate new-numbers", "1", "1", "1.0", "H200"],
        ["**all**", "", "", "**14.5**", ""],
    ]
    assert "the rows overlap" in text


def test_the_union_of_intervals():
    inside = [done("a", 0.0, 10.0), done("b", 2.0, 3.0), done("c", 6.0, 1.0), done("d", 20.0, 1.0)]
    assert wall_seconds(inside) == 11.0
    assert wall_seconds(inside[::-1]) == 11.0
    assert wall_seconds([]) == 0.0


def test_what_a_plot_shows():
    """Rules on the shared denoiser, of the adaptive ones the best two; an order has one point per budget."""
    rules = ("threshold:0.9", 0.7), ("factor:1", 0.8), ("eb:0.1", 0.6)
    chosen = [r for r in RECORDS if r.spec.split == "new-numbers"] + [record(rule, None, score=s) for rule, s in rules]
    shown = {series.label: series.means("score") for series in rule_series(chosen)}
    assert list(shown) == ["IID", "top probability", "factor:1", "threshold:0.9"]
    assert shown["top probability"] == [0.44, 0.45, 0.5], "by their steps, without the one on another denoiser"
    orders = {series.label: series.means("score") for series in order_series(chosen)}
    assert orders == {"learned, frozen, sampled": [pytest.approx(0.474), 0.575], "learned, joint, sampled": [0.3]}
    (axes,) = plot([*rule_series(chosen), *order_series(chosen)], "solved, %").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [*shown, *orders]
    assert not axes.texts, "nothing is written into the plot, where it would overprint the points"


def test_rules_of_one_order_are_not_mixed_up(folder):
    """The same order decoded in another way has rows, a mean, a gain and a line of its own."""
    other = {"policy": "learned(deterministic)"}
    append_records(folder / "small.jsonl", [record(seed=seed, score=0.2, **other) for seed in (0, 1)])
    append_jsonl(folder / "small" / "gains.jsonl", [gain(score=0.2, seed_gains=[-0.25, -0.25], **other)])
    (study,) = read_results(folder)
    found = rows(tables([study], "plots"))
    own = [row for row in found if "greedy" in row[0] and len(row) == 11]
    assert [row[5] for row in own] == ["20.0", "20.0", "**20.0**"]
    assert [row[-1] for row in own[:2]] == ["-25.0", "-25.0"]
    assert [row[-1] for row in found if row[:3] == ["frozen, sampled", "5", "0"]] == ["+3.4"]
    shown = {series.label: series.means("score") for series in order_series(study.records)}
    assert shown["learned, frozen, greedy"] == [pytest.approx(0.2)]
    assert shown["learned, frozen, sampled"] == [pytest.approx(0.474), 0.575]


def test_a_page_is_written_again_and_one_by_hand_is_not(folder, tmp_path, ok, refused):
    page = tmp_path / "docs" / "tables.md"
    ok("report", folder, "--markdown", page)
    text = page.read_text()
    assert text.startswith(f"{BEGIN}\n\n# ")
    first = {path.name: path.read_bytes() for path in (tmp_path / "docs" / "tables").iterdir()}
    assert set(first) == {"small-new-numbers.svg", "small-test.svg"}
    page.write_text(f"{BEGIN}\nold\n")
    ok("report", folder, "--markdown", page)
    assert page.read_text() == text
    assert {path.name: path.read_bytes() for path in (tmp_path / "docs" / "tables").iterdir()} == first
    page.write_text("# Mine\n")
    assert "was not written by this command: give another page" in refused("report", folder, "--markdown", page)
    assert page.read_text() == "# Mine\n"


def test_bad_folders(folder, tmp_path, refused):
    page = tmp_path / "page.md"
    assert "no such folder" in refused("report", tmp_path / "nothing", "--markdown", page)
    (tmp_path / "empty").mkdir()
    assert "has no records: run `unmask reproduce` first" in refused("report", tmp_path / "empty", "--markdown", page)
    assert "takes one folder" in refused("report", folder, folder, "--markdown", page)
    with (folder / "small.jsonl").open("a") as file:
        file.write('{"task": 1}\n')
    assert "small.jsonl, line 11: not what this version writes" in refused("report", folder, "--markdown", page)
    assert not page.exists()


@pytest.mark.skipif(not (ROOT / "results" / "gsm8k").is_dir(), reason="no records yet")
def test_the_committed_page_is_made_from_the_committed_records():
    folder = ROOT / "results" / "gsm8k"
    assert (folder / "tables.md").read_text() == tables(read_results(folder), "tables"), (
        "run `unmask report results/gsm8k --markdown results/gsm8k/tables.md`"
    )
