import gc
import os
import shutil

# Small tensors: a second thread only waits for the first, and on a busy machine much longer than that.  oneDNN has its
# own count, read when torch is loaded, and a child forked beside a second thread of OpenMP waits for it forever.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONUTF8"] = "1"  # for the workers of pytest-xdist and all children: any locale will do

import pytest
import torch

from unmask.runtime import process_settings

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--screenshot-of", metavar="RUN", help="Draw docs/results/*.png of this run.")


def pytest_configure():
    """Tests read what is printed: 80 columns and no colours, whatever the terminal or a CI service asks for."""
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)
    os.fsync = lambda handle: None  # tests kill processes, not machines: the system keeps what a process has written


def pytest_collection_finish():
    """Keep what is imported out of garbage collections: Accelerate asks for one after every stage of a training."""
    gc.freeze()


@pytest.fixture(autouse=True)
def same_settings_for_every_test():
    """A product in bfloat16 can change what torch does for the rest of the process."""
    with process_settings():
        yield


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
