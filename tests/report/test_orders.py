"""What the viewer is given: the same sequences as evaluated, and what the networks said while they were written."""

from types import SimpleNamespace

import pytest
import torch

import unmask
from tests.evaluation.by_hand import changed
from tests.evaluation.test_blocks import FAST
from tests.training.small import TINY_RECIPE, randomised
from unmask.decoding.policies import Learned, LeftToRight
from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError
from unmask.evaluation.records import read_run
from unmask.report.orders import Run, _policy, labels, orders_of, raced
from unmask.report.trace import END, write
from unmask.tasks.molecules.chemistry import drawn
from unmask.tasks.molecules.molecules import Molecules
from unmask.tasks.puzzles.groups import Groups
from unmask.tasks.sudoku.sudoku import Sudoku
from unmask.tasks.task import Examples
from unmask.tasks.text.text import Text
from unmask.training.run import load_run
from unmask.variational.selection import OneByOne


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    (folder / "tiny.toml").write_text(TINY_RECIPE)
    recipe = unmask.load_recipe(str(folder / "tiny.toml"), ["order.budget=3", "evaluate.budgets=[3]"])
    unmask.train(recipe, folder / "run", cpu=True)
    unmask.evaluate(folder / "run", cpu=True)
    unmask.evaluate(folder / "run", policies=["p2"], steps=[3], cpu=True)
    return folder / "run"


@pytest.fixture(scope="module")
def heard(run):
    """The orders of four examples, and what the learned rule saw and answered at each of its steps."""
    said, decide = [], Learned.decide

    def listening(self, step):
        decision = decide(self, step)
        said.append((step.masked, decision.scores.sigmoid(), step.stats["log_top"].exp()))
        return decision

    Learned.decide = listening
    try:
        return orders_of(run, read_run(run), 4), said
    finally:
        Learned.decide = decide


def canvases(policy):
    """All tokens after each step, without the shorthand for what has not changed."""
    found = []
    for step in policy["steps"]:
        found.append([found[-1][p] if token == 0 else token for p, token in enumerate(step["tokens"])])
    return found


def test_a_race_is_the_learned_order_and_the_best_rules_near_its_steps(run):
    first, *others = raced(read_run(run))
    assert first.spec.policy == "learned"
    assert {record.spec.policy for record in others} == {"iid", "top-prob", "p2"}
    assert all(abs(record.mean_steps - first.mean_steps) < 1 for record in others)
    plain = raced([record for record in read_run(run) if not record.spec.learned])
    assert [(record.spec.policy, record.spec.budget) for record in plain] == [("iid", 2), ("top-prob", 2)]


def test_what_is_shown_is_what_was_evaluated(run, heard):
    orders, _ = heard
    model, _, _, task = load_run(run)
    for k, record in enumerate(raced(read_run(run))):
        shown = [example["policies"][k] for example in orders["examples"]]
        assert [one["valid"] for one in shown] == record.verdicts.valid[:4].tolist()
        assert [len(one["steps"]) for one in shown] == record.verdicts.steps[:4].tolist()
    rule, choice = Learned(model.selector), TokenChoice(1.0)
    for i, example in enumerate(orders["examples"]):
        written = write(model.denoiser, task, rule, 3, i, choice, seed=0)
        frames = [[span.text for span in frame[::2]] for frame in written.frames]
        steps = canvases(example["policies"][0])
        assert [[token or "·" for token in tokens] for tokens in steps] == frames[: len(steps)]


def test_probabilities_are_those_of_the_decision(heard):
    """Of every mask, in percent, before the step; none at the last step, which reveals all that is left."""
    orders, said = heard
    for i, example in enumerate(orders["examples"]):
        steps = example["policies"][0]["steps"]
        assert steps[2]["selector"] == [None] * 4 if len(steps) == 3 else True
        for (masked, selector, sure), step in zip(said, steps[:2], strict=False):
            if len(masked) == 4:  # until the first sequence is finished
                for name, values in (("selector", selector), ("confidence", sure)):
                    expected = torch.where(masked, 100 * values, torch.nan)[i]
                    found = [torch.nan if value is None else value for value in step[name]]
                    torch.testing.assert_close(
                        torch.tensor(found, dtype=torch.float32), expected, atol=0.51, rtol=0, equal_nan=True
                    )
    rule = orders["examples"][0]["policies"][1]["steps"][0]
    assert "selector" not in rule
    assert None not in rule["confidence"]


def test_one_at_a_time_the_probabilities_sum_to_one(run, monkeypatch):
    model, plain, recipe, task = load_run(run)
    model.selector.selection = OneByOne()
    monkeypatch.setattr("unmask.report.orders.open_run", lambda *_: (model, plain, task, recipe))
    (example,) = orders_of(run, [record for record in read_run(run) if record.spec.learned], 1)["examples"]
    assert sum(example["policies"][0]["steps"][0]["selector"]) == pytest.approx(100, abs=2)


