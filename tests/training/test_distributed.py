"""The same training on one process and on two: under torchrun, with gloo, on the CPU; DDP and FSDP2."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.training.processes import CASES, UPDATES, curve, train_with_a_stop
from tests.training.small import TINY_RECIPE, json_lines
from unmask.models.order_model import OrderModel
from unmask.recipe import load_recipe
from unmask.training.loop import Stage, run_stage
from unmask.training.run import train

SETTINGS = [
    "denoise.updates=12",
    "order.updates=12",
    "order.denoiser_rate=1e-3",
    "order.baseline=moving-average",
    "order.ema=0.7",
    "saving.every_updates=5",
    "saving.every_seconds=3600",  # however slow the machine is
]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Everything that two processes do, in one launch."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "tiny.toml").write_text(TINY_RECIPE)
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    assert "stage order is saved after update 5" in train_with_a_stop(recipe(folder), folder / "begun-on-one", 17)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, "."])}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    call = [*torchrun, "-m", "tests.training.processes", str(folder)]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "printed.txt").write_text(done.stdout)
    train(recipe(folder), folder / "one", cpu=True)
    return folder


def recipe(folder):
    return load_recipe(folder / "tiny.toml", SETTINGS)


def found(folder, rank):
    return json.loads((folder / f"found.{rank}.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(two, tmp_path, case):
    """Float64: loss, bound and gradients of all updates agree within 1e-8, and all processes see the same."""
    alone = curve(case, tmp_path)
    first, second = (found(two, rank)["curves"][case] for rank in (0, 1))
    assert first == second
    assert len(first) == len(alone) == UPDATES
    for ours, theirs in zip(first, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert abs(ours[key] - value) < (1e-6 if key in ("q_steps", "saturated") else 1e-8), "those two are float32"
    assert abs(alone[0]["loss"] - alone[-1]["loss"]) > 1e-3, "the test has no power"


def assert_close(run, other):
    """The same training, but for the rounding of float32 sums in another order."""
    for part in (".", "denoiser", "baseline"):
        one, two = (OrderModel.from_pretrained(folder / part).state_dict() for folder in (run, other))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            assert (tensor - two[name]).abs().max() < 2e-4, (part, name)
    one, two = (json_lines(folder / "metrics.jsonl") for folder in (run, other))
    assert [(line["stage"], line["update"]) for line in one] == [(line["stage"], line["update"]) for line in two]
    for ours, theirs in zip(one, two, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


def test_a_stop_of_one_process_stops_and_saves_all(two):
    expected = "stopped by SIGTERM; stage order is saved after update 5 of 12; the same command resumes there"
    for how in ("ddp", "fsdp"):
        assert [found(two, rank)["said"][how] for rank in (0, 1)] == [expected, expected]
        names = sorted(path.name for path in (two / f"{how}-copy" / "checkpoints").iterdir())
        assert names == ["order-00000005"]


def test_runs_of_two_processes_end_where_one_ends(two):
    """Stopped in between and resumed; the last was begun by one process and finished by two."""
    for run in ("ddp", "fsdp", "begun-on-one"):
        assert_close(two / run, two / "one")


def test_a_checkpoint_of_two_processes_is_one_for_one(two, tmp_path):
    for how in ("ddp", "fsdp"):
        run = shutil.copytree(two / f"{how}-copy", tmp_path / how)
        train(recipe(two), run, cpu=True)
        assert_close(run, two / "one")


def test_the_shards_were_shards(two):
    said = found(two, 0)["said"]
    assert said["ddp sharded"] == [False, False], "order, baseline"
    assert said["fsdp sharded"] == [True, True]


def test_a_batch_too_small_for_its_micro_batches_is_refused(tmp_path):
    from unmask.recipe import Optimisation

    class Many:
        num_processes = 3

    with pytest.raises(ValueError, match="batch = 4 is too small for 3 processes with accumulate = 2: raise it to 6"):
        run_stage(Stage.ORDER, torch.nn.Linear(1, 1), {}, Optimisation(1, 4, accumulate=2), None, 0, Many(), None)


def comparable(path):
    """The lines of a file of results, without what differs from machine to machine and from call to call."""
    lines = json_lines(path)
    for line in lines:
        line.get("outcome", line).pop("seconds", None)
    return lines


def test_the_command_line_on_two_processes(two, tmp_path, ok):
    """`unmask train` and `evaluate` under torchrun: one speaks, and the records are those of one process."""
    printed = (two / "printed.txt").read_text()
    assert printed.count("model: ") == 1
    assert printed.count("true entropy") == 1
    run, alone = two / "run", shutil.copytree(two / "run", tmp_path / "alone")
    for name in ("results.jsonl", "verdicts.jsonl"):
        (alone / name).unlink()
    ok("evaluate", alone, "--cpu")
    for name in ("results.jsonl", "verdicts.jsonl"):
        assert comparable(run / name) == comparable(alone / name), name
    assert len(comparable(run / "results.jsonl")) >= 3
