"""Tasks by name; one line for everything that can be wrong with the name, an option or a user's own class."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from unmask.errors import UserError
from unmask.tasks import TASKS, make_task, task_class
from unmask.tasks.task import Examples, Task


def refused(wrong, *parts):
    with pytest.raises(UserError) as error:
        wrong()
    assert all(part in str(error.value) for part in parts), error.value


def test_every_name_is_the_name_of_its_class():
    for name in TASKS:
        assert make_task(name).name == name
        assert type(make_task(name)) is task_class(name)
    task = make_task("groups", groups=2, symbols=3)
    assert (task.length, task.vocabulary) == (8, ("a", "b", "c"))


def test_frequencies_of_tokens_are_those_of_the_responses():
    """Of training examples that come in the order of training; a token that never stands there counts as once."""

    @dataclass(frozen=True)
    class Counted(type(make_task("groups"))):
        def examples(self, ids, split):
            assert split == "train"
            tokens = torch.stack([torch.zeros_like(ids), torch.ones_like(ids), torch.full_like(ids, 2)], dim=-1)
            response, attended = torch.tensor([False, True, True]), torch.tensor([True, True, False])
            return Examples(tokens, response.expand_as(tokens), attended.expand_as(tokens))

    assert torch.allclose(Counted(symbols=4).token_frequencies(), torch.tensor([1, 1000, 1, 1]) / 1003)
    real = make_task("addition").token_frequencies()
    assert len(real) == len(make_task("addition").vocabulary)
    assert real.sum().item() == pytest.approx(1)


def test_errors_are_one_line():
    for name, options, parts in (
        ("group", {}, ["unknown task 'group'", "did you mean 'groups'?", *TASKS]),
        ("a\nb", {}, ["unknown task"]),
        ("text", {"seed": 0}, ["unknown key 'seed'; leave it out: task text has files, field, prompt"]),
        ("groups", {"group_sise": 4}, ["unknown key 'group_sise'", "did you mean 'group_size'?", "seed, groups"]),
        ("groups", {"groups": True}, ["task.groups must be a whole number, got True"]),
        ("groups", {"seed": 2**63}, ["seed must fit in 64 bits"]),
        ("groups", {"groups": 0}, ["task groups: set groups between 1 and 256, not 0"]),
        ("addition", {"ask": "difference"}, ["set ask to all or sum, not 'difference'"]),
        ("chain", {"length": 0}, ["set length between 1 and 65536"]),
        ("chain", {"branching": 9}, ["set branching between 2 and 8, not 9"]),
        ("permutation", {"length": 27}, ["set length between 2 and 26"]),
        ("latin-square", {"clues": 16}, ["set clues between 0 and 15"]),
        ("parity-dag", {"parents": 5}, ["set parents between 1 and 4"]),
        ("parity-dag", {"width": 30, "parents": 15}, ["set width or parents lower"]),
    ):
        refused(lambda name=name, options=options: make_task(name, **options), *parts)


def test_names_do_not_wait_for_torch():
    """`unmask --help` lists the tasks."""
    code = (
        "import sys, unmask; before = 'torch' in sys.modules; import unmask.tasks;"
        "sys.exit(('torch' in sys.modules) != before)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- a user's own class


@dataclass(frozen=True)
class Own(Task):
    """What is required, and nothing else."""

    tokens: tuple[int, ...] = (0, 1)
    width: int = 2
    name = "own"
    vocabulary = ("a", "b")
    length = 2

    def examples(self, ids, split):
        tokens = torch.tensor(self.tokens).expand(len(ids), -1)
        everywhere = torch.ones(len(ids), self.width, dtype=torch.bool)
        return Examples(tokens, everywhere, everywhere)

    def valid(self, tokens, examples):
        return tokens[:, 0] == 0


@dataclass(frozen=True)
class Unfinished(Task):
    name = "unfinished"
    vocabulary = ("a", "b")
    length = 2

    def examples(self, ids, split):
        raise NotImplementedError


class NoDataclass(Task):
    name, vocabulary, length, examples, valid = "plain", ("a",), 1, Own.examples, Own.valid


class NoTask:
    name = "nothing"


def test_what_is_optional_has_a_default():
    task = make_task(f"{__name__}:Own", width=2)
    task.check()
    examples = task.examples(torch.arange(2), "test")
    assert (task.metrics(examples.tokens, examples), task.log_likelihood(examples.tokens, examples)) == ({}, None)
    assert (task.held_out, task.layout, task.text([0, 1])) == ("test", ((0, 1),), "a b")
    ids = task.order(3, 1, torch.arange(100))
    assert len(set(ids.tolist())) == 100
    assert not torch.equal(ids, task.order(3, 2, torch.arange(100)))


def test_a_class_that_is_no_task_is_refused():
    for name, parts in (
        ("NoTask", ["make it a subclass of unmask.tasks.task.Task"]),
        ("refused", ["make it a subclass of unmask.tasks.task.Task"]),
        ("Unfinished", ["has no valid:"]),
        ("NoDataclass", ["must be a frozen dataclass"]),
        ("Nowhere", ["cannot be imported", "'Nowhere'"]),
    ):
        refused(lambda name=name: make_task(f"{__name__}:{name}"), f"{name}'", *parts)


def test_examples_that_break_the_contract_are_refused():
    for name in TASKS.keys() - {"gsm8k", "molecules", "statements", "sudoku", "text"}:  # which need files or time
        make_task(name).check()
    refused(replace(Own(), tokens=(0, 2)).check, "tokens run from 0 to 2, but the vocabulary has the ids 0 to 1")
    refused(replace(Own(), width=3).check, "response of shape [2, 3], expected [2, 2]")
