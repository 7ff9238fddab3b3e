"""How fast the decoding engine is, beside the loop that people use today.

    python benchmarks/decode.py cpu                    a table (under four minutes on two slow cores)
    python benchmarks/decode.py h200-85m h200-one h200-wide --json    one JSON object a line
    python benchmarks/decode.py table                  docs/benchmarks.md from the records in results/decode/

Both run in this one process on the same weights, dtype, attention, prompts and seeds, by turns; figures are medians.
The reference is the plain loop of LLaDA's and dLLM's samplers: full [B, L, V] logits, a float32 log-softmax over them,
and a top-k for every row at every step.  `eager` is against eager; in `compiled` the reference's model goes through
torch.compile, as its users do it, and the engine runs with `compile=True`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask import streams
from unmask.decoding.generate import Engine
from unmask.decoding.policies import IID, Learned, Policy, TopProbability
from unmask.decoding.schedules import reveal_count
from unmask.evaluation import device_name, revision
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser, Selector, SelectorConfig

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = ROOT / "results" / "decode", ROOT / "docs" / "benchmarks.md"
SEED = 0


@dataclass(frozen=True)
class Case:
    """A shape, and the bars that the engine must clear on it."""

    width: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    batch: int
    prompt: int
    response: int
    steps: int
    dtype: torch.dtype
    device: str
    repeats: int
    bars: dict[str, float]  # least ratio by policy, in compiled mode; eager must reach 1


CASES = {
    "cpu": Case(512, 8, 8, 1792, 32_000, 8, 64, 64, 16, torch.float32, "cpu", 3, dict.fromkeys(
        ("top-prob", "iid", "learned"), 1.25)),
    "h200-85m": Case(768, 12, 12, 2048, 32_000, 64, 256, 256, 16, torch.bfloat16, "cuda", 7, {
        "top-prob": 1.5, "iid": 1.5, "learned": 1.3}),
    "h200-one": Case(768, 12, 12, 2048, 32_000, 1, 256, 256, 16, torch.bfloat16, "cuda", 15, dict.fromkeys(
        ("top-prob", "iid", "learned"), 3.0)),
    "h200-wide": Case(4096, 2, 32, 11_008, 126_464, 16, 256, 256, 16, torch.bfloat16, "cuda", 7, dict.fromkeys(
        ("top-prob", "iid", "learned"), 1.6)),
}  # fmt: skip


def build(case: Case, dtype: torch.dtype | None = None) -> tuple[Denoiser, Selector, Tensor]:
    """A random denoiser, a random selector and prompts [B, L]."""
    torch.manual_seed(SEED)
    shape = BackboneConfig(case.width, case.layers, case.heads, case.intermediate)
    denoiser = Denoiser(shape, case.vocabulary)
    selector = Selector(SelectorConfig(256, 1, 4, budgets=(case.steps,)), case.width)
    torch.nn.init.normal_(selector.out.weight, std=0.5 / 16)  # at zero it would not read what it is given
    prompts = torch.randint(case.vocabulary, (case.batch, case.prompt + case.response))
    prompts[:, case.prompt :] = denoiser.mask_token_id
    to: dict[str, Any] = {"device": case.device, "dtype": dtype or case.dtype}
    return denoiser.to(**to).eval(), selector.to(**to).eval(), prompts.to(case.device)


def policies(selector: Selector) -> list[Policy]:
    return [TopProbability(), IID(), Learned(selector)]


# --- the reference ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain_loop(
    forward: Callable[[Tensor], tuple[Tensor, Tensor]],
    prompts: Tensor,
    policy: Policy,
    steps: int,
    mask_token_id: int,
    draws: list[Tensor],
    watch: Callable[[int, Tensor, Tensor], None] = lambda step, x, log_p: None,
) -> Tensor:
    """Tokens [B, L], greedy.  `forward` gives hidden states [B, L, D] and logits [B, L, V].

    `draws`: the engine's own uniforms [B, L + 1] for each step, so that both can be compared token by token.
    """
    x = prompts.clone()
    B, num_response = len(x), (x == mask_token_id).sum(-1)
    counts = torch.stack([reveal_count(num_response, i, steps) for i in range(steps)], dim=-1)  # [B, S]
    for i in range(steps):
        masked = x == mask_token_id
        if not masked.any():
            break
        states, logits = forward(x)
        log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)  # [B, L, V]
        watch(i, x, log_p)
        score, proposal = log_p.max(dim=-1)
        reveal = torch.zeros_like(masked)
        if i == steps - 1:
            reveal = masked
        elif isinstance(policy, TopProbability):
            score = torch.where(masked, score, -torch.inf)
            for row in range(B):
                best = score[row].sort(descending=True, stable=True).indices[: counts[row, i]]  # ties to the leftmost
                reveal[row, best] = True
        else:
            u = draws[i]
            if isinstance(policy, Learned):
                p = log_p.exp()
                top = p.topk(2, dim=-1).values
                said = torch.stack([top[..., 0], top[..., 0] - top[..., 1], -(p * log_p).sum(-1)], dim=-1)
                said = torch.where(masked[..., None], said, 0.0)
                t = torch.full((B,), steps - 1 - i, device=x.device)
                s = policy.network(states, said, masked, t, torch.full_like(t, steps), None)
                reveal = policy.network.selection.sample(s, masked, u)
            else:
                reveal = masked & (u[:, :-1] < 1 / (steps - i))
        x[reveal] = proposal[reveal]
    return x


def draws_of(prompts: Tensor, steps: int) -> list[Tensor]:
    """The uniforms [B, L + 1] that the engine draws at each step; the reference gets them for nothing."""
    ids, words = torch.arange(len(prompts))[:, None], torch.cat([torch.arange(prompts.shape[1]), torch.tensor([-1])])
    reveal = streams.Purpose.REVEAL
    drawn = (streams.uniforms(SEED, reveal, i, ids, words[None], dtype=torch.float64) for i in range(steps))
    return [u.to(prompts.device) for u in drawn]


def reference(denoiser: Denoiser, policy: Policy, steps: int, prompts: Tensor, compiled: bool) -> Callable[[], Tensor]:
    """The plain loop on this model, ready to be timed."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        states = denoiser.hidden(x)
        return states, denoiser.logits(states)

    run = torch.compile(forward, dynamic=False) if compiled else forward
    return partial(plain_loop, run, prompts, policy, steps, denoiser.mask_token_id, draws_of(prompts, steps))


