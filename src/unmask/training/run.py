"""From a recipe to a run folder: up to three stages, each of which a crash may interrupt anywhere (`run_folder.py`)."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, broadcast_object_list, parse_flag_from_env

from unmask.errors import Stopped, UserError, require
from unmask.models.frozen import FrozenDenoiser
from unmask.models.order_model import ModelFolderError, OrderModel, OrderModelConfig, weights_hash
from unmask.own_code import source_of
from unmask.recipe import THRESHOLDS, DenoiseRecipe, OrderRecipe, Recipe, SelectorRecipe, continued, flat, not_continued
from unmask.runtime import precision_on, process_settings
from unmask.tasks.exact import EXACT, ExactDenoiser, check_exact
from unmask.tasks.task import Task
from unmask.training.block_diffusion import BlockDenoiseObjective
from unmask.training.build import build_model, check_vocabulary, task_of, without_order
from unmask.training.checkpoint import Checkpoint, CheckpointError, CheckpointFolder, read_checkpoint, warn
from unmask.training.checkpointer import Checkpointer, stop_signal
from unmask.training.compiled import compiled_networks
from unmask.training.expected_time import warn_of_time
from unmask.training.lo_arm import scored_objective
from unmask.training.loop import Rates, Stage, run_stage
from unmask.training.metrics import Metrics
from unmask.training.objectives import DenoiseObjective, OrderObjective
from unmask.training.run_folder import (
    RunFolderError,
    changes_in,
    finish,
    is_finished,
    locked,
    note_start,
    prepare,
    read_recipe,
    save_stage,
    store_recipe,
    sweep,
)
from unmask.training.self_posterior import SelfObjective
from unmask.training.tensors import copied, copy_into, whole
from unmask.variational.estimators import Baseline, LeaveOneOut, MovingAverage, NoBaseline

OnUpdate = Callable[[Stage, int], None]


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    denoiser: Any = None,
    force: bool = False,
    cpu: bool = False,
    allow_change: bool = False,
    on_update: OnUpdate = lambda stage, update: None,
) -> OrderModel:
    """Train what the recipe says into the folder `out` and return the model; an unfinished run there is resumed.

    denoiser: the one that `model.denoiser` names, where it is not to be read from that folder.  Any function will do:

        denoiser = unmask.load_denoiser(my_function, mask_token_id=103)  # logits = my_function(tokens, attention_mask)
        recipe = unmask.load_recipe("order-for-your-model", ["task.files=pairs.jsonl", "task.tokenizer=tokenizer.json"])
        model = unmask.train(recipe, "runs/order", denoiser=denoiser)

    on_update: called before every update.  Raises Stopped when SIGTERM came and the run was saved.
    """
    out, frozen = Path(out), recipe.model.denoiser
    recipe.check_start()
    for name in recipe.trackers:  # Accelerate passes over one that is not installed without a word
        require(find_spec(name) is not None, f"trackers: {name} is not installed; pip install {name}, or leave it out")
    if recipe.init and not Path(recipe.init).exists():  # told before the task is built, which may take minutes
        start = "give the run folder of a finished `unmask train`, or an SMDM .safetensors file"
        raise UserError(f"init = {recipe.init!r}: no such folder or file; {start}")
    if denoiser is None:
        check_denoiser_folder(recipe)
    elif not frozen:
        raise UserError("the recipe does not say that its denoiser is given: set model.denoiser to a name for it")
    task = task_of(recipe, Path(frozen).expanduser())
    if recipe.order is not None and recipe.order.reward and not task.has_checker:
        instead = "set task.checker, or leave it out" if hasattr(task, "checker") else "leave it out"
        raise UserError(f"order.reward needs a checker, and task {task.name} has none: {instead}")
    task.check()
    if denoiser is None and frozen == EXACT:
        denoiser = ExactDenoiser(task)
    with ExitStack() as stack:
        precision = precision_on("cpu" if cpu or not torch.accelerator.is_available() else "gpu", recipe.precision)
        stack.enter_context(process_settings(threads=recipe.threads, bf16=precision == "bf16"))
        accelerator = stack.enter_context(_accelerator(recipe, precision, out, cpu))
        check_sharding(recipe, accelerator.distributed_type)
        if recipe.order is not None and recipe.order.distinct:
            _check_distinct(task, recipe.order, accelerator.num_processes)
        # Weights, gradients and the two moments of Adam, which a GPU keeps in memory of its own.
        model = build_model(recipe, task, copies=4 if accelerator.device.type == "cpu" else 1, denoiser=denoiser)
        plain, changes = _continued_elsewhere(recipe, model), ""
        if accelerator.is_main_process:
            prepare(out, force)
            stack.enter_context(locked(out))
            changes = changes_in(recipe, out, allow_change)
            if not changes:
                store_recipe(recipe, out)
            if recipe.init:
                note_start(out, weights_hash(model.denoiser))
            if isinstance(model.denoiser, FrozenDenoiser):
                note_start(out, model.denoiser.fingerprint, same=True)
        accelerator.wait_for_everyone()
        stop = stack.enter_context(stop_signal())
        if recipe.trackers:
            values = flat(dataclasses.asdict(recipe))
            config = {key: value if isinstance(value, int | float) else str(value) for key, value in values.items()}
            accelerator.init_trackers("unmask", config)
            for tracker in accelerator.trackers:
                stack.callback(tracker.finish)
        try:
            return _Training(recipe, task, out, accelerator, stop, changes, on_update).run(model, plain)
        except Stopped as stopped:
            raise Stopped(f"{stopped}; the same command resumes there") from None


def check_denoiser_folder(recipe: Recipe) -> None:
    """What is not there is told before the task is built, which may take minutes."""
    named, folder = f"model.denoiser = {recipe.model.denoiser!r}", Path(recipe.model.denoiser).expanduser()
    if recipe.model.denoiser == EXACT:
        check_exact(str(recipe.task["name"]))
    if recipe.model.denoiser in ("", EXACT):
        return
    from_hub = "one of the hub comes here with `hf download NAME --local-dir FOLDER`"
    missing = f"{named}: no such folder; give that of a masked language model, or of a run; {from_hub}"
    require(folder.is_dir(), missing)
    if recipe.task.get("tokenizer") == "" and not (folder / "tokenizer.json").is_file():
        save = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        raise UserError(f"{named} has no tokenizer.json: write it with {save}, or set task.tokenizer")


def check_sharding(recipe: Recipe, distributed: DistributedType) -> None:
    """What runs until its own sequences are written runs further in some processes; those that share shards cannot."""
    order = recipe.order
    what = "" if order is None else "teacher" if order.teacher else "posterior" if order.posterior == "selector" else ""
    if what and distributed == DistributedType.FSDP:
        raise UserError(f"order.{what} needs the whole denoiser in every process: launch with DDP instead of FSDP")


class _Training:
    """The stages of a run.  What is finished is read from its folder, what is under way resumes from its checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        out: Path,
        accelerator: Accelerator,
        stop: threading.Event,
        changes: str,
        on_update: OnUpdate,
    ) -> None:
        self.changes = changes  # of the recipe, which is stored once what is trained already is known to fit it
        self.recipe, self.task, self.out, self.accelerator, self.on_update = recipe, task, out, accelerator, on_update
        self.compiled = recipe.compile and accelerator.device.type == "cuda"
        order = recipe.denoise.updates if recipe.denoise else 0
        first = {"denoise": 0, "order": order, "baseline": order + (recipe.order.updates if recipe.order else 0)}
        self.metrics = Metrics(out / "metrics.jsonl", accelerator.log if recipe.trackers else None, first)
        self.checkpoints = CheckpointFolder(out / "checkpoints", recipe.saving.keep)
        self.checkpoints.folder.mkdir(exist_ok=True)
        about = {"recipe": dataclasses.asdict(recipe)}
        writes = accelerator.is_main_process
        self.checkpointer = Checkpointer(self.checkpoints, recipe.saving, self.metrics, stop, about, writes)
        self.finished: list[str] = []

    def run(self, model: OrderModel, plain: OrderModel | None) -> OrderModel:
        """`model` is new, or what `init` has; `plain` is its denoiser, trained further by another run."""
        recipe, out, main = self.recipe, self.out, self.accelerator.is_main_process
        if (out / "config.json").exists():  # a crash came after the model was saved and before the rest was removed
            frozen = model.denoiser if isinstance(model.denoiser, FrozenDenoiser) else None
            model = OrderModel.from_pretrained(out, frozen).place(self.accelerator.device)
            if main:
                sweep(out)
            return model
        model.place(self.accelerator.device)
        if main:
            warn_of_time(recipe, model, self.task, self.accelerator.device, self.accelerator.mixed_precision)
        before = self._before(model)
        if recipe.order is not None and before is not None:
            if before is not model:
                model.denoiser.load_state_dict(before.denoiser.state_dict())
            adapters = dict(model.denoiser.adapters.items()) if isinstance(model.denoiser, FrozenDenoiser) else {}
            start = copied(adapters)
            self._order(model, recipe.order, out / "order" if recipe.is_joint else None)
            if recipe.is_joint and plain is not None:
                self._save(plain, out / "baseline")
            elif recipe.is_joint and not (out / "baseline").exists():
                learned = copied(adapters)
                if before is model:  # the same denoiser with other adapters, for the time of the baseline
                    before = without_order(model)
                    copy_into(adapters, start)
                self._denoise(Stage.BASELINE, before, continued(recipe))
                self._save(before, out / "baseline")
                copy_into(adapters, learned)
        for part in (part for part in model.eval().children() if not isinstance(part, FrozenDenoiser)):
            part.requires_grad_(True)
        if main:
            self._settle()
            self.metrics.sync()
            finish(model, out)
        self.accelerator.wait_for_everyone()
        return model

    def _before(self, model: OrderModel) -> OrderModel | None:
        """The plain denoiser, in RUN/denoiser if an order follows; without one, `model` itself has been trained."""
        recipe, folder = self.recipe, self.out / "denoiser"
        if recipe.model.denoiser:
            return model
        if recipe.order is not None and folder.exists():
            self.finished.append("denoise")
            before = OrderModel.from_pretrained(folder).to(self.accelerator.device)
            _check_fits(folder, before, model, ("vocab_size", "denoiser", "tied_head", "shift"))
            return before
        if recipe.denoise is not None:
            if recipe.init and self.accelerator.is_main_process:
                warn(f"trains the denoiser of {recipe.init} further for {recipe.denoise.updates} updates")
            self._denoise(Stage.DENOISE_FURTHER if recipe.init else Stage.DENOISE, model, recipe.denoise)
        if recipe.order is None:
            return None
        before = without_order(model).to(self.accelerator.device)
        self._save(before, folder)
        self.checkpoints.remove("denoise")
        return before

    def _order(self, model: OrderModel, how: OrderRecipe, folder: Path | None) -> None:
        """Learn the order.  It has a folder of its own if the baseline is still to come."""
        if folder is not None and folder.exists():
            frozen = model.denoiser if isinstance(model.denoiser, FrozenDenoiser) else None
            found = OrderModel.from_pretrained(folder, frozen)
            _check_fits(folder, found, model, [field.name for field in dataclasses.fields(OrderModelConfig)])
            model.load_state_dict(found.state_dict())
            self.finished.append("order")
            return
        seed, shared = self.recipe.seed, {"learn_denoiser": how.denoiser_rate > 0, "compile": self.compiled}
        objective: OrderObjective | SelfObjective
        if how.posterior == "selector":
            checker, temperature = self.task if how.reward else None, how.temperature
            least = how.least_budget or how.budget
            objective = SelfObjective(
                model, how.trajectories, least, seed, checker=checker, temperature=temperature, distinct=how.distinct,
                reference_weight=how.reference_weight, log_uniform=how.budgets_drawn == "log-uniform", **shared,
            )  # fmt: skip
        else:
            baselines: dict[str, Baseline] = {
                "leave-one-out": LeaveOneOut(),
                "none": NoBaseline(),
                "moving-average": MovingAverage(how.budget),
            }
            weight = how.kl_weight
            objective = scored_objective(model)(
                model, how.trajectories, baselines[how.baseline], seed, initial_kl_weight=weight, **shared
            )
        networks = {name: getattr(model, name) for name in ("denoiser", "selector", "scorer")}
        rates = {name: (part, getattr(how, f"{name}_rate")) for name, part in networks.items() if part is not None}
        self._stage(Stage.ORDER_FURTHER if how.from_init else Stage.ORDER, objective, rates, how)
        if folder is not None:
            self._save(model, folder)
            self.checkpoints.remove("order")

    def _denoise(self, stage: Stage, model: OrderModel, how: DenoiseRecipe) -> None:
        kind = BlockDenoiseObjective if model.block_size else DenoiseObjective
        objective = kind(model.denoiser, self.recipe.seed, self.compiled)
        self._stage(stage, objective, {"denoiser": (model.denoiser, how.learning_rate)}, how)

    def _stage(
        self,
        stage: Stage,
        objective: DenoiseObjective | OrderObjective | SelfObjective,
        rates: Rates,
        how: DenoiseRecipe | OrderRecipe,
    ) -> None:
        self.checkpointer.resume = self._checkpoint(stage.label)
        self.checkpointer.begun = lambda update: self._begun(stage.label, update)
        # FSDP2 turns the weights of a module into shards for good, so there it is a copy that is trained.
        sharded = self.accelerator.distributed_type == DistributedType.FSDP
        trained, trained_rates = copy.deepcopy((objective, rates)) if sharded else (objective, rates)

        def on_update(update: int) -> None:
            if isinstance(trained, OrderObjective):
                trained.begin_update(update / how.updates)
            self.on_update(stage, update)

        data = how, self.task, self.recipe.seed, self.accelerator, self.metrics
        with compiled_networks(trained, replay=not sharded) if self.compiled else nullcontext():
            run_stage(stage, trained, trained_rates, *data, on_update=on_update, checkpointer=self.checkpointer)
        if sharded:
            copy_into(dict(objective.named_parameters()), {n: whole(p) for n, p in trained.named_parameters()})
        self.finished.append(stage.label)

    def _checkpoint(self, stage: str) -> Checkpoint | None:
        """What the stage resumes from: the main process chooses, all read the same."""
        found = None
        if self.accelerator.is_main_process:
            found = self.checkpoints.newest(stage)
            if found is not None:
                _check_same_networks(found, stage, self.recipe)
        (chosen,) = broadcast_object_list([found.path.name if found else ""])
        return read_checkpoint(self.checkpoints.folder / chosen) if chosen and found is None else found

    def _begun(self, stage: str, update: int) -> None:
        """All that the run has trained fits the recipe: only now is anything in its folder changed."""
        if self.accelerator.is_main_process:
            self._settle()
            self.metrics.rewind(self.finished, stage, update)

    def _settle(self) -> None:
        if self.changes:
            store_recipe(self.recipe, self.out, self.changes)
            self.changes = ""

    def _save(self, model: OrderModel, folder: Path) -> None:
        if self.accelerator.is_main_process:
            self.metrics.sync()
            save_stage(model, folder)
        self.accelerator.wait_for_everyone()


