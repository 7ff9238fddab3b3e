"""The model that a run trains, from its recipe and its task: newly built, or from weights that are there already."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from unmask.display import say
from unmask.errors import UserError, prefixed, require
from unmask.models.backbone import SIZES, BackboneConfig
from unmask.models.frozen import FrozenDenoiser
from unmask.models.importers.causal import adapt_causal
from unmask.models.importers.masked import load_denoiser
from unmask.models.importers.pretrained import load_causal, load_tokenizer
from unmask.models.importers.smdm import load_smdm
from unmask.models.importers.vocabulary import vocabulary_of
from unmask.models.networks import SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, check_memory, with_mask_token, word_level_tokenizer
from unmask.recipe import ModelRecipe, OrderRecipe, Recipe, SelectorRecipe, parse_teacher
from unmask.tasks import make_task
from unmask.tasks.task import Task


def task_of(recipe: Recipe, folder: Path, denoiser: str | Path = "") -> Task:
    """The task of a recipe.  On a denoiser of the user's it has, if no other is named, the tokenizer in `folder`.

    A chat template lies beside the denoiser's own tokenizer, in the folder `denoiser` if it was moved: a run has none.
    """
    options = dict(recipe.task)
    folder = Path(denoiser or recipe.model.denoiser).expanduser() if options.get("chat") else folder
    if recipe.model.denoiser and options.get("tokenizer") == "" and (folder / "tokenizer.json").is_file():
        options["tokenizer"] = str(folder / "tokenizer.json")
    return make_task(**options)


def build_model(recipe: Recipe, task: Task, copies: int, denoiser: Any = None) -> OrderModel:
    """New, from the seed, or what `init` has; the caller's random state is left alone.

    copies: how many of all weights the memory must hold to train them.
    denoiser: that of `model.denoiser`, where it is not to be read from its folder.
    """
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(recipe.seed)
        if recipe.model.denoiser:
            return _on_frozen(recipe, task, denoiser)
        denoiser = _denoiser(recipe, task, copies)
        if recipe.order is None:
            return denoiser
        model = _with_order(denoiser, recipe.model, recipe.order)
    if recipe.order.from_init:
        _take_order(model, recipe.init)
    return model


def without_order(model: OrderModel) -> OrderModel:
    """A model with a copy of the same denoiser and no order; a frozen one is shared."""
    with torch.random.fork_rng():  # the weights of a new network are drawn from torch's global state
        config = dataclasses.replace(model.config, selector=None, scorer=None)
        if isinstance(model.denoiser, FrozenDenoiser):
            return OrderModel(config, model.tokenizer, model.denoiser)
        plain = OrderModel(config, model.tokenizer)
    plain.denoiser.load_state_dict(model.denoiser.state_dict())
    return plain


def check_context(model: OrderModel, task: Task, instead: str) -> None:
    """A model has room for the sequences of the task."""
    longest = model.config.denoiser.max_length or task.length
    sizes = f"sequences of {task.length} tokens, longer than the model's context of {longest}"
    require(task.length <= longest, f"task {task.name} has {sizes}: {instead}")


def check_vocabulary(model: OrderModel, task: Task, where: str) -> None:
    """The tokens of a model are those of the task, id by id; two vocabularies of one size may still differ."""
    theirs, ours = vocabulary_of(model.tokenizer)[: model.config.vocab_size], task.vocabulary
    known = f"{where} knows {len(theirs)} tokens, but task {task.name} has {len(ours)}"
    require(len(theirs) == len(ours), f"{known}: give the run of the same task")
    for index, (token, wanted) in enumerate(zip(theirs, ours, strict=True)):
        if token != wanted:
            raise UserError(
                f"{where} has another tokenizer than task {task.name}: its token {index} is {token!r}, the task's is "
                f"{wanted!r}: give the run of the same task, with the same data and options"
            )


def _on_frozen(recipe: Recipe, task: Task, denoiser: Any) -> OrderModel:
    """A fresh selector for a denoiser of the user's."""
    named, order = recipe.model.denoiser, recipe.order
    assert order is not None
    with prefixed(f"model.denoiser = {named!r}"):
        read_as = {"bidirectional": recipe.model.bidirectional, "shift": recipe.model.shift}
        if denoiser is None:
            frozen = FrozenDenoiser(load_denoiser(named, **read_as))
        else:  # adapters are put into it
            frozen = FrozenDenoiser(copy.deepcopy(denoiser) if recipe.model.lora else denoiser)
        _check_tokens(frozen, task)
        frozen.adapt(recipe.model.lora)
        no_hidden = "it gives no hidden states: set model.selector.reads = 'logits', or leave it out"
        require(recipe.model.selector.reads != "hidden" or frozen.width > 0, no_hidden)
    place = frozen.config("" if denoiser is not None else str(Path(named).expanduser().absolute()), **read_as)
    examples = task.examples(torch.arange(2), "train")
    all_written = bool((examples.response == examples.attention_mask).all())  # then all positions look alike at first
    with prefixed("model and order"):
        positions = task.length if all_written else 0
        unknown = recipe.model.selector.drawn and frozen.vocab_size is None
        require(not unknown, "selector.drawn: the denoiser does not say its vocab_size: give it that attribute")
        num_tokens = max(frozen.vocab_size or len(task.vocabulary), frozen.mask_token_id + 1)
        selector = _selector(recipe.model.selector, order, num_tokens, frozen.width, positions, frozen.block_size)
        config = OrderModelConfig(len(task.vocabulary), place, selector=selector, selection=order.selection)
    model = OrderModel(config, task.text_tokenizer or word_level_tokenizer(task.vocabulary), frozen)
    check_context(model, task, "set task.length, or give a model with a longer one")
    return model


