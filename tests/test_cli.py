"""The command line, in this process: what each command prints and writes, and what it says of bad input."""

import html
import io
import json
import re
import shlex
import shutil
import sys
from itertools import pairwise

import pytest
import torch
from accelerate.state import AcceleratorState
from typer.main import get_command

import unmask
from tests.commands import exit_code
from tests.evaluation.by_hand import flat_lines
from tests.test_display import HIDDEN
from tests.test_docs import parse
from tests.training.small import TINY_RECIPE, contents, json_lines
from unmask import files
from unmask import recipe as recipe_module
from unmask.cli import app
from unmask.decoding.generate import Engine
from unmask.decoding.policies import RULES, Decision, Margin, check_policy
from unmask.decoding.policies.rule import highest
from unmask.errors import UserError
from unmask.evaluation import evaluate as evaluation
from unmask.evaluation.compare import curves
from unmask.evaluation.records import read_records, read_run
from unmask.models.order_model import weights_hash
from unmask.report import trace
from unmask.tasks.puzzles.groups import Groups
from unmask.training.run import load_run, load_task

JOINT = ["--set", "order.denoiser_rate=1e-3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The tiny recipe, and evaluated runs that tests only read: frozen and joint."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.toml").write_text(TINY_RECIPE)
    for name, overrides in (("frozen", []), ("joint", JOINT)):
        assert exit_code("train", folder / "tiny.toml", "--out", folder / name, *overrides) == 0
        assert exit_code("evaluate", folder / name) == 0
    return folder


@pytest.fixture
def run(base, tmp_path):
    """A copy of the frozen run, to be damaged."""
    return shutil.copytree(base / "frozen", tmp_path / "run")


# --- train ------------------------------------------------------------------------------------------------------------


def test_train_writes_a_run_and_says_what_next(base, ok, tmp_path):
    out = tmp_path / "deep" / "run"
    text = ok("train", base / "tiny.toml", "--out", out, "--set", "order.budget=3", "--set", "seed=5")
    assert f"unmask evaluate {out}" in text.replace("\n", "")
    recipe = json.loads((out / "recipe.json").read_text())
    assert (recipe["order"]["budget"], recipe["seed"], recipe["order"]["trajectories"]) == (3, 5, 2)


def test_a_recipe_for_a_gpu_runs_on_the_cpu_and_warns(base, call, tmp_path, monkeypatch):
    assert (
        "GPU" not in call("train", base / "tiny.toml", "--out", tmp_path / "short", "--cpu", "--set", "compile=true")[2]
    )
    monkeypatch.setattr("unmask.training.expected_time.WORTH_TELLING", 0)
    for option in ("compile=true", "precision=bf16"):
        AcceleratorState._reset_state(reset_partial_state=True)  # a process has one precision
        code, _, err = call("train", base / "tiny.toml", "--out", tmp_path / option, "--cpu", "--set", option)
        assert code == 0, err
        assert err.splitlines()[0].startswith("unmask: this recipe is meant for a GPU; on this CPU it would take about")
        assert "bfloat16" not in err or option == "precision=bf16"
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "GPU" not in call("train", base / "tiny.toml", "--out", tmp_path / "plain", "--cpu")[2]


def full(self, *args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_full_gpu(base, refused, tmp_path, monkeypatch):
    """One line: which micro-batch to try, and that the run goes on."""
    for stage, options, expected in [
        ("denoise", [], "micro-batches of 8 sequences: run the same command with --set denoise.accumulate=2"),
        ("order", ["order.accumulate=2"], "of 2 sequences: run the same command with --set order.accumulate=4"),
        ("order", ["order.accumulate=4"], "out of GPU memory with one sequence at a time: use a smaller model"),
    ]:
        objective = {"denoise": "DenoiseObjective", "order": "OrderObjective"}[stage]

        sets = [word for option in options for word in ("--set", option)]
        with monkeypatch.context() as patched:
            patched.setattr(f"unmask.training.objectives.{objective}.forward", full)
            message = refused("train", base / "tiny.toml", "--out", tmp_path / f"{stage}{options}", *sets, begun=True)
        assert expected in message
        assert ("resumes from its last checkpoint" in message) == ("one sequence at a time" not in expected)


def test_a_gpu_recipe_on_a_cpu_without_bf16(base, call, tmp_path, monkeypatch):
    """It computes in float32 instead, as fast as this CPU can, and says so."""
    monkeypatch.setattr("unmask.training.expected_time.WORTH_TELLING", 0)
    weights = []
    for option, precision in (("precision=bf16", "no"), ("precision=no", "no"), ("precision=bf16", "bf16")):
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr("unmask.training.run.precision_on", lambda device, wanted, found=precision: found)
        out = tmp_path / str(len(weights))
        code, _, err = call("train", base / "tiny.toml", "--out", out, "--cpu", "--set", option)
        assert code == 0, err
        assert ("in float32, since bfloat16 is slower here" in err) == (precision not in option)
        assert json.loads((out / "recipe.json").read_text())["precision"] in option
        weights.append((out / "model.safetensors").read_bytes())
    AcceleratorState._reset_state(reset_partial_state=True)
    assert weights[0] == weights[1] != weights[2]


def test_a_full_gpu_in_evaluation(refused, run, monkeypatch):
    monkeypatch.setattr(Engine, "generate", full)
    assert "out of GPU memory: try --cpu" in refused("evaluate", run, "--again")


def test_train_never_overwrites_without_force(base, ok, refused, run):
    (run / "notes.txt").write_text("mine")
    assert "--force" in refused("train", base / "tiny.toml", "--out", run)
    message = refused("train", base / "tiny.toml", "--out", run, "--force")
    assert f"{run / 'notes.txt'} was not written by unmask" in message
    (run / "notes.txt").unlink()
    ok("train", base / "tiny.toml", "--out", run, "--force", "--set", "seed=3")
    assert json.loads((run / "recipe.json").read_text())["seed"] == 3


# --- bad input: the sentences of the issue ----------------------------------------------------------------------------

WRONG_TRAINING = [
    (["task.name=gruops"], "unknown task 'gruops'; did you mean 'groups'?"),
    (["order.bugdet=3"], "did you mean 'budget'?"),
    (["order.budget=0"], "budget (T) must be at least 2, got 0"),
    (["model.max_length=3"], "longer than the model's context of 3: raise model.max_length"),
    (["init=nowhere"], "init = 'nowhere': no such folder or file"),
    (["order.budget"], "key=value"),
    (["order.selector_rate=0", "order.scorer_rate=0"], "both 0"),
    ([f"seed={2**80}"], "seed must fit in 64 bits"),
    (
        [*(f"model.{name}=0" for name in ("width", "layers", "heads", "intermediate")), "model.size=7m"],
        "model: size = '7m' is unknown; did you mean '170m'? choose from",
    ),
]


def test_a_recipe_that_cannot_be_trained(base, refused, run):
    """One line, and not even --force costs the run that was there."""
    for overrides, expected in WRONG_TRAINING:
        words = [word for override in overrides for word in ("--set", override)]
        assert expected in refused("train", base / "tiny.toml", "--out", run, "--force", *words)


def test_unknown_recipes(refused, tmp_path):
    message = refused("train", "gruops", "--out", tmp_path / "new")
    assert "no recipe 'gruops'; did you mean 'groups'?" in message
    (tmp_path / "broken.toml").write_text("[task\n")
    assert "not valid TOML" in refused("train", tmp_path / "broken.toml", "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_no_run_is_not_replaced(base, refused, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years")
    message = refused("train", base / "tiny.toml", "--out", tmp_path / "thesis", "--force")
    assert "give another --out" in message


READERS = (["evaluate"], ["evaluate", "--bound"], ["sample"], ["report"])


def test_a_missing_run(refused, tmp_path):
    for command in READERS:
        assert "no such folder; give the" in refused(command[0], tmp_path / "nowhere", *command[1:])
    assert not (tmp_path / "nowhere").exists()


def test_a_half_written_run(refused, run):
    for missing in ("config.json", "model.safetensors", "recipe.json"):
        whole = (run / missing).read_bytes()
        (run / missing).unlink()
        for command in READERS[:3]:
            message = refused(command[0], run, *command[1:])
            assert missing in message
            assert "from a copy" in message
        (run / missing).write_bytes(whole)


def test_a_run_of_another_version(refused, run):
    config = json.loads((run / "config.json").read_text())
    files.write_listed(run, "config.json", json.dumps({**config, "format_version": 99}))
    for command in READERS[:3]:
        message = refused(command[0], run, *command[1:])
        assert "format version 99" in message
        assert "train again" in message


def test_a_run_that_was_not_evaluated(refused, run):
    (run / "results.jsonl").unlink()
    assert "run `unmask evaluate" in refused("report", run)
    (run / "results.jsonl").write_text("")
    assert "run `unmask evaluate" in refused("report", run)


def test_results_that_are_damaged(refused, run):
    with (run / "results.jsonl").open("a") as file:
        file.write('{"task": "gro\n')
    lines = len((run / "results.jsonl").read_text().splitlines())
    assert f"results.jsonl, line {lines}: not a JSON object" in refused("report", run)


def test_one_bad_run_of_two_writes_nothing(refused, run, tmp_path):
    refused("report", run, tmp_path / "nowhere")


WRONG_OPTIONS = [
    ("evaluate RUN --policy magrin", "unknown policy 'magrin'; did you mean 'margin'? choose from"),
    ("evaluate RUN --policy threshold:2", "threshold"),
    ("evaluate RUN --policy blocks(5,margin) --steps 2", "blocks of 5 are larger than a response of 4 tokens"),
    ("evaluate RUN --policy blocks(2,margin) --steps 1", "give at least 2 steps, not 1"),
    ("evaluate RUN --policy iid --steps 0", "--steps must be between 1 and 65,536, got 0"),
    ("evaluate RUN --policy learned --steps 3", "trained for T = 2"),
    ("evaluate RUN --examples 0", "--examples"),
    ("evaluate RUN --top-p -1", "top_p must be above 0 and at most 1, got -1"),
    ("evaluate RUN --top-k 2 --temperature 0", "give a temperature above 0"),
    (
        "evaluate RUN --min-length 3",
        "task groups has no end of sequence (eos_token_id): leave out --min-length and --stop-at-eos",
    ),
    ("evaluate RUN --bound --top-k 2", "--bound takes no"),
    ("sample RUN --temperature 0 --top-p 0.5", "give a temperature above 0"),
    ("sample RUN --stop b", "no end of sequence (eos_token_id): leave out --min-length, --stop-at-eos, --eos-last and"),
    ("sample RUN --repetition-penalty 0", "repetition_penalty must be above 0 and finite, got 0"),
    ("evaluate RUN --bound --samples 0", "--samples"),
    ("evaluate RUN --samples 2", "--samples and --price are for --bound"),
    ("evaluate RUN --price 1", "--policy 'learned(price=0.1)'"),
    ("evaluate RUN --bound --price 1", "trained without prices"),
    ("evaluate RUN --bound --price -1", "price must be 0 or more, got -1"),
    ("evaluate RUN --policy learned(price=-1)", "price must be 0 or more"),
    ("evaluate RUN --bound --examples 1", "at least 2 examples"),
    ("sample RUN --steps 0", "--steps"),
    ("sample RUN --steps 3", "trained for T = 2"),
    ("sample RUN --temperature inf", "temperature"),
    ("trian", "No such command 'trian'"),
    ("sample RUN --fancy", "--fancy"),
    ("sample", "Missing argument"),
    ("train groups", "--out"),
    ("train sudoku-self --out nowhere", "an order needs a denoiser: give [denoise], init = "),
    ("sample RUN --num few", "--num"),
]


def test_wrong_options(refused, run):
    for command, expected in WRONG_OPTIONS:
        assert expected in refused(*(run if word == "RUN" else word for word in command.split())), command


def test_usage_errors_say_where_help_is(refused):
    assert "`unmask sample --help`" in refused("sample", "x", "--steps", "0")
    assert "`unmask --help`" in refused("trian")


def test_no_learned_order(base, ok, refused, tmp_path):
    text = TINY_RECIPE[: TINY_RECIPE.index("[order]")] + TINY_RECIPE[TINY_RECIPE.index("[evaluate]") :]
    (tmp_path / "plain.toml").write_text(text)
    ok("train", tmp_path / "plain.toml", "--out", tmp_path / "plain")
    for name in ("learned", "lo-arm", "reward"):
        said = f"{name} needs a learned order, and there is none: train one with an [order] section"
        assert said in refused("evaluate", tmp_path / "plain", "--policy", name)
        assert said in refused("sample", tmp_path / "plain", "--policy", name)
    assert "no learned order" in refused("evaluate", tmp_path / "plain", "--bound")
    text = ok("sample", tmp_path / "plain")
    assert "4 steps" in text
    text = ok("evaluate", tmp_path / "plain")
    assert "learned" not in text
    assert "denoiser, trained without an order" in text
    ok("report", tmp_path / "plain")


def test_help(call, ok):
    text = ok("--help")
    for command in ("demo", "train", "evaluate", "report", "policies", "sample"):
        assert command in text
    ok("sample", "--help")
    assert call("--version")[:2] == (0, f"{unmask.__version__}\n")
    assert "the recipe's [saving] says" in " ".join(ok("train", "--help").split())


def commands(group, *path):
    """Every command and group, by the words that call it."""
    yield [*path], group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *path, name)


def test_every_help_has_an_example_that_parses(call, ok):
    found = {" ".join(path): path for path, _ in commands(get_command(app))}
    assert {"", "demo", "recipe", "recipe list", "recipe show", "sample"} <= set(found)
    for name, path in found.items():
        code, text, _ = call(*path, "-h")
        assert (code, text) == (0, ok(*path, "--help"))
        example = re.search(r"Example: unmask (.*?)(\n *\n|╭)", text, flags=re.S)
        assert example is not None, f"unmask {name} --help shows no example"
        assert example[1].startswith(name)
        parse(shlex.split(example[1]))


def test_a_shell_completes(monkeypatch, capsys):
    for words, expected in (
        ("unmask sam", "sample"),
        ("unmask recipe li", "list"),
        ("unmask train chain-", "chain-self"),
    ):
        monkeypatch.setenv("_UNMASK_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert exit_code() == 0
        assert capsys.readouterr().out.split() == [expected]


def test_recipe_list(call):
    code, text, err = call("recipe", "list")
    assert (code, err) == (0, "")
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == recipe_module.known_recipes()
    assert max(map(len, lines)) <= 160
    groups = next(line for line in lines if line.startswith("groups "))
    assert groups.split(maxsplit=2)[1:] == [
        "groups",
        "denoiser and order, T = 2  Four groups of dependent tokens, the posterior a scorer as in the paper",
    ]
    assert any(line.endswith("An order for the denoiser of gsm8k-30m") for line in lines)


def test_policies_lists_every_rule(call):
    """A line each: how it is written, which is read back as it stands where nothing is missing, and what it does."""
    code, text, err = call("policies")
    assert (code, err) == (0, "")
    lines, _, explained = text.partition("\n\n")
    shown = [line.split(maxsplit=1) for line in lines.splitlines()]
    assert len(shown) == 27
    built_in = [(key, rule.__name__) for key, rule in RULES.items() if rule.__module__.startswith("unmask.")]
    assert [(usage.partition("(")[0], does.split()[0]) for usage, does in shown] == built_in
    for usage, does in shown:
        if re.search("[A-Z]", usage):
            assert usage in ("stochastic(ORDER,TEMPERATURE)", "blocks(SIZE,INNER)")
        else:
            check_policy(usage)
        assert len(does) > 20
    for example in ("margin", "threshold:0.9", "klass(0.9,0.01,2)", "blocks(32,stochastic(margin,0.5))"):
        assert example in explained
        check_policy(example)


def test_rules_that_need_more_than_a_name(ok, refused, run, chain, tmp_path):
    """pc-sampler counts its background in the task's training examples; wino asks the network for shadows."""
    rules = ["--policy", "blocks(2,pc-sampler(0.5,2))", "--policy", "wino(0.2,0.9)", "--steps", "2"]
    ok("evaluate", run, *rules, "--examples", "6")
    new = flat_lines(run / "results.jsonl")[-2:]
    assert [(r["policy"], r["mean_revisions"] is None) for r in new] == [(rules[1], True), (rules[3], False)]
    ok("sample", run, *rules)
    ok("evaluate", chain, "--exact-denoiser", "--out", tmp_path / "exact", *rules[:2], "--steps", "5")
    said = refused("evaluate", chain, "--exact-denoiser", "--out", tmp_path / "exact", *rules[2:])
    assert "needs a network that takes attention masks and position ids" in said


def test_an_interrupt_is_one_line(monkeypatch, call, base):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("unmask.evaluation.plan.load_run", interrupted)
    code, _, err = call("evaluate", base / "frozen")
    assert code == 130
    assert err.startswith("unmask: interrupted")
    assert len(err.splitlines()) == 1


# --- evaluate ---------------------------------------------------------------------------------------------------------


def test_evaluate_runs_what_the_recipe_says(base):
    """And one step, the floor of the learned order's mean."""
    for name in ("frozen", "joint"):
        records = flat_lines(base / name / "results.jsonl")
        assert 1 < records[0]["mean_steps"] < 2
        assert [(r["policy"], r["budget"], r["trained_budget"]) for r in records] == [
            ("learned", 2, 2),
            ("iid", 1, None),
            ("iid", 2, None),
            ("iid", 4, None),
            ("top-prob", 1, None),
            ("top-prob", 2, None),
            ("top-prob", 4, None),
        ]
        assert {(r["num_examples"], r["temperature"], r["seed"], r["model"]) for r in records} == {(20, 1.0, 0, "1x16")}
        assert [line["key"] for line in json_lines(base / name / "verdicts.jsonl")] == [r["key"] for r in records]


def test_evaluate_runs_heuristics_on_the_right_denoiser(base):
    """Frozen: all on the same weights.  Joint: the heuristics on the baseline, which is another one."""
    frozen, joint = (flat_lines(base / name / "results.jsonl") for name in ("frozen", "joint"))
    assert len({record["denoiser"] for record in frozen}) == 1
    learned, *others = (record["denoiser"] for record in joint)
    assert len(set(others)) == 1
    assert learned not in others


def test_the_library_evaluates_as_the_command_line_does(base, run):
    """A run in its folder, where everything is done already; its model by itself, which leaves no file."""
    before = contents(run)
    records = unmask.evaluate(run)
    assert [(record.key, record.outcome) for record in records] == [
        (record.key, record.outcome) for record in read_run(base / "frozen")
    ]
    model, _, _, task = load_run(run)
    alone = unmask.evaluate(model, task, ["learned", Margin()], [2], examples=20, seed=0)
    assert contents(run) == before
    assert [(record.spec.policy, record.spec.budget) for record in alone] == [("learned", 2), ("margin", 2)]
    assert (alone[0].verdicts.valid == records[0].verdicts.valid).all()
    assert alone[0].spec.model == records[0].spec.model == "1x16"
    with pytest.raises(UserError, match="a model is evaluated on a task: give one"):
        unmask.evaluate(model)
    with pytest.raises(UserError, match="a run has its own task"):
        unmask.evaluate(run, task)


def test_evaluate_adds_to_the_results_and_prints_a_table(ok, run):
    before = (run / "results.jsonl").read_text()
    text = ok(
        "evaluate", run, "--policy", "margin", "--policy", "iid", "--steps", "1", "--steps", "3", "--examples", "6",
        "--temperature", "0", "--seed", "9",
    )  # fmt: skip
    after = (run / "results.jsonl").read_text()
    assert after.startswith(before)
    new = flat_lines(run / "results.jsonl")[7:]
    assert [(r["policy"], r["budget"]) for r in new] == [("margin", 1), ("margin", 3), ("iid", 1), ("iid", 3)]
    assert {(r["num_examples"], r["temperature"], r["seed"]) for r in new} == {(6, 0.0, 9)}
    for part in ("margin @ 1", "iid @ 3", "2 steps for exact samples", "true entropy 2.197", "frozen denoiser"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


NEW_RULES = ["threshold:0.9", "p2", "lo-arm", "blocks(4,margin)"]


def test_rules_of_every_kind(ok, run):
    """By their names, one that a network decides at its own budget, and what is recorded of each."""
    options = [part for name in NEW_RULES for part in ("--policy", name)]
    text = ok("evaluate", run, *options)
    assert max(map(len, text.splitlines())) <= 80
    new = flat_lines(run / "results.jsonl")[7:]
    # lo-arm takes two steps always, so the recipe's budgets are all that a comparison needs
    heuristics = [(name, budget, None) for name in NEW_RULES if name != "lo-arm" for budget in (2, 4)]
    assert [(r["policy"], r["budget"], r["trained_budget"]) for r in new] == [("lo-arm", 2, 2), *heuristics]
    assert {r["policy"] for r in new if r["mean_revisions"] is not None} == {"p2"}
    by_name = {(r["policy"], r["budget"]): r for r in new}
    assert by_name["p2", 4]["mean_revisions"] > 0
    assert "p2 @ 4 re-masked a position" in " ".join(text.split())
    for budget in (2, 4):
        for name, low in (("p2", budget), ("blocks(4,margin)", budget), ("threshold:0.9", 1)):
            record = by_name[name, budget]
            assert low <= record["fewest_steps"] <= record["most_steps"] <= budget
            assert record["mean_passes"] == record["mean_steps"]
            assert record["selector"] is None
    lo_arm = by_name["lo-arm", 2]
    assert (lo_arm["fewest_steps"], lo_arm["most_steps"], lo_arm["selector"]) == (2, 2, "nonempty")
    assert "lo-arm, T = 2: " in text
    orders = {(r.spec.policy, r.spec.budget): r.verdicts.reveal_step for r in read_run(run)}
    assert {tuple(sorted(row)) for row in orders["lo-arm", 2]} == {(0, 1, 1, 1)}, "one, then the rest"
    assert {tuple(sorted(row)) for row in orders["blocks(4,margin)", 2]} == {(0, 0, 1, 1)}
    before = contents(run)
    ok("evaluate", run, *options)
    assert contents(run) == before, "kept, like all others"


def test_whatever_a_network_decides_runs_on_its_own_denoiser(base, ok, tmp_path):
    """In a joint run the heuristics have another one; and the records have the hash of the selector."""
    run = shutil.copytree(base / "joint", tmp_path / "run")
    rules = ("learned(temperature=0.5)", "lo-arm", "reward", "margin")
    ok("evaluate", run, *(part for name in rules for part in ("--policy", name)), "--steps", "2")
    model, plain, _, _ = load_run(run)
    own, heuristic = weights_hash(model.denoiser), weights_hash(plain.denoiser)
    assert own != heuristic
    new = {r["policy"]: r for r in flat_lines(run / "results.jsonl")[7:]}
    assert {name: r["denoiser"] for name, r in new.items()} == {
        **dict.fromkeys(("learned(temperature=0.5)", "lo-arm", "reward:1"), own),
        "margin": heuristic,
    }
    assert new["margin"]["selector_weights"] is None
    for name in ("learned(temperature=0.5)", "lo-arm", "reward:1"):
        assert new[name]["selector_weights"] == weights_hash(model.selector)


def test_a_rule_named_twice_runs_once(ok, run):
    """However it is written."""
    text = ok(
        "evaluate", run, "--policy", "threshold", "--policy", "threshold:0.9", "--policy", "threshold( 0.9 )",
        "--steps", "2", "--again",
    )  # fmt: skip
    assert [r["policy"] for r in flat_lines(run / "results.jsonl")[7:]] == ["threshold:0.9"]
    assert text.count("threshold:0.9 @") == 1


def test_compile_reaches_the_engine_and_changes_nothing(ok, base, run, uncompiled):
    """The records of --compile, without the compiler, are those of the run that was evaluated eagerly."""
    ok("evaluate", run, "--again")
    assert uncompiled == []
    ok("evaluate", run, "--again", "--compile")
    pieces = {getattr(function, "func", function).__name__ for function in uncompiled}  # of a partial, what it calls
    assert len(uncompiled) == 7 * len(pieces) > 0, "every piece once for each of seven evaluations"
    records, eager = ([{**r, "seconds": 0} for r in flat_lines(f / "results.jsonl")] for f in (run, base / "frozen"))
    assert len(records) == 21
    differ = {"num_forwards": 0, "compile": None}
    assert [{**r, **differ} for r in records[14:]] == [{**r, **differ} for r in eager]
    assert {r["compile"] for r in records[14:]} == {True}
    for now, before in zip(records[14:], eager, strict=True):
        assert now["num_forwards"] >= before["num_forwards"], "rows that idle are evaluated too"
        if now["fewest_steps"] == now["most_steps"]:
            assert now["num_forwards"] == before["num_forwards"]


def evaluated(run):
    """What an evaluation left, without what differs from call to call: the seconds."""
    records = [{**record, "seconds": 0} for record in flat_lines(run / "results.jsonl")]
    return records, [record.verdicts.reveal_step for record in read_run(run)]


def test_a_second_call_continues_where_the_first_was_killed(call, ok, base, tmp_path, monkeypatch):
    """In the middle of an evaluation, between two, and before the record is written: the end is always the same."""
    monkeypatch.setattr(evaluation, "CHUNK", 8)  # 20 examples are three chunks, 7 evaluations
    whole = evaluated(base / "frozen")
    assert len(whole[0]) == len(whole[1]) == 7
    generate, calls, last = Engine.generate, 0, 0

    def killed(self, *arguments, **options):
        nonlocal calls
        calls += 1
        if calls == last:
            raise KeyboardInterrupt
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Engine, "generate", killed)
    for last in (1, 2, 4, 9, 21):
        run, calls = tmp_path / f"killed-{last}", 0
        shutil.copytree(base / "frozen", run, ignore=shutil.ignore_patterns("*.jsonl"))
        assert call("evaluate", run)[0] == 130
        assert calls == last
        ok("evaluate", run)
        assert calls == 22, "nothing is generated twice but the batch that was lost"
        assert evaluated(run) == whole
    for cut in (-1, -20):  # killed before the last line, and in the middle of it
        text = (run / "results.jsonl").read_text()
        (run / "results.jsonl").write_text("".join(text.splitlines(keepends=True)[:-1]) if cut == -1 else text[:cut])
        calls = 0
        ok("evaluate", run)
        assert calls == 0
        assert evaluated(run) == whole


def test_a_second_call_repeats_nothing_unless_again(ok, run):
    before = contents(run)
    text = ok("evaluate", run)
    assert contents(run) == before
    assert "learned, T = 2" in text
    ok("evaluate", run, "--again")
    lines = flat_lines(run / "results.jsonl")
    assert len(lines) == 14
    assert [{**line, "seconds": 0} for line in lines[:7]] == [{**line, "seconds": 0} for line in lines[7:]]
    assert len(read_records(run / "results.jsonl")) == 7


def test_damaged_verdicts(refused, run):
    lines = (run / "verdicts.jsonl").read_text().splitlines()
    (run / "verdicts.jsonl").write_text("\n".join([lines[0], lines[1][:50], *lines[2:]]) + "\n")
    for command in ("evaluate", "report"):
        assert "verdicts.jsonl, line 2: not a JSON object" in refused(command, run)


def test_evaluate_compares_at_equal_steps(ok, run):
    """The numbers of the table, from the verdicts of the file by hand."""
    text = ok("evaluate", run)
    asked = {r["key"]: (r["policy"], r["budget"]) for r in flat_lines(run / "results.jsonl")}
    lines = {asked[line["key"]]: line for line in json_lines(run / "verdicts.jsonl")}

    def score(*key):
        return lines[key]["valid"].count("1") / 20

    steps = sum(lines["learned", 2]["steps"]) / 20
    assert f"learned, T = 2: {score('learned', 2):.3f} valid in {steps:.2f} steps" in text
    w = steps - 1
    expected = (1 - w) * score("top-prob", 1) + w * score("top-prob", 2)
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["top-prob"] and " to " in line)
    assert row[1] == f"{expected:.3f}"
    assert row[2] == f"{score('learned', 2) - expected:+.3f}"
    assert float(row[3]) <= float(row[2]) <= float(row[5])
    assert row[6:] == [f"{score('top-prob', 1):.3f}", f"{score('top-prob', 2):.3f}"]
    assert "floor 1  max 2" in text
    area = ((score("top-prob", 1) + score("top-prob", 2)) / 2 + score("top-prob", 2) + score("top-prob", 4)) / 3
    assert re.search(rf"top-prob +{area:.3f} +1.00–4.00", text)
    assert max(map(len, text.splitlines())) <= 80


def test_with_explicit_steps_only_those(ok, run):
    text = ok("evaluate", run, "--policy", "learned", "--policy", "margin", "--steps", "2")
    assert [(r["policy"], r["budget"]) for r in flat_lines(run / "results.jsonl")[7:]] == [("margin", 2)]
    assert "Not comparable: margin: evaluate it at 1 and 2 steps, if it can run there." in " ".join(text.split())


def test_budgets_that_a_rule_cannot_run_at_are_left_out(call, refused, run):
    """In one line, and only of that rule; where none fits, it is an error (WRONG_OPTIONS)."""
    rules = ["--policy", "blocks(1,margin)", "--policy", "iid"]
    code, _, err = call("evaluate", run, *rules, "--steps", "2", "--steps", "4", "--steps", "3")
    assert code == 0
    assert re.findall("unmask: .*", err) == ["unmask: blocks(1,margin) cannot run at 2, 3 steps: left out"]
    new = [(r["policy"], r["budget"]) for r in flat_lines(run / "results.jsonl")[7:]]
    # iid ran at 2 and 4 before
    assert new == [("blocks(1,margin)", 4), ("iid", 3)]
    code, _, err = call("evaluate", run, "--policy", "blocks(1,entropy)")  # the recipe's budgets: 2 and 4
    assert code == 0
    assert err.startswith("unmask: blocks(1,entropy) cannot run at 2 steps: left out\n")
    code, _, err = call("evaluate", run, "--policy", "learned", "--steps", "2", "--steps", "3")
    assert code == 0
    assert err.startswith("unmask: learned cannot run at 3 steps: left out\n")
    assert "at least 4 steps, not 2" in refused(
        "evaluate", run, "--policy", "blocks(1,margin)", "--steps", "2", "--steps", "3"
    )


def test_a_run_named_with_square_brackets(base, ok, tmp_path):
    run = shutil.copytree(base / "frozen", tmp_path / "de[red]mo")
    for command in (["evaluate", run], ["evaluate", run, "--bound", "--examples", "4"], ["sample", run]):
        text = ok(*command)
        assert "[/]" not in text
        if command[1:] == [run] and command[0] == "evaluate":
            assert "de[red]mo, groups: 4 tokens" in " ".join(text.split())
    ok("report", run)
    assert "de[red]mo, groups" in (run / "report.html").read_text()


def test_without_steps_the_learned_order_keeps_its_own(ok, run):
    """And every heuristic gets what the comparison needs, beside the recipe's budgets."""
    ok("evaluate", run, "--policy", "margin", "--policy", "learned")
    new = flat_lines(run / "results.jsonl")[7:]
    assert [(r["policy"], r["budget"]) for r in new] == [("margin", 1), ("margin", 2), ("margin", 4)]


def test_a_rule_a_little_below_its_budget_runs_one_step_further(ok, run, monkeypatch):
    """Of a learned order that always takes 2 steps, iid needs 3: at 2 it takes a little less."""

    def one_then_all(self, step):
        return Decision(highest(step.stats["log_top"], step.masked, torch.ones_like(step.num_response)))

    monkeypatch.setattr("unmask.decoding.policies.Learned.decide", one_then_all)
    text = ok("evaluate", run, "--again")
    new = [(r["policy"], r["budget"]) for r in flat_lines(run / "results.jsonl")[7:]]
    rules = [("iid", 2), ("iid", 4), ("top-prob", 2), ("top-prob", 4)]
    assert new == [("learned", 2), *rules, ("iid", 3)]
    assert "not comparable" not in text.lower()


def test_token_choices_reach_the_record_and_the_caption(ok, run, monkeypatch):
    monkeypatch.setattr(Groups, "eos_token_id", 0, raising=False)
    text = ok(
        "evaluate", run, "--policy", "iid", "--steps", "2", "--top-p", "0.9", "--top-k", "2", "--guidance", "0.5",
        "--min-length", "1", "--stop-at-eos",
    )  # fmt: skip
    record = flat_lines(run / "results.jsonl")[-1]
    assert (record["top_p"], record["top_k"], record["guidance"]) == (0.9, 2, 0.5)
    assert record["eos_policy"] == "min-length:1,stop"
    caption = " ".join(text.split())
    assert "temperature 1, top-p 0.9, top-k 2, guidance 0.5, end of sequence: min-length:1,stop; " in caption


def test_more_examples_than_a_task_has(refused, run, monkeypatch):
    monkeypatch.setattr(Groups, "test_examples", 30, raising=False)
    assert "task groups has 30 test examples: ask for at most as many (--examples), not for 31" in refused(
        "evaluate", run, "--examples", "31"
    )
    assert "has 30 test examples" in refused("evaluate", run, "--bound", "--examples", "31")


def order_on_the_same_denoiser(base, ok, tmp_path, *options):
    """A copy of the frozen run, and a run whose order was learned on its denoiser with another seed."""
    denoiser, order = tmp_path / "denoiser", tmp_path / "order"
    shutil.copytree(base / "frozen", denoiser)
    overrides = [f"init={denoiser}", "seed=1"]
    words = [word for override in overrides for word in ("--set", override)]
    recipe = tmp_path / "order.toml"
    recipe.write_text(TINY_RECIPE.replace("[denoise]\nupdates = 3\nbatch = 8\nwarmup = 1\n", ""))
    ok("train", recipe, "--out", order, *words, *options)
    return denoiser, order


def test_heuristics_at_the_steps_of_an_order_in_another_run(base, ok, refused, tmp_path):
    denoiser, order = order_on_the_same_denoiser(base, ok, tmp_path)
    words = ["evaluate", denoiser, "--policy", "margin", "--seed", "0", "--against", order]
    ok("evaluate", order, "--policy", "learned", "--seed", "0", "--examples", "10")
    assert "has not been evaluated on 20 examples of test with the same settings" in refused(*words)
    ok("evaluate", order, "--policy", "learned", "--seed", "0")
    before = len(flat_lines(denoiser / "results.jsonl"))
    text = ok(*words)
    new = [(r["policy"], r["budget"]) for r in flat_lines(denoiser / "results.jsonl")[before:]]
    assert new == [("margin", 1), ("margin", 2), ("margin", 4)], "the recipe's 2 and 4, and the order's 1.x"
    learned = flat_lines(order / "results.jsonl")[-1]
    assert (learned["trained_seed"], learned["seed"]) == (1, 0)
    assert f"learned, T = 2: {learned['score']:.3f} valid in {learned['mean_steps']:.2f} steps" in text
    assert "not comparable" not in text.lower()
    ok(*words, "--steps", "3")
    new = [(r["policy"], r["budget"]) for r in flat_lines(denoiser / "results.jsonl")[before + 3 :]]
    assert new == [("margin", 3)], "and what was asked for"


def test_an_order_of_another_denoiser_is_not_met(base, ok, refused, tmp_path):
    denoiser, order = order_on_the_same_denoiser(base, ok, tmp_path, *JOINT)
    ok("evaluate", order, "--policy", "learned", "--seed", "0")
    message = refused("evaluate", denoiser, "--policy", "margin", "--seed", "0", "--against", order)
    assert "its order was learned on another denoiser" in message
    assert "--against" in refused("evaluate", denoiser, "--bound", "--against", order)
    assert "results.jsonl is missing" in refused("evaluate", denoiser, "--against", tmp_path / "nothing")


def test_a_split_that_a_task_does_not_have(refused, run):
    assert "task groups has no held-out split 'dev'; choose from test" in refused("evaluate", run, "--split", "dev")
    assert "no held-out split 'dev'" in refused("evaluate", run, "--bound", "--split", "dev")


def test_half_precision_is_another_evaluation(call, run, monkeypatch):
    """Where it is worth it."""
    words = ["evaluate", run, "--bf16", "--policy", "top-prob", "--steps", "2"]
    for precision, told in (("bf16", False), ("no", True)):
        monkeypatch.setattr("unmask.evaluation.plan.precision_on", lambda device, wanted, found=precision: found)
        code, _, err = call(*words, "--again")
        assert code == 0, err
        assert ("without --bf16: bfloat16 is slower than float32 on this CPU" in err) == told
        record = flat_lines(run / "results.jsonl")[-1]
        assert (record["precision"], record["policy"], record["budget"]) == (precision, "top-prob", 2)


def test_a_label_is_what_records_call_the_model(base, ok, tmp_path):
    out = tmp_path / "run"
    ok("train", base / "tiny.toml", "--out", out, "--set", "model.label=tiny")
    ok("evaluate", out)
    assert {record.spec.model for record in read_records(out / "results.jsonl")} == {"tiny"}


@pytest.fixture
def chain(tmp_path):
    """The tiny recipe for a puzzle whose exact posterior is known."""
    options = 'name = "chain"\nlength = 5\nsymbols = 3'
    path = tmp_path / "chain.toml"
    path.write_text(TINY_RECIPE.replace('name = "groups"\ngroups = 2\ngroup_size = 2\nsymbols = 3', options))
    return path


def test_the_exact_denoiser_of_a_run_has_its_own_records(chain, ok, refused, tmp_path):
    run = tmp_path / "run"
    ok("train", chain, "--out", run)
    ok("evaluate", run)
    before = contents(run)
    one_by_one = ["--policy", "left-to-right", "--steps", "5", "--examples", "200"]
    text = ok("evaluate", run, "--exact-denoiser", *one_by_one)
    assert "Every rule runs on the exact posterior of the task" in " ".join(text.split())
    (record,) = read_run(run / "exact")
    spec, outcome = record.spec, record.outcome
    assert (spec.model, spec.denoiser[:6], spec.learned) == ("exact", "exact-", False)
    assert outcome.score == 1, "one token per step makes no mistake"
    assert outcome.is_varied
    assert {name: text for name, text in contents(run).items() if not name.startswith("exact/")} == before

    for command in (["--exact-denoiser"], []):  # the folder itself is evaluated and reported as a run is
        ok("evaluate", run / "exact", *command, *one_by_one)
    assert len(read_run(run / "exact")) == 1
    ok("evaluate", run, "--exact-denoiser", "--curve", "--policy", "threshold", "--examples", "20")
    assert (run / "exact" / "curve.json").exists()
    ok("report", run / "exact")
    assert "data-orders" in (run / "exact" / "report.html").read_text(), "nothing is left out"
    for options in ([], ["--curve"]):
        said = refused("evaluate", run, "--exact-denoiser", "--policy", "learned", *options)
        assert "learned was learned on a network, and does not run on the exact denoiser: leave it out" in said
        said = refused("evaluate", run, "--exact-denoiser", "--policy", "wino", *options)
        assert "wino(0.6,0.9) needs a network that takes attention masks and position ids: leave it out" in said
    ok("train", chain, "--out", run, "--force")
    assert not (run / "exact").exists(), "it goes with its run"


def test_an_order_of_the_exact_denoiser_runs_there_and_on_another(chain, ok, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ok("train", chain, "--out", "network")
    recipe = re.sub(r"\[(model.scorer|denoise)\][^[]*", "", chain.read_text())
    recipe = re.sub(r"\[model\][^[]*", '[model]\ndenoiser = "exact"\n', recipe)
    (tmp_path / "exact.toml").write_text(recipe.replace("[order]", '[order]\nposterior = "selector"'))
    ok("train", "exact.toml", "--out", "run")
    text = ok("evaluate", "run", "--exact-denoiser", "--policy", "learned")
    assert "Every rule runs on the exact posterior of the task" in " ".join(text.split())
    text = ok("evaluate", "run", "--denoiser", "network", "--any-denoiser")
    assert "The order was learned on another denoiser (`--any-denoiser`); every rule" in " ".join(text.split())
    ok("report", "run")
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert "The order viewer is left out: the order ran on another denoiser" in page
    assert "unmask evaluate run --policy=learned --steps=2\n" in page
    assert "unmask evaluate run --policy=learned --steps=2 --denoiser=FOLDER --any-denoiser\n" in page
    exact = ["evaluate", "exact.toml", "--exact-denoiser", "--out", "rules", "--policy", "learned"]
    assert "evaluate that run, without --exact-denoiser" in refused(*exact, begun=True)
    (tmp_path / "exact.toml").write_text(re.sub(r"\[(model.scorer|order)\][^[]*", "", chain.read_text()))
    exact[4] = "none"
    assert "learned needs a learned order, and there is none" in refused(*exact, begun=True)


def test_the_exact_denoiser_of_a_recipe(base, chain, ok, refused, tmp_path, monkeypatch):
    out = tmp_path / "exact"
    exact = ["evaluate", chain, "--exact-denoiser", "--out", out]
    for maker in ("task_of", "load_task"):  # which may take minutes
        monkeypatch.setattr(f"unmask.evaluation.plan.{maker}", None)
    for source in ("tiny.toml", "frozen"):
        unknown = refused("evaluate", base / source, "--exact-denoiser", "--out", out)
        assert "the exact posterior of task groups is not known: choose from chain, waiting-lines" in unknown
    monkeypatch.undo()
    assert not out.exists()
    ok(*exact)
    assert {(r.spec.policy, r.spec.budget) for r in read_run(out)} == {
        (rule, budget) for rule in ("iid", "top-prob") for budget in (2, 4)
    }
    other = tmp_path / "other"
    ok(*exact[:-1], other, "--set", "task.seed=1")
    rules = curves([*read_run(out), *read_run(other)])
    assert len(rules) == 4, "two rules on each of two posteriors, which no curve may join"
    for arguments, said in (
        ([*exact, "--set", "task.seed=1"], "holds a run, or the exact denoiser of another recipe"),
        ([*exact[:-1], base / "frozen"], "already holds a finished run"),
        (exact[:-2], "needs --out"),
        (["evaluate", out, "--exact-denoiser", "--set", "task.seed=1"], "--set is for a recipe"),
        (["evaluate", out, "--bf16"], "leave out --compile, --bf16 and --guidance"),
        (["evaluate", out, "--exact-denoiser", "--bound"], "--bound takes no --exact-denoiser"),
        (["evaluate", base / "frozen", "--out", out], "--out and --set are for --exact-denoiser"),
        (["evaluate", base / "frozen", "--set", "task.groups=3"], "train another with `unmask train --set`"),
        ([*exact, "--any-denoiser"], "leave out --denoiser and --any-denoiser"),
    ):
        assert said in refused(*arguments)


def test_without_verdicts_there_is_no_interval(ok, run):
    """As for records that were published without them: they are shown, and compared."""
    (run / "verdicts.jsonl").unlink()
    ok("report", run)
    page = (run / "report.html").read_text()
    assert "equal steps" in page
    assert 'data-label="95%">–</td>' in page


def test_the_table_says_what_the_heuristics_ran_on(base, ok, tmp_path):
    shutil.copytree(base / "joint", tmp_path / "joint")
    text = ok("evaluate", tmp_path / "joint", "--examples", "3")
    assert "as many further plain updates: 3 of 8 sequences" in " ".join(text.split())


def test_evaluate_bound(ok, run):
    results = (run / "results.jsonl").read_text()
    text = ok("evaluate", run, "--bound", "--examples", "10", "--samples", "2")
    bound = json.loads((run / "bound.json").read_text())
    assert (bound["budget"], bound["num_examples"], len(bound["reconstruction"])) == (2, 10, 2)
    assert f"{bound['order_bound']:.4f}" in text
    assert f"{bound['mdm_bound']:.4f}" in text
    assert f"{bound['self_bound']:.4f}" in text
    assert (bound["samples"], bound["price"]) == (2, None)
    assert "-0.5493" in text, "minus the true entropy, 2 log 3 / 4"
    assert (run / "results.jsonl").read_text() == results


def test_the_bound_and_the_price_of_an_order_without_a_scorer(base, call, ok, refused, tmp_path):
    options = ("order.posterior=selector", "order.prices=[0.1, 2.0]", "order.least_budget=1", "order.start=threshold")
    wanted = [word for option in options for word in ("--set", option)]
    ok("train", base / "tiny.toml", "--out", tmp_path / "run", *wanted)
    code, text, err = call("evaluate", tmp_path / "run", "--bound", "--samples", "3", "--examples", "10")
    assert code == 0
    assert "learned order (J), T = 2, price 0.1, " in text
    assert "the same from 3 samples" in text
    assert "unmask:" not in err
    said = "unmask: price 9 is outside the range that was trained, 0.1 to 2: the nearest in it is taken"
    for command in (["--bound", "--price", "9"], ["--policy", "learned(price=9)", "--steps", "3"]):
        code, _, err = call("evaluate", tmp_path / "run", "--examples", "10", *command)
        assert code == 0
        assert [line for line in err.splitlines() if not line.startswith(("bound", "evaluate"))] == [said]
    ok("report", tmp_path / "run")
    assert "price 2, " in (tmp_path / "run" / "report.html").read_text()
    assert "price must be 0 or more, got -1" in refused("evaluate", tmp_path / "run", "--bound", "--price", "-1")


def test_a_bound_is_replaced_whole_and_its_damage_is_noticed(ok, refused, run, monkeypatch):
    words = ("evaluate", run, "--bound", "--samples", "1", "--examples")
    ok(*words, "10")
    path, whole = run / "bound.json", (run / "bound.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert "No space left" in refused(*words, "11", begun=True)
    assert path.read_text() == whole
    path.write_text(whole.replace('"num_examples": 10', '"num_examples": 18'))
    assert "bound.json is damaged" in refused("report", run)


def test_evaluate_writes_through_no_link_that_leads_out(refused, run, tmp_path):
    for name in ("results.jsonl", "verdicts.jsonl"):
        outside = (run / name).rename(tmp_path / name)
        (run / name).symlink_to(outside)
        message = refused("evaluate", run, "--again", "--examples", "3")
        assert f"{name} is a link that leads out of its folder" in message
        outside.replace(run / name)


# --- sample -----------------------------------------------------------------------------------------------------------


def test_sample_prints_sequences(ok, run):
    before = contents(run)
    text = ok("sample", run, "--num", "3")
    lines = [line for line in text.splitlines() if "valid" in line]
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(r" +[abc] [abc] [abc] [abc]   [12] steps?, (not )?valid", line)
    assert contents(run) == before


def test_sample_takes_any_rule(ok, run):
    text = ok("sample", run, "--num", "3", *(word for rule in NEW_RULES for word in ("--policy", rule)))
    assert len(re.findall(r" +[abc] [abc] [abc] [abc]   [12] steps?, (?:not )?valid", text)) == 3 * len(NEW_RULES)


def test_sample_says_whether_it_is_valid(ok, run):
    """In agreement with the task's own checker."""
    _, task = load_task(run)
    text = ok("sample", run, "--num", "120", "--policy", "iid", "--steps", "4")
    found = re.findall(r"([abc] [abc] [abc] [abc])   \d steps?, (not )?valid", text)
    assert len(found) == 120
    tokens = torch.tensor([["abc".index(word) for word in words.split()] for words, _ in found])
    expected = task.valid(tokens, task.examples(torch.arange(120), "test")).tolist()
    assert [not negated for _, negated in found] == expected
    assert len(set(expected)) == 2, "both verdicts occur"


def test_sample_trace_prints_every_step(ok, run):
    """The real canvases, with as many dots as the schedule leaves masked; p2 takes back what it wrote."""
    for rule, remasks in (("top-prob", False), ("p2", True)):
        text = ok("sample", run, "--trace", "--num", "20", "--policy", rule, "--steps", "4")
        lines, again = text.splitlines()[1:], 0
        assert len(lines) == 20 * (4 + 1), "four steps and the result"
        for sequence in range(20):
            *steps, result = (line.split() for line in lines[5 * sequence : 5 * sequence + 5])
            assert [step[0] for step in steps] == ["1", "2", "3", "4"]
            assert [step.count("·") for step in steps] == [3, 2, 1, 0]
            assert result[:5] == ["=", *steps[-1][1:]]
            for earlier, later in pairwise(steps):
                for was, now in zip(earlier[1:], later[1:], strict=True):
                    assert was in ("·", now) or now == "·", "exchanged only by way of the mask"
                    again += was != "·" and now == "·"
        assert (again > 0) == remasks


def test_sample_watch_off_a_terminal_is_plain_lines(call, run):
    words = ["sample", run, "--num", "2", "--policy", "margin", "--policy", "p2", "--steps", "3", "--cpu"]
    watched, traced = call(*words, "--watch"), call(*words, "--trace")
    assert watched == traced
    assert watched[0] == 0
    assert "\x1b" not in watched[1]


def test_sample_on_the_cpu(ok, run, monkeypatch):
    """Even an order for a denoiser of the user's, which is placed on a GPU otherwise."""
    asked, opened = [], trace.open_run
    monkeypatch.setattr(trace, "open_run", lambda run, device, *rest: asked.append(device) or opened(run, None, *rest))
    for words in ([], ["--cpu"]):
        ok("sample", run, "--num", "1", *words)
    assert asked == [None, torch.device("cpu")]


def test_sample_chooses_tokens_as_it_is_asked_to(ok, run, monkeypatch):
    chosen, write = [], trace.write
    monkeypatch.setattr(trace, "write", lambda *given: chosen.append(given[5]) or write(*given))
    monkeypatch.setattr(Groups, "eos_token_id", 0)
    numbers = ["--top-p", "0.9", "--guidance", "0.5", "--min-length", "1", "--repetition-penalty", "1.5"]
    ok("sample", run, "--num", "1", *numbers, "--stop-at-eos", "--eos-last", "--stop", "b c", "--stop", "c c")
    wanted = {"top_p": 0.9, "guidance": 0.5, "min_length": 1, "stop_at_eos": True, "eos_last": True}
    wanted |= {"repetition_penalty": 1.5, "stop_strings": ("b c", "c c"), "eos_ids": (0,)}
    assert {name: getattr(chosen[0], name) for name in wanted} == wanted


def test_sample_is_repeatable(ok, run):
    texts = [ok("sample", run, "--seed", seed, "--num", "8") for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


# --- report -----------------------------------------------------------------------------------------------------------


def test_report_writes_one_page(ok, run):
    text = ok("report", run)
    assert "report.html" in text
    page = (run / "report.html").read_text()
    assert "learned, T = 2" in page
    for part in ("equal steps", "95% interval from a paired bootstrap", "mean score", "frozen denoiser", "Watch it"):
        assert part in page
    ok("report", run, "--examples", "0")
    assert "data-orders" not in (run / "report.html").read_text()


def test_the_commands_of_a_report_make_its_records(ok, run, monkeypatch):
    """Each of them finds everything done already."""
    options = ["--examples", "7", "--seed", "3", "--temperature", "0.5", "--top-p", "0.9"]
    ok("evaluate", run, "--policy", "margin", "--policy", "threshold:0.8", "--steps", "3", *options)
    ok("evaluate", run, "--curve", "--policy", "learned", "--policy", "threshold", "--steps", "2", "--examples", "5")
    ok("report", run)
    page, before = html.unescape((run / "report.html").read_text()), contents(run)
    train, *made, report = re.search(r"<pre>(unmask train .*?)</pre>", page, flags=re.S)[1].splitlines()
    assert (train, report) == ("unmask train recipe.toml --out run", "unmask report run")
    monkeypatch.chdir(run.parent)
    for line in made:
        ok(*shlex.split(line)[1:])
    assert made[-1] == "unmask evaluate run --curve --policy=learned --policy=threshold --steps=2 --examples=5"
    assert len(made) == 5, "the learned order, here and in the curve, the recipe's rules, the two above, the curve"
    assert contents(run) == before


def test_report_without_the_model(ok, run):
    """The records are enough for all but the viewer, and the page says why."""
    (run / "model.safetensors").write_bytes(b"damaged")
    ok("report", run)
    page = (run / "report.html").read_text()
    assert "The order viewer is left out: " in page
    assert "data-chart" in page
    assert "data-orders" not in page


def test_report_for_papers(ok, refused, run):
    for name in ("md", "csv", "tex"):
        assert f"report.{name}" in ok("report", run, "--format", name)
        assert "learned" in (run / f"report.{name}").read_text()
    assert "report-orders.png" in ok("report", run, "--format", "png")
    assert (run / "report-orders.png").read_bytes().startswith(b"\x89PNG")
    assert "choose from html, md" in refused("report", run, "--format", "docx")
    ok("report", run, "--out", run / "named.csv")
    assert (run / "named.csv").read_text().startswith("run,key,"), "no page in a file of this name"


def test_report_elsewhere_leaves_the_run_alone(base, ok, tmp_path):
    before = contents(base / "frozen")
    ok("report", base / "frozen", "--out", tmp_path / "page.html")
    assert contents(base / "frozen") == before
    assert "learned, T = 2" in (tmp_path / "page.html").read_text()


def test_names_that_steer_a_terminal_are_written_out(call, refused, run):
    hostile = run.rename(run.parent / "\x1b]0;owned\x07\u202e[red]")
    for command in (["evaluate", hostile], ["sample", hostile, "--svg", hostile / "a.svg"], ["report", hostile]):
        code, out, err = call(*command)
        assert code == 0, err
        assert not re.search(HIDDEN, out + err)
        assert command[0] == "evaluate" or r"\x1b]0;owned\x07\u202e[red]" in out
    assert not re.search(HIDDEN, (hostile / "report.html").read_text(encoding="utf-8"))
    assert r"\x1b]0;owned" in refused("sample", hostile / "nowhere")


def test_any_encoding_will_do(monkeypatch, call, run):
    shown_by = {"evaluate": "0.000-", "sample": " mask", "report": "report: "}
    for command, encoding in [("evaluate", "ascii"), ("sample", "ascii"), ("sample", "latin-1"), ("report", "ascii")]:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
            code, _, err = call(command, run)
            shown = sys.stdout.buffer.getvalue().decode(encoding)
        assert code == 0, err
        assert shown_by[command] in shown


def test_report_of_several_runs(base, ok, tmp_path):
    for name in ("frozen", "joint"):
        shutil.copytree(base / name, tmp_path / name)
    ok("report", tmp_path / "frozen", tmp_path / "joint", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<section>") == 3, "one that they share, and one each"
    assert "frozen denoiser" in page
    assert "learned jointly" in page
    assert not (tmp_path / "frozen" / "report.html").exists()


def test_report_of_two_runs_of_the_same_name(base, ok, tmp_path):
    for folder in ("a", "b"):
        shutil.copytree(base / "frozen", tmp_path / folder / "run")
    ok("report", tmp_path / "a" / "run", tmp_path / "b" / "run", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"<h2>groups: {tmp_path / 'a' / 'run'}, {tmp_path / 'b' / 'run'}</h2>" in page


def test_report_of_other_tasks_shares_nothing(base, ok, tmp_path):
    """The same puzzle with another seed is another task."""
    for name in ("one", "two"):
        shutil.copytree(base / "frozen", tmp_path / name)
    recipe = json.loads((tmp_path / "two" / "recipe.json").read_text())
    recipe["task"]["seed"] = 1
    files.write_listed(tmp_path / "two", "recipe.json", json.dumps(recipe))
    ok("report", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count("<section>") == 2


# --- the demo ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_demo(base, monkeypatch):
    """`demo` on the tiny recipe: its `groups` is the one in this folder."""
    folder = base / "recipes"
    folder.mkdir(exist_ok=True)
    (folder / "groups.toml").write_text(TINY_RECIPE)
    monkeypatch.setattr(recipe_module, "recipe_folder", lambda: folder)
    monkeypatch.chdir(base)  # no file called groups here


def test_the_demo_fails_loudly_if_the_order_does_not_win(tiny_demo, call, tmp_path):
    """Three updates teach nothing: exit code 1, and everything is written all the same."""
    out = tmp_path / "demo"
    code, text, err = call("demo", "--out", out, "--seed", "3")
    assert code == 1
    assert "the learned order did NOT win: " in err
    assert "better than every" not in text
    assert {"config.json", "results.jsonl", "report.html"} <= set(contents(out))
    assert json.loads((out / "recipe.json").read_text())["seed"] == 3
    assert {record["seed"] for record in flat_lines(out / "results.jsonl")} == {3}


def test_the_demo_says_that_the_order_wins(tiny_demo, ok, tmp_path, monkeypatch):
    monkeypatch.setattr("unmask.evaluation.compare.why_not_won", lambda records: [])
    text = ok("demo", "--out", tmp_path / "demo")
    assert re.match(r"The learned order is .* rule: \d+\.\d% valid in .*\n", text), "the verdict first"
    assert "CPU seconds" in text
    assert "learned, T = 2" in text
    for more in ("equal steps:", "area under score", "held-out bounds"):
        assert more not in text
    text = ok("demo", "--out", tmp_path / "details", "--details")
    for more in ("equal steps:", "area under score", "held-out bounds", "step 2 (t = 0)"):
        assert more in text


def test_the_demo_never_overwrites_without_force(tiny_demo, refused, call, run):
    before = contents(run)
    assert "--force" in refused("demo", "--out", run)
    assert call("demo", "--out", run, "--force")[0] == 1
    assert contents(run) != before
