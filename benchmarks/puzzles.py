"""All six puzzles at their natural budgets, and the demo on ten seeds, as tables.

    python benchmarks/puzzles.py run              trains and evaluates what has no record yet (hours on two cores)
    python benchmarks/puzzles.py run groups-self  the same for these only
    python benchmarks/puzzles.py table            writes results/puzzles/tables.md from the records beside it

One folder of records per run, results/puzzles/NAME-SEED/: results.jsonl and bound.json as `unmask evaluate` wrote them,
and cost.json with the exit code and the CPU seconds (user + system) of the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import torch

from unmask.decoding.generate import generate
from unmask.decoding.policies import Dilated
from unmask.evaluation.curve import compared_curves, frontier, height
from unmask.evaluation.records import Record, read_records
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser
from unmask.recipe import known_recipes, load_recipe
from unmask.tasks import TASKS, make_task

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "puzzles"
PAGE = RECORDS / "tables.md"
DEMO = "groups"
PUZZLES = [name for name, source in TASKS.items() if ".puzzles." in source and name in known_recipes()]
PUZZLES = [name for name in PUZZLES if load_recipe(name).order is not None]  # the others have a page of their own
# The recipes were tuned on seeds 0 to 9, and kl_weight = 4 was chosen after seed 13 had failed without it; no seed
# from 100 on had been run before.  A seed fixes the puzzle's hidden structure, its examples, the initial weights and
# every draw.
DEMO_SEEDS, PUZZLE_SEEDS, VARIANT_SEEDS = [*range(100, 110), *range(10, 20)], range(10, 12), range(10, 11)
# The selector as its own posterior: name -> seeds.
SELF_SEEDS = {f"{name}-self": range(100, 110 if name in (DEMO, "latin-square") else 103) for name in PUZZLES}
for name in ("addition-self", "permutation-self"):  # their recipes were changed after 100 to 102 had been seen
    SELF_SEEDS[name] = range(103, 106)
# Settings that the recipes do not use, kept for comparison: name -> recipe and overrides.
VARIANTS = {
    "addition, the sum asked for": ("addition", ["task.ask=sum"]),
    "groups, kl_weight 1": ("groups", ["order.kl_weight=1.0"]),
    "groups, bernoulli": ("groups", ["order.selection=bernoulli"]),
    "groups, no baseline": ("groups", ["order.baseline=none"]),
    "groups, frozen": ("groups", ["order.denoiser_rate=0.0"]),
    "latin-square, frozen": ("latin-square", ["order.denoiser_rate=0.0"]),
    "latin-square, joint 5e-4": ("latin-square", ["order.denoiser_rate=5e-4"]),
    "chain, T = 5": ("chain", ["order.budget=5", "evaluate.budgets=[5]"]),
    **{  # LO-ARM writes one token per step; at fewer steps there is nothing to compare
        f"{name}, LO-ARM": (name, ["order.selection=one", f"order.budget={steps}", f"evaluate.budgets=[{steps}]"])
        for name, steps in (("chain", 16), ("latin-square", 10), ("permutation", 8))
    },
    **{
        f"{name}, UPO": (f"{name}-self", ["order.reference_weight=0.1"])
        for name in ("addition", "chain", "latin-square", "permutation")
    },
}

INTRODUCTION = """# The puzzles

**Verdict.** With as many steps, learned orders are far better than the rules on `groups` and `addition`, and than any
one rule on `parity-dag`. Rules that are not in these tables ran on denoisers trained anew
(`results/explorations/puzzles-rules`): on `chain` the fixed order of `dus` is better, 0.950 in 4 steps; on `parity-dag`
every seed has some rule that is as good (`dus` 0.994, top probability 1.000, `pc-sampler` 1.000), but none has more
than 0.67 on average. On `permutation` they are four points better on average, and on one of three seeds a point worse.
On `latin-square` they are two points better than the rules at the steps of each seed, but `threshold:0.9` with up to 10
steps has 0.985 in 3.05 steps on average. The selector as its own posterior is better than the paper's scorer on
`chain`, `permutation`, `latin-square` and `parity-dag`, and as good on `groups` and `addition`; the scorer ran on other
seeds, two but for `groups`. With UPO's pull towards the rule that it starts as (weight 0.1, one other seed) it is below
the mean of the order without it on `chain`, `permutation` and `latin-square`, and as good on `addition`.

