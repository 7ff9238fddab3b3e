"""Recipes: small complete TOML files, validated whole before anything is built.

The tables of one, and what is in them:

    seed, init        top-level values
    [task]            name, and the options of that task; those left out are written out with their defaults
    [model]           the denoiser: `size`, or width, layers, heads, intermediate; or `denoiser`, one that you have;
                      [model.selector], [model.scorer]
    [denoise]         the plain masked-diffusion objective
    [order]           the paper's objective
    [evaluate]        what to compare when training is done
    [saving]          how often a checkpoint is written, and how many are kept
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unmask.display import say
from unmask.errors import UserError, did_you_mean, prefixed, require
from unmask.fields import build
from unmask.own_code import is_own
from unmask.tasks import make_task, task_class

if TYPE_CHECKING:
    from unmask.decoding.policies import Policy

# Modules that import torch are imported where they are needed: `unmask --help` must not wait for it.

PLAIN_RULES = ("iid", "top-prob", "margin")  # the paper's rivals
PRICES = (0.02, 2.0)  # of a step, lowest and highest, in nats
REWARD_PRICES = (0.002, 0.3)  # where a valid answer counts 1
THRESHOLDS = (0.995, 0.6)  # of an order's start, at the lowest and at the highest price
GAMMAS = (0.001, 1.0)  # of the start eb
MOST_STEPS = 65_536  # of generation: one per token of the longest sequence that a task here may have
MOST_EXAMPLES = 1_000_000  # of an evaluation


@dataclass(frozen=True)
class ScorerRecipe:
    width: int = 0  # 0: the denoiser's
    layers: int = 2
    heads: int = 4

    def __post_init__(self) -> None:
        _check_range(self, 1, "layers", "heads")
        _check_range(self, 0, "width")


@dataclass(frozen=True)
class SelectorRecipe(ScorerRecipe):
    width: int = 0  # 0: a quarter of the denoiser's, at least 32
    layers: int = 1
    reads: Literal["auto", "hidden", "logits"] = "auto"  # logits: the confidences alone; auto: hidden, if there are any
    drawn: bool = False  # it also reads the token that was drawn at each mask; needs order.reward


_SHAPE = ("width", "layers", "heads", "intermediate")


@dataclass(frozen=True)
class ModelRecipe:
    size: str = ""  # a name such as "34m"; or leave it out and give the four numbers
    label: str = ""  # what records call the model; "": the size, or layers x width
    width: int = 0
    layers: int = 0
    heads: int = 0
    intermediate: int = 0
    max_length: int = 0  # 0: the task's length
    absolute_positions: bool = False  # a learned vector per position; tasks without a prompt need it
    block_size: int = 0  # block-causal: a block of the response sees itself and what came before; 0: all see all
    causal: str = ""  # a causal language model to start from, which has a shape: a folder, a .gguf, smollm2-135m
    denoiser: str = ""  # one that you have: a folder that `load_denoiser` reads; "exact": the task's own posterior
    bidirectional: bool = False  # with denoiser: a causal model, trained to see both ways
    shift: bool = False  # of a causal model: read each token from the hidden state of the token before it
    lora: int = 0  # with denoiser: rank of adapters that learn along with the order; 0: it stays as it is
    selector: SelectorRecipe = field(default_factory=SelectorRecipe)
    scorer: ScorerRecipe = field(default_factory=ScorerRecipe)

    def __post_init__(self) -> None:
        given, either = self.shape_given, "give one or the other"
        missing = [name for name in _SHAPE if not getattr(self, name)]
        if self.size:
            from unmask.models.backbone import SIZES

            require(len(given) == 1, f"size = {self.size!r} already says {', '.join(given[1:])}: {either}")
            nearest = did_you_mean(self.size, SIZES)
            require(self.size in SIZES, f"size = {self.size!r} is unknown; {nearest}choose from {', '.join(SIZES)}")
        elif given and missing:
            raise UserError(f"{', '.join(missing)} missing: give a size such as '34m', or {', '.join(_SHAPE)}")
        given += [name for name in ("absolute_positions", "block_size") if getattr(self, name)]
        _check_range(self, 0, "block_size", high=MOST_STEPS)
        for name, source in (("causal", self.causal), ("denoiser", self.denoiser)):
            require(not (source and given), f"{name} = {source!r} already says {', '.join(given)}: {either}")
        if self.bidirectional and not self.denoiser:
            raise UserError("bidirectional = true is for a denoiser that you have: give denoiser, or leave it out")
        _check_range(self, 0, "lora", high=1024)
        require(
            not self.lora or bool(self.denoiser), "lora is for a denoiser that you have: give denoiser, or leave it out"
        )
        if self.shift and not (self.causal or self.bidirectional):
            raise UserError("shift = true is for a causal language model: give causal, or leave shift out")

    @property
    def shape_given(self) -> list[str]:
        """The keys that say something about the denoiser's shape."""
        return [name for name in ("size", *_SHAPE) if getattr(self, name)]