def test_in_blocks_the_probabilities_are_those_of_the_block_and_its_step(tmp_path, monkeypatch):
    """The selector is asked about the block that is written; the denoiser sees no later block."""
    unmask.train(unmask.load_recipe("groups-blocks", [*FAST, "order.budget=3"]), tmp_path, cpu=True)
    unmask.evaluate(tmp_path, policies=["learned"], examples=2, cpu=True)
    model, _, recipe, task = load_run(tmp_path)
    randomised(model)
    monkeypatch.setattr("unmask.report.orders.open_run", lambda *_: (model, None, task, recipe))
    examples, said, decide = type(task).examples, [], Learned.decide

    def with_prompt(self, ids, split):
        found = examples(self, ids, split)
        return Examples(found.tokens, found.response & (torch.arange(task.length) >= 3), found.attention_mask)

    def listening(self, step):
        decision = decide(self, step)
        asked = step.masked & (step.index < step.max_steps - 1)[:, None]
        seen = (asked, decision.scores.sigmoid()), (step.masked, step.stats["log_top"].exp())
        said.append([torch.where(where, 100 * values, torch.nan)[0] for where, values in seen])
        return decision

    monkeypatch.setattr(type(task), "examples", with_prompt)
    monkeypatch.setattr(Learned, "decide", listening)
    for policy in ("learned", "blocks(8,learned)"):
        said.clear()
        records = [changed(record, policy=policy) for record in read_run(tmp_path)]
        (example,) = orders_of(tmp_path, records, 1)["examples"]
        steps = example["policies"][0]["steps"]
        assert len(steps) - 1 <= len(said) > 2, "at the very last step it is not asked"
        for step, (chosen, sure) in zip(steps, said, strict=False):
            found, confidence = (
                torch.tensor([torch.nan if value is None else value for value in step[name]]).float()
                for name in ("selector", "confidence")
            )
            torch.testing.assert_close(found, chosen, atol=0.51, rtol=0, equal_nan=True)
            here = ~sure.isnan()
            torch.testing.assert_close(confidence[here], sure[here], atol=0.51, rtol=0)


def test_a_rule_may_need_the_frequencies_of_tokens(run):
    records = [changed(record, policy="pc-sampler") for record in read_run(run) if record.spec.policy == "iid"]
    assert orders_of(run, records, 1)["heat"]["policies"] == ["pc-sampler @ 2"]


def test_heat_is_the_mean_step_from_1(heard):
    orders, _ = heard
    for k, name in enumerate(orders["heat"]["policies"]):
        totals = [0.0] * 4
        for example in orders["examples"]:
            assert example["policies"][k]["name"] == name
            steps = [[None] * 4, *canvases(example["policies"][k])]
            for p in range(4):
                totals[p] += max(i for i in range(1, len(steps)) if steps[i - 1][p] is None and steps[i][p]) / 4
        assert orders["heat"]["positions"][k] == pytest.approx(totals, abs=0.006)
    assert sorted(place for group in orders["heat"]["groups"] for place in group) == [0, 1, 2, 3]
    assert orders["heat"]["classes"] == {}, "there is only one"


def test_rules_of_ones_own_run_only_if_trusted(run):
    records = [changed(record, policy="os:abort") for record in read_run(run)]
    with pytest.raises(UserError, match="--trust-task"):
        orders_of(run, records, 1)


def test_parts_of_a_letter_are_one_text():
    task = Text(prompt="q", response="a")
    assert labels(task, [*"né".encode(), 256, 257]) == ["n", "é", "", END, None]


def test_a_letter_in_two_parts_is_written_once():
    """Its first part reads otherwise when the second comes, and has been there before."""
    task, here = Text(prompt="q", response="a"), torch.tensor([True, True, True])
    denoiser = SimpleNamespace(mask_token_id=257)
    history = torch.tensor([[[257, 257, 257], [*"é".encode()[:1], 257, 110], [*"én".encode()]]])
    out = SimpleNamespace(history=history, num_steps=torch.tensor([2]), tokens=history[:, -1])
    run = Run("a", LeftToRight(), 2, denoiser, out, None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unmask.report.orders._said", lambda *_: (torch.zeros(2, 3), [None, None]))
        steps = _policy(task, run, 0, torch.arange(3), here, here)["steps"]
    assert [step["tokens"] for step in steps] == [["\ufffd", None, "n"], [["é"], "", 0]]


def test_classes_of_tokens(tmp_path):
    def kinds(task, tokens):
        return [task.kind(task.vocabulary.index(token)) for token in tokens]

    task = Text(prompt="q", response="a")
    assert [task.kind(byte) for byte in b"7+a."] == ["digit", "operator", "word", "other"]
    assert task.kind(256) == "EOS"
    (tmp_path / "m.smi").write_text("CC(=O)c1ccccc1\nCC(=O)c1ccccc1O\n" * 50)
    molecules = Molecules(file=str(tmp_path / "m.smi"), cache=str(tmp_path / "cache"))
    assert kinds(molecules, ["C", "(", "=", "1", "<eos>"]) == ["atom", "bracket", "bond", "ring digit", "EOS"]
    assert (Sudoku(box=2).grid, Groups().grid) == ((4, 2), (0, 0))


def test_molecules_are_drawn():
    pytest.importorskip("rdkit", reason="pip install 'unmask[molecules]'")
    assert drawn("CCO").startswith("<svg")
    assert drawn("C(") == drawn("") == ""
