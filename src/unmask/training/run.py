"""From a recipe to a run folder: up to three stages, each of which a crash may interrupt anywhere (`folder.py`)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
    parse_flag_from_env,
)

from unmask.errors import UserError
from unmask.models.backbone import SIZES, BackboneConfig
from unmask.models.importers.causal import adapt_causal
from unmask.models.importers.pretrained import load_causal, load_tokenizer
from unmask.models.importers.smdm import load_smdm
from unmask.models.importers.vocabulary import vocabulary_of
from unmask.models.networks import SelectorConfig
from unmask.models.order_model import (
    ModelFolderError,
    OrderModel,
    OrderModelConfig,
    check_memory,
    weights_hash,
    with_mask_token,
    word_level_tokenizer,
)
from unmask.own_code import source_of
from unmask.recipe import (
    DenoiseRecipe,
    ModelRecipe,
    OrderRecipe,
    Recipe,
    RecipeError,
    continued,
    flat,
    not_continued,
)
from unmask.runtime import precision_on, process_settings
from unmask.tasks import make_task
from unmask.tasks.task import Task
from unmask.training.checkpoint import Checkpoint, CheckpointError, CheckpointFolder, read_checkpoint
from unmask.training.checkpointer import Checkpointer, Stopped, StopSignal, stop_signal
from unmask.training.collapse import CollapseGuard
from unmask.training.compiled import compiled_networks
from unmask.training.expected_time import warn_of_time
from unmask.training.loop import Rates, run_stage
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
from unmask.training.state import copy_into, whole
from unmask.training.teacher import parse_teacher
from unmask.variational.estimators import Baseline, LeaveOneOut, MovingAverage, NoBaseline


def train(
    recipe: Recipe, out: Path, *, force: bool = False, cpu: bool = False, allow_change: bool = False
) -> OrderModel:
    """Train what the recipe says into the folder `out` and return the model; an unfinished run there is continued.

    Raises Stopped when SIGTERM came and the run was saved.
    """
    _check_trackers(recipe)
    if recipe.init and not Path(recipe.init).exists():  # said before the task is built, which may take minutes
        start = "give the run folder of a finished `unmask train`, or an SMDM .safetensors file"
        raise RecipeError(f"init = {recipe.init!r}: no such folder or file; {start}")
    task = _task(recipe)
    with ExitStack() as stack:
        precision = precision_on("cpu" if cpu or not torch.accelerator.is_available() else "gpu", recipe.precision)
        stack.enter_context(process_settings(threads=recipe.threads, bf16=precision == "bf16"))
        accelerator = stack.enter_context(_accelerator(recipe, precision, out, cpu))
        _check_teacher(recipe, accelerator.distributed_type)
        # Weights, gradients and the two moments of Adam, which a GPU keeps in memory of its own.
        model = _new_model(recipe, task, copies=4 if accelerator.device.type == "cpu" else 1)
        plain, changes = _continued_elsewhere(recipe, model), ""
        if accelerator.is_main_process:
            prepare(out, force)
            stack.enter_context(locked(out))
            changes = changes_in(recipe, out, allow_change)
            if not changes:
                store_recipe(recipe, out)
            if recipe.init:
                note_start(out, weights_hash(model.denoiser))
        accelerator.wait_for_everyone()
        stop = stack.enter_context(stop_signal())
        stack.enter_context(_trackers(recipe, accelerator))
        try:
            return _Training(recipe, task, out, accelerator, stop, changes).run(model, plain)
        except Stopped as stopped:
            raise Stopped(f"{stopped}; the same command goes on from there") from None


class _Training:
    """The stages of a run.  What is finished is read from its folder, what is under way goes on from its checkpoint."""

    def __init__(
        self, recipe: Recipe, task: Task, out: Path, accelerator: Accelerator, stop: StopSignal, changes: str
    ) -> None:
        self.changes = changes  # of the recipe, which is stored once what is trained already is known to fit it
        self.recipe, self.task, self.out, self.accelerator = recipe, task, out, accelerator
        self.compiled = recipe.compile and accelerator.device.type == "cuda"
        self.metrics = Metrics(out / "metrics.jsonl", accelerator.log if recipe.trackers else None, _first(recipe))
        self.checkpoints = CheckpointFolder(out / "checkpoints", recipe.saving.keep)
        self.checkpoints.folder.mkdir(exist_ok=True)
        about = {"recipe": dataclasses.asdict(recipe)}
        writes = accelerator.is_main_process
        self.checkpointer = Checkpointer(self.checkpoints, recipe.saving, self.metrics, stop, about, writes)
        self.finished: list[str] = []

    def run(self, model: OrderModel, plain: OrderModel | None) -> OrderModel:
        """`model` as it was born or as `init` has it; `plain` is its denoiser, trained on by another run."""
        recipe, out = self.recipe, self.out
        if (out / "config.json").exists():  # a crash came after the model was saved and before the rest was removed
            model = OrderModel.from_pretrained(out).to(self.accelerator.device)
            if self.accelerator.is_main_process:
                sweep(out)
            return model
        model.to(self.accelerator.device)
        if self.accelerator.is_main_process:
            warn_of_time(recipe, model, self.task, self.accelerator.device, self.accelerator.mixed_precision)
        before = self._before(model)
        if recipe.order is not None and before is not None:
            joint = recipe.order.denoiser_rate > 0
            model.denoiser.load_state_dict(before.denoiser.state_dict())
            self._order(model, recipe.order, out / "order" if joint else None)
            if joint and plain is not None:
                self._save(plain, out / "baseline")
            elif joint:
                self._baseline(before, out / "baseline")
        model.requires_grad_(True).eval()
        if self.accelerator.is_main_process:
            self._settle()
            self.metrics.sync()
            finish(model, out)
        self.accelerator.wait_for_everyone()
        return model

    def _before(self, model: OrderModel) -> OrderModel | None:
        """The plain denoiser, in RUN/denoiser if an order follows; without one, `model` itself has been trained."""
        recipe, folder = self.recipe, self.out / "denoiser"
        if recipe.order is not None and folder.exists():
            self.finished.append("denoise")
            before = OrderModel.from_pretrained(folder).to(self.accelerator.device)
            _check_fits(folder, before, model, ("vocab_size", "denoiser", "tied_head", "shift"))
            return before
        if recipe.denoise is not None:
            rates: Rates = {"denoiser": (model.denoiser, recipe.denoise.learning_rate)}
            index = 3 if recipe.init else 0  # the run that `init` names may have seen the examples of stage 0
            self._stage(
                "denoise", index, DenoiseObjective(model.denoiser, recipe.seed, self.compiled), rates, recipe.denoise
            )
        if recipe.order is None:
            return None
        before = _copy_denoiser(model).to(self.accelerator.device)
        self._save(before, folder)
        self.checkpoints.remove("denoise")
        return before

    def _order(self, model: OrderModel, how: OrderRecipe, folder: Path | None) -> None:
        """Learn the order.  It has a folder of its own if the baseline is still to come."""
        if folder is not None and folder.exists():
            found = OrderModel.from_pretrained(folder)
            _check_fits(folder, found, model, [field.name for field in dataclasses.fields(OrderModelConfig)])
            model.load_state_dict(found.state_dict())
            self.finished.append("order")
            return
        objective = OrderObjective(
            model,
            how.budget,
            how.trajectories,
            _baseline(how),
            self.recipe.seed,
            learn_denoiser=how.denoiser_rate > 0,
            attach_selector=how.attach_selector,
            initial_kl_weight=how.kl_weight,
            compile=self.compiled,
        )
        index = 4 if how.from_init else 1  # the order that it goes on with may have seen the examples of stage 1
        self._stage("order", index, objective, _order_rates(model, how), how)
        if folder is not None:
            self._save(model, folder)
            self.checkpoints.remove("order")

    def _baseline(self, before: OrderModel, folder: Path) -> None:
        """The same denoiser, plainly trained on: what heuristics run on beside a jointly trained one."""
        if folder.exists():
            return
        plain = continued(self.recipe)
        rates: Rates = {"denoiser": (before.denoiser, plain.learning_rate)}
        self._stage("baseline", 2, DenoiseObjective(before.denoiser, self.recipe.seed, self.compiled), rates, plain)
        self._save(before, folder)

    def _stage(
        self,
        name: str,
        index: int,
        objective: DenoiseObjective | OrderObjective,
        rates: Rates,
        how: DenoiseRecipe | OrderRecipe,
    ) -> None:
        """`index` names the stage's stream of examples and times: no two stages see the same ones."""
        accelerator = self.accelerator
        self.checkpointer.resume = self._checkpoint(name)
        self.checkpointer.begun = lambda update: self._begun(name, update)
        # FSDP2 turns the weights of a module into shards for good, so there it is a copy that is trained.
        sharded = accelerator.distributed_type == DistributedType.FSDP
        trained, trained_rates = copy.deepcopy((objective, rates)) if sharded else (objective, rates)
        begin = trained.begin_update if isinstance(trained, OrderObjective) else lambda progress: None
        with compiled_networks(trained, replay=not sharded) if self.compiled else nullcontext():
            run_stage(
                name,
                index,
                trained,
                trained_rates,
                how,
                self.task,
                self.recipe.seed,
                accelerator,
                self.metrics,
                begin,
                checkpointer=self.checkpointer,
                guard=_guard(how),
            )
        if sharded:
            copy_into(dict(objective.named_parameters()), {n: whole(p) for n, p in trained.named_parameters()})
        self.finished.append(name)

    def _checkpoint(self, stage: str) -> Checkpoint | None:
        """What the stage goes on from: the main process chooses, all read the same."""
        chosen: list[str] = [""]
        found = None
        if self.accelerator.is_main_process:
            found = self.checkpoints.newest(stage)
            if found is not None:
                _check_same_networks(found, stage, self.recipe.model)
            chosen = [found.path.name if found else ""]
        chosen = broadcast_object_list(chosen)
        if chosen[0] and found is None:
            found = read_checkpoint(self.checkpoints.folder / chosen[0])
        return found

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
                f"{folder} has another {name} than the recipe: give the recipe of the run, or --force to begin anew"
            )


