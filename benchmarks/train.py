"""How fast training is, and what an order step costs beside a plain one.

    python benchmarks/train.py cpu                 in a few minutes on this machine
    python benchmarks/train.py h200-30m h200-170m  the published cases, on one GPU
    python benchmarks/train.py h200-30m --growth   how an order step grows with k, N and T, and with the time t
    python benchmarks/train.py h200-30m --self     the selector as its own posterior: 1,024 rollouts, or --rollouts N
    python benchmarks/train.py h200-30m --self --profile  where its time goes
    python benchmarks/train.py table               results/train/tables.md from the records beside it

Every step is the training loop itself (`run_stage`: data, both passes, clipping, AdamW, metrics) on random tokens with
the lengths of GSM8K.  Counted are:

    FLOP = 6 x block parameters x tokens that are no padding + 6 x width x vocabulary x projected positions
         + 12 x layers x width x sum of squared lengths

With --self they are those of the trunk of a frozen denoiser, as far as it is run (`trunk_operations`).  Its random
weights would reveal hardly anything, so the bias of the selector is set for rollouts of 3.5 steps; with --run RUN, the
denoiser and the task are those of a run, and the selector starts as a threshold.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.profiler import profile, record_function

from unmask.evaluation.evaluate import device_name, revision
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer
from unmask.models.packing import Layout, places
from unmask.recipe import Optimisation
from unmask.tasks.task import Examples, Task, to_device
from unmask.training import self_posterior
from unmask.training.compiled import compiled_networks
from unmask.training.loop import Metrics, Rates, Stage, run_stage
from unmask.training.objectives import DenoiseObjective, OrderObjective
from unmask.training.reading import log_likelihood, selector_features
from unmask.training.run import load_run
from unmask.training.self_posterior import Orders, SelfObjective
from unmask.variational.estimators import LeaveOneOut

RECORDS = Path(__file__).parents[1] / "results" / "train"
PAGE = Path(__file__).parents[1] / "results" / "train" / "tables.md"


@dataclass(frozen=True)
class Case:
    shape: BackboneConfig
    vocabulary: int
    prompt: int  # room for the prompt
    response: int
    mean_prompt: int  # the lengths of prompts have this mean, and a fifth of them is shorter than half of it
    sequences: int  # per update: B x k for the order
    budget: int
    device: str
    bar: float  # TFLOP/s
    trajectories: int = 8


CASES = {
    "cpu": Case(BackboneConfig(64, 2, 4, 192, max_length=264), 512, 48, 24, 24, 64, 5, "cpu", 0.0),
    "h200-30m": Case(BackboneConfig(512, 8, 8, 1408, max_length=264), 4096, 192, 72, 65, 512, 5, "cuda", 290.0),
    "h200-170m": Case(BackboneConfig(768, 18, 12, 3072, max_length=256), 32_000, 128, 128, 128, 256, 5, "cuda", 380.0),
}
BARS = {"order, joint": 1.15, "order, frozen": 0.6}
LEARN = 1e-5
EVERY = 20  # updates between two records of the loop

SELF_BUDGET, SELF_STEPS, SELF_BAR = 10, 3.5, 150.0  # T, mean steps of a rollout with random weights, TFLOP/s
PRICES = {"likelihood": (0.02, 2.0), "reward": (0.004, 0.3)}


@dataclass(frozen=True)
class Drawn(Task):
    """A task of random tokens: prompts of different lengths, padded on the left, and a response of a fixed one."""

    case: Case

    name = "drawn"

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(str(i) for i in range(self.case.vocabulary))

    @property
    def length(self) -> int:
        return self.case.prompt + self.case.response

    @cached_property
    def pool(self) -> Examples:
        """4,096 examples to choose from."""
        case, generator = self.case, torch.Generator().manual_seed(0)
        tokens = torch.randint(case.vocabulary, (4096, self.length), generator=generator)
        spread = torch.empty(4096, 1).log_normal_(0, 0.35, generator=generator)
        prompts = torch.full((4096, 1), case.prompt)
        if case.mean_prompt < case.prompt:
            prompts = (case.mean_prompt * spread / spread.mean()).long().clamp(4, case.prompt)
        place = torch.arange(self.length)
        response = (place >= case.prompt).expand(4096, -1).clone()
        return Examples(tokens, response, place >= case.prompt - prompts)

    def examples(self, ids: Tensor, split: str) -> Examples:
        pool, rows = self.pool, ids % 4096
        return Examples(pool.tokens[rows], pool.response[rows], pool.attention_mask[rows])

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return (tokens == examples.tokens).all(-1)


def build(case: Case) -> OrderModel:
    shape = case.shape
    config = OrderModelConfig(
        case.vocabulary,
        shape,
        selector=SelectorConfig(shape.width // 4, 1, 4, case.budget),
        scorer=replace(shape, layers=2, heads=shape.heads // 2, intermediate=2 * shape.width),
    )
    return OrderModel(config, word_level_tokenizer([str(i) for i in range(case.vocabulary)])).to(case.device)


def operations(case: Case, task: Drawn) -> float:
    """FLOP of a plain update, as the head of this file counts them."""
    shape, lengths = case.shape, task.pool.attention_mask.sum(-1).double()
    blocks = shape.layers * (4 * shape.width**2 + 3 * shape.width * shape.intermediate)
    projected = (case.response + 1) / 2  # of a sequence, on average
    attention_mask = 12 * shape.layers * shape.width * float((lengths**2).mean())
    each = 6 * blocks * float(lengths.mean()) + 6 * shape.width * case.vocabulary * projected + attention_mask
    return each * case.sequences


def update_seconds(
    case: Case, model: OrderModel, task: Drawn, what: str, accelerator: Accelerator
) -> tuple[float, int]:
    """Seconds per update of the training loop, and the peak memory (0 on the CPU)."""
    if what == "denoise":
        objective: Any = DenoiseObjective(model.denoiser, 0, compile=case.device == "cuda")
        rates: dict[str, Any] = {"denoiser": (model.denoiser, LEARN)}
        batch = case.sequences
    else:
        joint = what == "order, joint"
        objective = OrderObjective(
            model, case.trajectories, LeaveOneOut(), 0, learn_denoiser=joint, compile=case.device == "cuda"
        )
        networks = {"denoiser": model.denoiser, "selector": model.selector, "scorer": model.scorer}
        rates = {key: (net, LEARN if joint or key != "denoiser" else 0.0) for key, net in networks.items()}
        batch = case.sequences // case.trajectories
    return loop_seconds(case, objective, rates, batch, task, accelerator)


def loop_seconds(
    case: Case, objective: Any, rates: Rates, batch: int, task: Task, accelerator: Accelerator, warm: int = 1
) -> tuple[float, int]:
    """As `update_seconds`.  The loop records every twentieth update; the first `warm` times twenty compile."""
    rounds = 3 if case.device == "cuda" else 1
    stage = Optimisation(updates=EVERY * (rounds + warm) + 1, batch=batch)
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(sys.stderr),
    ):  # stdout is for records
        path = Path(folder) / "metrics.jsonl"
        run_stage(Stage.ORDER, objective, rates, stage, task, 0, accelerator, Metrics(path))
        seconds = [json.loads(line)["seconds"] for line in path.read_text().splitlines()]
    objective.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated() if case.device == "cuda" else 0
    return statistics.median(b - a for a, b in pairwise(seconds[warm:])) / EVERY, peak


def measure(name: str) -> Iterator[dict[str, Any]]:
    """The rows of one case, each as soon as it is measured."""
    case = CASES[name]
    with running(case) as (model, accelerator):
        task, plain = Drawn(case), 0.0
        tokens = float(task.pool.attention_mask.sum(-1).double().mean()) * case.sequences
        for what in ("denoise", *BARS):
            seconds, peak = update_seconds(case, model, task, what, accelerator)
            plain = plain or seconds
            yield {
                "case": name,
                "what": what,
                "milliseconds": round(1000 * seconds, 2),
                "ratio": round(seconds / plain, 3),
                "teraflops": round(operations(case, task) / seconds / 1e12, 3) if what == "denoise" else None,
                "tokens_per_s": round(tokens / seconds),
                "peak_bytes": peak or None,
                "loss_bytes": loss_bytes(case, model) if what == "denoise" else None,
                "sequences": case.sequences,
                "budget": case.budget,
                **about(accelerator),
            }


def measure_growth(name: str) -> Iterator[dict[str, Any]]:
    """A frozen order step as one of k, N and T grows, the number of sequences B held; and at every time t."""
    base = CASES[name]
    B, N, T = base.sequences // base.trajectories, base.response, base.budget
    grown = [("k", k, replace(base, trajectories=k, sequences=B * k)) for k in (2, 4, 8, 16)]
    grown += [("N", n, replace(base, response=n)) for n in (N // 4, N // 2, N)]
    grown += [("T", t, replace(base, budget=t)) for t in (2, 5, 10, 20)]
    for symbol, value, case in grown:
        with running(case) as (model, accelerator):
            seconds, _ = update_seconds(case, model, Drawn(case), "order, frozen", accelerator)
            yield growth_row(name, symbol, value, seconds, accelerator)
    with running(base) as (model, accelerator):
        for t in range(T):
            yield growth_row(name, "t", t, seconds_at(base, model, t, accelerator), accelerator)


def growth_row(case: str, symbol: str, value: int, seconds: float, accelerator: Accelerator) -> dict[str, Any]:
    milliseconds = round(1000 * seconds, 2)
    return {"case": case, "grows": symbol, "value": value, "milliseconds": milliseconds, **about(accelerator)}


def seconds_at(case: Case, model: OrderModel, t: int, accelerator: Accelerator) -> float:
    """Both passes of the frozen order objective with every sequence at the time t: the median of ten."""
    model.denoiser.requires_grad_(False)
    batch = case.sequences // case.trajectories
    objective = OrderObjective(
        model, case.trajectories, LeaveOneOut(), 0, learn_denoiser=False, compile=case.device == "cuda"
    )
    times = []
    for update in range(13):
        ids = torch.arange(update * batch, (update + 1) * batch)
        examples = Drawn(case).examples(ids, "train").to(case.device)
        _wait(case)
        started = time.perf_counter()
        with accelerator.autocast():
            loss = objective(examples, ids, torch.full((batch,), (t + 0.5) / case.budget)).loss
        loss.backward()
        _wait(case)
        times.append(time.perf_counter() - started)
    model.zero_grad(set_to_none=True)
    return statistics.median(times[3:])


def loss_bytes(case: Case, model: OrderModel) -> list[int]:
    """What a loss keeps for its backward pass beside the trunk's own, with the prompt as it is and twice as long."""
    found = []
    for prompt in (case.prompt, 2 * case.prompt):
        masked = torch.zeros(4, prompt + case.response, dtype=torch.bool, device=case.device)
        masked[:, prompt::2] = True
        tokens = torch.ones_like(masked, dtype=torch.long)
        hidden = torch.zeros(*masked.shape, case.shape.width, device=case.device, requires_grad=True)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            at = places(masked, None)
            log_likelihood(model.denoiser.logits(hidden.flatten(0, 1)[at]), tokens.flatten()[at]).sum()
        found.append(sum(kept.values()))
    return found