@dataclass(frozen=True)
class Optimisation:
    """What both objectives share: how many updates of how many sequences, and the shape of the learning rate."""

    updates: int
    batch: int  # sequences per update, over all processes and micro-batches
    accumulate: int = 1  # micro-batches per update
    warmup: int = 100  # updates of linear warm-up
    final_rate: float = 0.05  # the cosine ends at this fraction of the learning rate
    weight_decay: float = 0.0
    clip: float = 1.0  # each network's gradient is clipped by its own norm
    ema: float = 0.0  # decay of an average of the weights that replaces them at the end; 0: none
    max_bad: int = 5  # an update whose loss or gradient is not finite is skipped; this many in a row stop the run
    on_collapse: Literal["report", "restore"] = "report"  # restore: resume from the best weights, at a smaller rate
    restored_rate: float = 0.5  # the learning rates are multiplied by this when weights are restored

    def __post_init__(self) -> None:
        _check_range(self, 1, "updates", "accumulate", "max_bad")
        _check_range(self, 1, "batch", high=1_000_000)
        _check_range(self, 0, "warmup", "weight_decay", "final_rate")
        require(self.clip > 0, f"clip must be above 0, got {self.clip}")
        require(0 <= self.ema < 1, f"ema must be at least 0 and below 1, got {self.ema}")
        _check_rate(self, "restored_rate")
        whole = self.batch % self.accumulate == 0
        require(whole, f"batch = {self.batch} must be a multiple of accumulate = {self.accumulate}")


@dataclass(frozen=True)
class DenoiseRecipe(Optimisation):
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate(self, "learning_rate")