def _check_same_networks(found: Checkpoint, stage: str, model: ModelRecipe) -> None:
    """As `_check_fits`, of a checkpoint: heads, for one, change a network and no shape."""
    was, now = (flat(table) for table in (found.facts["recipe"]["model"], dataclasses.asdict(model)))
    for key in now.keys() - {"label"}:
        used = stage == "order" or not key.startswith(("selector.", "scorer."))
        if used and was.get(key) != now[key]:
            raise CheckpointError(
                f"checkpoint {found.path} does not fit the recipe (model.{key} was {was.get(key)!r}): "
                "give the recipe of the run, or --force to begin anew"
            )


@contextmanager
def _accelerator(recipe: Recipe, precision: str, out: Path, cpu: bool) -> Iterator[Accelerator]:
    """An Accelerator of this precision.

    Accelerate keeps one precision a process; ours is put in its place for the time of the training.
    """
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


def _first(recipe: Recipe) -> dict[str, int]:
    """For each stage, the updates of the stages before it."""
    order = recipe.denoise.updates if recipe.denoise else 0
    return {"denoise": 0, "order": order, "baseline": order + (recipe.order.updates if recipe.order else 0)}


@contextmanager
def _trackers(recipe: Recipe, accelerator: Accelerator) -> Iterator[None]:
    """The experiment trackers of the recipe, told all its values."""
    if recipe.trackers:
        values = flat(dataclasses.asdict(recipe))
        config = {key: value if isinstance(value, int | float) else str(value) for key, value in values.items()}
        accelerator.init_trackers("unmask", config)
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()


