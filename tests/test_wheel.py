"""The wheel, made from the sdist, in an environment of its own: all that a command needs is in it."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, cwd):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PIP_"))}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build", reason="pip install 'unmask[dev]'")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    [path] = (source / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_every_module_and_recipe(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = [path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")]
    recipes = [f"unmask/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "recipes").rglob("*.toml")]
    pages = [path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "unmask").glob("*/page/*")]
    assert sorted({*sources, *recipes, *pages, "unmask/py.typed"} - packed) == []


DEMO = """
from pathlib import Path

import unmask
from unmask.report.html import write_report

run, short = Path("run"), ["denoise.updates=1", "order.updates=1", "order.denoiser_rate=0.0", "evaluate.examples=4"]
unmask.train(unmask.load_recipe("groups", short), run, cpu=True)
print([record.spec.policy for record in unmask.evaluate(run, cpu=True)])
write_report([run], Path("report.html"))
print(unmask.__version__, unmask.__file__)
"""


def test_the_wheel_runs_elsewhere(wheel, tmp_path):
    """Its dependencies are those of this environment; nothing else of unmask is on its path."""
    venv.create(tmp_path / "venv")
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python, unmask = (tmp_path / "venv" / "bin" / name for name in ("python", "unmask"))
    # Another unmask in the shared packages must not count as this one.
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--ignore-installed")
    run(*pip, wheel, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "threshold(0.9," in run(unmask, "policies", cwd=elsewhere)
    assert 'name = "groups"' in run(unmask, "recipe", "show", "groups", cwd=elsewhere)
    *_, policies, where = run(python, "-c", DEMO, cwd=elsewhere).splitlines()
    assert "'learned'" in policies
    assert "orderViewer" in (elsewhere / "report.html").read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert where == f"{version} {packages / 'unmask' / '__init__.py'}"
