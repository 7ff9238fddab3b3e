import gc
import os
import re
import shutil

# Small tensors: a second thread only waits for the first, and on a busy machine much longer than that.  oneDNN has its
# own count, read when torch is loaded, and a child forked beside a second thread of OpenMP waits for it forever.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONUTF8"] = "1"  # for the workers of pytest-xdist and all children: any locale will do

import pytest
import torch

from unmask.errors import UserError
from unmask.runtime import process_settings

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--screenshot-of", metavar="RUN", help="Draw docs/results/*.png of this run.")


def pytest_configure():
    """Tests read what is printed: 80 columns and no colours, whatever the terminal or a CI service asks for."""
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)
    os.fsync = lambda handle: None  # tests kill processes, not machines: the system keeps what a process has written
    UserError.__init__ = _in_one_line


def _in_one_line(error, message):
    """Whatever a test raises that a user can mend."""
    assert message
    assert "\n" not in message
    ValueError.__init__(error, message)


def pytest_collection_finish():
    """Keep what is imported out of garbage collections: Accelerate asks for one after every stage of a training."""
    gc.freeze()


@pytest.fixture(autouse=True)
def same_settings_for_every_test():
    """A product in bfloat16 can change what torch does for the rest of the process."""
    with process_settings():
        yield


@pytest.fixture
def uncompiled(monkeypatch):
    """`compile=True` without its compiler: fixed shapes, run eagerly.  What was given to it."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(function) or function)
    return compiled


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, for the pages."""
    driver = pytest.importorskip("playwright.sync_api", reason="pip install 'unmask[dev]'")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium here: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def call(capsys):
    """Runs a command; its exit code, what it printed, and what it said on stderr."""
    from tests.commands import exit_code

    def run_command(*arguments):
        capsys.readouterr()
        return exit_code(*arguments), *capsys.readouterr()

    return run_command


@pytest.fixture
def ok(call):
    """Runs a command that must succeed; what it printed."""

    def run_command(*arguments):
        code, out, err = call(*arguments)
        assert code == 0, err
        return out

    return run_command


@pytest.fixture
def refused(call, tmp_path):
    """Runs a command that must fail as bad input does: exit code 2, one line on stderr, no traceback, no file changed.

    Progress that was made before is told above it.  begun: it may leave new files.
    """
    from tests.training.small import contents

    def run_command(*arguments, begun=False):
        before = contents(tmp_path)
        code, _, err = call(*arguments)
        assert code == 2, err
        after = contents(tmp_path)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        changed -= {name for name in after if name.endswith("/hashes.json")}  # it knows more the older a file is
        assert not (changed & before.keys() if begun else changed), f"changed: {changed}"
        *progress, err = err.splitlines()
        assert all(re.match(r"[a-z]+ \d+/\d+", line) for line in progress), progress
        assert err.startswith("unmask: ")
        assert "Traceback" not in err
        assert "Error" not in err, "a message, not the name of an exception"
        return err

    return run_command