def _check_trackers(recipe: Recipe) -> None:
    """Accelerate passes over a tracker that is not installed without a word."""
    for name in recipe.trackers:
        if find_spec(name) is None:
            raise RecipeError(f"trackers: {name} is not installed; pip install {name}, or leave it out")


def _new_model(recipe: Recipe, task: Task, copies: int) -> OrderModel:
    """As the seed has it born, or as `init` has it; the caller's random state is left alone.

    copies: how many of all weights the memory must hold to train them.
    """
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(recipe.seed)
        denoiser = _denoiser(recipe, task, copies)
        if recipe.order is None:
            return denoiser
        model = _with_order(denoiser, recipe)
    if recipe.order.from_init:
        _take_order(model, recipe.init)
    return model


def _continued_elsewhere(recipe: Recipe, start: OrderModel) -> OrderModel | None:
    """The model that `order.continued` names: from the same weights, just what this run would have trained itself."""
    if recipe.order is None or not recipe.order.continued:
        return None
    folder = Path(recipe.order.continued)
    where = f"order.continued = {str(folder)!r}"
    if not is_finished(folder):
        raise RecipeError(f"{where} is no finished run: train it first, or leave it out")
    for key, has, needed in not_continued(read_recipe(folder), recipe):
        raise RecipeError(f"{where} has {key} = {has!r}, but beside this order it must be {needed!r}: train it so")
    model, noted = OrderModel.from_pretrained(folder), folder / "start.txt"
    same_weights = noted.exists() and noted.read_text(encoding="utf-8").strip() == weights_hash(start.denoiser)
    if not same_weights or model.config.denoiser != start.config.denoiser:
        raise RecipeError(f"{where} did not start from the denoiser of init = {recipe.init!r}: train it from there")
    return model


