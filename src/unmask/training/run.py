"""From a recipe to a run folder.

RUN/config.json, model.safetensors, tokenizer.json    the model, written last: a folder without it is unfinished
RUN/recipe.json                                       the recipe, resolved
RUN/metrics.jsonl                                     one object a line
RUN/denoiser/                                         the denoiser as it was before order learning
RUN/baseline/                                         joint order learning only: that denoiser, plainly trained on for
                                                      as many further sequences, which is what heuristics run on
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from torch import nn

from unmask.models.adaptation import adapt_causal
from unmask.models.backbone import SIZES, Backbone, BackboneConfig
from unmask.models.networks import Selector, SelectorConfig
from unmask.models.order_model import (
    ModelFolderError,
    OrderModel,
    OrderModelConfig,
    with_mask_token,
    word_level_tokenizer,
)
from unmask.models.pretrained import load_causal, load_tokenizer
from unmask.models.smdm import load_smdm
from unmask.models.vocabulary import vocabulary_of
from unmask.suggest import did_you_mean
from unmask.tasks import make_task
from unmask.tasks.task import Task, check_task
from unmask.training.expected_time import warn_of_time
from unmask.training.loop import Metrics, NonFiniteError, Rates, run_stage
from unmask.training.objectives import DenoiseObjective, OrderObjective
from unmask.training.recipe import DenoiseRecipe, ModelRecipe, Optimisation, OrderRecipe, Recipe, RecipeError
from unmask.variational.estimators import Baseline, LeaveOneOut, MovingAverage, NoBaseline

Hook = Callable[[float], None]


class RunFolderError(ValueError):
    """A run folder that cannot be used; the message says what to do."""


def train(recipe: Recipe, out: Path, *, force: bool = False, cpu: bool = False) -> OrderModel:
    """Train what the recipe says into the folder `out` and return the model."""
    task = _task(recipe)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    accelerator = Accelerator(mixed_precision=recipe.precision, cpu=cpu)
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(recipe.seed)
        denoiser = _denoiser(recipe, task)
        model = _with_order(denoiser, recipe) if recipe.order else denoiser
    replaced = _prepare_folder(out, force)
    (out / "recipe.json").write_text(recipe.to_json())
    metrics = Metrics(out / "metrics.jsonl")
    compiled = recipe.compile and accelerator.device.type == "cuda"
    _place(model, compiled, accelerator)
    warn_of_time(recipe, model, task, accelerator.device)

    def stage(
        name: str, index: int, objective: nn.Module, rates: Rates, how: Optimisation, trained: OrderModel, **hook: Hook
    ) -> None:
        """`index` names the stage's stream of examples and times: no two stages see the same ones."""
        try:
            run_stage(name, index, objective, rates, how, task, recipe.seed, accelerator, metrics, **hook)
        except NonFiniteError as error:
            trained.save_pretrained(out / "last-good")
            raise NonFiniteError(f"{error}; the last good state is in {out / 'last-good'}") from None

    rates: Rates
    if recipe.denoise:
        rates = {"denoiser": (model.denoiser, recipe.denoise.learning_rate)}
        index = 3 if recipe.init else 0  # the run that `init` names may have seen the examples of stage 0
        stage("denoise", index, DenoiseObjective(model.denoiser, recipe.seed, compiled), rates, recipe.denoise, model)
    if recipe.order:
        before = _place(_copy_denoiser(model), compiled, accelerator)
        before.save_pretrained(out / "denoiser")
        order = OrderObjective(
            model,
            recipe.order.budget,
            recipe.order.trajectories,
            _baseline(recipe.order),
            recipe.seed,
            learn_denoiser=recipe.order.denoiser_rate > 0,
            attach_selector=recipe.order.attach_selector,
            initial_kl_weight=recipe.order.kl_weight,
            compile=compiled,
        )
        rates = _order_rates(model, recipe.order)
        stage("order", 1, order, rates, recipe.order, model, begin_update=order.begin_update)
        if recipe.order.denoiser_rate > 0:
            plain = continued(recipe)
            rates = {"denoiser": (before.denoiser, plain.learning_rate)}
            stage("baseline", 2, DenoiseObjective(before.denoiser, recipe.seed, compiled), rates, plain, before)
            before.save_pretrained(out / "baseline")
    model.requires_grad_(True).eval()
    model.save_pretrained(out)
    if replaced is not None:
        shutil.rmtree(replaced)
    return model


def continued(recipe: Recipe) -> DenoiseRecipe:
    """The plain training that a joint order is measured against: as many further updates, each on B * k sequences."""
    assert recipe.order is not None
    order = recipe.order
    settings = recipe.denoise or DenoiseRecipe(1, 1, learning_rate=order.denoiser_rate, warmup=order.warmup)
    return dataclasses.replace(
        settings, updates=order.updates, batch=order.batch * order.trajectories, accumulate=order.accumulate
    )


def load_task(folder: Path) -> tuple[Recipe, Task]:
    """The recipe of a run and the task that it names."""
    try:
        recipe = Recipe.from_json((folder / "recipe.json").read_text())
    except (OSError, ValueError):
        raise RunFolderError(f"{folder}/recipe.json is missing or damaged: train the run again") from None
    return recipe, _task(recipe)


