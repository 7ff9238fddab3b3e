"""What the package imports, and when."""

import ast
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import unmask

SOURCE = Path(unmask.__file__).parent
TREES = {path.relative_to(SOURCE): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
RUN_TIME = {
    "torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "transformers", "accelerate", "typer", "rich",
    "matplotlib", "unmask",
    # Extras: imported only where they are needed.
    "datasets", "rdkit", "fcd_torch", "lm_eval", "peft", "diffusers", "sglang",
    "starlette", "uvicorn", "prometheus_client",
}  # fmt: skip
# A package imports from itself and from what stands below it; every other file of unmask/ is a leaf, below all.
LAYERS = [
    *(
        "__init__ __main__",
        "cli lm_eval diffusers sglang",
        "serve",
        "studies",
        "report",
        "evaluation",
        "training",
        "recipe",
        "tasks",
    ),
    *("models", "decoding", "variational"),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}


def imports():
    """(file, layer of the file, module) of every import, wherever in the file: `from a import b` is a.b."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                yield from ((path, path.parts[0].removesuffix(".py"), module + alias.name) for alias in node.names)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_only_the_promised_dependencies():
    assert {module.partition(".")[0] for _, _, module in imports()} <= RUN_TIME | set(sys.stdlib_module_names)


def test_imports_go_one_way():
    """`import unmask` alone is for its version: the root imports nothing until a name is used."""
    leaf, upward = len(LAYERS), []
    for path, layer, module in imports():
        package, other, *_ = [*module.split("."), ""]
        if package == "unmask" and other != layer and other in LEVEL and LEVEL[other] <= LEVEL.get(layer, leaf):
            upward.append(f"{path} imports {module}")
    assert set(LEVEL) <= {path.parts[0].removesuffix(".py") for path in TREES}
    assert upward == []


def test_the_mathematics_knows_tensors_only():
    """Never files, tokenizers or configurations: torch, the standard library, and small leaves."""
    foreign = {"files", "jsonl", "display", "progress", "runtime"}
    for path, layer, module in imports():
        if layer in ("variational", "decoding"):
            package, inside, *_ = [*module.split("."), ""]
            assert package in {"torch", "unmask"} | set(sys.stdlib_module_names) - {"json", "pathlib", "tomllib"}, path
            assert package != "unmask" or inside not in foreign, f"{path} imports {module}"


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
import tomllib
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
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell ignores in the background
    )
    assert (done.returncode, done.stderr) == (130, "unmask: interrupted\n")


def test_text_files_are_utf8_and_nothing_that_is_loaded_runs():
    """No text file is read or written in the locale's encoding.  What else may not be called, ruff checks."""
    wrong = []
    for path, tree in TREES.items():
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            called, options = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            binary = called == "os.open" or (called.endswith(".open") and any("b" in ast.unparse(a) for a in node.args))
            as_text = called.endswith((".read_text", ".write_text", ".open")) and called != "files.write_text"
            if (
                (as_text and not binary and "encoding" not in options)
                or called == "__import__"
                or options.get("trust_remote_code", "False") != "False"
            ):
                wrong.append(f"{path}:{node.lineno}: {called}")
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


def test_every_planted_mistake_still_has_its_place():
    rows = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))["mutant"]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert (SOURCE / row["file"]).read_text(encoding="utf-8").count(row["text"]) == 1, row["name"]