def load_task(folder: Path, trust_task: bool = False) -> tuple[Recipe, Task]:
    """The recipe of a run and the task that it names; where it names code of the user's own, only if `trust_task`."""
    recipe = read_recipe(folder)
    if recipe.own_code and not trust_task:
        name = recipe.own_code[0]
        raise RunFolderError(
            f"the recipe of {folder} names {name!r}, which would import {source_of(name)} and run its code: "
            "add --trust-task if you trust it"
        )
    return recipe, _task(recipe, trained=True)


def load_run(folder: Path, trust_task: bool = False) -> tuple[OrderModel, OrderModel, Recipe, Task]:
    """The model of a finished run, the model whose denoiser the heuristics run on, the recipe and the task.

    The heuristics' denoiser is the model's own when the order was learned on frozen weights, else RUN/baseline.
    """
    if (folder / "checkpoints").exists():
        raise RunFolderError(
            f"{folder} is not finished: wait for its `unmask train`, or give that command again if it was interrupted"
        )
    model = OrderModel.from_pretrained(folder)
    recipe, task = load_task(folder, trust_task)
    _check_vocabulary(model, task, str(folder))
    joint = recipe.order is not None and recipe.order.denoiser_rate > 0
    if not joint:
        return model, model, recipe, task
    try:
        return model, OrderModel.from_pretrained(folder / "baseline"), recipe, task
    except ModelFolderError as error:
        raise RunFolderError(f"the plain denoiser of this run is gone: {error}") from None


def _task(recipe: Recipe, trained: bool = False) -> Task:
    """The task that a recipe names.  One that was trained on has been checked, and its training data is left alone."""
    options = {key: value for key, value in recipe.task.items() if key != "name"}
    try:
        task = make_task(str(recipe.task["name"]), **options)
        if not trained:
            task.check()
    except UserError as error:
        raise RecipeError(str(error)) from None
    return task


