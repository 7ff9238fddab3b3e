"""What it takes to learn an order for a denoiser that stays as it is: memory and time of an update, by its size.

    python benchmarks/frozen.py --shape tiny                        on this machine, in seconds
    python benchmarks/frozen.py --shape 135m 1b 8b --device cuda    the published shapes, on one GPU
    python benchmarks/frozen.py --table                             results/train/frozen.md from the records

The records go to results/train/frozen-SHAPE.jsonl.  The weights are random.  An update is that of the training loop
(`run_stage`) with the likelihood form of `recipes/order-for-your-model.toml`: 32 sequences, 8 rollouts of each, at most
16 steps.  The bias of the selector is set for rollouts of 3.5 steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from train import LEARN, PRICES, RECORDS, Case, Counted, Drawn, about, accelerator_of, set_bias, trunk_operations

from unmask.models.backbone import BackboneConfig
from unmask.models.frozen import FrozenDenoiser
from unmask.models.networks import Denoiser, SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer
from unmask.recipe import Optimisation
from unmask.training.compiled import compiled_networks
from unmask.training.loop import Metrics, Stage, run_stage

BUDGET, TRAJECTORIES, BATCH = 16, 8, 32


class Shape(NamedTuple):
    backbone: BackboneConfig
    vocabulary: int
    mask_token_id: int
    tied_head: bool
    parts: int  # micro-batches of an update, which bound the memory of the logits


SHAPES = {
    "tiny": Shape(BackboneConfig(64, 2, 4, 128, kv_heads=2), 300, 299, False, 2),
    "135m": Shape(BackboneConfig(576, 30, 9, 1536, kv_heads=3, rope_theta=1e5), 49_152, 49_152, True, 2),  # SmolLM2
    "1b": Shape(BackboneConfig(2048, 16, 32, 8192, kv_heads=8, rope_theta=5e5), 128_256, 128_256, True, 4),  # Llama 3.2
    "8b": Shape(BackboneConfig(4096, 32, 32, 12_288, rope_theta=5e5), 126_464, 126_336, False, 8),  # LLaDA
}


def case_of(name: str, device: str) -> Case:
    """Prompts of up to 128 tokens, 64 on average, and responses of 128; on the CPU much less."""
    shape, less = SHAPES[name], 1 if device == "cuda" else 16
    lengths = (length // less for length in (128, 128, 64))
    batch = BATCH if device == "cuda" else 8
    return Case(shape.backbone, shape.mask_token_id, *lengths, batch * TRAJECTORIES, BUDGET, device, 0.0, TRAJECTORIES)


def random_denoiser(shape: Shape, device: str) -> FrozenDenoiser:
    """With its weights drawn where they are used, in the precision in which they are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            network = Denoiser(shape.backbone, shape.vocabulary, shape.tied_head, mask_token_id=shape.mask_token_id)
    finally:
        torch.set_default_dtype(before)
    return FrozenDenoiser(network)