def _check_fits(folder: Path, found: OrderModel, model: OrderModel, names: Sequence[str]) -> None:
    """What a stage left must have the networks that the recipe asks for, which may have been changed since."""
    for name in names:
        if getattr(found.config, name) != getattr(model.config, name):
            raise RunFolderError(
                f"{folder} has another {name} than the recipe: give the recipe of the run, or --force to start over"
            )


def _check_distinct(task: Task, order: OrderRecipe, processes: int) -> None:
    """Whether answers of a batch can be told apart at all: one prompt, and many more answers than sequences."""
    alone = "order.distinct compares what a process writes at once, which must be two sequences or more"
    require(order.batch >= 2 * order.accumulate * processes, f"{alone}: raise order.batch")
    some = task.examples(torch.arange(64), "train")
    given = some.attention_mask & ~some.response
    prompts = {tuple(row[kept].tolist()) for row, kept in zip(some.tokens, given, strict=True)}
    many = f"order.distinct is for answers to one prompt, and task {task.name} has many: leave it out"
    require(len(prompts) == 1, many)
    answers = math.inf if task.entropy is None else math.exp(task.entropy)
    few = f"task {task.name} has about {answers:,.0f} answers, not many more than a batch of {order.batch}"
    require(answers > 10 * order.batch, f"order.distinct: {few}: leave it out")