def _denoiser(recipe: Recipe, task: Task, copies: int) -> OrderModel:
    """The model without an order: from `init`, from a causal language model, or built anew."""
    if recipe.init.endswith(".safetensors"):
        model = _from_smdm(recipe, task)
    elif recipe.init:
        model = _from_run(recipe, task)
    elif recipe.model.causal:
        model = _from_causal(recipe, task)
    else:
        config = OrderModelConfig(len(task.vocabulary), _shape(recipe.model, task), recipe.model.tied_head)
        check_memory(config, copies)
        whole = task.text_tokenizer
        tokenizer = with_mask_token(whole) if whole else word_level_tokenizer(task.vocabulary)
        model = OrderModel(config, tokenizer)
    longest = model.config.denoiser.max_length
    if task.length > longest:
        raise RecipeError(
            f"task {task.name} has sequences of {task.length} tokens, longer than the model's context of {longest}: "
            + ("start from a run with a longer one" if recipe.init else "raise model.max_length")
        )
    return model


def _from_run(recipe: Recipe, task: Task) -> OrderModel:
    loaded = OrderModel.from_pretrained(recipe.init)
    _check_vocabulary(loaded, task, f"init = {recipe.init!r}")
    if recipe.model.shape_given:
        wanted, has = _shape(recipe.model, task), loaded.config.denoiser
        for name in ("width", "layers", "heads", "intermediate"):
            if getattr(wanted, name) != getattr(has, name):
                raise RecipeError(
                    f"init = {recipe.init!r} has {name} {getattr(has, name)}, but the recipe's [model] says "
                    f"{getattr(wanted, name)}: make them agree, or leave the shape out"
                )
    return _copy_denoiser(loaded)


def _from_causal(recipe: Recipe, task: Task) -> OrderModel:
    source = recipe.model.causal
    tokenizer = task.text_tokenizer
    if tokenizer is None:
        raise RecipeError(f"model.causal writes text, and task {task.name} has none: leave model.causal out")
    try:
        length = recipe.model.max_length or task.length
        return adapt_causal(load_causal(source), tokenizer, shift=recipe.model.shift, max_length=length)
    except UserError as error:
        advice = f": set task.tokenizer to {source!r}" if "are not tokens of" in str(error) else ""
        raise RecipeError(f"model.causal = {source!r}: {error}{advice}") from None


def _from_smdm(recipe: Recipe, task: Task) -> OrderModel:
    tokenizer, source = task.text_tokenizer, str(recipe.task.get("tokenizer", ""))
    if tokenizer is None or not source:
        raise RecipeError(
            f"init = {recipe.init!r} has no tokenizer in it: set task.tokenizer to a folder with the one that it was "
            "trained with (TinyLlama's)"
        )
    if not recipe.model.shape_given:
        raise RecipeError(f"init = {recipe.init!r} does not say its heads: set model.size, such as '170m'")
    try:
        return load_smdm(recipe.init, _shape(recipe.model, task), load_tokenizer(source).tokenizer, tokenizer)
    except UserError as error:
        raise RecipeError(f"init: {error}") from None


def _check_vocabulary(model: OrderModel, task: Task, where: str) -> None:
    """The tokens of a model are those of the task, id by id; two vocabularies of one size may still differ."""
    theirs, ours = vocabulary_of(model.tokenizer)[: model.config.vocab_size], task.vocabulary
    if len(theirs) != len(ours):
        raise RecipeError(
            f"{where} knows {len(theirs)} tokens, but task {task.name} has {len(ours)}: give the run of the same task"
        )
    for index, (token, wanted) in enumerate(zip(theirs, ours, strict=True)):
        if token != wanted:
            raise RecipeError(
                f"{where} has another tokenizer than task {task.name}: its token {index} is {token!r}, the task's is "
                f"{wanted!r}: give the run of the same task, with the same data and options"
            )


def _copy_denoiser(model: OrderModel) -> OrderModel:
    """A model with a copy of the same denoiser and no order."""
    with torch.random.fork_rng():  # the weights that a network is born with are drawn from torch's global state
        plain = OrderModel(dataclasses.replace(model.config, selector=None, scorer=None), model.tokenizer)
    plain.denoiser.load_state_dict(model.denoiser.state_dict())
    return plain