@dataclass(frozen=True)
class OrderRecipe(Optimisation):
    budget: int = 0  # T
    trajectories: int = 8  # k
    tau: float = 0.1
    selection: Literal["nonempty", "bernoulli", "one"] = "nonempty"  # one: a token per step, as LO-ARM, T = N
    baseline: Literal["leave-one-out", "none", "moving-average"] = "leave-one-out"
    posterior: Literal["scorer", "selector"] = "scorer"  # over orders; selector: it is its own, and there is no scorer
    teacher: str = ""  # a rule, such as threshold:0.9, from whose order the posterior starts; "": from a random one
    # For posterior = "selector":
    # Of a step, lowest and highest, in nats or reward: one order for all.  (): the usual ones if least_budget is given.
    prices: tuple[float, ...] = ()
    start: Literal["iid", "threshold", "paced", "eb"] = "iid"  # the rule from which the selector starts
    # Of that rule, at the lowest and at the highest price; of eb these are gamma.  (): the usual ones.
    thresholds: tuple[float, ...] = ()
    spread: float = 0.0  # of the selector's logits at the start, where positions look alike
    least_budget: int = 0  # with prices, half of the sequences have a budget between this and `budget`
    budgets_drawn: Literal["uniform", "log-uniform"] = "uniform"  # how these are drawn
    reward: bool = False  # learn from whether the answer is valid, not from the likelihood
    distinct: bool = False  # with a reward: none for an answer that another sequence of the batch wrote too
    temperature: float = 1.0  # of the tokens that are written for a reward; 0: greedy
    reference_weight: float = 0.0  # of the KL from the rule of `start`, as in UPO; 0: none
    from_init: bool = False  # train the order of the run that `init` names further, instead of a fresh one
    denoiser_rate: float = 0.0  # 0: frozen
    continued: str = ""  # joint: a run that has trained the denoiser further; "": this run does, into RUN/baseline
    selector_rate: float = 1e-3
    scorer_rate: float = 1e-3
    kl_weight: float = 1.0  # of the order KL at the first update, falling to 1 at half time; the paper has 1 throughout

    def __post_init__(self) -> None:
        super().__post_init__()
        no_order = "in one step everything is revealed, and there is no order to learn"
        require(self.budget >= 2, f"budget (T) must be at least 2, got {self.budget}: {no_order}")
        require(self.tau > 0, f"tau must be above 0, got {self.tau}")
        instead = ", or take baseline = 'none' or 'moving-average'" if self.posterior == "scorer" else ""
        require(
            self.baseline != "leave-one-out" or self.trajectories >= 2,
            f"trajectories (k) must be at least 2 with leave-one-out, got {self.trajectories}: raise it{instead}",
        )
        _check_range(self, 1, "kl_weight")
        _check_range(self, 2, "budget", high=MOST_STEPS)
        _check_range(self, 1, "trajectories", high=10_000)
        _check_range(self, 0, "denoiser_rate", "selector_rate", "scorer_rate", high=1)
        _check_range(self, 0, "temperature")
        if self.teacher:
            parse_teacher(self.teacher)
        _check_range(self, 0, "spread", "least_budget", "reference_weight")
        defaults = {field.name: field.default for field in dataclasses.fields(self)} | {"thresholds": THRESHOLDS}
        if not self.thresholds:
            object.__setattr__(self, "thresholds", GAMMAS if self.start == "eb" else THRESHOLDS)
        own = (
            *("prices", "start", "thresholds", "spread", "least_budget", "budgets_drawn"),
            *("reward", "distinct", "temperature", "reference_weight"),
        )
        if self.posterior == "scorer" and (given := [name for name in own if getattr(self, name) != defaults[name]]):
            raise UserError(f"{given[0]} is for posterior = 'selector': set that, or leave it out")
        if self.posterior == "selector":
            theirs = ("teacher", "kl_weight", "baseline", "tau", "scorer_rate")
            if given := [name for name in theirs if getattr(self, name) != defaults[name]]:
                unused = f"{given[0]} has no effect with posterior = 'selector'"
                raise UserError(f"{unused}: leave it out, or set it to its default, {defaults[given[0]]!r}")
            if self.prices and not self.least_budget:
                raise UserError(
                    "an order with prices serves every number of steps, from least_budget on: give least_budget too, "
                    "such as 2, or leave prices out"
                )
            if self.least_budget and not self.prices:
                object.__setattr__(self, "prices", REWARD_PRICES if self.reward else PRICES)
            self._check_thresholds()
            if self.budgets_drawn != defaults["budgets_drawn"] and not self.least_budget:
                raise UserError("budgets are drawn from least_budget on: give that too, or leave budgets_drawn out")
            if self.least_budget > self.budget:
                raise UserError(f"least_budget = {self.least_budget} must be at most budget = {self.budget}")
            if self.temperature != defaults["temperature"] and not self.reward:
                raise UserError("temperature is that of the tokens written for a reward: set reward, or leave it out")
            if self.distinct and not (self.reward and self.temperature):
                needs = "set reward = true and a temperature above 0"
                raise UserError(f"distinct is for answers drawn for a reward: {needs}, or leave it out")
            require(self.selector_rate > 0, "selector_rate is 0: no order would be learned")
        if self.continued and self.denoiser_rate == 0:
            raise UserError("continued is for denoiser_rate > 0: the rivals of a frozen order run on its own denoiser")
        require(
            self.selector_rate + self.scorer_rate > 0,
            "selector_rate and scorer_rate are both 0: no order would be learned; train the denoiser in [denoise]",
        )
        if self.kl_weight > 1 and not self.scorer_rate and not self.denoiser_rate:
            raise UserError("kl_weight has no effect where only the selector learns: leave it out")

    def _check_thresholds(self) -> None:
        if self.start == "iid" and self.thresholds != THRESHOLDS:
            rules = "start = 'threshold', 'paced' or 'eb'"
            raise UserError(f"thresholds are those of {rules}: set start, or leave them out")
        first, last = self.thresholds if len(self.thresholds) == 2 else (0.0, 0.0)
        if self.start == "eb":
            fits, wanted = 1e-4 <= first <= last, "two from 1e-4 on, the lower one first: gamma of start = 'eb'"
        else:
            fits = 1 - 1e-6 >= first >= last >= 1e-6
            wanted = "two from 1e-6 to 1 - 1e-6, where log-odds end, the higher one first"
        require(fits, f"thresholds must be {wanted}, got {list(self.thresholds)}")


