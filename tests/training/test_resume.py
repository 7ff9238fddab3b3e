"""A run that is killed, stopped or starved comes to the same end, bit for bit, as one that was left alone."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.training.killed import MOMENTS, run_killed
from tests.training.small import TINY_RECIPE, contents, json_lines
from unmask import files
from unmask.errors import Stopped, UserError
from unmask.models import order_model as order_model_module
from unmask.recipe import load_recipe
from unmask.training import checkpoint as checkpoints_module
from unmask.training import metrics as metrics_module
from unmask.training import run as run_module
from unmask.training.checkpoint import CheckpointError
from unmask.training.run import train
from unmask.training.run_folder import RunFolderError, is_finished, locked

# Twelve updates a stage, a checkpoint every five: all three stages, averages and a baseline that remembers.
SETTINGS = [
    "denoise.updates=12",
    "order.updates=12",
    "order.denoiser_rate=1e-3",
    "order.baseline=moving-average",
    "order.ema=0.7",
    "denoise.ema=0.7",
    "order.kl_weight=3",
    "order.on_collapse=restore",
    "denoise.on_collapse=restore",
    "saving.every_updates=5",
    "saving.every_seconds=3600",  # however slow the machine is
    "saving.keep=2",
]
OPTIONS = ["--cpu", *(word for setting in SETTINGS for word in ("--set", setting))]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The recipe, and a run of it that was left alone."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.toml").write_text(TINY_RECIPE)
    train(recipe(folder), folder / "alone", cpu=True)
    return folder


def recipe(base, *overrides):
    return load_recipe(base / "tiny.toml", [*SETTINGS, *overrides])


def command(base, run):
    return ["train", base / "tiny.toml", "--out", run, *OPTIONS]


def assert_same_run(run, alone):
    """Every file, and every metric but for the time that it took."""
    ours, theirs = contents(run), contents(alone)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        if name != "metrics.jsonl":
            assert ours[name] == theirs[name], name
    one, other = (json_lines(where / "metrics.jsonl") for where in (run, alone))
    assert [{**line, "seconds": 0} for line in one] == [{**line, "seconds": 0} for line in other]
    assert len(one) >= 6


@pytest.mark.parametrize("where", MOMENTS)
def test_killed_at_every_kind_of_moment(base, tmp_path, where):
    run = tmp_path / "run"
    for count in (1, 3):
        run_killed(command(base, run), where, count)
    assert run_killed(command(base, run)) in (0, 2), "finished now, or already before"
    assert_same_run(run, base / "alone")


@pytest.mark.parametrize(("where", "count"), [("rename", 1), ("rename", 2), ("manifest", 2), ("sweep", 1)])
def test_killed_while_a_finished_run_is_replaced(base, tmp_path, where, count):
    """A finished run is there at every moment, the old one or the new one, and in the end nothing else."""
    run = tmp_path / "run"
    shutil.copytree(base / "alone", run)
    assert run_killed([*command(base, run), "--force"], where, count) == -signal.SIGKILL
    assert is_finished(run) or is_finished(tmp_path / "run.replaced")
    assert run_killed([*command(base, run), "--force"]) == 0
    assert_same_run(run, base / "alone")
    assert list(tmp_path.iterdir()) == [run]


def stop_after(updates, action=None):
    """An `on_update` that interrupts a training, or acts, as its update number `updates` begins; and its calls."""
    calls = []

    def on_update(stage, update):
        calls.append((stage, update))
        if len(calls) == updates + 1:
            if action is None:
                raise KeyboardInterrupt
            action()

    return on_update, calls


def interrupted(base, run, updates=17):
    with pytest.raises(KeyboardInterrupt):
        train(recipe(base), run, cpu=True, on_update=stop_after(updates)[0])
    return run


def test_no_more_is_lost_than_since_the_last_checkpoint(base, tmp_path):
    for updates, redone in ((4, 4), (5, 0), (14, 2), (24, 0)):
        run = interrupted(base, tmp_path / f"after-{updates}", updates)
        on_update, calls = stop_after(99)
        train(recipe(base), run, cpu=True, on_update=on_update)
        assert len(calls) == 36 - updates + redone
        assert_same_run(run, base / "alone")


# --- the clock --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_as_soon_as_the_last_one_is_too_old(base, tmp_path, monkeypatch):
    saved = []
    original = checkpoints_module.CheckpointFolder.save
    monkeypatch.setattr(
        checkpoints_module.CheckpointFolder,
        "save",
        lambda self, stage, update, *rest: (saved.append((stage, update)), original(self, stage, update, *rest))[1],
    )
    train(recipe(base, "saving.every_updates=0", "saving.every_seconds=0"), tmp_path / "often", cpu=True)
    assert saved == [(stage, 1 + update) for stage in ("denoise", "order", "baseline") for update in range(12)]
    saved.clear()
    train(recipe(base, "saving.every_updates=0", "saving.every_seconds=3600"), tmp_path / "never", cpu=True)
    assert saved == []


# --- SIGTERM ----------------------------------------------------------------------------------------------------------


def test_sigterm_saves_and_exits_with_75(base, tmp_path):
    """Nothing is lost, not even since the last checkpoint, and one line says how to go on."""
    run, log = tmp_path / "run", tmp_path / "log"
    assert run_killed(command(base, run), "update", 20, signal.SIGTERM, log) == 75
    assert log.read_text().endswith(
        "\nunmask: stopped by SIGTERM; stage order is saved after update 8 of 12; the same command resumes there\n"
    )
    assert (run / "checkpoints" / "order-00000008").is_dir()
    assert run_killed(command(base, run)) == 0
    assert_same_run(run, base / "alone")


@pytest.mark.parametrize("ending", ["SIGTERM", "disk"])
def test_who_forced_a_run_is_told_to_go_on_without(base, tmp_path, monkeypatch, call, ending):
    """The very same command would start over."""

    def stop():
        if ending == "disk":
            raise OSError(28, "No space left on device")
        os.kill(os.getpid(), signal.SIGTERM)

    call_at_here(monkeypatch, stop)
    code, _, err = call(*command(base, tmp_path / "run"), "--force")
    assert code == (75 if ending == "SIGTERM" else 2)
    assert "the same command without --force" in err


def call_at_here(monkeypatch, action):
    """In this process, as the first checkpoint's tensors are written."""
    original = checkpoints_module.save_file
    monkeypatch.setattr(checkpoints_module, "save_file", lambda *arguments: (action(), original(*arguments))[1])


