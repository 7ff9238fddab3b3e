"""From a recipe to a run folder, end to end on a tiny puzzle; and what happens to folders that are already there."""

import dataclasses
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from tests.training.small import TINY_RECIPE, contents, json_lines, same, weights
from unmask import files
from unmask.errors import UserError
from unmask.models.order_model import ModelFolderError, OrderModel
from unmask.recipe import ModelRecipe, continued, load_recipe
from unmask.training import run as run_module
from unmask.training.loop import NonFiniteError, Stage, run_stage
from unmask.training.metrics import Metrics
from unmask.training.objectives import DenoiseObjective
from unmask.training.run import RunFolderError, load_run, load_task, train

JOINT = ["order.denoiser_rate=1e-3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The tiny recipe, and runs of it that tests only read: frozen and joint."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.toml").write_text(TINY_RECIPE)
    train(load_recipe(folder / "tiny.toml"), folder / "frozen", cpu=True)
    train(load_recipe(folder / "tiny.toml", JOINT), folder / "joint", cpu=True)
    return folder


def recipe(base, *overrides):
    return load_recipe(base / "tiny.toml", overrides)


def without(recipe, **sections):
    return dataclasses.replace(recipe, **sections)


# --- the layout -------------------------------------------------------------------------------------------------------

MODEL_FILES = {"config.json", "model.safetensors", "tokenizer.json", "manifest.json"}


def test_layout_of_a_run(base):
    for name, parts in [("frozen", ["denoiser"]), ("joint", ["denoiser", "baseline"])]:
        expected = MODEL_FILES | {"recipe.json", "metrics.jsonl"}
        assert set(contents(base / name)) == expected | {f"{part}/{file}" for part in parts for file in MODEL_FILES}


def test_layout_without_an_order(base, tmp_path):
    (tmp_path / "plain").mkdir()  # an empty folder is free
    model = train(without(recipe(base), order=None), tmp_path / "plain", cpu=True)
    assert set(contents(tmp_path / "plain")) == MODEL_FILES | {"recipe.json", "metrics.jsonl"}
    assert model.selector is None
    assert model.scorer is None
    loaded, plain, _, _ = load_run(tmp_path / "plain")
    assert plain is loaded


def test_the_recipe_is_kept(base):
    for name, overrides in (("frozen", []), ("joint", JOINT)):
        expected = load_recipe(base / "tiny.toml", overrides)
        found, task = load_task(base / name)
        assert found == expected
        assert (task.name, task.length) == ("groups", 4)


def test_metrics_tell_the_stages_apart(base):
    frozen, joint = (json_lines(base / name / "metrics.jsonl") for name in ("frozen", "joint"))
    assert [line["stage"] for line in frozen] == ["denoise"] * 2 + ["order"] * 2
    assert [line["stage"] for line in joint] == ["denoise"] * 2 + ["order"] * 2 + ["baseline"] * 2
    assert {tuple(line["gradient_norm"]) for line in frozen if line["stage"] == "order"} == {("selector", "scorer")}


def test_the_model_carries_the_order_of_the_recipe(base):
    model = OrderModel.from_pretrained(base / "frozen")
    assert model.selector.budget == 2
    assert (model.config.selection, model.config.tau) == ("nonempty", 0.1)
    assert (model.config.denoiser.width, model.config.selector.width, model.config.scorer.width) == (16, 8, 8)
    assert model.config.selector.positions == 4
    assert model.denoiser.mask_token_id == 3
    assert model.tokenizer.encode("a c b").ids == [0, 2, 1]


# --- which denoiser is which ------------------------------------------------------------------------------------------


def test_frozen_the_denoiser_before_is_the_denoiser_after(base):
    before = OrderModel.from_pretrained(base / "frozen" / "denoiser")
    model, plain, _, _ = load_run(base / "frozen")
    assert before.selector is None
    assert same(weights(before.denoiser), weights(model.denoiser))
    assert plain is model, "the heuristics run on those very weights"


def test_joint_the_heuristics_get_the_baseline(base):
    before = OrderModel.from_pretrained(base / "joint" / "denoiser")
    baseline = OrderModel.from_pretrained(base / "joint" / "baseline")
    model, plain, _, _ = load_run(base / "joint")
    assert same(weights(plain.denoiser), weights(baseline.denoiser))
    assert not same(weights(plain.denoiser), weights(model.denoiser)), "not the denoiser that the order changed"
    assert not same(weights(plain.denoiser), weights(before.denoiser)), "it was trained on"
    assert not same(weights(model.denoiser), weights(before.denoiser))


def test_the_baseline_trains_as_many_updates_on_as_many_sequences(base):
    joint = recipe(base, *JOINT, "order.updates=7", "order.accumulate=2", "denoise.learning_rate=5e-3")
    plain = continued(joint)
    assert (plain.updates, plain.batch) == (7, 4 * 2), "updates, and batch times trajectories"
    assert (plain.accumulate, plain.learning_rate, plain.warmup) == (2, 5e-3, 1)


def test_without_a_denoise_section_the_baseline_learns_as_the_denoiser_does_beside_the_order(base):
    settings = {"warmup": 2, "final_rate": 0.5, "weight_decay": 0.1, "clip": 3.0, "ema": 0.7, "on_collapse": "restore"}
    overrides = [f"order.{key}={value}" for key, value in settings.items()]
    plain = continued(without(recipe(base, *JOINT, "init=runs/earlier", *overrides), denoise=None))
    assert {key: getattr(plain, key) for key in settings} == settings


def test_the_baseline_is_the_denoiser_before_trained_on(base, tmp_path):
    """The saved denoiser, plainly trained as `continued` says, gives the saved baseline bit for bit."""
    joint, task = load_task(base / "joint")
    before = OrderModel.from_pretrained(base / "joint" / "denoiser")
    how = continued(joint)
    rates = {"denoiser": (before.denoiser, how.learning_rate)}
    objective = DenoiseObjective(before.denoiser, joint.seed)
    metrics = Metrics(tmp_path / "metrics.jsonl")
    run_stage(Stage.BASELINE, objective, rates, how, task, joint.seed, Accelerator(cpu=True), metrics)
    baseline = OrderModel.from_pretrained(base / "joint" / "baseline")
    assert same(weights(before), weights(baseline))


def test_the_stages_that_are_run(base, tmp_path, monkeypatch):
    stages = []

    def spy(stage, objective, rates, how, *rest, **hook):
        stages.append((stage, how.updates * how.batch, {key: rate for key, (_, rate) in rates.items()}))
        return run_stage(stage, objective, rates, how, *rest, **hook)

    monkeypatch.setattr(run_module, "run_stage", spy)
    train(recipe(base, "order.denoiser_rate=2e-4", "order.scorer_rate=3e-3"), tmp_path / "run", cpu=True)
    assert stages == [
        (Stage.DENOISE, 3 * 8, {"denoiser": 1e-3}),
        (Stage.ORDER, 3 * 4, {"denoiser": 2e-4, "selector": 1e-3, "scorer": 3e-3}),
        (Stage.BASELINE, 3 * 4 * 2, {"denoiser": 1e-3}),
    ]


# --- a baseline that another run has trained --------------------------------------------------------------------------

PLAIN = ["denoise.batch=8", "denoise.learning_rate=1e-4"]
ALONG = ["order.denoiser_rate=1e-4"]


@pytest.fixture(scope="module")
def shared(base):
    """The frozen run's denoiser, plainly trained on by a run of its own."""
    plain = without(recipe(base, *PLAIN, f"init={base / 'frozen'}"), order=None)
    train(plain, base / "continued", cpu=True)
    return base / "continued"


def joint_beside(base, continued, *overrides):
    return load_recipe(
        order_only(base), [f"init={base / 'frozen'}", f"order.continued={continued}", *ALONG, *overrides]
    )


def order_only(base):
    path = base / "order.toml"
    head, _, rest = TINY_RECIPE.partition("[denoise]")
    shape = "width = 16\nlayers = 1\nheads = 2\nintermediate = 16\nabsolute_positions = true\n"
    path.write_text(head.replace(shape, "") + rest[rest.index("[order]") :])
    return path


def test_a_baseline_that_another_run_has_trained(base, shared, tmp_path):
    stages = set()
    wanted = joint_beside(base, shared, "seed=1")
    train(wanted, tmp_path / "run", cpu=True, on_update=lambda stage, update: stages.add(stage))
    _, plain, _, _ = load_run(tmp_path / "run")
    assert same(weights(plain), weights(OrderModel.from_pretrained(shared)))
    assert stages == {Stage.ORDER}


UNFIT = [
    (["order.updates=4"], "has denoise.updates = 3, but beside this order it must be 4"),
    (["order.trajectories=4"], "has denoise.batch = 8, but beside this order it must be 16"),
    (["task.seed=1"], "has task.seed = 0, but beside this order it must be 1"),
    (["init={base}/joint"], "did not start from the denoiser of init = "),
    (["order.continued={base}/nothing"], "nothing' is no finished run: train it first"),
]


def test_a_baseline_that_is_not_what_the_run_would_have_trained(base, shared, tmp_path):
    for overrides, expected in UNFIT:
        unfit = joint_beside(base, shared, *(override.format(base=base) for override in overrides))
        with pytest.raises(UserError, match=re.escape(expected)):
            train(unfit, tmp_path / "run", cpu=True)
        assert not (tmp_path / "run").exists()


def test_an_unfinished_or_retrained_baseline_is_not_taken(base, shared, tmp_path):
    unfinished = shutil.copytree(shared, tmp_path / "unfinished")
    (unfinished / "checkpoints").mkdir()
    with pytest.raises(UserError, match="is no finished run"):
        train(joint_beside(base, unfinished), tmp_path / "run", cpu=True)
    start = shutil.copytree(base / "frozen", tmp_path / "start")
    train(without(recipe(base, *PLAIN, f"init={start}"), order=None), tmp_path / "plain", cpu=True)
    shutil.rmtree(start)
    shutil.copytree(base / "joint", start)  # another denoiser at the same place
    with pytest.raises(UserError, match="did not start from the denoiser of init"):
        train(joint_beside(base, tmp_path / "plain", f"init={start}"), tmp_path / "run", cpu=True)


def test_where_a_shared_baseline_makes_no_sense(base):
    with pytest.raises(UserError, match="continued is for denoiser_rate > 0"):
        load_recipe(order_only(base), ["init=runs/x", "order.continued=runs/y"])
    with pytest.raises(UserError, match="leave \\[denoise\\] out"):
        recipe(base, *JOINT, "order.continued=runs/y")


# --- repeatability and variants ---------------------------------------------------------------------------------------


def test_same_recipe_same_bits(base, tmp_path):
    torch.manual_seed(123)  # the global state is nobody's business
    train(recipe(base, *JOINT), tmp_path / "again", cpu=True)
    for part in (".", "denoiser", "baseline"):
        first = (base / "joint" / part / "model.safetensors").read_bytes()
        assert first == (tmp_path / "again" / part / "model.safetensors").read_bytes()


def test_what_train_returns_is_what_it_saved(base, tmp_path):
    model = train(recipe(base, "seed=1"), tmp_path / "run", cpu=True)
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert same(weights(model), weights(OrderModel.from_pretrained(tmp_path / "run")))
    assert not same(weights(model), weights(OrderModel.from_pretrained(base / "frozen"))), "another seed, another run"


@pytest.mark.parametrize(
    "overrides",
    [
        ["order.selection=bernoulli", "order.baseline=none", "order.trajectories=1"],
        ["order.denoiser_rate=1e-3", "order.ema=0.5", "order.accumulate=2"],
        ["order.budget=9", "model.absolute_positions=false"],  # more steps than positions: trajectories end early
        ["order.selector_rate=0"],
    ],
    ids=" ".join,
)
def test_variants_run(base, tmp_path, overrides):
    wanted = recipe(base, *overrides)
    train(wanted, tmp_path / "run", cpu=True)
    model, plain, _, _ = load_run(tmp_path / "run")
    assert model.config.selection == wanted.order.selection
    assert model.selector.budget == wanted.order.budget
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    assert (plain is model) == (wanted.order.denoiser_rate == 0)


def test_the_baseline_of_the_recipe_is_used(base, tmp_path):
    """After three updates, the scorer has gone another way than with leave-one-out."""
    leave_one_out = OrderModel.from_pretrained(base / "frozen")
    for baseline in ("none", "moving-average"):
        model = train(recipe(base, f"order.baseline={baseline}"), tmp_path / baseline, cpu=True)
        assert not same(weights(model.scorer), weights(leave_one_out.scorer))


@pytest.fixture
def fresh_accelerate():
    """Accelerate keeps one precision a process; these tests want their own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_bf16_autocast(base, tmp_path, monkeypatch):
    """The weights stay float32, and the run differs from the full-precision one."""
    monkeypatch.setattr("unmask.training.run.precision_on", lambda device, wanted: wanted)
    model = train(recipe(base, "precision=bf16", "order.ema=0.5", *JOINT), tmp_path / "run", cpu=True)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    assert not same(weights(model), weights(OrderModel.from_pretrained(base / "joint")))
    load_run(tmp_path / "run")


# --- init -------------------------------------------------------------------------------------------------------------


def test_an_order_for_an_earlier_denoiser(base, tmp_path):
    """No [model] and no [denoise]: the denoiser is that of the earlier run, to the last bit."""
    wanted = without(recipe(base, f"init={base / 'joint'}"), model=ModelRecipe(), denoise=None)
    train(wanted, tmp_path / "run", cpu=True)
    earlier = OrderModel.from_pretrained(base / "joint")
    model, plain, _, _ = load_run(tmp_path / "run")
    assert same(weights(model.denoiser), weights(earlier.denoiser))
    assert plain is model
    assert not same(weights(model.scorer), weights(earlier.scorer)), "the order is learned anew"
    assert [line["stage"] for line in json_lines(tmp_path / "run" / "metrics.jsonl")] == ["order"] * 2


def test_an_earlier_order_trained_further(base, tmp_path, monkeypatch):
    """Selector and scorer start as those of the earlier run, at another T too, and see other examples."""
    started = {}

    def spy(stage, objective, *rest, **hook):
        started[stage] = weights(objective.model)

    monkeypatch.setattr(run_module, "run_stage", spy)
    overrides = [f"init={base / 'frozen'}", "order.from_init=true", "order.budget=3", "order.tau=0.2"]
    model = train(load_recipe(order_only(base), overrides), tmp_path / "run", cpu=True)
    assert list(started) == [Stage.ORDER_FURTHER]
    assert same(started[Stage.ORDER_FURTHER], weights(OrderModel.from_pretrained(base / "frozen")))
    assert (model.selector.budget, model.config.tau) == (3, 0.2)


def test_an_order_that_is_taught(base, tmp_path):
    """A held scorer says nothing beside its teacher, the selector comes to follow it, and goes on without one."""
    taught = ["order.teacher=threshold:0.9", "order.scorer_rate=0", "order.selector_rate=0.01", "order.updates=100"]
    wanted = load_recipe(order_only(base), [f"init={base / 'frozen'}", *taught])
    model = train(wanted, tmp_path / "run", cpu=True)
    assert model.config.teacher == "threshold:0.9"
    assert (model.scorer.out.weight == 0).all()
    kl = [line["order_kl"] for line in json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert kl[-1] < 0.5 * kl[0]
    assert OrderModel.from_pretrained(tmp_path / "run").config == model.config
    options = [f"init={tmp_path / 'run'}", "order.posterior=selector", "order.from_init=true", "order.updates=1"]
    own = train(load_recipe(order_only(base), [*options, "order.selector_rate=1e-9"]), tmp_path / "own", cpu=True)
    assert own.scorer is None
    for name, weight in own.selector.state_dict().items():
        assert torch.allclose(weight, model.selector.state_dict()[name], atol=1e-6), (
            "it goes on from what it was taught"
        )


NO_ORDER_TO_TRAIN = [
    (["init={base}/frozen/denoiser"], "has no order to train further"),
    (["init={base}/frozen", "model.selector.heads=1"], "has a selector with heads = 2, the recipe says 1"),
    (["init={base}/frozen", "order.teacher=factor:1"], "was taught by no rule: set order.teacher = ''"),
]


def test_an_order_that_cannot_be_trained_further(base, tmp_path):
    for overrides, expected in NO_ORDER_TO_TRAIN:
        overrides = [override.format(base=base) for override in overrides]
        with pytest.raises(UserError, match=re.escape(expected)):
            train(load_recipe(order_only(base), [*overrides, "order.from_init=true"]), tmp_path / "run", cpu=True)
        assert not (tmp_path / "run").exists()
        with pytest.raises(UserError, match=r"set init to its run, and leave \[denoise\] out"):
            recipe(base, f"init={base / 'frozen'}", "order.from_init=true")


def test_an_order_of_a_scorer_as_the_start_of_one_without(base, tmp_path):
    options = [f"init={base / 'frozen'}", "order.posterior=selector", "order.from_init=true"]
    options += ["order.updates=1", "order.selector_rate=1e-9"]
    model = train(load_recipe(order_only(base), options), tmp_path / "run", cpu=True)
    assert model.scorer is None
    earlier = OrderModel.from_pretrained(base / "frozen").selector
    for name, weight in model.selector.state_dict().items():
        assert torch.allclose(weight, earlier.state_dict()[name], atol=1e-6)


def test_an_earlier_denoiser_trained_further(base, tmp_path, capsys):
    """On other examples than those that it was first trained on, and not without a word."""
    stages = set()
    wanted = without(recipe(base, f"init={base / 'frozen'}"), model=ModelRecipe(), order=None)
    model = train(wanted, tmp_path / "run", cpu=True, on_update=lambda stage, update: stages.add(stage))
    assert stages == {Stage.DENOISE_FURTHER}
    said = f"unmask: trains the denoiser of {base / 'frozen'} further for 3 updates"
    assert capsys.readouterr().err.splitlines()[0] == said
    assert not same(weights(model.denoiser), weights(OrderModel.from_pretrained(base / "frozen").denoiser))
    assert model.selector is None


def test_a_start_that_does_not_fit(base, tmp_path):
    for overrides, said in [
        (["init={base}/frozen", "model.width=32"], "has width 16, but the recipe's [model] says 32"),
        (["init={base}/frozen", "task.symbols=5"], "knows 3 tokens, but task groups has 5"),
        (["init=nowhere"], "init = 'nowhere': no such folder or file"),
        (["init={base}/frozen", "task.groups=3"], "sequences of 6 tokens, longer than the model's context of 4"),
        (["model.max_length=3"], "longer than the model's context of 3: raise model.max_length"),
    ]:
        with pytest.raises(UserError, match=re.escape(said)):
            train(recipe(base, *(override.format(base=base) for override in overrides)), tmp_path / "run", cpu=True)
        assert not (tmp_path / "run").exists()


# --- folders that are already there -----------------------------------------------------------------------------------


def finished(base, tmp_path):
    return Path(shutil.copytree(base / "frozen", tmp_path / "run"))


def test_an_existing_run_is_never_touched_without_force(base, tmp_path):
    folder = finished(base, tmp_path)
    (folder / "results.jsonl").write_text("precious\n")
    before = contents(folder)
    with pytest.raises(RunFolderError) as caught:
        train(recipe(base, "seed=1"), folder, cpu=True)
    message = str(caught.value)
    assert str(folder) in message
    assert "--force" in message
    assert contents(folder) == before


def test_force_replaces_a_run_whole(base, tmp_path):
    folder = finished(base, tmp_path)
    (folder / "results.jsonl").write_text("of the old model\n")
    train(without(recipe(base, "seed=1"), order=None), folder, force=True, cpu=True)
    assert set(contents(folder)) == MODEL_FILES | {"recipe.json", "metrics.jsonl"}
    assert load_task(folder)[0].seed == 1


@pytest.mark.parametrize("name", ["thesis.tex", "manifest.json"])
def test_force_replaces_nothing_but_runs(base, tmp_path, name):
    """A run is known by its manifest; a file of that name may be anybody's."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / name).write_text("years of work")
    with pytest.raises(RunFolderError, match="not a run folder"):
        train(recipe(base), folder, force=True, cpu=True)
    assert contents(folder) == {name: b"years of work"}


@pytest.mark.parametrize("name", ["denoiser/mine.safetensors", "link.json"])
@pytest.mark.parametrize("where", ["run", "run.replaced"])
def test_force_deletes_no_file_of_anybody_else(base, tmp_path, name, where):
    finished(base, tmp_path)
    if where == "run.replaced":  # as an interrupted --force leaves it
        shutil.copytree(tmp_path / "run", tmp_path / "run.replaced")
        files.write_manifest(tmp_path / "run.replaced", {}, replaced="run")
    mine = tmp_path / where / name
    mine.parent.mkdir(exist_ok=True)
    mine.symlink_to(tmp_path / "run" / "recipe.json") if name == "link.json" else mine.write_text("years of work")
    before = contents(tmp_path)
    with pytest.raises(RunFolderError, match="move it away") as caught:
        train(recipe(base), tmp_path / "run", force=True, cpu=True)
    assert str(mine if where == "run" else tmp_path / where) in str(caught.value)
    assert contents(tmp_path) == before


def test_a_run_that_is_called_replaced_is_no_spare(base, tmp_path):
    """Only what --force put aside goes when the new run is finished, and a refused command changes nothing."""
    shutil.copytree(base / "frozen", tmp_path / "run.replaced")
    kept = contents(tmp_path / "run.replaced")
    train(recipe(base), tmp_path / "run", cpu=True)
    for force in (False, True):
        with pytest.raises(RunFolderError):
            train(recipe(base), tmp_path / "run", force=force, cpu=True)
    assert contents(tmp_path / "run.replaced") == kept


def test_what_others_put_among_the_checkpoints_is_kept(base, tmp_path, monkeypatch):
    """Of those that are pruned, and of those that go with their folder when the run is finished."""
    original = run_module.CheckpointFolder.save

    def save(self, stage, update, *rest):
        path = original(self, stage, update, *rest)
        (path / "notes.txt").write_text(path.name)
        return path

    monkeypatch.setattr(run_module.CheckpointFolder, "save", save)
    train(recipe(base, "saving.every_updates=1", "saving.keep=1"), tmp_path / "run", cpu=True)
    found = {name: data for name, data in contents(tmp_path / "run").items() if name.endswith("notes.txt")}
    assert sorted(found.values()) == [
        f"{stage}-0000000{n}".encode() for stage in ("denoise", "order") for n in (1, 2, 3)
    ]
    load_run(tmp_path / "run")


def interrupt(stage, update):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_nothing_is_written_through_a_link_that_leads_out(base, tmp_path, name):
    with pytest.raises(KeyboardInterrupt):
        train(recipe(base), tmp_path / "run", cpu=True, on_update=interrupt)
    outside = tmp_path / "outside"
    (outside / "checkpoints").mkdir(parents=True)
    (outside / "metrics.jsonl").write_text("mine")
    if (tmp_path / "run" / name).is_dir():
        (tmp_path / "run" / name).rmdir()
    (tmp_path / "run" / name).symlink_to(outside / name)
    before = contents(outside)
    with pytest.raises(RunFolderError, match=f"{name} is a link that leads out of the run: take it away"):
        train(recipe(base), tmp_path / "run", cpu=True)
    assert contents(outside) == before


def test_a_file_in_the_way(base, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunFolderError, match="is a file"):
        train(recipe(base), tmp_path / "run", force=True, cpu=True)
    assert (tmp_path / "run").read_text() == "a file"


def test_a_recipe_that_fails_costs_nobody_a_run(base, tmp_path):
    """Even with --force: the old run goes only once the new one can start."""
    folder = finished(base, tmp_path)
    before = contents(folder)
    for override in ("task.symbols=1", "model.heads=3", "model.selector.width=7", "init=nowhere"):
        with pytest.raises(UserError):
            train(recipe(base, override), folder, force=True, cpu=True)
        assert contents(folder) == before


# --- runs that cannot be read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["config.json", "recipe.json"])
def test_a_half_written_run_is_refused(base, tmp_path, missing):
    folder = finished(base, tmp_path)
    (folder / missing).unlink()
    with pytest.raises((ModelFolderError, RunFolderError)) as caught:
        load_run(folder)
    message = str(caught.value)
    assert missing in message
    assert "missing" in message
    assert "from a copy" in message, "what to do"


def test_a_joint_run_without_its_baseline_is_refused(base, tmp_path):
    shutil.copytree(base / "joint", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "baseline")
    with pytest.raises(RunFolderError, match="plain denoiser of this run is gone"):
        load_run(tmp_path / "run")


def test_an_interrupted_run_is_unfinished_and_can_be_replaced(base, tmp_path):
    def in_the_order(stage, update):
        if stage == Stage.ORDER:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe(base), tmp_path / "run", cpu=True, on_update=in_the_order)
    with pytest.raises(RunFolderError, match=r"run is not finished: wait for its `unmask train`, or give that command"):
        load_run(tmp_path / "run")
    train(recipe(base), tmp_path / "run", force=True, cpu=True)
    load_run(tmp_path / "run")
    assert contents(tmp_path / "run").keys() == contents(base / "frozen").keys()