def _shape(model: ModelRecipe, task: Task) -> BackboneConfig:
    try:
        shape = SIZES.get(model.size) or BackboneConfig(model.width, model.layers, model.heads, model.intermediate)
        return dataclasses.replace(
            shape,
            max_length=model.max_length or task.length,
            qk_norm=model.qk_norm,
            absolute_positions=model.absolute_positions,
        )
    except UserError as error:
        raise RecipeError(f"model: {error}") from None


def _with_order(plain: OrderModel, recipe: Recipe) -> OrderModel:
    """The same denoiser with a fresh selector and scorer."""
    assert recipe.order is not None
    order, networks = recipe.order, recipe.model
    trunk = plain.config.denoiser
    selector, scorer = networks.selector, networks.scorer
    scorer_width = scorer.width or trunk.width
    try:
        config = dataclasses.replace(
            plain.config,
            selector=SelectorConfig(
                width=selector.width or max(32, trunk.width // 4),
                layers=selector.layers,
                heads=selector.heads,
                budgets=(order.budget,),
                positions=trunk.max_length if trunk.absolute_positions else 0,
            ),
            scorer=dataclasses.replace(
                trunk,
                width=scorer_width,
                layers=scorer.layers,
                heads=scorer.heads,
                intermediate=2 * scorer_width,
                kv_heads=0,
                head_width=0,
            ),
            teacher=parse_teacher(order.teacher).name if order.teacher else "",
            selection=order.selection,
            tau=order.tau,
        )
        check_memory(config, copies=1)
        model = OrderModel(config, plain.tokenizer)
    except UserError as error:
        raise RecipeError(f"model: {error}") from None
    model.denoiser.load_state_dict(plain.denoiser.state_dict())
    return model


def _check_teacher(recipe: Recipe, distributed: DistributedType) -> None:
    """A teacher walks until its own sequences are written; processes that gather shards must all walk as far."""
    if recipe.order is not None and recipe.order.teacher and distributed == DistributedType.FSDP:
        raise RecipeError("order.teacher needs the whole denoiser in every process: launch with DDP instead of FSDP")


def _take_order(model: OrderModel, source: str) -> None:
    """The selector and the scorer of another run, in the place of fresh ones.  T and tau may change, shapes may not."""
    where, found = f"order.from_init: init = {source!r}", OrderModel.from_pretrained(source)
    if found.selector is None or found.scorer is None:
        raise RecipeError(f"{where} has no order to go on with: name a run that has one, or leave order.from_init out")
    assert model.config.selector is not None
    assert found.config.selector is not None
    same = {
        "selector": dataclasses.replace(found.config.selector, budgets=model.config.selector.budgets)
        == model.config.selector,
        "scorer": found.config.scorer == model.config.scorer,
    }
    for name, fits in same.items():
        if not fits:
            raise RecipeError(f"{where} has another {name} than [model.{name}] says: make them agree")
        getattr(model, name).load_state_dict(getattr(found, name).state_dict())
    if found.config.teacher != model.config.teacher:
        taught = f"by {found.config.teacher}" if found.config.teacher else "by no rule"
        raise RecipeError(f"{where} was taught {taught}: set order.teacher = {found.config.teacher!r}")


def _guard(how: DenoiseRecipe | OrderRecipe) -> CollapseGuard:
    restored_rate = how.restored_rate if how.on_collapse == "restore" else 0.0
    if isinstance(how, OrderRecipe):
        return CollapseGuard("order", how.budget, restored_rate)
    return CollapseGuard("denoiser", restored_rate=restored_rate)


def _baseline(order: OrderRecipe) -> Baseline:
    if order.baseline == "moving-average":
        return MovingAverage(order.budget)
    return NoBaseline() if order.baseline == "none" else LeaveOneOut()


def _order_rates(model: OrderModel, order: OrderRecipe) -> Rates:
    assert model.selector is not None
    assert model.scorer is not None
    return {
        "denoiser": (model.denoiser, order.denoiser_rate),
        "selector": (model.selector, order.selector_rate),
        "scorer": (model.scorer, order.scorer_rate),
    }
