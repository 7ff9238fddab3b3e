"""How fast training is, and what an order step costs beside a plain one.

    python benchmarks/train.py cpu                 in a few minutes on this machine
    python benchmarks/train.py h200-30m h200-170m  the published cases, on one GPU
    python benchmarks/train.py h200-30m --growth   how an order step grows with k, N and T, and with the time t
    python benchmarks/train.py table               docs/training-speed.md from results/train/*.jsonl

Every step is the training loop itself (`run_stage`: data, both passes, clipping, AdamW, metrics) on random tokens with
the lengths of GSM8K.  Counted are:

    FLOP = 6 x block parameters x tokens that are no padding + 6 x width x vocabulary x projected positions
         + 12 x layers x width x sum of squared lengths
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
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from unmask.evaluation.evaluate import device_name, revision
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer
from unmask.models.packing import places
from unmask.recipe import Optimisation
from unmask.tasks.task import Examples, Task
from unmask.training.compiled import compiled_networks
from unmask.training.loop import Metrics, Stage, run_stage
from unmask.training.objectives import DenoiseObjective, OrderObjective
from unmask.training.reading import log_likelihood
from unmask.variational.estimators import LeaveOneOut

RECORDS = Path(__file__).parents[1] / "results" / "train"
PAGE = Path(__file__).parents[1] / "docs" / "training-speed.md"


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
    """Seconds per update of the training loop, and the peak memory (0 on the CPU).

    The loop records every twentieth update; the first twenty compile and warm up.
    """
    every, rounds = 20, 3 if case.device == "cuda" else 1
    learn = 1e-5
    if what == "denoise":
        objective: Any = DenoiseObjective(model.denoiser, 0, compile=case.device == "cuda")
        rates, batch = {"denoiser": (model.denoiser, learn)}, case.sequences
    else:
        joint = what == "order, joint"
        objective = OrderObjective(
            model, case.trajectories, LeaveOneOut(), 0, learn_denoiser=joint, compile=case.device == "cuda"
        )
        networks = {"denoiser": model.denoiser, "selector": model.selector, "scorer": model.scorer}
        rates = {key: (net, learn if joint or key != "denoiser" else 0.0) for key, net in networks.items()}
        batch = case.sequences // case.trajectories
    stage = Optimisation(updates=every * (rounds + 1) + 1, batch=batch)
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
    model.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated() if case.device == "cuda" else 0
    return statistics.median(b - a for a, b in pairwise(seconds[1:])) / every, peak


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


@contextmanager
def running(case: Case) -> Iterator[tuple[OrderModel, Accelerator]]:
    """A model on its device, compiled on a GPU."""
    if case.device == "cpu":
        torch.set_num_threads(1)  # on a busy machine, threads would wait for one another
    accelerator = Accelerator(mixed_precision="bf16" if case.device == "cuda" else "no", cpu=case.device == "cpu")
    model = build(case)
    if case.device == "cpu":
        yield model, accelerator
        return
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    with compiled_networks(model):
        yield model, accelerator


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
    for path in sorted(RECORDS.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        case, row = CASES[rows[0]["case"]], rows[0]
        shape, launch = case.shape, row.get("launch_microseconds")
        text += (
            f"## {path.stem}\n\nWidth {shape.width}, {shape.layers} layers, vocabulary {case.vocabulary:,}, "
            f"{case.prompt} + {case.response} tokens, T = {case.budget}, k = {case.trajectories}; {row['device']}, "
            f"torch {row['torch']}, revision {row['revision']}"
            + (f"; the host launches a kernel in {launch} microseconds" if launch else "")
            + ".\n\n"
        )
        text += (growth_table(rows) if "grows" in row else step_table(case, rows)) + "\n\n"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=[*CASES, "table"], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--growth", action="store_true", help="how an order step grows with k, N and T instead")
    arguments = parser.parse_args()
    for name in arguments.cases:
        if name == "table":
            write_page()
            continue
        if CASES[name].device == "cuda" and not torch.cuda.is_available():
            parser.error(f"{name} needs a CUDA device: run `python benchmarks/train.py cpu` here")
        for row in (measure_growth if arguments.growth else measure)(name):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