def parse_teacher(text: str) -> Policy:
    """The rule, or UserError: it must decide by what the selector reads, the denoiser's confidences or the place."""
    from unmask.decoding.confidence import FEATURES
    from unmask.decoding.policies import Dilated, EntropyBounded, Factor, Threshold, check_policy, own_rules

    with prefixed(f"teacher = {text!r}"):  # a run folder may name a teacher: no code of the user's own is imported
        rule = None if own_rules(text) else check_policy(text)
    if not isinstance(rule, Threshold | Factor | EntropyBounded | Dilated) or not rule.reads <= FEATURES:
        raise UserError(f"teacher = {text!r} cannot teach: take threshold, factor, eb or dus, such as threshold:0.9")
    return rule


@dataclass(frozen=True)
class EvaluateRecipe:
    examples: int = 1000
    temperature: float = 1.0
    policies: tuple[str, ...] = PLAIN_RULES  # beside the learned: see `unmask policies`
    budgets: tuple[int, ...] = ()  # for the heuristics; the learned order runs at its own

    def __post_init__(self) -> None:
        _check_range(self, 1, "examples", high=MOST_EXAMPLES)
        _check_range(self, 0, "temperature")
        possible = all(1 <= budget <= MOST_STEPS for budget in self.budgets)
        require(possible, f"budgets must be between 1 and {MOST_STEPS:,}, got {list(self.budgets)}")
        from unmask.decoding.policies import check_policy, own_rules

        for policy in self.policies:
            if not own_rules(policy):  # that is code, which only `load_recipe` runs
                check_policy(policy)


@dataclass(frozen=True)
class SavingRecipe:
    every_seconds: float = 60.0  # a checkpoint as soon as the last one is older
    every_updates: int = 0  # and after this many updates; 0: by the clock alone
    keep: int = 3  # of the newest

    def __post_init__(self) -> None:
        _check_range(self, 0, "every_seconds", "every_updates")
        _check_range(self, 1, "keep")


@dataclass(frozen=True)
class Recipe:
    task: dict[str, Any]
    model: ModelRecipe = field(default_factory=ModelRecipe)
    denoise: DenoiseRecipe | None = None
    order: OrderRecipe | None = None
    evaluate: EvaluateRecipe = field(default_factory=EvaluateRecipe)
    saving: SavingRecipe = field(default_factory=SavingRecipe)
    seed: int = 0
    init: str = ""  # weights to start from: a run folder, or a .safetensors file of SMDM
    precision: Literal["no", "bf16"] = "no"  # autocast
    compile: bool = False  # torch.compile, on CUDA
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()  # where metrics go beside RUN/metrics.jsonl
    threads: int = 0  # CPU threads; 0: torch's default; tiny models are fastest with 1

    def __post_init__(self) -> None:
        _check_range(self, 0, "threads", high=1024)  # with very many, torch fails in ways that cannot be caught
        require("name" in self.task, "[task] needs a name")
        for key, value in self.task.items():
            simple = isinstance(value, str | int | float)
            require(simple, f"task.{key} must be a number, a string, true or false, got {value!r}")
        if not is_own(str(self.task["name"])):  # that is code, which only `load_recipe` runs
            object.__setattr__(self, "task", _resolved_task(**self.task))
        require(bool(self.denoise or self.order), "nothing to train: give [denoise], [order] or both")
        if self.model.denoiser:
            self._check_frozen()
        if self.order and self.order.from_init and (not self.init or self.denoise):
            raise UserError("order.from_init trains an order further: set init to its run, and leave [denoise] out")
        if self.model.selector.drawn and not (self.order and self.order.reward and self.order.temperature):
            raise UserError(
                "model.selector.drawn reads the tokens that are drawn for a reward: set order.reward = true and "
                "order.temperature above 0, or leave it out"
            )
        if self.denoise and self.order and self.order.continued:
            raise UserError("order.continued starts where the order does: leave [denoise] out, and set init")
        if self.init and self.model.causal:
            raise UserError(
                f"init = {self.init!r} and model.causal = {self.model.causal!r} both say where to start: set one to ''"
            )
        if self.denoise and not (self.init or self.model.causal or self.model.shape_given):
            raise UserError("[model] has no shape: give a size such as '34m', or width, layers, heads and intermediate")

    def _check_frozen(self) -> None:
        """Of a denoiser of the user's only the adapters can learn beside the selector."""
        name, model = f"model.denoiser = {self.model.denoiser!r}", self.model
        given = {"init": self.init, "model.causal": model.causal, "model.max_length": model.max_length}
        for other in [other for other, value in given.items() if value]:
            raise UserError(f"{name} is where the run starts, and has a context: leave {other} out")
        require(self.denoise is None, f"{name} stays as it is: leave [denoise] out")
        order = self.order
        if order is None or order.posterior != "selector":
            raise UserError(f"{name} is for an order of its own: set order.posterior = 'selector'")
        if bool(order.denoiser_rate) != bool(model.lora):
            raise UserError(
                f"{name} learns along through adapters only: set model.lora, their rank, such as 8, and "
                "order.denoiser_rate, such as 1e-4; or both to 0, and it stays as it is"
            )
        require(not order.continued, f"{name} has a baseline of its own: leave order.continued out")

    def check_start(self) -> None:
        """An order without a denoiser can be shown, not trained."""
        if not (self.denoise or self.init or self.model.denoiser):
            raise UserError(
                "an order needs a denoiser: give [denoise], init = 'the folder of an earlier run', or model.denoiser = "
                "'the folder of a model of yours'"
            )

    @property
    def own_code(self) -> list[str]:
        """Each task, checker or rule of the user's own that it names: to use one is to import a module and run it."""
        from unmask.decoding.policies import own_rules

        names = [name for key in ("name", "checker") if is_own(name := str(self.task.get(key, "")))]
        return [*names, *(name for policy in self.evaluate.policies for name in own_rules(policy))]

    @property
    def is_joint(self) -> bool:
        """Whether the denoiser learns beside the order; the heuristics then run on a denoiser of their own."""
        return self.order is not None and self.order.denoiser_rate > 0

    def to_toml(self) -> str:
        """The recipe with every value written out, itself a recipe."""
        return "\n".join(_toml(dataclasses.asdict(self))).strip() + "\n"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def _check_range(recipe: Any, low: int, *names: str, high: int | None = None) -> None:
    for name in names:
        value = getattr(recipe, name)
        if high is not None and not low <= value <= high:
            raise UserError(f"{name} must be between {low} and {high:,}, got {value}")
        if value < low:
            raise UserError(f"{name} must be at least {low}, got {value}")