def _check_same_networks(found: Checkpoint, stage: str, recipe: Recipe) -> None:
    """As `_check_fits`, of a checkpoint: heads, for one, change a network and no shape."""
    was, now = flat(found.facts["recipe"]), flat(dataclasses.asdict(recipe))
    for key, usual in (("order.thresholds", THRESHOLDS), ("model.selector.drawn", SelectorRecipe.drawn)):
        was.setdefault(key, usual)  # of checkpoints from before they could be chosen
    order = [f"order.{name}" for name in ("selection", "prices", "start", "thresholds")]
    for key in [key for key in now if key.startswith("model.") and key != "model.label"] + order:
        used = stage == "order" or not key.startswith(("model.selector.", "model.scorer.", "order."))
        if used and _plain(was.get(key)) != _plain(now.get(key)):
            raise CheckpointError(
                f"checkpoint {found.path} does not fit the recipe ({key} was {was.get(key)!r}): "
                "give the recipe of the run, or --force to start over"
            )


def _plain(value: object) -> object:
    """As JSON has it, which knows no tuples."""
    return list(value) if isinstance(value, tuple) else value


@contextmanager
def _accelerator(recipe: Recipe, precision: str, out: Path, cpu: bool) -> Iterator[Accelerator]:
    """An Accelerator of this precision.

    Accelerate keeps one precision per process; ours is put in its place for the time of the training.
    """
    cpu = cpu or not torch.accelerator.is_available()  # else, on CPUs, it would know of no other processes
    shared, partial = AcceleratorState._shared_state, PartialState(cpu=cpu)._shared_state
    before, kind = dict(shared), partial["distributed_type"]
    shared.clear()
    try:
        accelerator = Accelerator(
            mixed_precision=precision, cpu=cpu, log_with=list(recipe.trackers) or None, project_dir=out
        )
        if accelerator.distributed_type == DistributedType.MULTI_CPU and parse_flag_from_env("ACCELERATE_USE_FSDP"):
            # Accelerate knows FSDP on accelerators only and would fall back to DDP without a word; gloo can do it.
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
            accelerator.state.distributed_type = partial["distributed_type"] = DistributedType.FSDP
        yield accelerator
    finally:
        shared.clear()
        shared.update(before)
        partial["distributed_type"] = kind


