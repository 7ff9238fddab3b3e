"""A task that a run folder names is imported only if the user trusts it."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import exit_code
from tests.training.small import TINY_RECIPE
from unmask import files
from unmask.errors import UserError
from unmask.recipe import load_recipe, parse_teacher
from unmask.training.run import train

HELPER = """
from dataclasses import dataclass
from pathlib import Path
from unmask.tasks.puzzles.groups import Groups

Path("imported").touch()


@dataclass(frozen=True)
class Helper(Groups):
    pass
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.toml").write_text(TINY_RECIPE)
    train(load_recipe(folder / "tiny.toml"), folder / "run", cpu=True)
    assert exit_code("evaluate", folder / "run", "--cpu", "--policy", "iid", "--steps", "2") == 0
    return folder


@pytest.fixture(params=["helper_task", "packed.helper_task"])
def somebody_elses(request, finished, tmp_path, monkeypatch):
    """The current folder is a run whose recipe names a module that lies in it."""
    shutil.copytree(finished / "run", tmp_path, dirs_exist_ok=True)
    shutil.copy(finished / "tiny.toml", tmp_path)
    file = tmp_path / f"{request.param.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    for path in {file, file.with_name("__init__.py")}:
        path.write_text(HELPER)
    values = json.loads((tmp_path / "recipe.json").read_text())
    values["task"]["name"] = f"{request.param}:Helper"
    files.write_listed(tmp_path, "recipe.json", json.dumps(values))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield file
    for name in ("helper_task", "packed", "packed.helper_task"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("command", ["sample", "evaluate", "report"])
def test_the_task_of_a_run_is_imported_only_if_trusted(somebody_elses, ok, refused, command):
    arguments = [command, ".", *(["--cpu", "--policy", "iid", "--steps", "2"] if command == "evaluate" else [])]
    said = refused(*arguments)
    assert all(part in said for part in ("helper_task:Helper'", str(somebody_elses), "--trust-task"))
    assert not Path("imported").exists()
    assert "" not in sys.path, "nothing else is looked for in the current folder"
    ok(*arguments, "--trust-task")
    assert Path("imported").exists()


def test_a_run_that_is_resumed_imports_only_what_the_user_names(somebody_elses, call):
    Path("checkpoints").mkdir()
    code, _, err = call("train", "tiny.toml", "--out", ".", "--cpu")
    assert code == 2
    assert "was begun with another recipe: task.name = 'groups'" in err
    assert not Path("imported").exists()


def test_a_rule_of_a_run_is_imported_only_if_trusted(somebody_elses, call, refused):
    values = json.loads(Path("recipe.json").read_text())
    name, values["task"]["name"] = values["task"]["name"], "groups"
    values["evaluate"]["policies"] = [f"blocks(2,{name}(1))"]
    files.write_listed(Path(), "recipe.json", json.dumps(values))
    said = refused("evaluate", ".", "--cpu")
    assert all(part in said for part in ("helper_task:Helper'", str(somebody_elses), "--trust-task"))
    assert not Path("imported").exists()
    code, _, err = call("evaluate", ".", "--cpu", "--trust-task")
    assert code == 2
    assert "must be a dataclass derived from unmask.policies.Policy" in err
    assert Path("imported").exists()
    with pytest.raises(UserError, match="cannot teach"):
        parse_teacher(f"{name}(0.9)")
