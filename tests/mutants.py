"""Plant mistakes, one at a time, and see whether the suite notices: `make mutants`.

    python tests/mutants.py                  all mistakes of mutants.toml
    python tests/mutants.py baseline tie     those whose name contains one of these words
    python tests/mutants.py --jobs 4         so many at once

Each mistake replaces one piece of text of one file in a copy of src, and runs the tests that it names against the copy.
A mistake is killed if a test fails, and has survived if all pass.  Exit code 1 if one survived or no longer applies.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    name: str
    file: str  # below src/unmask
    text: str  # stands there exactly once
    replacement: str
    tests: str  # what pytest is given, separated by spaces


def outcome(mutant: Mutant) -> str:
    """killed, survived, or why it could not be tried."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        (Path(folder) / "recipes").symlink_to(ROOT / "recipes")  # which the package looks for beside src
        path = source / "unmask" / mutant.file
        text = path.read_text() if path.exists() else ""
        if text.count(mutant.text) != 1:
            return f"the text stands {text.count(mutant.text)} times in {mutant.file}, not once"
        path.write_text(text.replace(mutant.text, mutant.replacement))
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *mutant.tests.split()]
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode in (0, 1):
        return "survived" if ended.returncode == 0 else "killed"
    last_line = (ended.stdout + ended.stderr).strip().rpartition("\n")[2]
    return f"pytest could not run (exit code {ended.returncode}): {last_line}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mistakes whose name or file contains one of these")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    rows = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]
    mutants = [Mutant(**row) for row in rows]
    chosen = [m for m in mutants if not arguments.words or any(w in f"{m.name} {m.file}" for w in arguments.words)]
    failed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for number, (mutant, said) in enumerate(zip(chosen, pool.map(outcome, chosen), strict=True), start=1):
            failed += said != "killed"
            print(f"[{number}/{len(chosen)}] {said}: {mutant.file}: {mutant.name}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} killed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