def _continued_elsewhere(recipe: Recipe, start: OrderModel) -> OrderModel | None:
    """The model that `order.continued` names: from the same weights, just what this run would have trained itself."""
    if recipe.order is None or not recipe.order.continued:
        return None
    folder = Path(recipe.order.continued)
    where = f"order.continued = {str(folder)!r}"
    if not is_finished(folder):
        raise UserError(f"{where} is no finished run: train it first, or leave it out")
    for key, has, needed in not_continued(read_recipe(folder), recipe):
        raise UserError(f"{where} has {key} = {has!r}, but beside this order it must be {needed!r}: train it so")
    model, noted = OrderModel.from_pretrained(folder), folder / "start.txt"
    same_weights = noted.exists() and noted.read_text(encoding="utf-8").strip() == weights_hash(start.denoiser)
    if not same_weights or model.config.denoiser != start.config.denoiser:
        raise UserError(f"{where} did not start from the denoiser of init = {recipe.init!r}: train it from there")
    return model


def load_task(folder: Path, trust_task: bool = False, denoiser: str | Path = "") -> tuple[Recipe, Task]:
    """The recipe of a run and the task that it names; where it names code of the user's own, only if `trust_task`.

    denoiser: see `task_of`.
    """
    recipe = read_recipe(folder)
    if recipe.own_code and not trust_task:
        name = recipe.own_code[0]
        raise RunFolderError(
            f"the recipe of {folder} names {name!r}, which would import {source_of(name)} and run its code: "
            "add --trust-task if you trust it"
        )
    return recipe, task_of(recipe, folder, denoiser)