def relisted(path, text):
    """As another version may write it: the manifest agrees."""
    files.write_listed(path.parent, path.name, text)


def unreadable(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_text("{"), "recipe.json is damaged (it is not what was written)"),
        (lambda path: relisted(path, "{"), "recipe.json is damaged"),
        (lambda path: relisted(path, "[" * 5_000), "recipe.json is damaged (nested too deeply)"),
        (lambda path: relisted(path, "[]"), "recipe.json does not fit this version"),
        (lambda path: relisted(path, '{"task": {"name": "groups"}, "new": 1}'), "unknown key 'new'"),
        (unreadable, "recipe.json cannot be read (Is a directory): mend that"),
        (
            lambda path: relisted(path, path.read_text().replace('"groups"', '"gone_module:Gone"', 1)),
            "task 'gone_module:Gone' cannot be imported: No module named 'gone_module'",
        ),
    ],
)
def test_a_recipe_that_cannot_be_used_says_why(base, tmp_path, spoil, said):
    """And never advises to train again, which could cost the run."""
    folder = finished(base, tmp_path)
    spoil(folder / "recipe.json")
    with pytest.raises(UserError) as caught:
        load_run(folder, trust_task=True)
    assert said in str(caught.value)
    assert "again" not in str(caught.value) or "same command again" in str(caught.value)


