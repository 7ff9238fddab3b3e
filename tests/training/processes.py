"""What two processes do, started by torchrun: see test_distributed.py.  python -m tests.training.processes FOLDER"""

import gc
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from tests.training.small import FixedTask, padded, small_model
from unmask.cli import main as unmask
from unmask.errors import Stopped
from unmask.recipe import Optimisation, load_recipe
from unmask.runtime import Processes
from unmask.training import loop
from unmask.training.metrics import Metrics
from unmask.training.objectives import DenoiseObjective, OrderObjective
from unmask.training.run import train
from unmask.training.self_posterior import SelfObjective
from unmask.variational.estimators import LeaveOneOut, MovingAverage

BUDGET, UPDATES = 3, 20
TASK = FixedTask(
    padded(
        [[2, 0, 1, 1, 0], [1, 2, 0], [0, 2, 1, 2], [1, 0, 0, 2, 2]],
        [[False, True, True, True, True], [True, False, True], [True, True, True, True], [True] * 5],
    )
)
CASES = {
    "order, moving average": {},
    "denoise, accumulated": {"accumulate": 2},
    "order, accumulated": {"accumulate": 2},
    "order, an odd batch": {"batch": 7},
    "self, accumulated": {"accumulate": 2},
}


def curve(case, folder):
    """Loss, bound and gradient norms of every update of a float64 model, as all processes see them."""
    accelerator = Accelerator(cpu=True)
    model = small_model(budget=BUDGET)
    if case.startswith("denoise"):
        objective, networks = DenoiseObjective(model.denoiser, 0), ["denoiser"]
    elif case.startswith("self"):
        model.scorer = None
        objective, networks = SelfObjective(model, 2, BUDGET, 0, learn_denoiser=True), ["denoiser", "selector"]
    else:
        baseline = MovingAverage(BUDGET) if "moving" in case else LeaveOneOut()
        objective, networks = OrderObjective(model, 2, baseline, 0), ["denoiser", "selector", "scorer"]
    rates = {name: (getattr(model, name), 3e-3) for name in networks}
    how = Optimisation(**{"updates": UPDATES, "batch": 8, "warmup": 2, **CASES[case]})
    recorded, judge = [], loop.StageState.judge

    def recording(state, wrong, values):
        recorded.append(dict(values))
        return judge(state, wrong, values)

    loop.StageState.judge = recording
    try:
        metrics = Metrics(Path(folder) / f"{case}.{accelerator.process_index}.jsonl")
        loop.run_stage(loop.Stage.ORDER, objective, rates, how, TASK, 0, accelerator, metrics)
    finally:
        loop.StageState.judge = judge
    return recorded


def train_with_a_stop(recipe, out, updates):
    """Train until SIGTERM comes to the last process alone, as its update number `updates` is under way."""
    calls = []

    def on_update(stage, update):
        calls.append(update)
        if len(calls) == updates and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train(recipe, out, cpu=True, on_update=on_update)
    except Stopped as stopped:
        return str(stopped)
    return "finished"


def main(folder):
    torch.set_num_threads(1)
    gc.freeze()  # as tests/conftest.py does
    if not torch.cuda.is_available():  # the first to ask decides for the process, also without --cpu
        assert Processes().count == int(os.environ["WORLD_SIZE"])
    found = {case: curve(case, folder) for case in CASES}
    recipe = load_recipe(folder / "tiny.toml", json.loads((folder / "settings.json").read_text()))
    said, sharded_weights, state_class = {}, [], loop.StageState

    class Noting(state_class):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            sharded_weights.append(all(isinstance(p, DTensor) for p in self.parameters.values()))

    loop.StageState = Noting
    train(recipe, folder / "begun-on-one", cpu=True)
    for name, sharded in (("ddp", "false"), ("fsdp", "true")):
        os.environ.update(ACCELERATE_USE_FSDP=sharded, FSDP_VERSION="2")
        said[name] = train_with_a_stop(recipe, folder / name, 17)
        if int(os.environ["RANK"]) == 0:
            shutil.copytree(folder / name, folder / f"{name}-copy")
        torch.distributed.barrier()
        sharded_weights.clear()
        train(recipe, folder / name, cpu=True)
        said[f"{name} sharded"] = sharded_weights[:]
    os.environ.update(ACCELERATE_USE_FSDP="false")
    for command in (["train", folder / "tiny.toml", "--out", folder / "run"], ["evaluate", folder / "run"]):
        try:
            unmask([*map(str, command), "--cpu"])
        except SystemExit as end:
            if end.code:
                raise
        torch.distributed.barrier()
    rank = os.environ["RANK"]
    (folder / f"found.{rank}.json").write_text(json.dumps({"curves": found, "said": said}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