# --- the selector as its own posterior --------------------------------------------------------------------------------


class Counted(SelfObjective):
    """Keeps, for every update, the lengths of its sequences [B] and the steps of their rollouts [B, k]."""

    def __init__(self, *settings: Any, **options: Any) -> None:
        super().__init__(*settings, **options)
        self.counted: list[tuple[Tensor, Tensor]] = []

    def orders(self, examples: Examples, ids: Tensor, budget: Tensor, price: Tensor) -> Orders:
        found = super().orders(examples, ids, budget, price)
        self.counted.append((examples.num_tokens, found.holds_mask.sum(0)))
        return found


class PlainRollouts(SelfObjective):
    """The same loss as one would first write it: every rollout a padded row, evaluated until the last one is finished,
    all logits [B k, L, V], and the selector's graph kept; with a checker, greedy tokens."""

    def orders(self, examples: Examples, ids: Tensor, budget: Tensor, price: Tensor) -> Orders:
        model, k, device = self.model, self.trajectories, examples.tokens.device
        assert model.selector is not None
        of = torch.arange(len(examples)).repeat_interleave(k)  # [B k]: the sequence of each rollout
        rows, every = examples.rows(of), torch.arange(len(of), device=device)
        of = to_device(of, device)
        tokens, masked, attended, budget = rows.tokens, rows.response, rows.attention_mask, budget[of]
        layout = Layout(rows.position.clamp(min=0), attended[:, None, None], None, (len(of), tokens.shape[1]))
        steps: list[tuple[Tensor, ...]] = []
        while masked.any():
            index = len(steps)
            with torch.no_grad():
                hidden = model.denoiser.hidden(torch.where(masked, model.denoiser.mask_token_id, tokens), layout)
                mu = model.denoiser.logits(hidden)  # [B k, L, V]
                log_mu = log_likelihood(mu.flatten(0, 1), rows.tokens.flatten()).view_as(tokens)
                seen = torch.where(masked[..., None], selector_features(mu.flatten(0, 1)).view(*tokens.shape, 3), 0.0)
            logits = model.selector(hidden, seen, masked, budget - 1 - index, layout, budget, price[of])
            log_mu = log_mu if self.checker is None else torch.zeros_like(log_mu)
            draws = self.seed_word, torch.stack([ids[of], every % k, torch.full_like(every, index)]), rows.position
            forced = budget == index + 1
            reveal = self.draw(model.selection, logits.detach(), masked, forced, *draws)
            earned = self.earn(model.selection, logits, log_mu, masked, forced, reveal)
            steps.append((*earned, masked.any(-1)))
            if self.checker is not None:
                tokens = torch.where(reveal, mu.argmax(-1), tokens)
            masked = masked & ~reveal
        told = (torch.stack(part[::-1]).view(len(part), -1, k) for part in zip(*steps, strict=True))
        return Orders(*told, *(part.view(-1, k, tokens.shape[1]) for part in (tokens, torch.full_like(tokens, -1))))