Written by `python benchmarks/puzzles.py table` from the records in `results/puzzles/`, which
`python benchmarks/puzzles.py run` makes with the commands in their `cost.json`.

## Validity in few steps

Mean over seeds, with the lowest and highest seed in brackets; 1,000 samples per seed at temperature 1.

- *Best heuristic*: the best of IID, top probability and margin at that number of steps, chosen after the fact, which
  favours it. The first table has no adaptive rules.
- *Order*: `frozen` or `joint`. For `joint`, the heuristics run on the denoiser from before order learning, trained
  further on as many sequences.
- *Seeds*: a seed fixes the puzzle's hidden structure, the examples, the initial weights and every draw. The recipes
  were tuned on seeds 0 to 9. `kl_weight = 4` was chosen after seed 13 of `groups` had failed without it. The rate of
  `addition-self` and `permutation-self` was lowered from 3e-3 to 1e-3, and 400 updates became 600, after seeds 100 to
  102 (0.657 and 0.306, `results/explorations/selector-rate`). No other seed from 100 on was run before its recipe was
  fixed.
"""


def run_one(name: str, seed: int) -> None:
    """Train and evaluate one puzzle or variant in child processes, and keep its records."""
    folder = f"{re.sub('[^a-z0-9.-]+', '_', name.lower())}-{seed}"
    kept, run = RECORDS / folder, ROOT / "runs" / "puzzles" / folder
    if (kept / "cost.json").exists():
        return
    task, overrides = VARIANTS.get(name, (name, []))
    unmask = [sys.executable, "-m", "unmask"]
    overrides = [f"seed={seed}", f"task.seed={seed}", *overrides]
    first = ["train", task, *(word for value in overrides for word in ("--set", value)), "--cpu"]
    if name == DEMO:
        first = ["demo", "--seed", str(seed)]
    code, seconds = _timed([*unmask, *first, "--out", str(run), "--force"])
    if name != DEMO:
        code = max(code, _timed([*unmask, "evaluate", str(run), "--cpu"])[0])
        code = max(code, _timed([*unmask, "evaluate", str(run), "--bound", "--cpu"])[0])
    kept.mkdir(parents=True, exist_ok=True)
    for file in ("results.jsonl", "bound.json"):
        shutil.copy(run / file, kept / file)
    cost = {
        "name": name,
        "seed": seed,
        "command": " ".join(["unmask", *first]),
        "exit_code": code,
        "cpu_seconds": round(seconds, 1),
    }
    (kept / "cost.json").write_text(json.dumps(cost) + "\n")
    print(f"{name} seed {seed}: exit code {code}, {seconds:.0f} CPU seconds", flush=True)


def _timed(command: list[str]) -> tuple[int, float]:
    """Exit code, and CPU seconds of this child."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_utime + usage.ru_stime


def table() -> str:
    runs = sorted((Run(cost.parent) for cost in RECORDS.glob("*/cost.json")), key=lambda run: run.seed)
    puzzles = {name: [run for run in runs if run.name == name] for name in PUZZLES}
    variants = {name: [run for run in runs if run.name == name] for name in VARIANTS}
    own = {name: [run for run in runs if run.name == name] for name in SELF_SEEDS}
    return "\n".join(
        [
            INTRODUCTION,
            *_validity(puzzles),
            *(_own(own, puzzles) if any(own.values()) else []),
            "\n## Held-out bounds, nats per token\n",
            "`unmask evaluate --bound` on 1,000 held-out sequences. The last column is their exact log-likelihood "
            "under the true distribution, which no bound can exceed on average.\n",
            *_bounds(puzzles),
            "\n## The demo\n",
            f"`unmask demo --seed S` on {len(puzzles[DEMO])} seeds, T = 2, 1,000 samples each.\n",
            _demo(puzzles[DEMO]),
            _fixed_order([run.seed for run in puzzles[DEMO]]),
            "\n## Other settings\n",
            "What the recipes do not use ([decisions.md](../../docs/decisions.md) says why).\n",
            *_validity(variants),
            "",
        ]
    )