def load_run(folder: Path) -> tuple[OrderModel, OrderModel, Recipe, Task]:
    """The model of a finished run, the model whose denoiser the heuristics run on, the recipe and the task.

    The heuristics' denoiser is the model's own when the order was learned on frozen weights, else RUN/baseline.
    """
    model = OrderModel.from_pretrained(folder)
    recipe, task = load_task(folder)
    _check_vocabulary(model, task, str(folder))
    joint = recipe.order is not None and recipe.order.denoiser_rate > 0
    if not joint:
        return model, model, recipe, task
    try:
        return model, OrderModel.from_pretrained(folder / "baseline"), recipe, task
    except ModelFolderError as error:
        raise RunFolderError(f"the plain denoiser of this run is gone: {error}") from None


def _task(recipe: Recipe) -> Task:
    options = {key: value for key, value in recipe.task.items() if key != "name"}
    try:
        task = make_task(str(recipe.task["name"]), **options)
        check_task(task)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return task


def _prepare_folder(out: Path, force: bool) -> Path | None:
    """An empty folder `out`.  A finished run that `force` replaces is kept beside it until the new one is finished."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RunFolderError(f"{out} is a {'link' if out.is_symlink() else 'file'}: give another --out")
    replaced = None
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise RunFolderError(f"{out} already holds something: give another --out, or --force to replace it")
        if not (out / "recipe.json").exists():  # a run's first file; config.json alone is any model of anybody
            raise RunFolderError(f"{out} is not a run folder, so --force will not replace it: give another --out")
        if (out / "config.json").exists():
            replaced = out.with_name(f"{out.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            out.rename(replaced)
        else:
            shutil.rmtree(out)  # never finished
    out.mkdir(parents=True, exist_ok=True)
    return replaced


def _denoiser(recipe: Recipe, task: Task) -> OrderModel:
    """The model without an order: from `init`, from a causal language model, or built anew."""
    if recipe.init.endswith(".safetensors"):
        model = _from_smdm(recipe, task)
    elif recipe.init:
        model = _from_run(recipe, task)
    elif recipe.model.causal:
        model = _from_causal(recipe, task)
    else:
        config = OrderModelConfig(len(task.vocabulary), _shape(recipe.model, task), recipe.model.tied_head)
        text_tokenizer = _text_tokenizer(task)
        tokenizer = with_mask_token(text_tokenizer) if text_tokenizer else word_level_tokenizer(task.vocabulary)
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
    tokenizer = _text_tokenizer(task)
    if tokenizer is None:
        raise RecipeError(f"model.causal writes text, and task {task.name} has none: leave model.causal out")
    try:
        length = recipe.model.max_length or task.length
        return adapt_causal(load_causal(source), tokenizer, shift=recipe.model.shift, max_length=length)
    except ValueError as error:
        advice = f": set task.tokenizer to {source!r}" if "are not tokens of" in str(error) else ""
        raise RecipeError(f"model.causal = {source!r}: {error}{advice}") from None


def _from_smdm(recipe: Recipe, task: Task) -> OrderModel:
    tokenizer, source = _text_tokenizer(task), str(recipe.task.get("tokenizer", ""))
    if tokenizer is None or not source:
        raise RecipeError(
            f"init = {recipe.init!r} has no tokenizer in it: set task.tokenizer to a folder with the one that it was "
            "trained with (TinyLlama's)"
        )
    if not recipe.model.shape_given:
        raise RecipeError(f"init = {recipe.init!r} does not say its heads: set model.size, such as '170m'")
    try:
        return load_smdm(recipe.init, _shape(recipe.model, task), load_tokenizer(source).tokenizer, tokenizer)
    except ValueError as error:
        raise RecipeError(f"init: {error}") from None


def _text_tokenizer(task: Task) -> Tokenizer | None:
    """What turns text into the tokens of a task that has text: its optional `text_tokenizer`."""
    return getattr(task, "text_tokenizer", None)


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


def _place(model: OrderModel, compiled: bool, accelerator: Accelerator) -> OrderModel:
    """The model on its device, its networks compiled or not."""
    model.to(accelerator.device)
    if compiled:
        compile_networks(model)
    return model


def compile_networks(model: OrderModel) -> None:
    """Compile the heavy parts, whatever the number of their tokens."""
    for module in model.modules():
        if isinstance(module, Backbone | Selector):
            module.run = torch.compile(module.run, dynamic=True)  # type: ignore[method-assign, assignment]


def _copy_denoiser(model: OrderModel) -> OrderModel:
    """A model with a copy of the same denoiser and no order."""
    with torch.random.fork_rng():  # the weights that a network is born with are drawn from torch's global state
        plain = OrderModel(dataclasses.replace(model.config, selector=None, scorer=None), model.tokenizer)
    plain.denoiser.load_state_dict(model.denoiser.state_dict())
    return plain


def _shape(model: ModelRecipe, task: Task) -> BackboneConfig:
    if model.size and model.size not in SIZES:
        nearest = did_you_mean(model.size, SIZES)
        raise RecipeError(f"model.size = {model.size!r} is unknown; {nearest}choose from {', '.join(SIZES)}")
    try:
        shape = SIZES.get(model.size) or BackboneConfig(model.width, model.layers, model.heads, model.intermediate)
        return dataclasses.replace(
            shape,
            max_length=model.max_length or task.length,
            qk_norm=model.qk_norm,
            absolute_positions=model.absolute_positions,
        )
    except ValueError as error:
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
            selection=order.selection,
            tau=order.tau,
        )
        model = OrderModel(config, plain.tokenizer)
    except ValueError as error:
        raise RecipeError(f"model: {error}") from None
    model.denoiser.load_state_dict(plain.denoiser.state_dict())
    return model


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