# --- measuring --------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_bytes(run: Callable[[], Any], device: str) -> int | None:
    """The most memory allocated during a run, weights included; unknown on the CPU."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@torch.no_grad()
def milliseconds(run: Callable[[], Any], repeats: int, calls: int = 20) -> float:
    """One call, as the median over `repeats` rounds of `calls`."""
    for _ in range(3):
        run()

    def many() -> None:
        for _ in range(calls):
            run()

    return 1000 * statistics.median(seconds(many) for _ in range(repeats)) / calls


def graphed(run: Callable[[], Any], device: str) -> Callable[[], Any]:
    """On a GPU the same call as a CUDA graph: no launch overhead, what the device needs and no more."""
    if device != "cuda":
        return run
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph.replay


def measure(name: str, modes: list[str], only: list[str]) -> list[dict[str, Any]]:
    """The rows of one case, each printed to stderr as soon as it is known."""
    case = CASES[name]
    denoiser, selector, prompts = build(case)
    compiled_trunk = torch.compile(denoiser.hidden, dynamic=False)
    compiled_selector = torch.compile(selector, dynamic=False)
    calls = 20 if case.device == "cuda" else 1
    with torch.no_grad():
        states = denoiser.hidden(prompts)
    said = torch.rand(*prompts.shape, 3, device=case.device)
    t = torch.full((case.batch,), case.steps - 1, device=case.device)
    masked, budget = prompts == denoiser.mask_token_id, torch.full_like(t, case.steps)
    rows = []
    for mode in modes:
        trunk, select = (compiled_trunk, compiled_selector) if mode == "compiled" else (denoiser.hidden, selector)

        def trunk_pass(trunk: Any = trunk) -> Any:
            return trunk(prompts, None)

        def selector_pass(select: Any = select) -> Any:
            return select(states, said, masked, t, budget, None)

        if mode == "compiled":
            trunk_ms = milliseconds(graphed(trunk_pass, case.device), case.repeats, calls)
            selector_ms = milliseconds(graphed(selector_pass, case.device), case.repeats, calls)
        else:
            trunk_ms = milliseconds(trunk_pass, case.repeats, calls)
            selector_ms = milliseconds(selector_pass, case.repeats, calls)
        for policy in policies(selector):
            if only and policy.name not in only:
                continue
            engine = Engine(denoiser, policy, case.steps, compile=mode == "compiled")
            theirs = reference(denoiser, policy, case.steps, prompts, mode == "compiled")

            def ours(engine: Engine = engine) -> Any:
                return engine.generate(prompts, seed=SEED)

            out, expected = ours(), theirs()  # compiled and warm
            same = float((out.tokens == expected).double().mean())
            memory, plain_memory = peak_bytes(ours, case.device), peak_bytes(theirs, case.device)
            times, plain_times = [], []
            for _ in range(case.repeats):
                times.append(seconds(ours))
                plain_times.append(seconds(theirs))
            # Ratio of neighbours in time: the machine's load weighs on both alike.
            ratio = statistics.median(theirs / ours for theirs, ours in zip(plain_times, times, strict=True))
            steps = int(out.num_steps.max())
            rows.append(
                {
                    "case": name,
                    "policy": policy.name,
                    "mode": mode,
                    "ratio": round(ratio, 3),
                    "step_ms": round(1000 * statistics.median(times) / steps, 3),
                    "trunk_ms": round(trunk_ms, 3),
                    "tokens_per_s": round(case.batch * case.response / statistics.median(times)),
                    "peak_bytes": memory,
                    "device": device_name(prompts.device),
                    "reference_step_ms": round(1000 * statistics.median(plain_times) / steps, 3),
                    "reference_peak_bytes": plain_memory,
                    "selector_ms": round(selector_ms, 3),
                    "steps": steps,
                    "same_tokens": round(same, 6),
                    "dtype": str(case.dtype).removeprefix("torch."),
                    "torch": torch.__version__,
                    "revision": revision(),
                }
            )
            print(json.dumps(rows[-1]), flush=True) if ARGS.json else print(show(rows[-1]), flush=True)
            del engine, ours, theirs
    return rows


HEADINGS = (
    "| case | policy | mode | ratio | bar | step ms | plain step ms | trunk ms | step / trunk | peak GiB (plain) |"
)


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    bar = CASES[row["case"]].bars[row["policy"]] if row["mode"] == "compiled" or row["case"] == "cpu" else 1.0
    memory = "–"
    if row["peak_bytes"]:
        memory = f"{row['peak_bytes'] / 2**30:.2f} ({row['reference_peak_bytes'] / 2**30:.2f})"
    cells = [
        row["case"],
        row["policy"],
        row["mode"],
        f"**{row['ratio']:.2f}x**",
        f"{bar:.2f}x",
        f"{row['step_ms']:.2f}",
    ]
    cells += [
        f"{row['reference_step_ms']:.2f}",
        f"{row['trunk_ms']:.2f}",
        f"{row['step_ms'] / row['trunk_ms']:.2f}",
        memory,
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=[*CASES, "table"], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--mode", action="append", choices=["eager", "compiled"], help="one of the two only")
    parser.add_argument("--policy", action="append", default=[], help="some of the policies only")
    ARGS = parser.parse_args()
    if not ARGS.json:
        print(HEADINGS + "\n" + "|---" * HEADINGS.count(" | ") + "|---|")
    for wanted in ARGS.cases:
        measure(wanted, ARGS.mode or ["eager", "compiled"], ARGS.policy)