def _check_rate(recipe: Any, name: str) -> None:
    value = getattr(recipe, name)
    require(0 < value <= 1, f"{name} must be above 0 and at most 1, got {value}")


def _resolved_task(name: str, **options: Any) -> dict[str, Any]:
    """Every option of a task with its value, after the task itself has checked them."""
    task: Any = make_task(str(name), **options)
    return {"name": str(name), **{field.name: getattr(task, field.name) for field in dataclasses.fields(task)}}


# What may differ between the recipe of a run and the one that continues it: nothing here changes what is learned.
FREE = {"evaluate", "saving", "threads", "compile", "trackers", "accumulate", "max_bad"}


def differences(stored: Recipe, given: Recipe) -> list[tuple[str, Any, Any]]:
    """Every value that matters and differs: its key, as --set takes it, and both values."""
    old, new = flat(dataclasses.asdict(stored)), flat(dataclasses.asdict(given))
    matter = [key for key in {**old, **new} if FREE.isdisjoint(key.split("."))]
    return [(key, old.get(key), new.get(key)) for key in matter if old.get(key) != new.get(key)]


def continued(recipe: Recipe) -> DenoiseRecipe:
    """The plain training that a joint order is measured against: as many further updates, each on B * k sequences.

    How is for `[denoise]` to say; without it, as the denoiser learns beside the order.
    """
    assert recipe.order is not None
    order = recipe.order
    alike = {shared.name: getattr(order, shared.name) for shared in dataclasses.fields(Optimisation)}
    settings = recipe.denoise or DenoiseRecipe(**alike, learning_rate=order.denoiser_rate)
    return dataclasses.replace(
        settings, updates=order.updates, batch=order.batch * order.trajectories, accumulate=order.accumulate
    )


def not_continued(plain: Recipe, joint: Recipe) -> list[tuple[str, Any, Any]]:
    """What keeps a run of `plain` from being `continued(joint)`: each key with its value and the one that is needed.

    Where they start from, and the shape of the denoiser, is for the weights to say.
    """
    wanted = dataclasses.replace(
        joint, order=None, denoise=continued(joint), seed=plain.seed, init=plain.init, model=plain.model
    )
    return differences(plain, wanted)


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by their keys, as --set takes them."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values