def measure(
    name: str, denoiser: FrozenDenoiser, reads: str, device: str, updates: int, parts: int, compile: bool
) -> dict[str, Any]:
    """One record: updates of a new selector, which reads hidden states or logits."""
    shape, case = SHAPES[name], case_of(name, device)
    selector = SelectorConfig(128, 2, 4, BUDGET, prices=PRICES["likelihood"], reads=reads)
    config = OrderModelConfig(shape.vocabulary, denoiser.config(""), selector=selector)
    model = OrderModel(config, word_level_tokenizer(["a"]), denoiser).place(torch.device(device))
    assert model.selector is not None
    accelerator, task = accelerator_of(case), Drawn(case)
    objective = Counted(model, TRAJECTORIES, BUDGET, 0, compile=compile)
    set_bias(replace(case, sequences=4 * TRAJECTORIES), objective, task, accelerator)
    objective.counted.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []

    def on_update(update: int) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    how = Optimisation(updates=updates + 2, batch=case.sequences // TRAJECTORIES, accumulate=parts)
    rates = {"denoiser": (denoiser, 0.0), "selector": (model.selector, LEARN)}
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(sys.stderr),
        compiled_networks(objective) if compile else nullcontext(),
    ):
        metrics = Metrics(Path(folder) / "metrics.jsonl")
        run_stage(Stage.ORDER, objective, rates, how, task, 0, accelerator, metrics, on_update=on_update)
    assert not any(p.requires_grad or p.grad is not None for p in denoiser.parameters())
    timed = [(lengths, steps.cpu()) for lengths, steps in objective.counted[parts : parts * (updates + 1)]]
    seconds = statistics.median(b - a for a, b in pairwise(times[1:]))  # the first one compiles and asks for memory
    done = sum(trunk_operations(case.shape, *counted) for counted in timed) / updates
    weights = sum(p.numel() * p.element_size() for p in denoiser.parameters())
    return {
        "shape": name,
        "reads": reads,
        "milliseconds": round(1000 * seconds, 2),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "denoiser_bytes": weights,
        "denoiser_parameters": sum(p.numel() for p in denoiser.parameters()),
        "selector_parameters": sum(p.numel() for p in model.selector.parameters()),
        "mean_steps": round(statistics.mean(float(steps.double().mean()) for _, steps in timed), 3),
        "teraflops": round(done / seconds / 1e12, 3),
        "sequences": case.sequences,
        "parts": parts,
        "budget": BUDGET,
        "length": task.length,
        "response": case.response,
        "updates": updates,
        "compiled": compile,
        **about(accelerator),
    }


INTRODUCTION = """# An order for a frozen denoiser: memory and time

Written by `python benchmarks/frozen.py --table` from the records `frozen-*.jsonl` beside it. The denoiser has random
weights in bfloat16 and neither gradients nor optimiser state. An update has 32 sequences of at most 128 + 128 tokens,
8 rollouts of each, T = 16, in so many parts.

| denoiser | selector reads | parts | compiled | ms per update | mean steps | TFLOP/s | peak GiB | of it the denoiser |
|---|---|---|---|---|---|---|---|---|
"""


def write_page() -> None:
    rows = [json.loads(line) for path in sorted(RECORDS.glob("frozen-*.jsonl")) for line in path.open()]
    text = INTRODUCTION
    for row in sorted(rows, key=lambda row: row["denoiser_parameters"]):
        peak = f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else ""
        cells = [
            f"{row['shape']} ({row['device']})",
            f"{row['reads']}, {row['selector_parameters']:,} weights",
            str(row["parts"]),
            "yes" if row["compiled"] else "no",
            f"{row['milliseconds']:,.0f}",
            f"{row['mean_steps']:.2f}",
            f"{row['teraflops']:.3g}",
            peak,
            f"{row['denoiser_bytes'] / 2**30:.1f}" if peak else "",
        ]
        text += f"| {' | '.join(cells)} |\n"
    (RECORDS / "frozen.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=[], help="of the denoiser")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--updates", type=int, default=4, help="that are timed, after one that is not")
    parser.add_argument("--parts", type=int, help="micro-batches of an update; by default as many as the shape wants")
    parser.add_argument("--compile", action="store_true", help="compile the networks, as a recipe's compile = true")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--table", action="store_true", help="write results/train/frozen.md instead")
    arguments = parser.parse_args()
    if arguments.table:
        write_page()
        return
    for name in arguments.shape:
        torch.manual_seed(0)
        started = time.perf_counter()
        denoiser = random_denoiser(SHAPES[name], arguments.device)
        print(f"{name}: random weights after {time.perf_counter() - started:.1f} s", file=sys.stderr)
        parts = arguments.parts or SHAPES[name].parts
        for reads in ("hidden", "logits"):
            row = measure(name, denoiser, reads, arguments.device, arguments.updates, parts, arguments.compile)
            print(json.dumps(row), flush=True)
            with (arguments.out / f"frozen-{name}.jsonl").open("a") as records:
                records.write(json.dumps(row) + "\n")
        del denoiser


if __name__ == "__main__":
    main()