def trunk_operations(shape: BackboneConfig, lengths: Tensor, steps: Tensor) -> float:
    """FLOP of the forward passes for sequences of `lengths` [B] whose k rollouts take `steps` [B, k]:

    sum_b passes_b (2 x block parameters x length_b + 4 x layers x width x length_b^2)
    passes_b = 1 + sum_k (steps_bk - 1)                             x_T is evaluated once for all k
    """
    passes, lengths = 1 + (steps.double() - 1).sum(-1), lengths.double()
    attention = 4 * shape.layers * shape.heads * shape.E * lengths**2
    return float((passes * (2 * shape.num_weights() * lengths + attention)).sum())


def self_case(name: str, run: Path | None, rollouts: int | None) -> tuple[Case, Task, OrderModel]:
    """The case with T = 10, its task, and a model with the denoiser."""
    case = CASES[name]
    usual = 2 * case.sequences if case.device == "cuda" else 16
    case = replace(case, budget=SELF_BUDGET, sequences=rollouts or usual)
    if run is None:
        return case, Drawn(case), build(case)
    model, _, _, task = load_run(run)
    return replace(case, shape=model.config.denoiser, vocabulary=model.config.vocab_size), task, model


def with_selector(case: Case, found: OrderModel, prices: tuple[float, ...], trained: bool) -> OrderModel:
    """The denoiser with a new selector; without a trained one it starts as IID, which takes alike steps for all."""
    selector = SelectorConfig(128, 2, 4, case.budget, prices=prices, start="threshold" if trained else "iid")
    model = OrderModel(replace(found.config, selector=selector, scorer=None), found.tokenizer)
    model.denoiser.load_state_dict(found.denoiser.state_dict())
    return model.to(case.device)