def test_stopped_in_this_process(base, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    on_update, calls = stop_after(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match="after update 3 of 12"):
        train(recipe(base), tmp_path / "run", cpu=True, on_update=on_update)
    assert len(calls) == 3
    assert signal.getsignal(signal.SIGTERM) is before
    train(recipe(base), tmp_path / "run", cpu=True)
    assert_same_run(tmp_path / "run", base / "alone")


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused(base, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    run.mkdir()
    with locked(run):
        assert run_killed(command(base, run), log=log) == 2
        expected = f"unmask: another process is training into {run}: wait for it, or give another --out\n"
        assert log.read_text() == expected
        assert list(run.iterdir()) == [run / "lock"]


def test_a_crash_leaves_no_lock_behind(base, tmp_path):
    """And a forced run replaces nobody who is at work."""
    run = tmp_path / "run"
    assert run_killed(command(base, run), "update", 3) == -signal.SIGKILL
    assert (run / "lock").exists(), "the file is there, but nobody holds it"
    before = contents(run)
    with locked(run), pytest.raises(RunFolderError, match="another process"):
        train(recipe(base), run, force=True, cpu=True)
    assert contents(run) == before
    assert run_killed(command(base, run)) == 0
    assert not (run / "lock").exists()


# --- bad disks --------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_costs_only_the_way_from_the_one_before(base, tmp_path, capsys):
    run = interrupted(base, tmp_path / "run", 23)
    path = run / "checkpoints" / "order-00000010" / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    capsys.readouterr()
    train(recipe(base), run, cpu=True)
    said = capsys.readouterr().err
    assert "order-00000010 is damaged (tensors.safetensors is not what was written)" in said
    assert "trying the one before it" in said
    assert_same_run(run, base / "alone")


def test_a_damaged_checkpoint_with_none_before_it_starts_the_stage_anew(base, tmp_path, capsys):
    run = interrupted(base, tmp_path / "run")
    for path in (run / "checkpoints").glob("order-*"):
        (path / "facts.json").unlink()
    capsys.readouterr()
    train(recipe(base), run, cpu=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "is damaged" in line]
    assert said[-1].endswith("none is left: the stage starts over")
    assert_same_run(run, base / "alone")


@pytest.mark.parametrize("where", ["checkpoint", "stage", "model"])
def test_a_disk_that_takes_nothing_more(base, tmp_path, monkeypatch, where):
    """The message says what failed; what was there is still good, and the run ends as it would have."""
    run, fault = tmp_path / "run", OSError(28, "No space left on device")

    def broken(*arguments, **options):
        raise fault

    def broken_at_the_end(folder, *names, **texts):
        if folder == run and "model.safetensors" in names:
            raise fault
        list_files(folder, *names, **texts)

    list_files = files.list_files
    module, name, mistake = {
        "checkpoint": (checkpoints_module, "save_file", broken),
        "stage": (order_model_module, "save_file", broken),
        "model": (files, "list_files", broken_at_the_end),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, mistake)
        with pytest.raises((CheckpointError, RunFolderError)) as caught:
            train(recipe(base), run, cpu=True)
    message = str(caught.value)
    assert fault.strerror in message
    assert "could not be written" in message
    assert "same command again" in message
    train(recipe(base), run, cpu=True)
    assert_same_run(run, base / "alone")


def test_a_run_folder_that_vanishes(base, tmp_path):
    run = tmp_path / "run"
    on_update, _ = stop_after(3, lambda: shutil.rmtree(run))
    with pytest.raises(CheckpointError, match=r"could not be written \(No such file or directory\)"):
        train(recipe(base), run, cpu=True, on_update=on_update)
    assert not run.exists()


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_line_that_a_crash_cut_off_is_written_again(base, tmp_path):
    run = interrupted(base, tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "order", "upd')
    train(recipe(base), run, cpu=True)
    assert_same_run(run, base / "alone")


def test_metrics_are_on_the_disk_before_a_stage_is_called_finished(base, tmp_path, monkeypatch):
    """Else a machine that goes down then would leave a gap."""
    done = []
    original, save_stage, finish = metrics_module.Metrics.sync, run_module.save_stage, run_module.finish
    monkeypatch.setattr(metrics_module.Metrics, "sync", lambda self: (done.append(self.path.name), original(self))[1])
    monkeypatch.setattr(run_module, "save_stage", lambda *a: (done.append("stage"), save_stage(*a))[1])
    monkeypatch.setattr(run_module, "finish", lambda *a: (done.append("finish"), finish(*a))[1])
    train(recipe(base, "saving.every_updates=0"), tmp_path / "run", cpu=True)
    assert done == [*["metrics.jsonl", "stage"] * 3, "metrics.jsonl", "finish"]


def test_damaged_metrics_cost_one_line_which_is_named(base, tmp_path, capsys):
    run = interrupted(base, tmp_path / "run")
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"update": 11', '"update": 10'))  # the second line
    train(recipe(base), run, cpu=True)
    assert f"{path}: line 2 is damaged and left out; the rest is kept" in capsys.readouterr().err
    ours, theirs = (
        [(line["stage"], line["update"]) for line in json_lines(where / "metrics.jsonl")]
        for where in (run, base / "alone")
    )
    assert ours == [theirs[0], *theirs[2:]]


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_another_recipe_is_refused_unless_the_change_is_allowed(base, tmp_path):
    run = interrupted(base, tmp_path / "run")
    before = contents(run)
    with pytest.raises(RunFolderError) as caught:
        train(recipe(base, "order.scorer_rate=5e-4", "seed=1"), run, cpu=True)
    message = str(caught.value)
    assert "order.scorer_rate = 0.0005 (was 0.001)" in message
    assert "seed = 1 (was 0)" in message
    assert "--allow-change" in message
    assert contents(run) == before
    train(recipe(base, "order.scorer_rate=5e-4"), run, cpu=True, allow_change=True)
    assert json.loads((run / "recipe.json").read_text())["order"]["scorer_rate"] == 5e-4
    assert (run / "changes.log").read_text() == "order.scorer_rate = 0.0005 (was 0.001)\n"
    ours, theirs = (contents(where)["model.safetensors"] for where in (run, base / "alone"))
    assert ours != theirs


def test_a_change_that_does_not_matter(base, tmp_path):
    run, changed = interrupted(base, tmp_path / "run"), recipe(base, "saving.every_updates=3", "evaluate.examples=7")
    train(changed, run, cpu=True)
    assert contents(run)["model.safetensors"] == contents(base / "alone")["model.safetensors"]
    assert json.loads((run / "recipe.json").read_text()) == json.loads(changed.to_json())


def test_smaller_micro_batches_may_go_on(base, tmp_path):
    """What to do when the memory is full must not need a second permission."""
    run = interrupted(base, tmp_path / "run")
    train(recipe(base, "denoise.accumulate=2", "order.accumulate=2"), run, cpu=True)
    ours, theirs = (load_file(where / "model.safetensors") for where in (run, base / "alone"))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-3
    assert not (run / "changes.log").exists()


UNFIT = {
    7: ["model.intermediate=32", "model.heads=1"],  # the shape of the denoiser, and what no shape shows
    13: ["model.width=32"],  # the denoiser of a finished stage
    17: ["model.selector.heads=1", "order.denoiser_rate=0"],  # what is trained
    25: ["order.selection=bernoulli"],  # the order of a finished stage
}


@pytest.mark.parametrize("updates", UNFIT)
def test_a_change_that_does_not_fit_costs_nothing(base, tmp_path, updates):
    """It is refused in one line before anything is written, and the original command resumes."""
    run = interrupted(base, tmp_path / "run", updates)
    before = contents(run)
    for override in UNFIT[updates]:
        with pytest.raises(UserError, match="give the recipe of the run, or --force to start over"):
            train(recipe(base, override), run, cpu=True, allow_change=True)
        assert contents(run) == before
    train(recipe(base), run, cpu=True)
    assert_same_run(run, base / "alone")


# --- one process, two precisions --------------------------------------------------------------------------------------


def test_two_precisions_in_one_process(base, tmp_path, monkeypatch):
    """Accelerate knows one precision a process; a training leaves it as it found it."""
    from accelerate import Accelerator

    monkeypatch.setattr("unmask.training.run.precision_on", lambda device, wanted: wanted)
    mine = Accelerator(cpu=True)
    short = ["denoise.updates=2", "order.updates=2"]
    plain = train(recipe(base, *short, "precision=no"), tmp_path / "plain", cpu=True)
    half = train(recipe(base, *short, "precision=bf16"), tmp_path / "half", cpu=True)
    again = train(recipe(base, *short, "precision=no"), tmp_path / "again", cpu=True)
    assert mine.mixed_precision == "no"
    one, two, other = (model.state_dict() for model in (plain, again, half))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
