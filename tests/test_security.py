"""Nothing that unmask reads can run code, and nothing is trusted that was not asked for."""

import ast
from pathlib import Path

import pytest

import unmask

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