def batch_of(case: Case, task: Task, update: int) -> tuple[Examples, Tensor, Tensor]:
    """What the objective takes: examples, ids and uniforms."""
    batch = case.sequences // case.trajectories
    ids = torch.arange(update * batch, (update + 1) * batch)
    return task.examples(ids, "train").to(case.device), ids, (torch.arange(batch) + 0.5) / batch


@torch.no_grad()
def set_bias(case: Case, objective: SelfObjective, task: Task, accelerator: Accelerator) -> None:
    """Bisect the bias of the selector's logits until rollouts take 3.5 steps."""
    assert objective.model.selector is not None
    low, high = -10.0, 20.0
    for _ in range(10):
        objective.model.selector.out.bias.fill_((low + high) / 2)
        with accelerator.autocast():
            steps = float(objective(*batch_of(case, task, 0)).metrics["q_steps"])
        low, high = ((low + high) / 2, high) if steps > SELF_STEPS else (low, (low + high) / 2)


def passes_seconds(case: Case, objective: SelfObjective, task: Task, accelerator: Accelerator) -> float:
    """Both passes of an objective, without the rest of the loop: the median of three."""
    times = []
    for update in range(4):
        batch = batch_of(case, task, update)
        _wait(case)
        started = time.perf_counter()
        with accelerator.autocast():
            loss = objective(*batch).loss
        loss.backward()
        _wait(case)
        times.append(time.perf_counter() - started)
        objective.zero_grad(set_to_none=True)
    return statistics.median(times[1:])