def _check_tokens(denoiser: FrozenDenoiser, task: Task) -> None:
    """A token has the same id for the denoiser as for the task."""
    size = len(task.vocabulary)
    known = max(denoiser.vocab_size or size, denoiser.mask_token_id + 1)
    require(
        size <= known,
        f"it knows {known} tokens, and the tokenizer of task {task.name} has {size}: set task.tokenizer to its own",
    )
    if denoiser.tokenizer is None or task.text_tokenizer is None:
        return
    theirs = denoiser.tokenizer.get_vocab()
    for index, token in enumerate(task.vocabulary):
        if theirs.get(token) != index:
            raise UserError(
                f"it has another tokenizer than task {task.name}: {token!r} is token {index} of the task, and "
                f"{theirs.get(token, 'no token')} of the denoiser: leave task.tokenizer out, or name its own"
            )
    end, theirs_end = task.eos_token_id, denoiser.eos_token_id
    if None not in (end, theirs_end) and end != theirs_end:
        names = task.vocabulary[end or 0], task.vocabulary[theirs_end or 0]
        say(
            "unmask: responses end with {!r}, and the denoiser's texts with {!r}: is task.eos right?".format(*names),
            err=True,
        )


def _denoiser(recipe: Recipe, task: Task, copies: int) -> OrderModel:
    """The model without an order: from `init`, from a causal language model, or newly built."""
    tokenizer = task.text_tokenizer
    if recipe.init.endswith(".safetensors"):
        model = _from_smdm(recipe, task, tokenizer)
    elif recipe.init:
        model = _from_run(recipe, task)
    elif recipe.model.causal:
        model = _from_causal(recipe.model, task, tokenizer)
    else:
        config = OrderModelConfig(len(task.vocabulary), _shape(recipe.model, task))
        check_memory(config, copies)
        model = OrderModel(config, with_mask_token(tokenizer) if tokenizer else word_level_tokenizer(task.vocabulary))
    check_context(model, task, "start from a run with a longer one" if recipe.init else "raise model.max_length")
    return model


def _from_run(recipe: Recipe, task: Task) -> OrderModel:
    loaded, where = OrderModel.from_pretrained(recipe.init), f"init = {recipe.init!r}"
    if isinstance(loaded.denoiser, FrozenDenoiser):
        raise UserError(f"{where} has no denoiser of its own: set model.denoiser to that which it was learned for")
    check_context(loaded, task, "start from a run with a longer one")  # first: a longer task may have more tokens too
    check_vocabulary(loaded, task, where)
    names = ("width", "layers", "heads", "intermediate") if recipe.model.shape_given else ()
    wanted = {name: getattr(_shape(recipe.model, task), name) for name in names}
    if names or recipe.model.block_size:
        wanted["block_size"] = recipe.model.block_size
    for name, value in wanted.items():
        if (has := getattr(loaded.config.denoiser, name)) != value:
            raise UserError(
                f"{where} has {name} {has}, but the recipe's [model] says {value}: make them agree, or leave the shape "
                "out"
            )
    return without_order(loaded)


def _from_causal(model: ModelRecipe, task: Task, tokenizer: Tokenizer | None) -> OrderModel:
    if tokenizer is None:
        raise UserError(f"model.causal writes text, and task {task.name} has none: leave model.causal out")
    with prefixed(f"model.causal = {model.causal!r}"):
        causal = load_causal(model.causal)
        return adapt_causal(causal, tokenizer, shift=model.shift, max_length=model.max_length or task.length)


