"""Which policies are evaluated at which budgets, and what a comparison at equal steps needs besides."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.decoding.cache import Cache
from unmask.decoding.policies import (
    Policy,
    check_policy,
    in_blocks,
    network_of,
    own_blocks,
    parse_policy,
    trained_steps,
)
from unmask.decoding.tokens import TokenChoice
from unmask.display import say
from unmask.errors import UserError, require
from unmask.evaluation.compare import next_budget
from unmask.evaluation.curve import compared_curves, family, sweep, write_curve
from unmask.evaluation.evaluate import (
    ExactModel,
    Setup,
    device_of,
    evaluate_policy,
    examples_of,
    fingerprint,
    response_sizes,
)
from unmask.evaluation.records import Record, append_records, read_records, read_run
from unmask.evaluation.verdicts import VerdictFile
from unmask.files import refuse_link
from unmask.models.frozen import FrozenConfig, FrozenDenoiser
from unmask.models.order_model import OrderModel
from unmask.progress import progress
from unmask.recipe import MOST_STEPS, PLAIN_RULES, EvaluateRecipe, Recipe, differences, load_recipe
from unmask.runtime import Processes, precision_on
from unmask.tasks.exact import EXACT, ExactDenoiser, check_exact
from unmask.tasks.task import Task
from unmask.training.build import check_context, check_vocabulary, task_of
from unmask.training.run import load_run, load_task
from unmask.training.run_folder import prepare, read_recipe, store_recipe

Plan = list[tuple[Policy, int]]  # policies and budgets


def evaluate(
    run_or_model: str | Path | OrderModel,
    task: Task | None = None,
    policies: Sequence[str | Policy] = (),
    steps: Sequence[int] = (),
    *,
    examples: int | None = None,
    temperature: float | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    guidance: float = 0.0,
    min_length: int = 0,
    stop_at_eos: bool = False,
    seed: int | None = None,
    split: str | None = None,
    against: Sequence[str | Path] = (),
    curve: bool = False,
    again: bool = False,
    compile: bool = False,
    bf16: bool = False,
    cache: Cache = "auto",
    trust_task: bool = False,
    denoiser: Any = None,
    any_denoiser: bool = False,
    cpu: bool = False,
) -> list[Record]:
    """Evaluate policies x budgets: of a run folder, or of a model on a task.

    What is not given is the recipe's, or for a model the recipe's default.  Without `steps`, heuristics also run at the
    budgets that a comparison with the learned order at equal steps needs; and always at those that one with the orders
    of the runs `against` needs, whose records are returned too.  The records and verdicts of a run are kept in its
    folder: what has been evaluated is not evaluated again, unless `again`.  The options are those of `unmask evaluate`.
    A folder that `exact_folder` made is a run too: its rules run on the exact posterior of the task.

    curve: the learned order at many prices and every rule at many settings instead, or those of the families (learned,
    threshold) and rules in `policies`, each with `steps` as the most steps.  RUN/curve.json is what `compared_curves`
    makes of the records, where there are some of the order and of rules.
    """
    processes = Processes(cpu)
    policies = [policies] if isinstance(policies, str | Policy) else policies
    steps = [steps] if isinstance(steps, int) else steps
    recipe, folder = None, None
    model: OrderModel | ExactModel
    plain: OrderModel | ExactModel
    if isinstance(run_or_model, OrderModel):
        if task is None:
            raise UserError("a model is evaluated on a task: give one, such as unmask.make_task('groups')")
        model = plain = run_or_model
        check_context(model, task, "give a model with a longer one")
        check_vocabulary(model, task, "the model")
        task = task.on_split(split) if split else task
        shape = model.config.denoiser
        found = Path(shape.folder).name if isinstance(shape, FrozenConfig) else f"{shape.layers}x{shape.width}"
        label, defaults = found, EvaluateRecipe()
    else:
        if task is not None:
            raise UserError("a run has its own task: leave out `task`, or give a model instead of the run's folder")
        folder = Path(run_or_model)
        if is_exact(folder):
            recipe, task = load_task(folder, trust_task)
            task = task.on_split(split) if split else task
            model = plain = ExactModel(ExactDenoiser(task))
            no_network = "the exact denoiser is no network: leave out --compile, --bf16 and --guidance"
            require(not (compile or bf16 or guidance), no_network)
            if recipe.order is not None:  # else it is said that there is none
                _refuse_networks(policies, recipe)
        else:
            model, plain, task, recipe = open_run(folder, processes.device, split, trust_task, denoiser, any_denoiser)
        label, defaults = model_label(recipe), recipe.evaluate
    if bf16 and isinstance(model.denoiser, FrozenDenoiser):
        raise UserError("--bf16: a denoiser of your own is in bfloat16 on a GPU already, else in float32: leave it out")
    precision = precision_on(device_of(model.denoiser).type, "bf16" if bf16 else "no")
    if bf16 and precision == "no" and processes.is_main:
        say("unmask: without --bf16: bfloat16 is slower than float32 on this CPU", err=True)
    check_end(task, "--min-length and --stop-at-eos", min_length, stop_at_eos)
    temperature = defaults.temperature if temperature is None else temperature
    choice = TokenChoice(temperature, top_p, top_k, guidance, task.eos_token_id, min_length, stop_at_eos)
    number = examples_of(task, examples, defaults.examples)
    trained_seed = recipe.seed if recipe else None
    seed = (trained_seed or 0) if seed is None else seed
    setup = Setup(model, plain, task, label, number, choice, seed, trained_seed, precision, compile, cache)
    sizes = response_sizes(task, number)
    if curve:
        none = f"--curve compares how many answers are valid, and task {task.name} has no checker: give it one"
        require(task.has_checker, none)
        require(not against, "--curve takes no --against: records of several runs meet in a study with `curve = true`")
        learned, heuristics, elsewhere = _swept(setup, policies, steps, sizes, processes), Plan(), list[Record]()
    else:
        rivals = defaults.policies
        if rivals == PLAIN_RULES:  # nobody chose them
            rivals = tuple(own_blocks(rule, plain.denoiser) for rule in rivals)
        names = list(policies) or [*(["learned"] if model.selector is not None else []), *rivals]
        known = model.selector, partial(task.token_frequencies, device_of(model.denoiser))
        rules = [rule if isinstance(rule, Policy) else parse_policy(rule, *known) for rule in names]
        size = getattr(plain.denoiser, "block_size", 0)
        rules = [rule if network_of(rule) is not None else in_blocks(rule, size) for rule in rules]
        budgets = steps or defaults.budgets
        learned, heuristics = _planned(setup, rules, budgets, bool(policies and steps), sizes, processes)
        elsewhere = [record for other in against for record in _learned_in(Path(other), setup, rules[0])]
    for rule, _ in (*learned, *heuristics):
        masks = f"{rule.name} needs a network that takes attention masks and position ids: leave it out"
        require(not rule.shadows or hasattr(plain.denoiser, "hidden_with"), masks)
    results, verdicts, recorded = None, None, list[Record]()
    if folder:
        results = folder / "results.jsonl"
        for path in (results, folder / "verdicts.jsonl", folder / "curve.json"):
            refuse_link(path)
        recorded = read_records(results) if results.exists() else []
        verdicts = VerdictFile(folder / "verdicts.jsonl", processes.is_main)

    def run(plan: Plan) -> list[Record]:
        found = []
        shown = processes.is_main and bool(plan)
        with progress("evaluate", setup.num_examples * len(plan), visible=shown) as advance:
            for rule, budget in plan:
                record = evaluate_policy(setup, rule, budget, verdicts, again, advance, processes)
                if results and processes.is_main and (again or record not in recorded):
                    append_records(results, [record])
                found.append(record)
        return found

    records = run(learned)
    if curve:
        sides = {family(record.spec.policy) == "learned" for record in records}
        # One side alone, which a study compares with others, takes nothing from an earlier curve.
        if folder and processes.is_main and (model.selector is None or len(sides) == 2):
            asked = [f"--policy={rule.name if isinstance(rule, Policy) else rule}" for rule in policies]
            write_curve(folder, compared_curves(records), [*asked, *(f"--steps={cap}" for cap in steps)])
        return records
    met = [*([] if steps else records), *elsewhere]
    heuristics = _with_equal_steps(heuristics, met, sizes)
    records += [*elsewhere, *run(heuristics)]
    return records + run(_budgets_lacking(heuristics, met, records, sizes))


def open_run(
    run: Path,
    device: torch.device | None,
    split: str | None = None,
    trust_task: bool = False,
    denoiser: Any = None,
    any_denoiser: bool = False,
) -> tuple[OrderModel, OrderModel, Task, Recipe]:
    """The model of a run, the one whose denoiser the heuristics run on, the task and the recipe, ready to use.

    device: None is the CPU, but for a denoiser of the user's, which may be large, a GPU where there is one.
    """
    model, plain, recipe, task = load_run(run, trust_task, denoiser, any_denoiser)
    if split is not None:
        task = task.on_split(split)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    device = device or Processes(cpu=not recipe.model.denoiser).device
    return model.place(device), plain.place(device), task, recipe


def check_end(task: Task, options: str, *given: Any) -> None:
    """UserError where one of these options is given, and the task has no end of sequence."""
    missing = f"task {task.name} has no end of sequence (eos_token_id): leave out {options}"
    require(task.eos_token_id is not None or not any(given), missing)


def exact_folder(source: Path, out: Path | None, overrides: Sequence[str] = (), trust_task: bool = False) -> Path:
    """A folder for evaluations of the exact posterior of a run's or a recipe's task, in the place of a network.

    source: a run, whose folder is RUN/exact unless `out` names another; a recipe, with `overrides`; or such a folder.
    It is a run folder without a model, and its recipe calls the model `exact`: no record of a network is ever there.
    A run whose order was learned on the exact posterior is its own folder.
    """
    require(os.environ.get("WORLD_SIZE", "1") == "1", "--exact-denoiser runs in one process: start it without torchrun")
    if (source / "recipe.json").exists():
        require(not overrides, f"--set is for a recipe, and {source} is a run: give its recipe and --out, or no --set")
        check_exact(read_recipe(source).task["name"])
        recipe, task = load_task(source, trust_task)
        if out is None and recipe.model.denoiser == EXACT and (source / "config.json").exists():
            return source
        folder = out or (source if is_exact(source) else source / EXACT)
    else:
        recipe = load_recipe(source, overrides)
        if out is None:
            raise UserError("--exact-denoiser with a recipe needs --out, a folder for the records")
        check_exact(recipe.task["name"])
        task, folder = task_of(recipe, Path(recipe.model.denoiser)), out
    ExactDenoiser(task)  # or says that it is not known
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, label=EXACT))
    prepare(folder, force=False)
    same = not (folder / "recipe.json").exists() or not differences(read_recipe(folder), recipe)
    require(same, f"{folder} holds a run, or the exact denoiser of another recipe: give another --out")
    store_recipe(recipe, folder)
    return folder


def is_exact(folder: Path) -> bool:
    """Whether `exact_folder` made it."""
    found = (folder / "recipe.json").exists() and not (folder / "config.json").exists()
    return found and read_recipe(folder).model.label == EXACT


def _refuse_networks(policies: Iterable[str | Policy], recipe: Recipe) -> None:
    why = "was learned on a network, and does not run on the exact denoiser: leave it out"
    if recipe.model.denoiser == EXACT:
        why = "is in the run that was trained, not here: evaluate that run, without --exact-denoiser"
    for given in policies:
        rule = given if isinstance(given, Policy) else check_policy(given)
        if network_of(rule) is not None:
            raise UserError(f"{rule.key} {why}")


def model_label(recipe: Recipe) -> str:
    """What records call a model: its label, the name of what it started from or of its size, or layers x width."""
    model = recipe.model
    start = Path(recipe.init or model.causal or model.denoiser).name
    return model.label or start or model.size or f"{model.layers}x{model.width}"


def _swept(
    setup: Setup, policies: Sequence[str | Policy], caps: Sequence[int], sizes: Tensor, processes: Processes
) -> Plan:
    """What a curve needs, less what cannot run."""
    _check_steps(caps)
    longest, sampled, denoiser = int(sizes.max()), setup.choice.temperature > 0, setup.plain.denoiser
    known = getattr(denoiser, "vocab_size", None) in (None, len(setup.task.vocabulary))  # others' may write more tokens
    background = partial(setup.task.token_frequencies, device_of(setup.model.denoiser)) if known else None
    size = getattr(denoiser, "block_size", 0)
    plan = sweep(setup.model.selector, policies, caps, longest, sampled, background, denoiser)
    fitting = [(rule, cap) for rule, cap in plan if _can_run(in_blocks(rule, size), cap, sizes)]
    for rule, cap in plan[:1] if not fitting else []:
        in_blocks(rule, size).check(cap, sizes)  # says why
    if len(fitting) < len(plan) and processes.is_main:
        say(f"unmask: {len(plan) - len(fitting)} of {len(plan)} points of the sweep cannot run: left out", err=True)
    return fitting


def _check_steps(budgets: Iterable[int]) -> None:
    for budget in budgets:
        require(1 <= budget <= MOST_STEPS, f"--steps must be between 1 and {MOST_STEPS:,}, got {budget}")


def _planned(
    setup: Setup, rules: Iterable[Policy], budgets: Sequence[int], all_at: bool, sizes: Tensor, processes: Processes
) -> tuple[Plan, Plan]:
    """The learned rules, at their own budget unless `all_at`, and the heuristics, at the budgets that each can run at.

    Without any budget, heuristics run at the learned one, or else at one step per token.
    """
    selector = setup.model.selector
    trained = trained_steps(selector, int(sizes.max()))
    own = [trained] if trained is not None else []
    learned: Plan = []
    heuristics: Plan = []
    for rule in {rule.name: rule for rule in rules}.values():
        is_learned = network_of(rule) is not None
        wanted = own if is_learned and not all_at else budgets or own or [setup.task.length]
        wanted = list(dict.fromkeys(wanted))
        _check_steps(wanted)
        fitting = [budget for budget in wanted if _can_run(rule, budget, sizes)]
        if not fitting:
            rule.check(wanted[0], sizes)  # says why
        left_out = [str(budget) for budget in wanted if budget not in fitting]
        if left_out and processes.is_main:
            say(f"unmask: {rule.name} cannot run at {', '.join(left_out)} steps: left out", err=True)
        (learned if is_learned else heuristics).extend((rule, budget) for budget in fitting)
    return learned, heuristics


def _can_run(rule: Policy, budget: int, sizes: Tensor) -> bool:
    try:
        rule.check(budget, sizes)
    except UserError:
        return False
    return True


def _learned_in(run: Path, setup: Setup, any_rule: Policy) -> list[Record]:
    """The learned orders of another run, evaluated with the same settings and learned on the same denoiser."""
    asked, denoiser = setup.spec(any_rule, 1), fingerprint(setup.plain.denoiser)
    found = [record for record in read_run(run) if record.spec.learned and record.spec.setting == asked.setting]
    if not found:
        raise UserError(
            f"--against {run}: its learned order has not been evaluated on {asked.num_examples} examples of "
            f"{asked.split} with the same settings: run `unmask evaluate {run} --policy learned` with them first"
        )
    if any(record.spec.plain_denoiser != denoiser for record in found):
        raise UserError(f"--against {run}: its order was learned on another denoiser, so nothing here compares with it")
    return found


def _with_equal_steps(heuristics: Plan, learned: Sequence[Record], sizes: Tensor) -> Plan:
    """Each heuristic also at the floor and the ceiling of the learned mean steps, and at the learned maximum."""
    if not learned:
        return heuristics
    means = [record.mean_steps for record in learned]
    needed = {*map(math.floor, means), *map(math.ceil, means), *(record.outcome.most_steps for record in learned)}
    plan: Plan = []
    for rule in {rule.name: rule for rule, _ in heuristics}.values():
        asked = {budget for other, budget in heuristics if other.name == rule.name}
        plan += [(rule, b) for b in sorted(asked | {steps for steps in needed if _can_run(rule, steps, sizes)})]
    return plan


def _budgets_lacking(heuristics: Plan, learned: Sequence[Record], compared: Sequence[Record], sizes: Tensor) -> Plan:
    """What else a comparison needs of rules that take fewer steps than their budget."""
    plan: Plan = []
    for rule in {rule.name: rule for rule, _ in heuristics}.values():
        curve = [record for record in compared if record.spec.policy == rule.name]
        lacking = dict.fromkeys(next_budget(record.mean_steps, curve) for record in learned)
        plan += [(rule, budget) for budget in lacking if budget and _can_run(rule, budget, sizes)]
    return plan
