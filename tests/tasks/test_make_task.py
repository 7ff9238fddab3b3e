"""Tasks by name, and one line for everything that can be wrong with the name or an option."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unmask.tasks import TASKS, make_task, task_class


def test_every_name_is_the_name_of_its_class():
    for name in TASKS:
        assert make_task(name).name == name
        assert type(make_task(name)) is task_class(name)


def test_options_are_passed_on():
    task = make_task("groups", groups=2, symbols=3)
    assert (task.length, task.vocabulary) == (8, ("a", "b", "c"))


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("group", {}, ["unknown task 'group'", "did you mean 'groups'?", *TASKS]),
        ("latin_square", {}, ["did you mean 'latin-square'?"]),
        ("a\nb", {}, ["unknown task"]),
        ("", {}, ["unknown task", *TASKS]),
        ("groups", {"group_sise": 4}, ["unknown key 'group_sise'", "did you mean 'group_size'?", "seed, groups"]),
        ("groups", {"groups": "4"}, ["task.groups must be a whole number, got '4'"]),
        ("groups", {"groups": 0}, ["task groups: set groups between 1 and 256, not 0"]),
        ("groups", {"group_size": 1}, ["set group_size between 2 and 256, not 1"]),
        ("groups", {"symbols": 27}, ["set symbols between 2 and 26, not 27"]),
        ("addition", {"digits": 0}, ["set digits between 1 and 1000"]),
        ("addition", {"ask": "difference"}, ["set ask to all or sum, not 'difference'"]),
        ("addition", {"ask": 3}, ["task.ask must be a string, got 3"]),
        ("chain", {"length": 0}, ["set length between 1 and 65536"]),
        ("chain", {"symbols": 1}, ["set symbols between 2 and 26"]),
        ("chain", {"branching": 9}, ["set branching between 2 and 8, not 9"]),
        ("permutation", {"length": 27}, ["set length between 2 and 26"]),
        ("latin-square", {"clues": 16}, ["set clues between 0 and 15"]),
        ("latin-square", {"clues": -1}, ["set clues between 0 and 15"]),
        ("parity-dag", {"levels": 1}, ["set levels between 2 and 256"]),
        ("parity-dag", {"width": 1}, ["set width between 2 and 256"]),
        ("parity-dag", {"parents": 5}, ["set parents between 1 and 4"]),
        ("parity-dag", {"width": 30, "parents": 15}, ["set width or parents lower"]),
    ],
)
def test_errors_are_one_line(name, options, parts):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        make_task(name, **options)
    assert all(part in str(error.value) for part in parts), error.value


def test_names_do_not_wait_for_torch():
    """`unmask --help` lists the tasks."""
    code = (
        "import sys, unmask; before = 'torch' in sys.modules; import unmask.tasks;"
        "sys.exit(('torch' in sys.modules) != before)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