def _from_smdm(recipe: Recipe, task: Task, tokenizer: Tokenizer | None) -> OrderModel:
    source = str(recipe.task.get("tokenizer", ""))
    if tokenizer is None or not source:
        raise UserError(
            f"init = {recipe.init!r} has no tokenizer in it: set task.tokenizer to a folder with the one that it was "
            "trained with (TinyLlama's)"
        )
    if not recipe.model.shape_given:
        raise UserError(f"init = {recipe.init!r} does not say its heads: set model.size, such as '170m'")
    shape = _shape(recipe.model, task)
    with prefixed("init"):
        return load_smdm(recipe.init, shape, load_tokenizer(source).tokenizer, tokenizer)


def _shape(model: ModelRecipe, task: Task) -> BackboneConfig:
    with prefixed("model"):
        return dataclasses.replace(
            SIZES.get(model.size) or BackboneConfig(model.width, model.layers, model.heads, model.intermediate),
            max_length=model.max_length or task.length,
            absolute_positions=model.absolute_positions,
            block_size=model.block_size,
        )


def _with_order(plain: OrderModel, networks: ModelRecipe, order: OrderRecipe) -> OrderModel:
    """The same denoiser with a fresh selector and scorer."""
    trunk, scorer = plain.config.denoiser, networks.scorer
    assert isinstance(trunk, BackboneConfig)
    scorer_width = scorer.width or trunk.width
    with prefixed("model and order"):
        config = dataclasses.replace(
            plain.config,
            selector=_selector(
                networks.selector,
                order,
                plain.config.vocab_size + 1,
                trunk.width,
                trunk.max_length if trunk.absolute_positions else 0,
                trunk.block_size,
            ),
            scorer=None
            if order.posterior == "selector"
            else dataclasses.replace(
                trunk,
                width=scorer_width,
                layers=scorer.layers,
                heads=scorer.heads,
                intermediate=2 * scorer_width,
                kv_heads=0,
                head_width=0,
                rope_frequencies=(),
                rope_scale=1.0,
            ),
            teacher=parse_teacher(order.teacher).name if order.teacher else "",
            selection=order.selection,
            tau=order.tau,
        )
        check_memory(config, copies=1)
        model = OrderModel(config, plain.tokenizer)
    model.denoiser.load_state_dict(plain.denoiser.state_dict())
    return model


def _selector(
    recipe: SelectorRecipe, order: OrderRecipe, num_tokens: int, denoiser_width: int, positions: int, block_size: int
) -> SelectorConfig:
    """num_tokens: ids that the denoiser knows, the mask's included."""
    whole = "a reward judges a whole answer, and the order of a block-causal model is learned one block at a time"
    require(not (order.reward and block_size), f"order.reward: {whole}: set it to false")
    return SelectorConfig(
        width=recipe.width or max(32, denoiser_width // 4),
        layers=recipe.layers,
        heads=recipe.heads,
        budget=order.budget,
        positions=positions,
        prices=order.prices,
        start=order.start,
        thresholds=order.thresholds,
        spread=order.spread,
        drawn=num_tokens if recipe.drawn else 0,
        reads="logits" if recipe.reads == "logits" or not denoiser_width else "hidden",
        block_size=block_size,
    )


def _take_order(model: OrderModel, source: str) -> None:
    """The selector and the scorer of another run, in the place of fresh ones.  T and tau may change, shapes may not.

    Without a scorer the selector goes on as its own posterior, whoever taught it.
    """
    where, found = f"order.from_init: init = {source!r}", OrderModel.from_pretrained(source)
    theirs, ours = found.config, model.config
    if theirs.selector is None or ours.selector is None:
        raise UserError(f"{where} has no order to train further: name a run that has one, or leave order.from_init out")
    for part in dataclasses.fields(theirs.selector):
        was, now = getattr(theirs.selector, part.name), getattr(ours.selector, part.name)
        if part.name == "drawn":  # true or false in a recipe; here the number of ids
            was, now = bool(was), bool(now)
        if part.name not in ("budget", "spread") and was != now:  # the spread is that of fresh weights
            raise UserError(f"{where} has a selector with {part.name} = {was}, the recipe says {now}: make them agree")
    if ours.scorer is not None and theirs.scorer != ours.scorer:
        raise UserError(f"{where} has another scorer than [model.scorer] says: make them agree")
    if ours.scorer is not None and theirs.teacher != ours.teacher:
        taught = f"by {theirs.teacher}" if theirs.teacher else "by no rule"
        raise UserError(f"{where} was taught {taught}: set order.teacher = {theirs.teacher!r}")
    for name in ("selector", "scorer"):
        if getattr(ours, name) is not None:
            getattr(model, name).load_state_dict(getattr(found, name).state_dict())
