"""What the package imports, and when."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import unmask

SOURCE = Path(unmask.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
RUN_TIME = {
    "torch", "numpy", "safetensors", "tokenizers", "transformers", "accelerate", "typer", "rich", "matplotlib",
    "unmask", "datasets",  # datasets is an extra: imported only where a task is asked to load from the hub
}  # fmt: skip


def imported(path):
    """Every module that a file imports, wherever in the file: `from a import b` is both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_source_was_found():
    names = {path.relative_to(SOURCE).as_posix() for path in FILES}
    assert {"cli.py", "variational/elbo.py", "decoding/generate.py", "training/loop.py"} <= names
    assert {path.name for path in MATHEMATICS} >= {"elbo.py", "generate.py", "rule.py"}


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(SOURCE).as_posix() for path in FILES])
def test_only_the_promised_dependencies(path):
    packages = {name.partition(".")[0] for name in imported(path)}
    assert packages <= RUN_TIME | set(sys.stdlib_module_names)


MATHEMATICS = [path for path in FILES if path.relative_to(SOURCE).parts[0] in ("variational", "decoding")]


@pytest.mark.parametrize("path", MATHEMATICS, ids=[path.relative_to(SOURCE).as_posix() for path in MATHEMATICS])
def test_the_mathematics_knows_tensors_only(path):
    """Never files, tokenizers, configurations or networks: torch, the standard library, and each other."""
    for name in imported(path):
        package, *rest = name.split(".")
        if package == "unmask" and rest:
            assert rest[0] in ("rng", "errors", "fields", "variational", "decoding"), f"{path.name} imports {name}"
        elif package != "unmask":
            assert package == "torch" or package in sys.stdlib_module_names, f"{path.name} imports {name}"
        assert package not in ("json", "pathlib", "tomllib"), f"{path.name} reads files"


def test_variational_does_not_know_decoding():
    for path in MATHEMATICS:
        if path.parent.name == "variational":
            assert not any(name.startswith("unmask.decoding") for name in imported(path))


def test_public_names():
    assert sorted(unmask.__all__) == unmask.__all__
    for name in unmask.__all__:
        assert getattr(unmask, name) is not None
    assert unmask.policies.TopProbability().name == "top-prob"
    assert unmask.policies.TopProbability.key == "top-prob"
    assert unmask.make_task("groups").length == 16
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        unmask.generat  # noqa: B018


def test_every_public_name_has_a_home():
    from unmask import _HOMES

    assert sorted([*_HOMES, "policies"]) == unmask.__all__


@pytest.mark.parametrize("command", ["--help", "policies"])
def test_neither_help_nor_policies_wait_for_torch(command):
    code = f"""
import sys
from unmask.cli import main
try:
    main(["{command}"])
except SystemExit as leaving:
    assert not leaving.code
print("HEAVY", [name for name in ("torch", "transformers", "numpy", "matplotlib", "accelerate") if name in sys.modules])
"""
    out = run(code)
    assert {"--help": "evaluate", "policies": "threshold(0.9,"}[command] in out
    assert "HEAVY []" in out


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_during_an_import_is_one_line(tmp_path, module):
    """Also where the import that was interrupted raises something else."""
    send = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / f"{module}.py").write_text(send + "except KeyboardInterrupt:\n    raise RecursionError from None\n")
    command = [sys.executable, "-m", "unmask", "sample", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (130, "unmask: interrupted\n")


def test_what_is_printed_is_escaped_and_what_is_written_is_utf8():
    """All that is printed goes through unmask.display; no text file is read or written in the locale's encoding."""
    wrong = []
    for path in FILES:
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        for node in calls if path.name not in ("display.py", "__main__.py") else []:
            called = ast.unparse(node.func)
            binary = called == "os.open" or (called.endswith(".open") and any("b" in ast.unparse(a) for a in node.args))
            as_text = (
                called.endswith((".read_text", ".write_text", ".open")) and not binary and called != "files.write_text"
            )
            if called in ("print", "typer.echo", "escape", "html.escape") or (
                as_text and "encoding" not in [keyword.arg for keyword in node.keywords]
            ):
                wrong.append(f"{path.name}:{node.lineno}: {called}")
    assert wrong == []


def test_import_unmask_does_not_wait_for_torch():
    assert run("import sys, unmask; print('torch' in sys.modules)").strip() == "False"
    assert run("import sys, unmask; unmask.generate; print('torch' in sys.modules)").strip() == "True"


def test_the_console_script_and_the_module_run():
    for command in ([str(Path(sys.executable).parent / "unmask")], [sys.executable, "-m", "unmask"]):
        done = subprocess.run([*command, "train", "no-such-recipe", "--out", "x"], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("unmask: no recipe 'no-such-recipe'")
        assert len(done.stderr.splitlines()) == 1