def load_run(
    folder: Path, trust_task: bool = False, denoiser: Any = None, any_denoiser: bool = False
) -> tuple[OrderModel, OrderModel, Recipe, Task]:
    """The model of a finished run, the model whose denoiser the heuristics run on, the recipe and the task.

    The heuristics' denoiser is the model's own when the order was learned on frozen weights, else RUN/baseline.
    denoiser, any_denoiser: see `OrderModel.from_pretrained`.
    """
    if (folder / "checkpoints").exists():
        raise RunFolderError(
            f"{folder} is not finished: wait for its `unmask train`, or give that command again if it was interrupted"
        )
    if denoiser is None and (folder / "recipe.json").is_file() and read_recipe(folder).model.denoiser == EXACT:
        denoiser = ExactDenoiser(load_task(folder, trust_task)[1])
    model = OrderModel.from_pretrained(folder, denoiser, any_denoiser)
    lies = denoiser if isinstance(denoiser, str | Path) else getattr(model.config.denoiser, "folder", "")
    recipe, task = load_task(folder, trust_task, lies)
    check_vocabulary(model, task, str(folder))
    if not recipe.is_joint:
        return model, model, recipe, task
    try:
        return model, OrderModel.from_pretrained(folder / "baseline", denoiser, any_denoiser), recipe, task
    except ModelFolderError as error:
        raise RunFolderError(f"the plain denoiser of this run is gone: {error}") from None