def recipe_folder() -> Path:
    """Where the recipes that come with unmask lie: beside the package when installed, at the root of a checkout."""
    installed = Path(__file__).parent / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def known_recipes() -> list[str]:
    """The names of the recipes that come with unmask."""
    return sorted(recipe.stem for recipe in recipe_folder().glob("*.toml"))


def listed_recipes() -> list[tuple[str, str, str, str]]:
    """Each of them: its name, its task, what it trains, and how its comment begins."""
    found = []
    for name in known_recipes():
        text = (recipe_folder() / f"{name}.toml").read_text(encoding="utf-8")
        values = tomllib.loads(text)
        trained = ["denoiser"] if "denoise" in values else []
        trained += [f"order, T = {values['order']['budget']}"] if "order" in values else []
        comment = re.match(r"# (.*?)(\.  |[.:;]? ?\n|[:;] )", text)
        found.append((name, values["task"]["name"], " and ".join(trained), comment[1] if comment else ""))
    return found


def known_studies() -> list[str]:
    """The names of the studies that come with unmask."""
    return sorted(study.stem for study in (recipe_folder() / "studies").glob("*.toml"))


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by path, or by the name of one that comes with unmask, with `key.key=value` overrides applied.

    A run, or its `recipe.json`, is one too.  If overrides change the task, options in the file that the new one does
    not have are left out, with a line on stderr.
    """
    path, known = Path(name), known_recipes()
    if str(name) not in known and (path / "recipe.json").is_file():
        path = path / "recipe.json"
    if not path.is_file():
        path = recipe_folder() / f"{name}.toml"
        nearest = did_you_mean(str(name), known)
        require(path.is_file(), f"no recipe {str(name)!r}; {nearest}give a file or one of {', '.join(known)}")
    values = _read_json(path) if path.suffix == ".json" else read_toml(path)
    task = values.get("task")
    name_in_file = task.get("name") if isinstance(task, dict) else None
    for override in overrides:
        _override(values, override)
    if isinstance(task, dict) and task.get("name") != name_in_file:
        _drop_options(task, kept={override.partition("=")[0].strip() for override in overrides})
    recipe = build(Recipe, values)
    if recipe.own_code and path.suffix == ".json":  # a run may be somebody else's
        raise UserError(f"{path} names code of its own, {recipe.own_code[0]}: read it, and name it in a TOML file")
    if recipe.own_code:
        from unmask.decoding.policies import check_policy

        for policy in recipe.evaluate.policies:
            with prefixed("evaluate.policies"):
                check_policy(policy)
    own = is_own(str(recipe.task["name"]))
    return dataclasses.replace(recipe, task=_resolved_task(**recipe.task)) if own else recipe


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Without what is null: what TOML would leave out."""
    from unmask.jsonl import parse_json

    with prefixed(str(path)):
        values = parse_json(path.read_bytes())
        require(isinstance(values, dict), "no recipe: give a TOML file, or the recipe.json of a run")
    return {key: value for key, value in values.items() if value is not None}


def _drop_options(task: dict[str, Any], kept: set[str]) -> None:
    """Take out what the task of this name does not have, except what an override says."""
    try:
        options = {option.name for option in dataclasses.fields(task_class(str(task["name"])))}
    except UserError:
        return  # no such task, which is said when the recipe is built
    dropped = [key for key in task if key not in options | {"name"} and f"task.{key}" not in kept]
    for key in dropped:
        del task[key]
    if dropped:
        say(f"unmask: task {task['name']} has no {', '.join(dropped)}: left out of the recipe", err=True)


def _override(values: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` in nested tables; the value is TOML, or a bare string where it is not."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"override {override!r} is not of the form key=value, such as order.budget=3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise UserError(f"override of {key.strip()}: the value is nested too deeply") from None
    except ValueError:
        value = text
    *tables, last = key.strip().split(".")
    table = values
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UserError(f"override {override!r}: {name} is a value, not a table")
    table[last] = value


def _toml(table: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """The lines of a table: its values first, then the tables inside it.  What is None is left out."""
    if name:
        yield f"\n[{name}]"
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{key} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml(value, f"{name}.{key}" if name else key)


def _toml_value(value: str | bool | int | float | Sequence[Any]) -> str:
    if isinstance(value, str | bool):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return f"[{', '.join(map(_toml_value, value))}]" if isinstance(value, Sequence) else repr(value)