# --- a loss that is not finite ----------------------------------------------------------------------------------------


def not_finite_from(patch, cls, first):
    """The loss of an objective, from its call number `first` on."""
    original, calls = cls.forward, []

    def forward(self, *arguments):
        calls.append(0)
        outcome = original(self, *arguments)
        return outcome._replace(loss=outcome.loss * math.nan) if len(calls) >= first else outcome

    patch.setattr(cls, "forward", forward)


def test_the_state_before_is_what_is_resumed(base, tmp_path, monkeypatch):
    """Though checkpoints were written while updates were skipped."""
    folder, often = tmp_path / "run", ["denoise.updates=12", "denoise.max_bad=5", "saving.every_updates=1"]
    with monkeypatch.context() as patch:
        not_finite_from(patch, run_module.DenoiseObjective, 3)
        with pytest.raises(NonFiniteError, match="the state before update 2 is saved"):
            train(recipe(base, *often), folder, cpu=True)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["denoise-00000002"]
    one, other = (train(recipe(base, *often), where, cpu=True) for where in (folder, tmp_path / "alone"))
    assert same(weights(one), weights(other))


@pytest.mark.parametrize(("bad_stage", "objective"), [("denoise", "DenoiseObjective"), ("order", "OrderObjective")])
def test_a_loss_that_is_not_finite_saves_the_state_before(base, tmp_path, monkeypatch, bad_stage, objective):
    """And the run goes on from there to where it would have come without, once the cause is mended."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        not_finite_from(patch, getattr(run_module, objective), 2)
        with pytest.raises(NonFiniteError) as caught:
            train(recipe(base, *JOINT, f"{bad_stage}.max_bad=2"), folder, cpu=True)
    message = str(caught.value)
    assert f"{bad_stage}, update 2: loss, gradient of the denoiser" in message
    assert "the state before update 1 is saved" in message
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"{bad_stage}-00000001"]
    with pytest.raises(RunFolderError):
        load_run(folder)
    train(recipe(base, *JOINT, f"{bad_stage}.max_bad=2"), folder, cpu=True)
    for part in (".", "baseline"):
        one, other = (OrderModel.from_pretrained(where / part) for where in (folder, base / "joint"))
        assert same(weights(one), weights(other))
    assert not any("event" in line for line in json_lines(folder / "metrics.jsonl"))


def test_a_finished_run_is_replaced_only_by_a_finished_one(base, tmp_path):
    """--force, then Ctrl-C: the old run is still there, beside the unfinished one, until that is finished."""
    folder = tmp_path / "run"
    shutil.copytree(base / "frozen", folder)
    old = weights(OrderModel.from_pretrained(folder))

    for _ in range(2):  # the second one replaces the unfinished one
        with pytest.raises(KeyboardInterrupt):
            train(recipe(base), folder, force=True, cpu=True, on_update=interrupt)
    assert same(weights(OrderModel.from_pretrained(tmp_path / "run.replaced")), old)
    train(recipe(base), folder, cpu=True)
    assert not (tmp_path / "run.replaced").exists()
    assert OrderModel.from_pretrained(folder).selector is not None


def test_weights_that_are_not_finite_are_never_a_finished_model(base, tmp_path, monkeypatch, capsys):
    """They overflow in the first of three updates, so the last two are skipped: fewer than max_bad."""
    original, calls = run_module.DenoiseObjective.forward, []

    def forward(self, *arguments):
        calls.append(0)
        if len(calls) == 2:
            next(self.parameters()).data.fill_(math.inf)
        return original(self, *arguments)

    monkeypatch.setattr(run_module.DenoiseObjective, "forward", forward)
    with pytest.raises(NonFiniteError, match="denoise: the weights are not finite after the last update"):
        train(recipe(base, "denoise.max_bad=5", "saving.every_updates=1"), tmp_path / "run", cpu=True)
    assert capsys.readouterr().err.count("skipped") == 2, "and the run went on"
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(RunFolderError, match="is not finished"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("when", ["save_stage", "finish"])
def test_a_folder_that_is_gone_does_not_come_back_with_a_model_alone(base, tmp_path, monkeypatch, when):
    folder, original = tmp_path / "run", getattr(run_module, when)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, when, lambda *rest: (shutil.rmtree(folder), original(*rest)))
        with pytest.raises(RunFolderError, match="the same command"):
            train(recipe(base), folder, cpu=True)
    assert not folder.exists()


def test_a_folder_beside_a_run_that_is_no_run_is_left_alone(base, tmp_path):
    (tmp_path / "run.replaced").mkdir()
    (tmp_path / "run.replaced" / "thesis.txt").write_text("all of it")
    train(recipe(base), tmp_path / "run", cpu=True)
    assert contents(tmp_path / "run.replaced") == {"thesis.txt": b"all of it"}
    with pytest.raises(RunFolderError, match="is not a run"):
        train(recipe(base), tmp_path / "run", force=True, cpu=True)
    assert contents(tmp_path / "run.replaced") == {"thesis.txt": b"all of it"}
    load_run(tmp_path / "run")


# --- trackers ---------------------------------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="trackers: wandb is not installed; pip install wandb, or leave it out"):
        train(recipe(base, 'trackers=["wandb"]'), tmp_path / "run", cpu=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="must be tensorboard or wandb or trackio, got 'wandbe'"):
        recipe(base, 'trackers=["wandbe"]')


def test_trackers_are_told_the_recipe_and_every_metric(base, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(run_module, "find_spec", lambda name: True)
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, project, config: told.append((project, config)))
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: told.append((step, values)))
    train(recipe(base, *JOINT, 'trackers=["tensorboard"]'), tmp_path / "run", cpu=True)
    (project, config), *steps = told
    assert project == "unmask"
    assert config["order.budget"] == 2
    assert config["task.name"] == "groups"
    assert [step for step, _ in steps] == [0, 2, 3, 5, 6, 8], "over all stages, as wandb wants them"
    lines = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert steps[-1][1]["baseline/loss"] == lines[-1]["loss"]
    assert steps[2][1]["order/gradient_norm/scorer"] == lines[2]["gradient_norm"]["scorer"]