class Run:
    """The records of one run."""

    def __init__(self, folder: Path) -> None:
        self.cost = json.loads((folder / "cost.json").read_text())
        self.bound = json.loads((folder / "bound.json").read_text())
        self.records = read_records(folder / "results.jsonl")
        self.name: str = self.cost["name"]
        self.seed: int = self.cost["seed"]

    @property
    def learned(self) -> Record:
        return next(record for record in self.records if record.spec.learned)

    def heuristics(self, budget: int) -> list[Record]:
        return [record for record in self.records if not record.spec.learned and record.spec.budget == budget]


def _validity(groups: dict[str, list[Run]], equal_steps: bool = False) -> list[str]:
    lines = [
        "| puzzle | seeds | order | T | steps used | **learned** | best heuristic, T steps | "
        f"... at {'equal' if equal_steps else 'more'} steps | fewest for exact samples |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in groups.items():
        if not runs:
            continue
        task, overrides = VARIANTS.get(name, (name, []))
        recipe = load_recipe(task, overrides)
        order = recipe.order
        assert order is not None
        budgets = [budget for budget in recipe.evaluate.budgets if budget > order.budget]
        more = "; ".join(f"{_best(runs, steps)} @ {steps}" for steps in budgets)
        lines.append(
            f"| {name} | {len(runs)} | {'joint' if order.denoiser_rate else 'frozen'} | {order.budget} "
            f"| {mean(run.learned.mean_steps for run in runs):.2f} "
            f"| **{_spread(run.learned.outcome.score for run in runs)}** "
            f"| {_best(runs, order.budget)} | {_spread(map(_best_mixture, runs)) if equal_steps else more} "
            f"| {make_task(**recipe.task).min_steps or 'varies'} |"
        )
    return lines


def _bounds(groups: dict[str, list[Run]]) -> list[str]:
    lines = [
        "| puzzle | learned order | of which order KL | plain denoiser, IID order, same steps | true log-likelihood |",
        "|---|---|---|---|---|",
    ]
    for name, runs in groups.items():
        if runs:
            order, mdm = (_spread(run.bound[key] for run in runs) for key in ("order_bound", "mdm_bound"))
            kl = _spread(sum(run.bound["order_kl"]) for run in runs)
            true = _spread(run.bound["true_log_likelihood"] for run in runs)
            lines.append(f"| {name} | {order} | {kl} | {mdm} | {true} |")
    return lines


def _own(groups: dict[str, list[Run]], taught_by_a_scorer: dict[str, list[Run]]) -> list[str]:
    lines = [
        "\n## The selector as its own posterior\n",
        "On a frozen denoiser. The rules include `threshold`, `factor`, `eb` and `klass`, which take fewer steps. "
        "*Equal steps*: the best mixture of all rules and caps at the order's mean steps.\n",
        *_validity(groups, equal_steps=True),
        "",
        "The paper's bound is that of the scorer's orders, on their seeds and mostly joint denoisers.\n",
        "| puzzle | J, nats per token | from 8 samples | the paper's bound | plain denoiser, IID order, same steps "
        "| true log-likelihood |",
        "|---|---|---|---|---|---|",
    ]
    keys = ("self_bound", "many_sample_bound", "mdm_bound", "true_log_likelihood")
    for name, runs in groups.items():
        if runs:
            own = [_spread(run.bound[key] for run in runs) for key in keys]
            scorers = taught_by_a_scorer[name.removesuffix("-self")]
            own.insert(2, _spread(run.bound["order_bound"] for run in scorers) if scorers else "not run")
            lines.append(f"| {name} | {' | '.join(own)} |")
    return lines


def _best_mixture(run: Run) -> float:
    """C(m) of all rules (`unmask.evaluation.curve.frontier`) at the mean steps of the order."""
    (curve,) = compared_curves(run.records)
    rules = [point for point in curve.points if point.family != "learned"]
    return height(frontier(rules), run.learned.mean_steps)


def _demo(runs: list[Run]) -> str:
    """What the seeds have in common; each is in its record."""
    found = [run.learned.outcome for run in runs]
    inside = sum(o.distinct_low <= o.distinct <= o.distinct_high for o in found)
    rivals = [max(r.outcome.score for r in run.heuristics(run.learned.spec.budget)) for run in runs]
    return (
        f"Learned, valid at 2 steps: {_spread(o.score for o in found)}; the best heuristic: {_spread(rivals)}. The "
        f"number of different valid samples is in the 99% range of the true distribution for {inside} of {len(runs)} "
        f"seeds. A run takes {_seconds(runs)} CPU seconds; {sum(not r.cost['exit_code'] for r in runs)} exit with 0."
    )


def _seconds(runs: list[Run]) -> str:
    seconds = [run.cost["cpu_seconds"] for run in runs]
    return f"{min(seconds):.0f} to {max(seconds):.0f}"


def _fixed_order(seeds: list[int]) -> str:
    """On how many seeds the fixed order of `dus` solves the puzzle, given a perfect denoiser."""
    task, any_model = make_task(DEMO), Denoiser(BackboneConfig(8, 1, 1, 8), 8)
    canvas = torch.full((1, task.length), any_model.mask_token_id)
    when = generate(any_model, canvas, Dilated(), task.length).reveal_step[0].tolist()

    def exact(seed: int) -> bool:
        """Whether no step reveals two tokens of a group that was untouched before it."""
        steps = [sorted(when[n] for n in group) for group in make_task(DEMO, seed=seed).layout]
        return all(first < second for first, second, *_ in steps)

    return (
        f"\nThe rule `dus` has a fixed order of {max(when) + 1} steps. With a perfect denoiser it solves "
        f"{sum(map(exact, seeds))} of these {len(seeds)} seeds, and {sum(map(exact, range(1000)))} of the seeds 0 to "
        "999: those where no step reveals two tokens of a group that was untouched before."
    )


def _best(runs: list[Run], budget: int) -> str:
    """The heuristic with the best mean score at this budget, with its spread over the seeds."""
    scores: dict[str, list[float]] = {}
    for run in runs:
        for record in run.heuristics(budget):
            scores.setdefault(record.spec.policy, []).append(record.outcome.score)
    if not scores:
        return "not run"
    policy = max(scores, key=lambda name: mean(scores[name]))
    return f"{_spread(scores[policy])} {policy}"


def _spread(values: Iterable[float]) -> str:
    numbers = list(values)
    return f"{mean(numbers):.3f}" + (f" [{min(numbers):.3f}, {max(numbers):.3f}]" if len(numbers) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("names", nargs="*", help="of puzzles and variants; all if none is given")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    options = parser.parse_args()
    if options.action == "run":
        wanted = [(DEMO, seed) for seed in DEMO_SEEDS]
        wanted += [("groups, kl_weight 1", seed) for seed in range(11, 14)]  # 13 is known to fail
        for seed in PUZZLE_SEEDS:
            wanted += [(task, seed) for task in PUZZLES if task != DEMO]
            wanted += [(name, seed) for name in VARIANTS if seed in VARIANT_SEEDS]
        wanted += [(name, seed) for name, seeds in SELF_SEEDS.items() for seed in seeds]
        wanted = [(name, seed) for name, seed in wanted if not options.names or name in options.names]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda pair: run_one(*pair), wanted))
    PAGE.write_text(table())
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
