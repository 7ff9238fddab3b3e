"""What the documentation shows runs."""

import re
import sys
from pathlib import Path

import pytest
import torch

import unmask
from unmask.cli import main

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.S)


def test_a_task_of_your_own(tmp_path, monkeypatch, capsys):
    """The guide's task, from a file in the current folder, through the guide's commands on a tiny recipe."""
    (tmp_path / "palindromes.py").write_text(BLOCKS[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    shown = re.search(r"```\n(unmask train groups.*?)```", GUIDE, flags=re.S)
    assert shown is not None
    commands = [line.removeprefix("unmask ") for line in shown.group(1).strip().splitlines()]
    assert len(commands) == 4
    commands[0] += " --set denoise.updates=2 --set order.updates=2"
    commands[1] += " --examples 20"
    for command in commands:
        with pytest.raises(SystemExit) as done:
            main(command.split())
        assert not done.value.code, capsys.readouterr().err
    assert "palindromes" in (tmp_path / "runs" / "palindromes" / "report.html").read_text()
    assert len(BLOCKS[0].strip().splitlines()) <= 45


def test_generation_as_the_guide_shows_it(tmp_path, monkeypatch):
    task = unmask.make_task("groups")
    recipe = unmask.load_recipe("groups", ["denoise.updates=1", "order.updates=1", "order.denoiser_rate=0.0"])
    unmask.train(recipe, tmp_path / "runs" / "demo", cpu=True)
    monkeypatch.chdir(tmp_path)
    shown: dict = {}
    exec(BLOCKS[1], shown)
    learned = shown["out"]
    assert learned.tokens.shape == (8, task.length)
    assert (learned.num_steps <= 2).all()
    assert torch.equal(learned.num_passes, learned.num_steps)
    exec(BLOCKS[2], shown)  # composed rules, token choice and an engine go on from there
    rules, several = shown["rules"], shown["out"]
    block = rules.parse_policy("blocks(4,stochastic(margin,0.5))")
    assert rules.Blocks(4, rules.Stochastic(rules.Margin(), 0.5)) == block
    assert shown["careful"].name == "learned(temperature=0.5,floor=0.01,cap=8)"
    assert several.attention.sum(-1).tolist() == [16, 12, 9]
    assert several.num_steps.tolist() == [4, 4, 4]
    assert several.memory_bytes > 0
    exec(BLOCKS[3], shown)  # and so does a rule of your own
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


def test_checking_a_variant_as_the_guide_shows_it():
    shown = {
        "denoiser": lambda x: torch.zeros(*x.shape, 2, dtype=torch.float64).log_softmax(-1),
        "selector": lambda x, t: torch.zeros(x.shape, dtype=torch.float64),
        "scorer": lambda x: torch.linspace(0, 1, x.shape[1], dtype=torch.float64).expand(len(x), -1),
        "x0": torch.tensor([0, 1, 1]),
    }
    exec(BLOCKS[4], shown)
    assert shown["model"].vocab_size == 2


def test_a_causal_language_model_as_the_guide_shows_it(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install 'unmask[pretrained]'")
    from tests.models.test_adaptation import TEXTS, save, tiny

    save(tiny(), tmp_path / "models" / "llama")
    monkeypatch.chdir(tmp_path)
    shown = {"texts": TEXTS}
    exec(BLOCKS[5], shown)
    model = unmask.OrderModel.from_pretrained("runs/llama")
    assert model.config.shift
    assert shown["causal"].tokenizer.token_to_id("zy") is not None
    assert model.tokenizer.token_to_id("zy") is None  # no text has it
    assert model.tokenizer.encode("2 + 2 = [MASK]").ids[-1] == model.denoiser.mask_token_id
    assert len(BLOCKS) == 6, "every block of the guide is run"


def test_every_file_that_the_documentation_names_exists():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
    notation = (ROOT / "docs" / "notation.md").read_text()
    for name in re.findall(r"`((?:models|variational|training|decoding|tasks)/\w+\.py)`", notation):
        assert (ROOT / "src" / "unmask" / name).exists(), f"notation.md names {name}"
