"""What a cache changes and saves: the same generation with and without it.

    python benchmarks/cache.py RUN [RUN ...] --policy "blocks(8,top-prob)" --steps 16    finished runs, on their tasks
    python benchmarks/cache.py speed                                                     a random model on the CPU
    ... --json                                                                           one JSON object per line

Of a bidirectional model the prefix cache, which is approximate; of a block-causal one the exact cache.  Both sides run
alternately in one process on the same weights, examples and draws; times are medians, ratios medians of neighbours;
on a CPU they are CPU seconds (set OMP_NUM_THREADS=1).
To compare a block-causal model with a bidirectional one, name both runs: `training_s` is what each took to train.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.decoding.cache import Cache
from unmask.decoding.generate import Engine, Generation
from unmask.decoding.policies import Blocks, Policy, network_of, parse_policy
from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError
from unmask.evaluation.evaluate import HalfTrunk, device_name, revision
from unmask.evaluation.plan import model_label, open_run
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser
from unmask.runtime import Processes
from unmask.tasks.task import Examples, Task

SEED = 0
COLUMNS = (
    "run",
    "policy",
    "cache",
    "steps",
    "score",
    "score_without",
    "equal_tokens",
    "seconds",
    "ratio",
    "training_s",
)
# Width, layers, heads and vocabulary of the random model, its prompt and response, and the blocks.
SPEED = {"width": 512, "layers": 4, "heads": 8, "vocabulary": 4096, "prompt": 64, "response": 64, "block": 16}


def generated(engine: Engine, canvas: Tensor, attended: Tensor | None) -> tuple[float, Generation]:
    """Seconds, and what came of it; on a CPU its own seconds, which other work on the machine does not change."""
    clock = time.perf_counter if canvas.is_cuda else time.process_time
    if canvas.is_cuda:
        torch.cuda.synchronize()
    started = clock()
    out = engine.generate(canvas, seed=SEED, attention_mask=attended)
    if canvas.is_cuda:
        torch.cuda.synchronize()
    return clock() - started, out


def compared(
    denoiser: Any,
    policy: Policy,
    steps: int,
    examples: Examples,
    choice: TokenChoice,
    batch: int,
    repeats: int,
    task: Task | None = None,
) -> dict[str, Any]:
    """With the cache that the model can have against none: equal tokens of the response, scores, times.

    A bidirectional model that does not write in blocks has no cache: then only how good and fast it is.
    """
    exact = bool(getattr(denoiser, "block_size", 0))
    kind = "exact" if exact else "prefix" if isinstance(policy, Blocks) else "none"
    device = next(getattr(denoiser, "denoiser", denoiser).parameters()).device
    attended = None if examples.attention_mask.all() else examples.attention_mask.to(device)
    canvas = torch.where(examples.response, denoiser.mask_token_id, examples.tokens).to(device)
    caches: tuple[Cache, Cache] = ("auto" if kind != "prefix" else "prefix", "none")  # auto: exact, or none
    engines = [Engine(denoiser, policy, steps, choice, batch_size=batch, cache=cache) for cache in caches]
    generated(engines[0], canvas[:batch], None if attended is None else attended[:batch])  # warms up
    runs = [[generated(engine, canvas, attended) for engine in engines] for _ in range(repeats)]
    tokens = [out.tokens.cpu() for _, out in runs[0]]
    scores = [None if task is None else float(task.valid(each, examples).double().mean()) for each in tokens]
    return {
        "policy": policy.name,
        "cache": kind,
        "steps": round(float(runs[0][0][1].num_steps.double().mean()), 3),
        "score": scores[0],
        "score_without": scores[1],
        "equal_tokens": round(float((tokens[0] == tokens[1])[examples.response].double().mean()), 4),
        "seconds": round(statistics.median(pair[0][0] for pair in runs), 3),
        "ratio": round(statistics.median(pair[1][0] / pair[0][0] for pair in runs), 3),
        "max_steps": steps,
        "examples": len(examples),
        "batch": batch,
        "temperature": choice.temperature,
        "device": device_name(device),
        "torch": torch.__version__,
        "revision": revision(),
    }


def training_seconds(run: Path) -> float:
    """Of the denoiser: the last entry of its stage."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(max((row["seconds"] for row in rows if row["stage"] == "denoise"), default=0.0))


def of_runs(
    runs: Sequence[Path], names: Sequence[str], steps: Sequence[int], number: int, batch: int, repeats: int, bf16: bool
) -> Iterator[dict[str, Any]]:
    for run in runs:
        model, plain, task, recipe = open_run(run, Processes().device)
        examples, choice = task.examples(torch.arange(number), "test"), TokenChoice(recipe.evaluate.temperature)
        for name in names:
            policy = parse_policy(name, model.selector)
            denoiser = (model if network_of(policy) is not None else plain).denoiser
            used = HalfTrunk(denoiser) if bf16 else denoiser
            for most in steps:
                row = compared(used, policy, most, examples, choice, batch, repeats, task)
                about = {"run": run.name, "task": task.name, "model": model_label(recipe), "bf16": bf16}
                yield about | row | {"training_s": round(training_seconds(run), 1)}


def of_a_random_model(repeats: int) -> Iterator[dict[str, Any]]:
    """Bidirectional and block-causal, by the number of sequences and of steps in a block; tokens mean nothing here."""
    D, P, N, size = SPEED["width"], SPEED["prompt"], SPEED["response"], SPEED["block"]
    for block_size in (0, size):
        torch.manual_seed(SEED)
        config = BackboneConfig(D, SPEED["layers"], SPEED["heads"], 4 * D, max_length=P + N, block_size=block_size)
        denoiser = Denoiser(config, SPEED["vocabulary"]).eval()
        for batch, each in ((1, 2), (1, 8), (8, 4)):
            tokens = torch.randint(SPEED["vocabulary"], (batch, P + N))
            response = (torch.arange(P + N) >= P).expand(batch, -1)
            examples = Examples(tokens, response, torch.ones_like(response))
            policy = parse_policy(f"blocks({size},top-prob)")
            row = compared(denoiser, policy, each * N // size, examples, TokenChoice(), batch, repeats)
            yield {"run": "random weights", **SPEED, "steps_per_block": each} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="finished runs, or `speed`")
    parser.add_argument("--policy", action="append", help="blocks(SIZE,RULE), learned, or any rule; may be repeated")
    parser.add_argument("--steps", type=int, action="append", help="the most steps; may be repeated")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=250, help="sequences at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help="the trunk in bfloat16")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    given = parser.parse_args()
    if given.runs == ["speed"]:
        rows = of_a_random_model(given.repeats)
    else:
        if not given.policy or not given.steps:
            parser.error("give --policy and --steps")
        paths = [Path(run) for run in given.runs]
        rows = of_runs(paths, given.policy, given.steps, given.examples, given.batch, given.repeats, given.bf16)
    if not given.json:
        print(f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    try:
        for row in rows:
            cells = (str(row.get(column, "")) for column in COLUMNS)
            print(json.dumps(row) if given.json else f"| {' | '.join(cells)} |", flush=True)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