def self_objectives(
    name: str, run: Path | None, rollouts: int | None
) -> Iterator[tuple[str, Case, Task, Counted, PlainRollouts, Accelerator]]:
    """For the likelihood and for the reward: the objective, and its plain form on the same weights."""
    case, task, found = self_case(name, run, rollouts)
    accelerator = accelerator_of(case)
    for what, prices in PRICES.items():
        model = with_selector(case, found, prices, run is not None)
        model.denoiser.requires_grad_(False)
        settings = model, case.trajectories, case.budget, 0
        options: dict[str, Any] = {"checker": task if what == "reward" else None, "temperature": 0.0}
        plain = PlainRollouts(*settings, **options)
        if run is None:
            set_bias(case, plain, task, accelerator)
        yield what, case, task, Counted(*settings, **options, compile=case.device == "cuda"), plain, accelerator


def measure_self(name: str, run: Path | None, rollouts: int | None) -> Iterator[dict[str, Any]]:
    """An update with the likelihood, and one with the reward."""
    for what, case, task, objective, plain, accelerator in self_objectives(name, run, rollouts):
        plain_seconds = passes_seconds(case, plain, task, accelerator)
        model, batch = objective.model, case.sequences // case.trajectories
        assert model.selector is not None
        rates: Rates = {"denoiser": (model.denoiser, 0.0), "selector": (model.selector, LEARN)}
        warm = 2 if case.device == "cuda" else 1
        with compiled(case, model):
            seconds, peak = loop_seconds(case, objective, rates, batch, task, accelerator, warm)
        timed = [(lengths, steps.cpu()) for lengths, steps in objective.counted[warm * EVERY :]]
        done = statistics.mean(trunk_operations(case.shape, *counted) for counted in timed)
        yield {
            "case": name,
            "what": f"selector as posterior, {what}",
            "milliseconds": round(1000 * seconds, 2),
            "rollouts_per_s": round(case.sequences / seconds),
            "mean_steps": round(statistics.mean(float(steps.double().mean()) for _, steps in timed), 3),
            "teraflops": round(done / seconds / 1e12, 3),
            "plain_milliseconds": round(1000 * plain_seconds, 2),
            "ratio": round(plain_seconds / seconds, 3),
            "peak_bytes": peak or None,
            "sequences": case.sequences,
            "budget": case.budget,
            "weights": "random" if run is None else run.name,
            **about(accelerator),
        }


