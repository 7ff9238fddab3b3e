"""All six puzzles at their natural budgets, and the demo on ten seeds: from the command line to docs/puzzles.md.

    python benchmarks/puzzles.py run              trains and evaluates what has no record yet (an hour on two cores)
    python benchmarks/puzzles.py table            writes docs/puzzles.md from the records in results/puzzles/

One folder of records a run, results/puzzles/TASK-SEED/: results.jsonl and bound.json as `unmask evaluate` wrote them,
and cost.json with the exit code and the CPU seconds (user + system) of the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from unmask.evaluation import Record
from unmask.report import read_records
from unmask.tasks import TASKS, make_task
from unmask.training.recipe import load_recipe

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = ROOT / "results" / "puzzles", ROOT / "docs" / "puzzles.md"
DEMO = "groups"


def run_one(task: str, seed: int) -> None:
    """Train and evaluate one puzzle in processes of their own, and keep its records."""
    kept, run = RECORDS / f"{task}-{seed}", ROOT / "runs" / "puzzles" / f"{task}-{seed}"
    if (kept / "cost.json").exists():
        return
    unmask = [sys.executable, "-m", "unmask"]
    first = ["demo", "--seed", str(seed)] if task == DEMO else ["train", task, "--set", f"seed={seed}", "--cpu"]
    code, seconds = _timed([*unmask, *first, "--out", str(run), "--force"])
    if task != DEMO:
        code = max(code, _timed([*unmask, "evaluate", str(run), "--cpu"])[0])
    code = max(code, _timed([*unmask, "evaluate", str(run), "--bound", "--cpu"])[0])
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("results.jsonl", "bound.json"):
        shutil.copy(run / name, kept / name)
    cost = {"command": " ".join(["unmask", *first]), "exit_code": code, "cpu_seconds": round(seconds, 1)}
    (kept / "cost.json").write_text(json.dumps(cost) + "\n")
    print(f"{task} seed {seed}: exit code {code}, {seconds:.0f} CPU seconds", flush=True)


def _timed(command: list[str]) -> tuple[int, float]:
    """Exit code, and CPU seconds of that one child."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_utime + usage.ru_stime


def table() -> str:
    folders = sorted(RECORDS.iterdir(), key=lambda folder: (folder.name.rsplit("-", 1)[0], _seed(folder)))
    return (
        "# The puzzles\n\nWritten by `python benchmarks/puzzles.py table` from the records in `results/puzzles/`; "
        "`python benchmarks/puzzles.py run` makes the records.\n\n"
        + _puzzle_table(folders)
        + "\n"
        + _bound_table(folders)
        + "\n"
        + _demo_table([folder for folder in folders if folder.name.startswith(f"{DEMO}-")])
    )


def _puzzle_table(folders: list[Path]) -> str:
    lines = [
        "## Validity in few steps\n",
        "Mean validity over seeds, with the lowest and highest seed in brackets; 1,000 samples a seed, tokens sampled "
        "at temperature 1. `Best heuristic` is the best of IID, top probability and margin at that number of steps, "
        "chosen after the fact, which favours it. `Order` says whether the denoiser learned along: for "
        "`joint` the heuristics run on the denoiser from before order learning, plainly trained on for as many further sequences.\n",
        "| puzzle | seeds | order | T | steps used | **learned** | best heuristic, T steps | ... at more steps | "
        "best possible steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        runs = [read_records(folder / "results.jsonl") for folder in folders if _task(folder) == task]
        if not runs:
            continue
        learned = [record for records in runs for record in records if record.trained_budget is not None]
        budget = learned[0].budget
        others = sorted(
            {r.budget for records in runs for r in records if r.trained_budget is None and r.budget > budget}
        )
        recipe = load_recipe(task)
        assert recipe.order is not None
        more = "; ".join(f"{_best(runs, steps)} @ {steps}" for steps in others)
        possible = make_task(task).min_steps
        lines.append(
            f"| {task} | {len(runs)} | {'joint' if recipe.order.denoiser_rate else 'frozen'} | {budget} "
            f"| {mean(r.mean_steps for r in learned):.2f} | **{_spread(r.score for r in learned)}** "
            f"| {_best(runs, budget)} | {more} | {possible or 'varies'} |"
        )
    return "\n".join(lines) + "\n"


def _bound_table(folders: list[Path]) -> str:
    lines = [
        "## Held-out bounds, nats a token\n",
        "`unmask evaluate --bound`, mean over seeds [lowest, highest]. No bound can exceed minus the true entropy.\n",
        "| puzzle | learned order | of which order KL | plain denoiser, IID order, same steps | minus true entropy |",
        "|---|---|---|---|---|",
    ]
    for task in TASKS:
        bounds = [json.loads((folder / "bound.json").read_text()) for folder in folders if _task(folder) == task]
        if bounds:
            order, mdm = _spread(b["order_bound"] for b in bounds), _spread(b["mdm_bound"] for b in bounds)
            kl = _spread(sum(b["order_kl"]) for b in bounds)
            entropy = bounds[0]["entropy"]
            limit = "not known" if entropy is None else f"{-entropy:.3f}"
            lines.append(f"| {task} | {order} | {kl} | {mdm} | {limit} |")
    return "\n".join(lines) + "\n"


def _demo_table(folders: list[Path]) -> str:
    lines = [
        "## The demo, seed by seed\n",
        "`unmask demo --seed S`: T = 2. `Distinct` counts different valid samples, beside the 99% range of that number "
        "for as many draws from the true distribution.\n",
        "| seed | learned valid @ 2 | 95% | distinct | true 99% | best heuristic @ 2 | CPU seconds | exit code |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for folder in folders:
        records = read_records(folder / "results.jsonl")
        cost = json.loads((folder / "cost.json").read_text())
        learned = next(r for r in records if r.trained_budget is not None)
        rival = max((r for r in records if r.trained_budget is None and r.budget == learned.budget), key=_score)
        lines.append(
            f"| {_seed(folder)} | {learned.score:.3f} | {learned.ci_low:.3f}–{learned.ci_high:.3f} "
            f"| {learned.distinct} | {learned.distinct_low}–{learned.distinct_high} "
            f"| {rival.score:.3f} ({rival.policy}) | {cost['cpu_seconds']:.0f} | {cost['exit_code']} |"
        )
    return "\n".join(lines) + "\n"


def _best(runs: list[list[Record]], budget: int) -> str:
    """The heuristic with the best mean score at this budget, with its spread over the seeds."""
    at = [record for records in runs for record in records if record.trained_budget is None and record.budget == budget]
    scores = {policy: [r.score for r in at if r.policy == policy] for policy in {r.policy for r in at}}
    if not scores:
        return "not run"
    policy = max(scores, key=lambda name: mean(scores[name]))
    return f"{_spread(scores[policy])} {policy}"


def _score(record: Record) -> float:
    return record.score


def _spread(values: Iterable[float]) -> str:
    numbers = list(values)
    return f"{mean(numbers):.3f} [{min(numbers):.3f}, {max(numbers):.3f}]"


def _task(folder: Path) -> str:
    return folder.name.rsplit("-", 1)[0]


def _seed(folder: Path) -> int:
    return int(folder.name.rsplit("-", 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each puzzle (the demo always has ten)")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    options = parser.parse_args()
    if options.action == "run":
        wanted = [(DEMO, seed) for seed in range(10)]
        wanted += [(task, seed) for seed in range(options.seeds) for task in TASKS if task != DEMO]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda pair: run_one(*pair), wanted))
    PAGE.write_text(table())
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
