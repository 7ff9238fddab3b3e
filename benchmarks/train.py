"""How fast training is, and what an order step costs beside a plain one.

    python benchmarks/train.py cpu                 tables for this machine, in a few minutes
    python benchmarks/train.py h200-30m h200-170m  the published cases, on one GPU
    python benchmarks/train.py table               docs/training-speed.md from results/train/*.jsonl

Every figure is the training loop itself (`run_stage`: data, both passes, clipping, AdamW, metrics) on drawn tokens with
the lengths of GSM8K.  What is counted, and nothing else:

    FLOP = 6 x block parameters x tokens that are no padding + 6 x width x vocabulary x projected positions
         + 12 x layers x width x sum of squared lengths
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from unmask.evaluation import device_name, revision
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer
from unmask.tasks.task import Examples
from unmask.training.loop import Metrics, run_stage
from unmask.training.objectives import DenoiseObjective, OrderObjective
from unmask.training.recipe import Optimisation
from unmask.training.run import compile_networks
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
    sequences: int  # an update: B x k for the order
    budget: int
    device: str
    bar: float  # TFLOP/s
    trajectories: int = 8


CASES = {
    "cpu": Case(BackboneConfig(128, 4, 4, 384, max_length=264), 512, 48, 24, 24, 64, 5, "cpu", 0.0),
    "h200-30m": Case(BackboneConfig(512, 8, 8, 1408, max_length=264), 4096, 192, 72, 65, 512, 5, "cuda", 290.0),
    "h200-170m": Case(BackboneConfig(768, 18, 12, 3072, max_length=256), 32_000, 128, 128, 128, 256, 5, "cuda", 380.0),
}
BARS = {"order, joint": 1.15, "order, frozen": 0.6}


@dataclass(frozen=True)
class Drawn:
    """A task of random tokens: prompts of different lengths, padded on the left, and a response of a fixed one."""

    case: Case

    name = "drawn"

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
        return Examples(pool.tokens[rows], pool.response[rows], pool.attention[rows])


def build(case: Case) -> OrderModel:
    shape = case.shape
    config = OrderModelConfig(
        case.vocabulary,
        shape,
        selector=SelectorConfig(shape.width // 4, 1, 4, (case.budget,)),
        scorer=replace(shape, layers=2, heads=shape.heads // 2, intermediate=2 * shape.width),
    )
    return OrderModel(config, word_level_tokenizer([str(i) for i in range(case.vocabulary)])).to(case.device)


def operations(case: Case, task: Drawn) -> float:
    """FLOP of a plain update, as the head of this file counts them."""
    shape, lengths = case.shape, task.pool.attention.sum(-1).double()
    blocks = shape.layers * (4 * shape.width**2 + 3 * shape.width * shape.intermediate)
    projected = (case.response + 1) / 2  # of a sequence, on average
    attention = 12 * shape.layers * shape.width * float((lengths**2).mean())
    each = 6 * blocks * float(lengths.mean()) + 6 * shape.width * case.vocabulary * projected + attention
    return each * case.sequences


def update_seconds(
    case: Case, model: OrderModel, task: Drawn, what: str, accelerator: Accelerator
) -> tuple[float, int]:
    """Seconds of an update in the training loop, and its peak memory (0 on the CPU)."""
    every, rounds = 20, 3 if case.device == "cuda" else 2
    learn = 1e-5
    if what == "denoise":
        objective: Any = DenoiseObjective(model.denoiser, 0, compile=case.device == "cuda")
        rates, batch = {"denoiser": (model.denoiser, learn)}, case.sequences
    else:
        joint = what == "order, joint"
        objective = OrderObjective(
            model, case.budget, case.trajectories, LeaveOneOut(), 0, learn_denoiser=joint, compile=case.device == "cuda"
        )
        networks = {"denoiser": model.denoiser, "selector": model.selector, "scorer": model.scorer}
        rates = {key: (net, learn if joint or key != "denoiser" else 0.0) for key, net in networks.items()}
        batch = case.sequences // case.trajectories
    stage = Optimisation(updates=every * (rounds + 1) + 1, batch=batch)
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        run_stage(what[:8], 0, objective, rates, stage, task, 0, accelerator, Metrics(path))  # type: ignore[arg-type]
        seconds = [json.loads(line)["seconds"] for line in path.read_text().splitlines()]
    model.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated() if case.device == "cuda" else 0
    # The first twenty updates compile and warm up.
    return statistics.median(b - a for a, b in pairwise(seconds[1:])) / every, peak


def measure(name: str) -> Iterator[dict[str, Any]]:
    """The rows of one case, each as soon as it is known."""
    case = CASES[name]
    accelerator = Accelerator(mixed_precision="bf16" if case.device == "cuda" else "no", cpu=case.device == "cpu")
    about = {"device": device_name(accelerator.device), "torch": torch.__version__, "revision": revision()}
    model, task = build(case), Drawn(case)
    if case.device == "cuda":
        compile_networks(model)
    plain = 0.0
    for what in ("denoise", *BARS):
        seconds, peak = update_seconds(case, model, task, what, accelerator)
        plain = plain or seconds
        tokens = float(task.pool.attention.sum(-1).double().mean()) * case.sequences
        yield {
            "case": name,
            "what": what,
            "milliseconds": round(1000 * seconds, 2),
            "ratio": round(seconds / plain, 3),
            "teraflops": round(operations(case, task) / seconds / 1e12, 1) if what == "denoise" else None,
            "tokens_per_s": round(tokens / seconds),
            "peak_bytes": peak or None,
            "sequences": case.sequences,
            **about,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="+", choices=[*CASES, "table"], metavar="CASE", help=", ".join([*CASES, "table"])
    )
    arguments = parser.parse_args()
    for name in arguments.cases:
        if CASES[name].device == "cuda" and not torch.cuda.is_available():
            parser.error(f"{name} needs a CUDA device: run `python benchmarks/train.py cpu` here")
        for row in measure(name):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