def profile_self(name: str, run: Path | None, rollouts: int | None) -> None:
    """Print host and device time of the parts of an update, and the operations that take most of either."""
    for what, case, task, objective, _, accelerator in self_objectives(name, run, rollouts):
        model, updates, warm = objective.model, 5, 40 if case.device == "cuda" else 1
        parts: list[tuple[Any, str]] = [
            *((self_posterior, part) for part in ("with_layout", "read_denoiser", "scatter", "estimate_self")),
            *((objective, part) for part in ("read", "_rollouts", "draw", "_logits_with_graph", "earn", "_judged")),
            *((model.selector, "forward"), (Tensor, "cpu")),
        ]
        with ExitStack() as stack:
            stack.enter_context(compiled(case, model))
            for update in range(warm + updates):
                if update == warm:
                    for owner, part in (each for each in parts if hasattr(*each)):
                        stack.enter_context(patch.object(owner, part, labelled(owner, part)))
                    _wait(case)
                    profiler = stack.enter_context(profile())
                with record_function("= batch"):
                    batch = batch_of(case, task, update)
                with record_function("= forward"), accelerator.autocast():
                    loss = objective(*batch).loss
                with record_function("= backward"):
                    loss.backward()
                with record_function("= the host waits at the end"):  # hardly at all: it is the host that is slow
                    _wait(case)
                objective.zero_grad(set_to_none=True)
        found = profiler.key_averages()
        print(f"\n{name}, {what}, ms per update")
        times: dict[str, Tensor] = {}  # a part has a row for the host and one for the device
        for row in found:
            if row.key.startswith("= "):
                seen = torch.tensor([row.cpu_time_total / 1000, row.device_time_total / 1000, row.count]) / updates
                times[row.key] = torch.maximum(times.get(row.key, seen), seen)
        for key, (host, there, calls) in sorted(times.items(), key=lambda item: -float(item[1][0])):
            print(f"{key[2:]:>32}  host {host:9.2f}  device {there:9.2f}  calls {calls:6.1f}")
        print(found.table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))
        if case.device == "cuda":
            print(found.table(sort_by="self_device_time_total", row_limit=20, max_name_column_width=60))


def labelled(owner: Any, name: str) -> Any:
    """A function or method that the profiler lists under its name."""
    function = getattr(owner, name)
    label = f"= {getattr(owner, '__name__', type(owner).__name__).rpartition('.')[2]}.{name}"

    def run(*arguments: Any, **options: Any) -> Any:
        with record_function(label):
            return function(*arguments, **options)

    return run


# --- what all cases share ---------------------------------------------------------------------------------------------


@contextmanager
def running(case: Case) -> Iterator[tuple[OrderModel, Accelerator]]:
    """A model on its device, compiled on a GPU."""
    accelerator, model = accelerator_of(case), build(case)
    with compiled(case, model):
        yield model, accelerator


def accelerator_of(case: Case) -> Accelerator:
    if case.device == "cpu":
        torch.set_num_threads(1)  # on a busy machine, threads would wait for one another
    return Accelerator(mixed_precision="bf16" if case.device == "cuda" else "no", cpu=case.device == "cpu")


@contextmanager
def compiled(case: Case, model: OrderModel) -> Iterator[None]:
    """The networks compiled on a GPU, as they are on the CPU."""
    if case.device == "cpu":
        yield
        return
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    with compiled_networks(model):
        yield


def about(accelerator: Accelerator) -> dict[str, Any]:
    return {
        "device": device_name(accelerator.device),
        "launch_microseconds": launch_microseconds(accelerator.device),
        "torch": torch.__version__,
        "revision": revision(),
    }


@cache
def launch_microseconds(device: torch.device) -> float | None:
    """How long the host takes to launch a small kernel, which bounds an order step.  None on the CPU."""
    if device.type == "cpu":
        return None
    number, launches = torch.zeros(1, device=device), 5000
    for _ in range(launches):
        number += 1
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(launches):
        number += 1
    torch.cuda.synchronize()
    return round(1e6 * (time.perf_counter() - started) / launches, 2)


