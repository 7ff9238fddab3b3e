"""What the documentation shows runs."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import unmask
from unmask.cli import UsageError, app
from unmask.evaluation.curve import Curve
from unmask.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCKS = {name: re.findall(r"```python\n(.*?)```", text, flags=re.S) for name, text in PAGES.items()}
COMMANDS = [  # the lines of the blocks without a language
    line
    for text in PAGES.values()
    for block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.S | re.M)
    if not block[0]
    for line in block[1].splitlines()
]


def test_a_task_of_your_own(tmp_path, monkeypatch, ok):
    """The tutorial's task, from a file in the current folder, through its commands on a tiny recipe."""
    (tmp_path / "palindromes.py").write_text(BLOCKS["tutorial"][0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    shown = re.search(r"```\n(unmask train groups.*?)```", PAGES["tutorial"], flags=re.S)
    assert shown is not None
    commands = [line.removeprefix("unmask ") for line in shown.group(1).strip().splitlines()]
    assert len(commands) == 4
    commands[0] += " --set denoise.updates=2 --set order.updates=2"
    commands[1] += " --examples 20"
    for command in commands:
        ok(*command.split())
    assert "palindromes" in (tmp_path / "runs" / "palindromes" / "report.html").read_text()
    assert len(BLOCKS["tutorial"][0].strip().splitlines()) <= 45


def test_generation_as_the_tutorial_shows_it(tmp_path, monkeypatch):
    task = unmask.make_task("groups")
    recipe = unmask.load_recipe("groups", ["denoise.updates=1", "order.updates=1", "order.denoiser_rate=0.0"])
    unmask.train(recipe, tmp_path / "runs" / "demo", cpu=True)
    monkeypatch.chdir(tmp_path)
    shown: dict = {}
    exec(BLOCKS["README"][0], shown)
    assert (shown["out"].num_steps <= 2).all()
    exec(BLOCKS["evaluation"][0], shown)
    assert [(r.spec.policy, r.spec.budget, len(r.verdicts.valid)) for r in shown["records"]] == [
        ("learned", 2, 100),
        ("margin", 2, 100),
    ]
    _, generation, composition, own_rule, _ = BLOCKS["tutorial"]
    exec(generation, shown)
    learned = shown["out"]
    assert learned.tokens.shape == (8, task.length)
    assert (learned.num_steps <= 2).all()
    assert torch.equal(learned.num_passes, learned.num_steps)
    exec(composition, shown)
    rules, several, constrained = shown["rules"], shown["engine"].generate(shown["prompts"], seed=1), shown["out"]
    assert (constrained.tokens % 2 == 0).all()
    assert torch.equal(shown["so_far"].tokens, shown["engine"].generate(shown["canvas"]).tokens)
    assert not shown["so_far"].masked.any()
    block = rules.parse_policy("blocks(4,stochastic(margin,0.5))")
    assert rules.Blocks(4, rules.Stochastic(rules.Margin(), 0.5)) == block
    assert shown["careful"].name == "learned(temperature=0.5,floor=0.01,cap=8)"
    assert several.attention_mask.sum(-1).tolist() == [16, 12, 9]
    assert several.num_steps.tolist() == [4, 4, 4]
    assert several.memory_bytes > 0
    exec(own_rule, shown)
    own, rule, canvas = shown["out"], shown["Clear"], shown["canvas"]
    assert own is not learned
    assert (own.tokens < shown["mask"]).all()
    assert (own.reveal_step >= 0).all()
    assert rule(0.3).name == "clear:0.3"
    assert isinstance(rule(), unmask.policies.Policy)
    # At its two ends it is known what it does.
    one_by_one = unmask.generate(shown["model"].denoiser, canvas, policy=rule(1.1), max_steps=16)
    assert torch.equal(one_by_one.reveal_step, torch.arange(task.length).expand(8, -1))
    at_once = unmask.generate(shown["model"].denoiser, canvas, policy=rule(0.0), max_steps=16)
    assert (at_once.num_steps == 1).all()


def test_checking_a_variant_as_the_tutorial_shows_it():
    shown = {
        "denoiser": lambda x: torch.zeros(*x.shape, 2, dtype=torch.float64).log_softmax(-1),
        "selector": lambda x, t: torch.zeros(x.shape, dtype=torch.float64),
        "scorer": lambda x: torch.linspace(0, 1, x.shape[1], dtype=torch.float64).expand(len(x), -1),
        "x0": torch.tensor([0, 1, 1]),
    }
    exec(BLOCKS["tutorial"][4], shown)
    assert shown["model"].vocab_size == 2


def test_a_causal_language_model_as_its_page_shows_it(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install 'unmask[pretrained]'")
    from tests.models.test_adaptation import TEXTS, save, tiny

    save(tiny(), tmp_path / "models" / "llama")
    monkeypatch.chdir(tmp_path)
    shown = {"texts": TEXTS}
    exec(BLOCKS["pretrained"][0], shown)
    model = unmask.OrderModel.from_pretrained("runs/llama")
    assert model.config.shift
    assert shown["causal"].tokenizer.token_to_id("zy") is not None
    assert model.tokenizer.token_to_id("zy") is None  # no text has it
    assert model.tokenizer.encode("2 + 2 = [MASK]").ids[-1] == model.denoiser.mask_token_id


def test_your_model_as_its_page_shows_it(tmp_path, monkeypatch, ok):
    """The file, the six commands with fewer updates, and a function for a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exec(BLOCKS["your-model"][0], {})
    commands = re.findall(r"^unmask (.*)$", PAGES["your-model"], flags=re.M)
    assert len(commands) == 6
    few = {"train": "--cpu --set order.updates=1 --set order.batch=2 --set evaluate.examples=4", "evaluate": "--cpu"}
    for command in commands:
        name = command.split()[0]
        words = [*shlex.split(command), *few.get(name, "").split()]
        words += ["--set", "denoise.updates=1"] if command.startswith("train text") else []
        text = ok(*words)
        assert {"evaluate": "bits/char", "sample": "12+7=", "train": "next: unmask evaluate"}[name] in text
    shown = {"my_function": lambda tokens, attention_mask: torch.zeros(*tokens.shape, 258)}
    exec(BLOCKS["your-model"][1], shown)
    assert unmask.OrderModel.from_pretrained("runs/mine", denoiser=shown["denoiser"]).selector is not None


def test_every_block_is_run_by_a_test_above():
    found = {name: len(blocks) for name, blocks in BLOCKS.items() if blocks}
    assert found == {"README": 1, "tutorial": 5, "evaluation": 1, "pretrained": 1, "your-model": 2}


def test_every_command_exists_with_its_options():
    """Parsed, not run: a command or an option that is gone is a usage error."""
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if words[:1] == ["python"]:
            assert (ROOT / words[1]).exists(), line
        if "unmask" in words:
            parse(words[words.index("unmask") + 1 :])
    with pytest.raises(UsageError):
        parse(["evaluate", "RUN", "--no-such-option"])


def parse(words):
    command, context = get_command(app), None
    while hasattr(command, "commands"):
        context = command.make_context("unmask", words[:1], parent=context, resilient_parsing=True)
        command, words = command.resolve_command(context, words[:1])[1], words[1:]
    command.make_context(command.name, words, parent=context)


def test_every_file_that_the_documentation_names_exists():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
    notation = (ROOT / "docs" / "notation.md").read_text()
    for name in re.findall(r"`((?:models|variational|training|decoding|tasks)/\w+\.py)`", notation):
        assert (ROOT / "src" / "unmask" / name).exists(), f"notation.md names {name}"


def test_the_puzzles_of_the_readme_are_those_of_their_table():
    """Learned, and the best rules for each seed at equal steps; other comparisons stand beside them."""
    table = (ROOT / "results" / "puzzles" / "tables.md").read_text()
    rows = re.findall(r"^\| ([\w-]+)-self \|.*\*\*([\d.]+) \[.*\| ([\d.]+) \[[^|]*\|[^|]*\|$", table, flags=re.M)
    assert len(rows) == 6
    for name, *scores in rows:
        _, _, _, learned, best, _, _ = re.search(rf"^\| `{name}` .*$", PAGES["README"], flags=re.M)[0].split("|")
        shown = [{float(share) for share in re.findall(r"\d+\.\d|\d+", cell)} for cell in (learned, best)]
        for score, cell in zip(scores, shown, strict=True):
            assert round(100 * float(score), 1) in cell, name


def test_the_docs_stay_short():
    """Words: what has a letter or a digit, not the lines of tables."""
    words = {name: sum(any(map(str.isalnum, word)) for word in text.split()) for name, text in PAGES.items()}
    assert sum(words.values()) < 10_500
    assert words["results"] <= 1_100


def test_the_gains_of_the_readme_are_those_of_the_curves():
    """Learned, best rule, gain and interval of each row that has them, at its steps, else the mean of the curve.

    Of what is valid and diverse, where the curve has that.
    """
    shown = {
        ("one of 16 names removed, exact denoiser, overlap (1)", "4"): ("exact", "exact", "test"),
        ("molecules, valid and different, by reward", "8"): (
            "where-order-matters",
            "26m by reward, drawn tokens",
            "test",
        ),
        ("the same, trained denoiser, overlap (1); the order learned on the exact one", "4"): (
            "where-order-matters",
            "5m by exact posterior",
            "remove-random-16",
        ),
        ("lists of names, ten operations, overlap (1)", "1.3 to 4.7"): ("where-order-matters", "5m", "test"),
        ("Python statements, valid and different, by reward (2)", "8"): (
            "where-order-matters",
            "11m by reward, drawn tokens",
            "test",
        ),
        ("gaps in statements, valid and different, by reward", "1.7 to 4.6"): (
            "where-order-matters",
            "11m infilling by reward, drawn tokens",
            "test",
        ),
        ("Sudoku", "2 to 5.1"): ("where-order-matters", "6m by reward, drawn digits", "test"),
        ("Sudoku, hard", "3.9 to 10"): ("where-order-matters", "6m by reward, drawn digits", "hard"),
        ("GSM8K, new numbers, 30M", "3.0"): ("gsm8k-30m-self", "30m by reward", "new-numbers"),
        ("GSM8K, new numbers, order and denoiser together", "3.0"): ("gsm8k-30m-joint", "30m joint", "new-numbers"),
        ("GSM8K, test, 135M", "2.0"): ("gsm8k-135m-self", "135m by reward on new templates", "test"),
        ("GSM8K, test, 135M", "5.0"): ("gsm8k-135m-self", "135m by reward on new templates", "test"),
    }
    curves = {
        (path.parent.name, curve.model, curve.split): curve.diverse or curve
        for path in (ROOT / "results").glob("*/*/curve.jsonl")
        for curve in read_jsonl(path, Curve)
    }
    found = {}
    for line in re.findall(r"^\|.*\[[-+].*\|$", PAGES["README"], flags=re.M):
        task, steps, learned, rule, gain = (cell.replace("*", "").strip() for cell in line.strip("|").split("|"))
        found[task.split(" ([")[0], steps] = float(learned), float(rule.split()[0]), gain
    assert found.keys() == shown.keys()
    for (task, steps), figures in found.items():
        curve = curves[shown[task, steps]]
        at = {one.steps: one.reading for one in curve.at}
        reading = curve.mean if " to " in steps else at[float(steps)]
        learned, rule, *gain = (
            100 * x for x in (reading.learned, reading.rule, reading.gain, reading.low, reading.high)
        )
        assert figures == (round(learned, 1), round(rule, 1), "{:+.1f} [{:+.1f}, {:+.1f}]".format(*gain)), task
        if " to " in steps:
            assert steps == f"{curve.start:.2g} to {curve.stop:.2g}", task
