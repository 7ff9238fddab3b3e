"""Nothing that unmask reads can run code, and nothing is trusted that was not asked for."""

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest

import unmask
from tests.test_bad_input import call
from tests.training.small import TINY_RECIPE
from unmask import files
from unmask.errors import UserError
from unmask.recipe import load_recipe
from unmask.training.run import train
from unmask.training.teacher import parse_teacher

SOURCES = sorted(Path(unmask.__file__).parent.rglob("*.py"))
FORBIDDEN = {"eval", "exec", "compile_command", "__import__"}  # as plain calls; `module.compile` is torch's
MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def mistakes(text):
    """What in a source could run code that is not in it."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN:
            found.append(node.func.id)
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.partition(".")[0] in MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(node.module)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "torch.load",
            "torch.save",
            "np.load",
            "numpy.load",
        ):
            safe = ast.unparse(node).endswith("load") and "allow_pickle=False" in text
            found += [] if safe else [ast.unparse(node)]
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "shell"):
            found += [node.arg] if getattr(node.value, "value", True) is True else []
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_source_runs_what_it_reads(path):
    assert mistakes(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')",
        "import pickle",
        "from pickle import load",
        "import torch\ntorch.load('x')",
        "f(trust_remote_code=True)",
    ],
)
def test_the_scan_has_power(text):
    assert mistakes(text) != []


# --- a task that a run folder names -----------------------------------------------------------------------------------

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
    assert call("evaluate", folder / "run", "--cpu", "--policy", "iid", "--steps", "2") == 0
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
def test_the_task_of_a_run_is_imported_only_if_trusted(somebody_elses, capsys, command):
    arguments = [command, ".", *(["--cpu", "--policy", "iid", "--steps", "2"] if command == "evaluate" else [])]
    assert call(*arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(part in said for part in ("helper_task:Helper'", str(somebody_elses), "--trust-task"))
    assert not Path("imported").exists()
    assert "" not in sys.path, "nothing else is looked for in the current folder"
    assert call(*arguments, "--trust-task") == 0
    assert Path("imported").exists()


def test_a_run_that_is_resumed_imports_only_what_the_user_names(somebody_elses, capsys):
    Path("checkpoints").mkdir()
    assert call("train", "tiny.toml", "--out", ".", "--cpu") == 2
    assert "was begun with another recipe: task.name = 'groups'" in capsys.readouterr().err
    assert not Path("imported").exists()


def test_a_rule_of_a_run_is_imported_only_if_trusted(somebody_elses, capsys):
    values = json.loads(Path("recipe.json").read_text())
    name, values["task"]["name"] = values["task"]["name"], "groups"
    values["evaluate"]["policies"] = [f"blocks(2,{name}(1))"]
    files.write_listed(Path(), "recipe.json", json.dumps(values))
    assert call("evaluate", ".", "--cpu") == 2
    said = capsys.readouterr().err
    assert all(part in said for part in ("helper_task:Helper'", str(somebody_elses), "--trust-task"))
    assert not Path("imported").exists()
    assert call("evaluate", ".", "--cpu", "--trust-task") == 2
    assert "must be a dataclass derived from unmask.policies.Policy" in capsys.readouterr().err
    assert Path("imported").exists()
    with pytest.raises(UserError, match="cannot teach"):
        parse_teacher(f"{name}(0.9)")