def _wait(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()


INTRODUCTION = """# Training speed

**Verdict.** On an H200, an update of the order costs about half of a plain update with a frozen denoiser, and about as
much as a plain update with a joint one, for the same number of sequences.

Written by `python benchmarks/train.py table` from the records in `results/train/`, which these commands made:

```
python benchmarks/train.py cpu > results/train/cpu.jsonl                  # and h200-30m, h200-170m
python benchmarks/train.py cpu --growth > results/train/cpu-growth.jsonl  # and h200-30m
```

A step is the training loop itself (data, both passes, clipping, AdamW, metrics) on random tokens with GSM8K's lengths.
FLOP counted: 6 x block parameters x tokens without padding, 6 x width x vocabulary x projected positions, attention.
*Loss keeps*: what the loss holds for its backward pass, for the prompt length and for twice that. The two agree because
only masked positions are projected to the vocabulary.

"""


def write_page() -> None:
    text = INTRODUCTION
    for path in sorted(set(RECORDS.glob("*.jsonl")) - set(RECORDS.glob("frozen-*"))):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        row = rows[0]
        case = replace(CASES[row["case"]], budget=row.get("budget", CASES[row["case"]].budget))
        shape, launch = case.shape, row.get("launch_microseconds")
        text += (
            f"## {path.stem}\n\nWidth {shape.width}, {shape.layers} layers, vocabulary {case.vocabulary:,}, "
            f"{case.prompt} + {case.response} tokens, T = {case.budget}, k = {case.trajectories}; {row['device']}, "
            f"torch {row['torch']}, revision {row['revision']}"
            + (f"; the host launches a kernel in {launch} microseconds" if launch else "")
            + ".\n\n"
        )
        table = growth_table(rows) if "grows" in row else self_table(case, rows) if "rollouts_per_s" in row else None
        text += (table or step_table(case, rows)) + "\n\n"
    PAGE.write_text(text.rstrip() + "\n")


def step_table(case: Case, rows: list[dict[str, Any]]) -> str:
    lines = [
        "| step | ms | over plain | bar | TFLOP/s | bar | tokens/s | peak GiB | loss keeps, MiB |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        most, least = BARS.get(row["what"]), case.bar if row["teraflops"] is not None else 0.0
        missed = bool(most and row["ratio"] > most) and case.device == "cuda"
        cells = [
            f"{row['what']}, {row['sequences']} sequences",
            f"{row['milliseconds']:.1f}",
            f"{row['ratio']:.2f}" + (" (missed)" if missed else ""),
            f"{most:.2f}" if most and case.device == "cuda" else "",
            ""
            if row["teraflops"] is None
            else f"{row['teraflops']:.3g}" + (" (missed)" if row["teraflops"] < least else ""),
            f"{least:.0f}" if least else "",
            f"{row['tokens_per_s']:,}",
            f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else "",
            ", ".join(f"{kept / 2**20:.2f}" for kept in row["loss_bytes"] or []),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def growth_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| what grows | value: ms of a frozen order step |", "|---|---|"]
    for symbol in ("k", "N", "T", "t"):
        found = [f"{row['value']}: {row['milliseconds']:.1f}" for row in rows if row["grows"] == symbol]
        lines.append(f"| {symbol} | {', '.join(found)} |")
    return "\n".join(lines)


def self_table(case: Case, rows: list[dict[str, Any]]) -> str:
    lines = ["| update | ms | rollouts/s | mean steps | TFLOP/s | bar | plain loop, ms | ratio | peak GiB |"]
    lines.append("|---" * 9 + "|")
    for row in rows:
        missed = case.device == "cuda" and row["teraflops"] < SELF_BAR
        cells = [
            f"{row['what']}, {row['sequences']} rollouts, {row['weights']} weights",
            f"{row['milliseconds']:.1f}",
            f"{row['rollouts_per_s']:,}",
            f"{row['mean_steps']:.2f}",
            f"{row['teraflops']:.3g}" + (" (missed)" if missed else ""),
            f"{SELF_BAR:.0f}" if case.device == "cuda" else "",
            f"{row['plain_milliseconds']:.1f}",
            f"{row['ratio']:.1f}x",
            f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=[*CASES, "table"], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--growth", action="store_true", help="how an order step grows with k, N and T instead")
    parser.add_argument("--self", action="store_true", help="updates of the selector as its own posterior instead")
    parser.add_argument("--run", type=Path, help="with --self: the denoiser and the task of this run")
    parser.add_argument("--rollouts", type=int, help="with --self: per update; a multiple of 8 [1024; on a CPU 16]")
    parser.add_argument("--profile", action="store_true", help="with --self: where the time goes, and no records")
    arguments = parser.parse_args()
    if (arguments.run or arguments.rollouts or arguments.profile) and not arguments.self:
        parser.error("--run, --rollouts and --profile go with --self")
    for name in arguments.cases:
        if name == "table":
            write_page()
            continue
        if CASES[name].device == "cuda" and not torch.cuda.is_available():
            parser.error(f"{name} needs a CUDA device: run `python benchmarks/train.py cpu` here")
        if arguments.profile:
            profile_self(name, arguments.run, arguments.rollouts)
            continue
        rows = measure_self(name, arguments.run, arguments.rollouts) if arguments.self else None
        for row in rows or (measure_growth if arguments.growth else measure)(name):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
