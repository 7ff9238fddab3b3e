"""How often a sequence comes out differently in a batch than alone, and what fixed shapes cost.

    python benchmarks/batches.py                                              about a minute on a CPU
    python benchmarks/batches.py --compile > results/decode/batches-cpu.txt   with two rules compiled: some minutes

Random draws never depend on the batch; the rounding of matrix products depends on their shapes.  The denoisers are
random and have no absolute positions, so on a canvas that is all mask every position ties with every other, and
rounding alone decides between them.  A comparison is one sequence under one rule: its tokens and the step of each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from unmask.decoding.generate import Engine, Generation
from unmask.decoding.policies import parse_policy
from unmask.decoding.tokens import TokenChoice
from unmask.evaluation.evaluate import device_name, revision
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser

RULES = ["top-prob", "p2", "iid", "margin", "entropy", "threshold:0.9", "eb", "klass"]
LENGTHS = [12, 5, 7, 32]
SEQUENCES, STEPS, BATCH = 9, 4, 4


def build(seed: int, width: int, layers: int, vocabulary: int, device: str, dtype: torch.dtype) -> Denoiser:
    torch.manual_seed(seed)
    denoiser = Denoiser(BackboneConfig(width, layers, 4, 2 * width), vocabulary)
    assert denoiser.head is not None
    denoiser.head.weight.data *= 8  # far from uniform, so that thresholds are reached
    return denoiser.to(device, dtype).eval()


def canvases(denoiser: Denoiser, lengths: list[int], device: str) -> Iterator[tuple[str, Tensor]]:
    """[B, L] each."""
    for length in lengths:
        canvas = torch.full((SEQUENCES, length), denoiser.mask_token_id)
        yield "all mask", canvas.to(device)
        canvas[:, : length // 2] = torch.randint(denoiser.vocab_size, (SEQUENCES, length // 2))
        yield "half a prompt", canvas.to(device)


def outcomes(out: Generation) -> list[tuple[list[int], list[int]]]:
    return list(zip(out.tokens.tolist(), out.reveal_step.tolist(), strict=True))


def differing(denoiser: Denoiser, canvas: Tensor, rules: list[str], options: dict[str, bool]) -> Iterator[bool]:
    """Alone against batches that are refilled, and where shapes are not fixed against all at once too."""
    ids, sampled = torch.arange(SEQUENCES), TokenChoice(temperature=1.0)
    sizes = [BATCH] if options else [BATCH, SEQUENCES]
    for rule in rules:
        engines = [Engine(denoiser, parse_policy(rule), STEPS, sampled, batch_size=n, **options) for n in sizes]
        rows = [slice(row, row + 1) for row in range(SEQUENCES)]
        alone = [outcomes(engines[0].generate(canvas[row], ids=ids[row]))[0] for row in rows]
        for engine in engines:
            together = outcomes(engine.generate(canvas, ids=ids))
            yield from (one != other for one, other in zip(alone, together, strict=True))


def count(name: str, options: dict[str, bool], few: bool, device: str, dtype: torch.dtype) -> None:
    rules, lengths = (RULES[:2], LENGTHS[:1]) if few else (RULES, LENGTHS)
    found: dict[str, list[bool]] = {}
    denoiser = build(0, 128, 2, 100, device, dtype)
    for kind, canvas in canvases(denoiser, lengths, device):
        found.setdefault(kind, []).extend(differing(denoiser, canvas, rules, options))
    for kind, differ in found.items():
        print(f"{name}, {dtype}, {kind}: {sum(differ)} of {len(differ)} comparisons differ", flush=True)


def cost(device: str, dtype: torch.dtype, repeats: int = 3) -> None:
    """The time of fixed shapes over that of shapes that follow the work; 20 prompts in a batch of 8."""
    denoiser = build(0, 256, 4, 8000, device, dtype)
    canvas = torch.randint(denoiser.vocab_size, (20, 128), device=device)
    canvas[:, 64:] = denoiser.mask_token_id
    for rule in ("top-prob", "threshold:0.9", "iid"):
        settings = denoiser, parse_policy(rule), STEPS
        follow, fixed = (Engine(*settings, batch_size=8, fixed_shapes=shapes) for shapes in (False, True))
        ratios = []
        for repeat in range(repeats + 1):  # the first warms up
            seconds = []
            for engine in (fixed, follow):
                started = time.perf_counter()
                engine.generate(canvas)
                seconds.append(time.perf_counter() - started)
            if repeat:
                ratios.append(seconds[0] / seconds[1])
        print(f"fixed shapes take {statistics.median(ratios):.2f} of the time, {dtype}, {rule}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="two rules compiled, too: minutes more")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # tiny models
    dtypes = [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]
    print(f"{device_name(torch.device(device))}, torch {torch.__version__}, revision {revision()}", flush=True)
    for dtype in dtypes:
        count("shapes follow the work", {}, False, device, dtype)
        count("fixed shapes", {"fixed_shapes": True}, False, device, dtype)
        if arguments.compile:
            count("compiled", {"compile": True}, True, device, dtype)
        cost(device, dtype)


if __name__ == "__main__":
    main()
