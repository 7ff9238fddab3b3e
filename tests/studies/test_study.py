"""A whole study on hand-written problems: its commands, what it writes, and that nothing is done twice."""

import json
import shlex
import shutil
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.commands import exit_code
from tests.evaluation.by_hand import LEARNED
from tests.evaluation.test_compare import learned, result
from tests.tasks.test_gsm8k import TEST, many, write_jsonl
from tests.training.small import contents, json_lines
from unmask import files
from unmask.errors import UserError
from unmask.evaluation.compare import Gain
from unmask.evaluation.records import read_records
from unmask.jsonl import read_jsonl
from unmask.runtime import process_settings
from unmask.studies.study import Reproduction, load_study

DENOISER = """
threads = 1

[task]
name = "gsm8k"
resample = 10
vocab_size = 300
prompt_length = 100
response_length = 40

[model]
label = "tiny"
width = 16
layers = 1
heads = 2
intermediate = 16

[denoise]
updates = 2
batch = 4
warmup = 1

[evaluate]
examples = 6
temperature = 0.0
budgets = [3]
"""
ORDER = DENOISER.replace("[denoise]\nupdates = 2\n", "[order]\nupdates = 2\nbudget = 2\ntrajectories = 2\n").replace(
    "width = 16\nlayers = 1\nheads = 2\nintermediate = 16\n", "selector.heads = 2\nscorer = {width = 8, heads = 2}\n"
)
STUDY = """
policies = ["iid", "top-prob"]
others = ["entropy", "left-to-right"]
learned_tried = ["learned(deterministic)"]

[[train]]
name = "denoiser"
recipe = "denoiser.toml"

[[train]]
name = "frozen"
recipe = "order.toml"
start = "denoiser"
seeds = [0, 1]

[[train]]
name = "joint"
recipe = "order.toml"
start = "denoiser"
set = ["order.denoiser_rate=1e-4"]

[[train]]
name = "continued"
recipe = "denoiser.toml"
start = "denoiser"
set = ["denoise.batch=8", "denoise.learning_rate=1e-4"]

[[train]]
name = "shared"
recipe = "order.toml"
start = "frozen"
baseline = "continued"
set = ["order.denoiser_rate=1e-4", "order.budget=3", "order.from_init=true"]
seeds = [0, 1]

[[evaluate]]
split = "new-numbers-dev"
examples = 6
steps = [1, 4]

[[evaluate]]
split = "test"
examples = 2
"""
FIRST = ["denoiser", "frozen-seed0", "frozen-seed1", "joint", "continued", "shared-seed0", "shared-seed1"]
ELSEWHERE = ["frozen-seed0", "frozen-seed1", "shared-seed0", "shared-seed1"]  # orders whose rivals another run has
LATER = [*ELSEWHERE, "denoiser", "denoiser/others", "joint", "continued"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The files of the study, with data, and the study done in `runs`: tests only read it."""
    folder = tmp_path_factory.mktemp("study")
    write_jsonl(folder / "train.jsonl", many())
    write_jsonl(folder / "test.jsonl", TEST)
    for name, text in (("denoiser", DENOISER), ("order", ORDER), ("study", STUDY)):
        (folder / f"{name}.toml").write_text(text)
    run(folder, folder / "runs")
    return folder


def options(folder):
    return [f"task.folder={folder}", f"task.cache={folder / 'cache'}"]


def reproduction(folder, out, **values):
    return Reproduction(*load_study(str(folder / "study.toml")), out, options(folder), cpu=True, **values)


def run(folder, out, *wanted, stop_at=None):
    """Run stages of the study, whose commands are returned, all in this process: torch is imported once.

    The command that starts with `stop_at` is stopped by Ctrl-C.
    """
    ran = []

    def run_here(jobs, at_once, began, ended):
        assert at_once == 1
        for job in jobs:
            assert job.log is None, "one at a time writes to the terminal"
            began(job)
            words = job.command[job.command.index("unmask") + 1 :]
            if stop_at and " ".join(words).startswith(stop_at):
                ended(job, 75, time.time(), 0.5)
                raise KeyboardInterrupt
            ran.append(words)
            with process_settings():
                assert exit_code(*words) == 0
            ended(job, 0, time.time(), 0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unmask.studies.study.run_jobs", run_here)
        try:
            reproduction(folder, out).run(wanted)
        except KeyboardInterrupt:
            assert stop_at
    return ran


def test_stages_in_order(study):
    names = [stage.name for stage in reproduction(study, study / "nowhere").stages()]
    assert names[:7] == FIRST
    assert names[7:15] == [f"new-numbers-dev/{name}" for name in LATER]
    assert names[15:] == [f"test/{name}" for name in LATER if name != "denoiser/others"]


def test_the_other_rules_run_beyond_the_budgets_of_the_orders(study):
    """What ends by itself ends there, and in between there is something to interpolate from."""
    plan = reproduction(study, study / "nowhere")
    for steps, expected in [((1, 2, 3, 4), (3, 4)), ((1, 2), (2,))]:
        plan.study = replace(plan.study, evaluate=(replace(plan.study.evaluate[0], steps=steps),))
        [others] = [stage for stage in plan.stages() if stage.name.endswith("/others")]
        assert others.steps == expected


def test_every_seed_starts_from_its_own(study):
    """`shared` trains the orders of `frozen` further, whose seeds it has; all of those start from the one denoiser."""
    plan = reproduction(study, study / "nowhere")
    starts = {run: plan.runs[run].recipe.init for run in FIRST}
    nowhere = study / "nowhere"
    assert starts == {
        "denoiser": "",
        **dict.fromkeys(("frozen-seed0", "frozen-seed1", "joint", "continued"), str(nowhere / "denoiser")),
        **{f"shared-seed{seed}": str(nowhere / f"frozen-seed{seed}") for seed in (0, 1)},
    }
    by_name = {stage.name: stage for stage in plan.stages()}
    assert plan._needs(by_name["shared-seed1"]) == {"frozen-seed1", "continued"}


def test_a_task_that_the_study_names_is_trusted_in_its_evaluations(study):
    for task, trusted in [("gsm8k", False), ("unmask.tasks.gsm8k.gsm8k:GSM8K", True)]:
        plan = Reproduction(*load_study(str(study / "study.toml")), study / "nowhere", [f"task.name={task}"])
        assert {"--trust-task" in plan.command(stage) for stage in plan.stages() if stage.split} == {trusted}


def test_what_it_writes(study):
    results = study / "runs" / "results"
    assert sorted(contents(results)) == sorted(
        ["study.jsonl", "study/gains.jsonl", "study/stages.jsonl", *(f"study/recipes/{run}.json" for run in FIRST)]
    )
    stages = json_lines(results / "study" / "stages.jsonl")
    names = [stage.name for stage in reproduction(study, study / "runs").stages()]
    assert [stage["stage"] for stage in stages] == names
    assert all(stage["finished"] and stage["seconds"] > 0 and stage["device"] == "cpu" for stage in stages)
    assert all(stage["command"].startswith(("unmask train ", "unmask evaluate ")) for stage in stages)
    everything = [record for run in FIRST for record in read_records(study / "runs" / run / "results.jsonl")]
    assert read_records(results / "study.jsonl") == everything, "nothing is taken for something else"


def test_the_records_tell_runs_and_splits_apart(study):
    plain, frozen0, frozen1, joint, continued, *shared = (
        read_records(study / "runs" / run / "results.jsonl") for run in FIRST
    )
    denoiser = plain[0].spec.denoiser
    assert {record.spec.split for record in plain} == {"new-numbers-dev", "test"}
    assert {record.spec.denoiser for record in plain} == {denoiser}
    assert {record.spec.trained_seed for record in plain} == {None}
    for seed, records in enumerate((frozen0, frozen1)):
        assert [(r.spec.policy, r.spec.split, r.spec.trained_seed, r.spec.seed) for r in records] == [
            ("learned", "new-numbers-dev", seed, 0),
            ("learned(deterministic)", "new-numbers-dev", seed, 0),
            ("learned", "test", seed, 0),
        ]
        assert {(r.spec.model, r.spec.denoiser, r.spec.plain_denoiser) for r in records} == {
            ("tiny", denoiser, denoiser)
        }
        assert [(r.spec.num_examples, r.outcome.metrics["overlong"]) for r in records] == [(6, 0), (6, 0), (2, 0)]
    learned = [record for record in joint if record.spec.trained_budget is not None]
    rivals = {record.spec.denoiser for record in joint if record.spec.trained_budget is None}
    assert {record.spec.plain_denoiser for record in learned} == rivals
    assert denoiser not in rivals | {learned[0].spec.denoiser}
    assert all(r.outcome.score <= r.outcome.metrics["flexible"] <= 1 for r in [*plain, *joint])
    assert {record.spec.trained_budget for record in continued} == {None}
    (baseline,) = {record.spec.denoiser for record in continued}
    assert baseline not in rivals | {denoiser}, "the other joint order trained its own"
    for seed, records in enumerate(shared):
        assert [(r.spec.policy, r.spec.split, r.spec.trained_seed, r.spec.trained_budget) for r in records] == [
            ("learned", "new-numbers-dev", seed, 3),
            ("learned(deterministic)", "new-numbers-dev", seed, 3),
            ("learned", "test", seed, 3),
        ]
        assert {r.spec.plain_denoiser for r in records} == {baseline}
        assert baseline not in {r.spec.denoiser for r in records}
    for run in ("shared-seed0", "shared-seed1"):
        stages = {line["stage"] for line in json_lines(study / "runs" / run / "metrics.jsonl")}
        assert stages == {"order"}, "no baseline of its own"


def test_of_the_other_rules_only_one_is_left_on_later_splits(study):
    plain = read_records(study / "runs" / "denoiser" / "results.jsonl")
    by_split = {split: {r.spec.policy for r in plain if r.spec.split == split} for split in ("new-numbers-dev", "test")}
    assert by_split["new-numbers-dev"] == {"iid", "top-prob", "entropy", "left-to-right"}
    assert by_split["test"] in ({"iid", "top-prob", "entropy"}, {"iid", "top-prob", "left-to-right"})
    spec = [r.spec.budget for r in plain if r.spec.policy == "top-prob" and r.spec.split == "new-numbers-dev"]
    assert {1, 4} < set(spec), "the steps that were asked for, and those that a comparison needs"


def test_another_rule_is_chosen(study, tmp_path):
    """On the first split nothing changes, and on the others it is evaluated instead."""
    chosen = 'learned = ["learned(deterministic)"]\nlearned_tried = ["learned"]'
    for path in study.glob("*.toml"):
        (tmp_path / path.name).write_text(
            path.read_text().replace('learned_tried = ["learned(deterministic)"]', chosen)
        )
    new, old = (reproduction(f, study / "x").commands() for f in (tmp_path, study))
    dev = [[line for line in lines if "evaluate" in line and "new-numbers-dev" in line] for lines in (new, old)]
    assert dev[0] == dev[1]
    on_test = [line for line in new if "--split test" in line and "-seed" in line.split()[2]]
    assert [line.partition("--policy ")[2] for line in on_test] == ["'learned(deterministic)' --cpu"] * 4


def test_the_best_of_the_other_rules(study):
    """By the mean score at the steps of the frozen orders on the first split; a rule that stops early, by its best."""
    dev = {"split": "new-numbers-dev"}
    one = learned("11111111", [2] * 8, plain_denoiser=LEARNED.spec.denoiser, **dev)
    two = learned(plain_denoiser=LEARNED.spec.denoiser, trained_seed=1, **dev)  # 1.75 steps
    rules = [result("entropy", 1, "11111111", **dev), result("entropy", 2, "00000000", **dev)]  # 0 and 1/4
    rules += [result("left-to-right", 4, "11000000", [1] * 8, **dev)]  # 1/4: it never takes more than one step
    rules += [result("margin", steps, "11111111", **dev) for steps in (1, 2)]  # none of the others
    elsewhere = [result("entropy", steps, "11111111", split="test") for steps in (1, 2)]
    joint = learned(denoiser="ba9876543210", plain_denoiser=LEARNED.spec.denoiser, steps=[1] * 8, **dev)
    whole = reproduction(study, study / "nowhere")
    frozen = {"trained_budget": 2, "plain_denoiser": LEARNED.spec.denoiser}
    tried = result("learned(deterministic)", 2, "00000000", [1] * 8, **frozen, **dev)
    whole.evaluated = lambda: [one, two, joint, tried, tried, *rules, *elsewhere]
    assert whole._best_others() == ["left-to-right"]
    whole.evaluated = lambda: [two, *rules[:2], result("left-to-right", 4, "10000000", [1] * 8, **dev)]
    assert whole._best_others() == ["entropy"]
    four = result("learned", 4, "11111111", [1] * 8, **{**frozen, "trained_budget": 4}, **dev)
    whole.evaluated = lambda: [four, one, two, *rules]
    assert whole._best_others() == ["left-to-right", "entropy"], "each budget has its own, at its own steps"
    [stage] = [stage for stage in whole.stages() if stage.name == "test/denoiser"]
    assert "  # and --policy with the best of the other rules" in whole.typed(stage), "not known yet"
    assert not any("#" in command for command in whole.commands())
    command = whole.command(stage)
    policies = [value for option, value in pairwise(command) if option == "--policy"]
    assert policies == [*whole.study.policies, "left-to-right", "entropy"]
    whole.evaluated = list
    assert whole._best_others() == []


def test_the_gains_hold_both_seeds(study):
    gains = read_jsonl(study / "runs" / "results" / "study" / "gains.jsonl", Gain)
    tried = [gain for gain in gains if gain.policy == "learned(deterministic)"]
    assert {gain.split for gain in tried} == {"new-numbers-dev"}
    assert {(gain.trained_budget, gain.joint, *gain.seeds) for gain in tried} == {
        (2, False, 0, 1),
        (2, True, 0),
        (3, True, 0, 1),
    }
    gains = [gain for gain in gains if gain.policy == "learned"]
    frozen = [gain for gain in gains if not gain.joint]
    assert {(gain.split, gain.rival) for gain in frozen} >= {
        (split, rival) for split in ("new-numbers-dev", "test") for rival in ("iid", "top-prob")
    }
    assert all(gain.seeds == [0, 1] and gain.trained_budget == 2 for gain in frozen)
    for split in ("new-numbers-dev", "test"):
        assert [gain.split for gain in frozen if gain.best].count(split) == 1
        joint = [
            (gain.trained_budget, gain.seeds) for gain in gains if gain.joint and gain.best and gain.split == split
        ]
        assert sorted(joint) == [(2, [0]), (3, [0, 1])]


def test_what_is_done_is_not_done_again(study):
    before = contents(study / "runs")
    assert run(study, study / "runs") == []
    assert contents(study / "runs") == before


def test_a_finished_order_no_longer_needs_its_start(study, tmp_path):
    out = tmp_path / "runs"
    shutil.copytree(study / "runs" / "frozen-seed1", out / "frozen-seed1")
    recipe = out / "frozen-seed1" / "recipe.json"
    files.write_listed(recipe.parent, recipe.name, recipe.read_text().replace(str(study / "runs"), str(out)))
    assert run(study, out, "frozen-seed1") == []


def test_it_resumes_where_it_stopped(study, tmp_path):
    """A run that was interrupted is trained again, a finished one is not; the attempt is noted."""
    out = tmp_path / "runs"
    ran = run(study, out, "denoiser", "frozen-seed1", stop_at=f"train {study / 'order.toml'}")
    assert [words[0] for words in ran] == ["train"]
    (out / "frozen-seed1").mkdir()
    files.write_listed(out / "frozen-seed1", "recipe.json", "{}")  # what a training that died leaves
    ran = run(study, out, "denoiser", "frozen-seed1", "new-numbers-dev")
    assert [words[0] for words in ran] == ["train", "evaluate", "evaluate", "evaluate"]
    assert ran[0][-1] == "--force"
    stages = json_lines(out / "results" / "study" / "stages.jsonl")
    assert [(stage["stage"], stage["finished"]) for stage in stages[:3]] == [
        ("denoiser", True),
        ("frozen-seed1", False),
        ("frozen-seed1", True),
    ]
    assert read_records(out / "frozen-seed1" / "results.jsonl")[0] in read_records(out / "results" / "study.jsonl")


def test_stages_at_once(study, tmp_path, capsys):
    """The same runs as one after another, to the last bit, each by a process of its own."""
    out = tmp_path / "runs"
    shutil.copytree(study / "runs" / "denoiser", out / "denoiser")
    reproduction(study, out, jobs=2).run(["denoiser", "frozen"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "[1/3] denoiser: done before"
    assert said[1].startswith("[2/3] frozen-seed0: unmask train ")
    assert sorted(line.rpartition(" ")[0].rpartition(" ")[0] for line in said[3:5]) == [
        f"[{number}/3] frozen-seed{number - 2}: done in" for number in (2, 3)
    ]
    first, second = json_lines(out / "results" / "study" / "stages.jsonl")
    assert [(stage["finished"], stage["jobs"]) for stage in (first, second)] == [(True, 2)] * 2
    first_end = min(stage["started"] + stage["seconds"] for stage in (first, second))
    assert first_end > max(first["started"], second["started"])
    for run in ("frozen-seed0", "frozen-seed1"):
        model = f"{run}/model.safetensors"
        assert (out / model).read_bytes() == (study / "runs" / model).read_bytes()
        assert (out / "logs" / f"{run}.txt").read_text().count("model: ") == 1


def test_what_waits_for_what(study, tmp_path, monkeypatch):
    """Every stage is given away once, after all that it reads and never beside one that writes to the same records."""
    rounds = []
    monkeypatch.setattr("unmask.studies.study.run_jobs", lambda jobs, at_once, began, ended: rounds.append(jobs))
    whole = reproduction(study, tmp_path / "runs", jobs=9)
    monkeypatch.setattr(whole, "_best_others", lambda: ["entropy"])
    whole.run()
    names = [[job.name for job in jobs] for jobs in rounds]
    assert sorted(name for found in names for name in found) == sorted(stage.name for stage in whole.stages())
    assert names[1] == ["test/denoiser", "test/joint", "test/continued"], "what needs the best of the others"
    after = {job.name: job.after for jobs in rounds for job in jobs}
    assert after["frozen-seed1"] == {"denoiser"}
    assert after["shared-seed0"] == {"frozen-seed0", "continued"}
    assert after["test/frozen-seed0"] == {"frozen-seed0", "new-numbers-dev/frozen-seed0"}
    orders = {f"new-numbers-dev/frozen-seed{seed}" for seed in (0, 1)}
    assert after["new-numbers-dev/denoiser"] == {"denoiser", "frozen-seed0", "frozen-seed1", *orders}
    assert "new-numbers-dev/denoiser" in after["new-numbers-dev/denoiser/others"]


def test_a_changed_model_is_evaluated_anew(study, tmp_path):
    out = tmp_path / "runs"
    run(study, out, "denoiser", "new-numbers-dev")
    config = out / "denoiser" / "config.json"
    files.write_listed(config.parent, config.name, config.read_text() + "\n")
    assert [words[0] for words in run(study, out, "denoiser", "new-numbers-dev")] == ["evaluate"]


def test_a_run_of_another_recipe_is_not_taken(study, tmp_path):
    out = tmp_path / "runs"
    run(study, out, "denoiser")
    recipe = (out / "denoiser" / "recipe.json").read_text()
    files.write_listed(out / "denoiser", "recipe.json", recipe.replace('"updates": 2', '"updates": 3'))
    with pytest.raises(UserError, match=r"another denoise\.updates: move it away, or give another --out"):
        run(study, out, "denoiser")
    files.write_listed(out / "denoiser", "recipe.json", recipe.replace('"budgets": [', '"budgets": [7,'))
    assert run(study, out, "denoiser") == [], "what it says of its evaluation does not change the model"


def test_on_the_command_line(study, tmp_path, ok, refused):
    words = ["reproduce", study / "study.toml", "--out", tmp_path / "runs", "--cpu"]
    sets = [word for option in options(study) for word in ("--set", option)]
    text = ok(*words, *sets, "--dry-run")
    assert not (tmp_path / "runs").exists()
    commands = [shlex.split(line) for line in text.splitlines()]
    assert len(commands) == 22
    assert all(command[0] == "unmask" for command in commands)
    assert [command for command in commands if "#" in command] == commands[19:], "on test, all but the orders"
    for stage, jobs in (("frozen-seed1", 1), ("frozen", 2)):
        needs = refused(*words, *sets, "--stage", stage, "--jobs", jobs, begun=True)
        assert f"needs {tmp_path / 'runs' / 'denoiser'}: add --stage denoiser" in needs
    text = ok(*commands[0][1:])
    text = ok(*words, *sets, "--stage", "denoiser")
    assert "[1/1] denoiser: done before" in text
    text = ok(*words, *sets, "--dry-run", "--set", "frozen:order.tau=0.2", "--set", "frozen-seed1:order.clip=2")
    lines = text.splitlines()
    assert [("order.tau=0.2" in line, "order.clip=2" in line) for line in lines[:4]] == [
        (False, False),
        (True, False),
        (True, True),
        (False, False),
    ]
    assert "--set: no run 'frozne'; did you mean 'frozen'?" in refused(*words, "--set", "frozne:order.tau=0.2")
    assert "no stage 'frozne'; did you mean 'frozen'?" in refused(*words, *sets, "--stage", "frozne")
    assert "test/denoiser needs the best of entropy, left-to-right: run stage new-numbers-dev first" in refused(
        *words, *sets, "--stage", "test"
    )
    assert "no study 'gsm8k-30'; did you mean 'gsm8k-30m'?" in refused("reproduce", "gsm8k-30", "--out", tmp_path / "x")


WRONG = [
    ('name = "joint"', 'name = "frozen"', "two stages are called 'frozen'"),
    *(
        ('name = "joint"', f'name = "{name}"', f"a run cannot be called '{name}'")
        for name in ("../joint", "..", "a/b", "results")
    ),
    ('baseline = "con', 'baseline = "dis', "shared has the baseline 'distinued', which is no run bef"),
    (
        '"order.from_init=true"]\nseeds = [0, 1]',
        '"order.from_init=true"]\nseeds = [1, 2]',
        "shared starts from 'frozen', which has seeds of its own",
    ),
    ('baseline = "con', 'denoiser = "con2', "shared is evaluated on 'con2tinued', which is no run before it"),
    ('baseline = "continued', 'denoiser = "frozen', "shared is evaluated on 'frozen', which has seeds of its own"),
    ('split = "test"', 'split = "test"\nruns = ["frozne"]', "test: no run 'frozne'; did you mean 'frozen'?"),
    ('start = "denoiser"', 'start = "continued"', "frozen starts from 'continued', which is no run before it"),
    ('start = "denoiser"', 'start = "denoisr"', "starts from 'denoisr', which is no run before it"),
    ("others =", "other =", "unknown key 'other'; did you mean 'others'?"),
    ('learned_tried = ["learned(d', 'learned_tried = ["margin", "l(', "'margin' is no learned order"),
    ("[[train]]", "[[train", "is not valid TOML"),
]


def test_a_study_that_makes_no_sense(tmp_path, refused):
    for old, new, expected in WRONG:
        path = tmp_path / "study.toml"
        path.write_text(STUDY.replace(old, new, 1))
        assert expected in refused("reproduce", path, "--out", tmp_path / "runs")
    path.write_text('[[train]]\nname = "order"\nrecipe = "sudoku-self"\n')
    assert "an order needs a denoiser" in refused("reproduce", path, "--out", tmp_path / "runs", "--dry-run")


def test_orders_that_would_be_taken_for_seeds_of_one_are_refused(study, tmp_path, ok, refused):
    """Their records say the model, the budget, whether the denoiser learned along, and the seed."""
    words = ["reproduce", tmp_path / "study.toml", "--out", tmp_path / "runs", "--dry-run"]
    for name in ("denoiser", "order"):
        (tmp_path / f"{name}.toml").write_text((study / f"{name}.toml").read_text())
    (tmp_path / "study.toml").write_text(STUDY)
    assert "frozen-seed0 and frozen-seed1 have the same budget and the same seed" in refused(*words, "--set", "seed=3")
    (tmp_path / "study.toml").write_text(STUDY.replace("order.denoiser_rate=1e-4", "order.tau=0.2", 1))
    assert "frozen-seed0 and joint have the same budget and the same seed: set another model.label" in refused(*words)
    ok(*words, "--set", "joint:model.label=warm")


def test_a_baseline_that_does_not_fit_its_orders_is_refused_at_once(study, refused):
    words = ["reproduce", study / "study.toml", "--out", study / "nowhere", "--dry-run", "--set"]
    said = refused(*words, "shared-seed1:order.updates=9")
    assert "continued has denoise.updates = 2: as the baseline of shared-seed1 it must have 9" in said
    assert "continued is for denoiser_rate > 0" in refused(*words, "shared:order.denoiser_rate=0.0")
    path = study / "started.toml"
    path.write_text(
        STUDY.replace(
            'name = "continued"\nrecipe = "denoiser.toml"\nstart = "denoiser"',
            'name = "continued"\nrecipe = "denoiser.toml"',
        )
    )
    words[1] = path
    assert "shared-seed0 and its baseline continued must start from the same denoiser" in refused(*words[:-1])


def test_the_studies_that_come_with_unmask():
    """Every recipe of theirs can be read, every order has a denoiser to start from, and every rule exists."""
    for path in sorted((Path(__file__).parents[2] / "recipes" / "studies").glob("*.toml")):
        given = ["task.folder=data"] if path.stem.startswith("gsm8k") else []
        whole = Reproduction(*load_study(path.stem), Path("runs"), given)
        for run in whole.runs.values():
            assert set(given) <= set(run.overrides)
            recipe = run.recipe
            assert json.loads(recipe.to_json())["task"].get("folder", "") == ("data" if given else "")
            assert recipe.model.label
            assert recipe.evaluate.temperature == (0 if given else 1)


def test_a_split_for_one_task_or_some_runs():
    whole = Reproduction(*load_study("where-order-matters"), Path("runs"), [])
    tasks = {run.training.name: run.recipe.task["name"] for run in whole.runs.values()}
    found = {
        split.split: {whole.runs[stage.run].training.name for stage in whole.stages() if stage.split == split}
        for split in whole.study.evaluate
    }
    exact = {f"exact-seed{seed}" for seed in (0, 1, 2)}
    assert found == {
        "test": tasks.keys() - exact - {"search"},
        "remove-random-16": {"lines", "lines-order", "search"},
        "hard": {name for name, task in tasks.items() if task == "sudoku"},
        "remove-random": exact,
    }
    seeds = {name: (whole.runs[name].recipe.seed, whole.runs[name].recipe.task["seed"]) for name in exact}
    assert seeds == {f"exact-seed{seed}": (seed, seed) for seed in (0, 1, 2)}
    for stage in whole.stages():
        rounded = stage.split is not None and not whole.runs[stage.run].recipe.model.denoiser
        assert ("--bf16" in whole.command(stage)) == rounded, "which an exact denoiser refuses"
    (lines,) = whole._evaluate(replace(whole.study.evaluate[1], runs=("lines",)), list(whole.runs))
    assert lines.run == "lines", "and not lines-order"
