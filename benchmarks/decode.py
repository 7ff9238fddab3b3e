"""How fast the decoding engine is, compared with the usual loop.

    python benchmarks/decode.py cpu                    a table (under four minutes on two slow cores)
    python benchmarks/decode.py h200-85m h200-one h200-wide --json    one JSON object per line
    python benchmarks/decode.py h200-one --peer LLaDA/generate.py     against the own loop of LLaDA, or of Fast-dLLM
                                                                      (v1/llada/generate.py) or dLLM (samplers/mdlm.py)
    python benchmarks/decode.py table                  results/decode/tables.md from the records beside it

Both run alternately in one process on the same weights, dtype, attention, prompts and seeds; figures are medians.
The reference is the plain loop of LLaDA's and dLLM's samplers: full [B, L, V] logits, a float32 log-softmax over them,
and a top-k for every row at every step.  `eager`: both eager.  `compiled`: the reference's model under torch.compile,
and the engine with `compile=True`.  `shipped`: the engine with `compile=True`, the reference eager, as its authors ship
it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask import rng as rng
from unmask.decoding.generate import Engine
from unmask.decoding.policies import IID, Blocks, Factor, Learned, Policy, Threshold, TopProbability, parse_policy
from unmask.decoding.schedules import reveal_count
from unmask.evaluation.evaluate import device_name, revision
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser, Selector, SelectorConfig

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "decode"
PAGE = RECORDS / "tables.md"
SEED = 0
RULES = ("top-prob", "iid", "learned")
# The peers, and the rules that they have too; blocks are with Fast-dLLM's prefix cache.
LLADA, FAST_DLLM, DLLM = "LLaDA's generate.py", "Fast-dLLM's generate.py", "dLLM's mdlm.py"
PEERS = {
    LLADA: ["top-prob"],
    FAST_DLLM: ["top-prob", "threshold:0.9", "factor:1", "blocks(32,top-prob)", "blocks(32,threshold:0.9)"],
    DLLM: ["top-prob"],
}
SURER = 24.0  # times the logits, against Fast-dLLM: of a random model's tokens no threshold is ever met
# In `graphs`, only if asked for, the plain loop's model runs with torch.compile's own CUDA graphs ("reduce-overhead").
COMPILE = {"compiled": None, "graphs": "reduce-overhead"}
MODES = ["eager", "shipped", *COMPILE]


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
    bars: dict[str, float]  # least ratio by policy, on a GPU in compiled mode
    step_bars: dict[str, float] = field(default_factory=dict)  # most time of a compiled step, in compiled trunks
    memory_bar: float = float("inf")  # the largest share of the plain loop's peak memory


CASES = {
    "cpu": Case(512, 8, 8, 1792, 32_000, 8, 64, 64, 16, torch.float32, "cpu", 1, dict.fromkeys(RULES, 1.25)),
    "cpu-1k": Case(512, 8, 8, 1792, 1000, 8, 64, 64, 16, torch.float32, "cpu", 3, dict.fromkeys(RULES, 1.1)),
    "h200-85m": Case(
        *(768, 12, 12, 2048, 32_000, 64, 256, 256, 16, torch.bfloat16, "cuda", 7),
        bars={"top-prob": 1.5, "iid": 1.5, "learned": 1.3},
        step_bars={"top-prob": 1.4, "iid": 1.4, "learned": 1.55},
    ),
    "h200-one": Case(768, 12, 12, 2048, 32_000, 1, 256, 256, 16, torch.bfloat16, "cuda", 25, dict.fromkeys(RULES, 3.0)),
    "h200-wide-one": Case(
        *(4096, 2, 32, 11_008, 126_464, 1, 256, 256, 16, torch.bfloat16, "cuda", 25),
        bars=dict.fromkeys(RULES, 1.6),
    ),
    "h200-wide": Case(
        *(4096, 2, 32, 11_008, 126_464, 16, 256, 256, 16, torch.bfloat16, "cuda", 7),
        bars=dict.fromkeys(RULES, 1.6),
        memory_bar=0.45,
    ),
}


def build(case: Case, dtype: torch.dtype | None = None) -> tuple[Denoiser, Selector, Tensor]:
    """A random denoiser, a random selector and prompts [B, L]."""
    torch.manual_seed(SEED)
    shape = BackboneConfig(case.width, case.layers, case.heads, case.intermediate)
    denoiser = Denoiser(shape, case.vocabulary)
    selector = Selector(SelectorConfig(256, 1, 4, budget=case.steps), case.width)
    torch.nn.init.normal_(selector.out.weight, std=0.5 / 16)  # at zero it would not read what it is given
    prompts = torch.randint(case.vocabulary, (case.batch, case.prompt + case.response))
    prompts[:, case.prompt :] = denoiser.mask_token_id
    to: dict[str, Any] = {"device": case.device, "dtype": dtype or case.dtype}
    return denoiser.to(**to).eval(), selector.to(**to).eval(), prompts.to(case.device)


def policies(selector: Selector) -> list[Policy]:
    return [TopProbability(), IID(), Learned(selector)]


def inner(policy: Policy) -> Policy:
    return policy.inner if isinstance(policy, Blocks) else policy


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
        states, logits = forward(x)
        log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)  # [B, L, V]
        watch(i, x, log_p)
        proposal = logits.argmax(dim=-1)
        score = log_p.gather(-1, proposal[..., None])[..., 0]
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
                s = selector_logits(policy, states, log_p, masked, steps - 1 - i, steps)
                reveal = policy.network.selection.sample(s, masked, u)
            else:
                reveal = masked & (u[:, :-1] < 1 / (steps - i))
        x[reveal] = proposal[reveal]
    return x


def selector_logits(policy: Learned, states: Tensor, log_p: Tensor, masked: Tensor, t: int, steps: int) -> Tensor:
    """[B, L] from hidden states [B, L, D] and log-probabilities [B, L, V], all of them."""
    p = log_p.exp()
    top = p.topk(2, dim=-1).values
    stats = torch.stack([top[..., 0], top[..., 0] - top[..., 1], -(p * log_p).sum(-1)], dim=-1)
    times = torch.full((len(masked),), t, device=masked.device)
    return policy.network(states, torch.where(masked[..., None], stats, 0.0), masked, times, None)


def draws_of(prompts: Tensor, steps: int) -> list[Tensor]:
    """The uniforms [B, L + 1] that the engine draws at each step; the reference does not pay for them."""
    ids, words = torch.arange(len(prompts))[:, None], torch.cat([torch.arange(prompts.shape[1]), torch.tensor([-1])])
    reveal = rng.Purpose.REVEAL
    drawn = (rng.uniforms(SEED, reveal, i, ids, words[None], dtype=torch.float64) for i in range(steps))
    return [u.to(prompts.device) for u in drawn]


def reference(
    denoiser: Denoiser, policy: Policy, steps: int, prompts: Tensor, mode: str = "eager"
) -> Callable[[], Tensor]:
    """The plain loop on this model, ready to be timed."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        states = denoiser.hidden(x)
        return states, denoiser.logits(states)

    run: Callable[[Tensor], tuple[Tensor, Tensor]] = forward
    if mode != "eager":
        run = torch.compile(forward, dynamic=False, mode=COMPILE[mode])
    return partial(plain_loop, run, prompts, policy, steps, denoiser.mask_token_id, draws_of(prompts, steps))


def open_peer(path: Path) -> tuple[str, ModuleType]:
    """Whose loop a file holds, and the module: imported from the folder above its packages, as its imports expect."""
    root, names = path.resolve().parent, [path.stem]
    while (root / "__init__.py").exists():
        root, names = root.parent, [root.name, *names]
    sys.path.insert(0, str(root))
    peer = importlib.import_module(".".join(names))
    if hasattr(peer, "MDLMSampler"):
        return DLLM, peer
    return FAST_DLLM if "factor" in inspect.signature(peer.generate).parameters else LLADA, peer


class PeerModel:
    """What a peer's loop calls: logits [B, W, V] of the last W tokens of its canvas, and keys and values if asked."""

    def __init__(self, denoiser: Denoiser, device: torch.device, mode: str) -> None:
        def logits(x: Tensor) -> Tensor:
            return denoiser.logits(denoiser.hidden(x))

        self.denoiser, self.device = denoiser, device
        self.logits = logits if mode == "eager" else torch.compile(logits, dynamic=False, mode=COMPILE[mode])
        self.cache = torch.empty(0)

    def __call__(self, x: Tensor, attention_mask: Any = None, past_key_values: Any = None, use_cache: bool = False):
        if not use_cache:
            return SimpleNamespace(logits=self.logits(x))
        if past_key_values is None:
            self.cache = self.denoiser.new_cache(*x.shape)  # [layers, 2, B, L, K, E]
        (B, W), L = x.shape, self.cache.shape[3]
        places, rows = torch.arange(L - W, L, device=x.device).expand(B, -1), torch.arange(B, device=x.device)
        sees = torch.ones(1, 1, 1, dtype=torch.bool, device=x.device).expand(B, W, L)
        states = self.denoiser.cached(x, places, sees, self.cache, rows)
        return SimpleNamespace(logits=self.denoiser.logits(states), past_key_values=self.cache.transpose(3, 4))


def peer_loop(
    peer: ModuleType, denoiser: Denoiser, policy: Policy, case: Case, prompts: Tensor, mode: str
) -> Callable[[], Tensor]:
    """A peer's own loop on this model, with its defaults."""
    model, mask, prompts = PeerModel(denoiser, prompts.device, mode), denoiser.mask_token_id, prompts[:, : case.prompt]
    if hasattr(peer, "MDLMSampler"):
        sampler = peer.MDLMSampler(model, SimpleNamespace(mask_token_id=mask, bos_token_id=0, eos_token_id=0))
        shape = {"max_new_tokens": case.response, "block_size": case.response}
        return partial(sampler.sample, list(prompts), steps=case.steps, **shape)
    run, size = peer.generate, case.response
    if isinstance(policy, Blocks):
        run, size = peer.generate_with_prefix_cache, policy.size
    own = {name: getattr(inner(policy), name) for name in ("threshold", "factor") if hasattr(inner(policy), name)}
    shape = {"steps": case.steps, "gen_length": case.response, "block_length": size}
    run = partial(run, model, prompts, mask_id=mask, **shape, **own)
    return lambda: found[0] if isinstance(found := run(), tuple) else found  # Fast-dLLM counts the passes too


# --- the same tokens? -------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Where a sequence of the engine first parts from the reference, and how far apart the two scores were."""

    policy: str
    sequence: int
    step: int
    gap: float


def differences(denoiser: Denoiser, policy: Policy, steps: int, prompts: Tensor, other: Any = None) -> list[Difference]:
    """Every sequence in which the two differ.  The gap is that of the first step at which they do, where both still
    see the same canvas: between the log p of two positions (top-prob), between a uniform and the probability that it is
    compared with (learned), or between the log p of two tokens at a position that both reveal.

    `other`: the denoiser that the engine runs on, where that is not the reference's.
    """
    canvases, stats = [], []

    def watch(step: int, x: Tensor, log_p: Tensor) -> None:
        canvases.append(x.clone())
        stats.append(log_p)

    expected = partial(reference(denoiser, policy, steps, prompts), watch=watch)()
    out = Engine(other or denoiser, policy, steps).generate(prompts, seed=SEED)
    mask, draws, found = denoiser.mask_token_id, draws_of(prompts, steps), []
    for b in range(len(prompts)):
        for i, (before, after) in enumerate(zip(canvases, [*canvases[1:], expected], strict=True)):
            theirs, ours = (before[b] == mask) & (after[b] != mask), out.reveal_step[b] == i
            moved, rewritten = theirs ^ ours, theirs & ours & (after[b] != out.tokens[b])
            if not (moved | rewritten).any():
                continue
            log_p = stats[i][b]
            gaps = [float(log_p[n, after[b, n]] - log_p[n, out.tokens[b, n]]) for n in rewritten.nonzero()[:, 0]]
            if moved.any() and isinstance(policy, Learned):
                each, first = thresholds_of(denoiser, policy, before[b : b + 1], log_p, i, steps)
                near = torch.minimum((each - draws[i][b, :-1]).abs(), (first - draws[i][b, -1]).abs())
                gaps.append(float(near[moved].min()))
            elif moved.any():
                score = log_p.amax(-1)
                gaps.append(float((score[moved & ours][:, None] - score[moved & theirs]).abs().max()))
            found.append(Difference(policy.name, b, i, max(map(abs, gaps))))
            break
    return found


@torch.no_grad()
def thresholds_of(denoiser: Denoiser, policy: Learned, x: Tensor, log_p: Tensor, i: int, steps: int) -> Tensor:
    """[2, L]: what the uniform of each position, and that of the sequence, are compared with in one row x [1, L]."""
    masked = x == denoiser.mask_token_id
    s = selector_logits(policy, denoiser.hidden(x), log_p[None], masked, steps - 1 - i, steps)[0].double()
    reveal = torch.where(masked[0], s.sigmoid(), 0.0)
    first = (reveal * (torch.cat([torch.ones_like(reveal[:1]), (1 - reveal).cumprod(-1)[:-1]]))).cumsum(-1)
    return torch.stack([reveal, first / first[-1]])


def check(device: str) -> None:
    """Identical tokens in float64; in float32, only differences that start at a near tie of two scores."""
    case = Case(128, 2, 2, 384, 1000, 64, 32, 64, 16, torch.float32, device, 1, {})
    for dtype in (torch.float64, torch.float32):
        denoiser, selector, prompts = build(case, dtype)
        for policy in policies(selector):
            found = differences(denoiser, policy, case.steps, prompts)
            where = "; ".join(f"sequence {d.sequence}, step {d.step}, {d.gap:.1e} apart" for d in found)
            print(
                f"{device}, {dtype}, {policy.name}: {len(found)} of {case.batch} sequences differ. {where}", flush=True
            )
            if found and dtype == torch.float64:
                raise SystemExit("the engine and the reference disagree in float64")
            if any(not d.gap <= 1e-5 for d in found):
                raise SystemExit("the engine and the reference disagree where no two scores are close")


# --- measuring --------------------------------------------------------------------------------------------------------


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def peak_bytes(run: Callable[[], Any], device: str) -> int | None:
    """The most memory allocated during a run, weights included; unknown on the CPU, where the run only warms up."""
    if device != "cuda":
        run()
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
    run()

    def many() -> None:
        for _ in range(calls):
            run()

    return 1000 * statistics.median(timed(many)[0] for _ in range(repeats)) / calls


def graphed(run: Callable[[], Any], device: str) -> Callable[[], Any]:
    """On a GPU the same call as a CUDA graph: no launch overhead."""
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


def measure(name: str, modes: list[str], only: list[str], path: Path | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one case, each as soon as it is measured, against the plain loop or a peer's."""
    case = CASES[name]
    denoiser, selector, prompts = build(case)
    rules, against, peer = policies(selector), "the plain loop", None
    if path is not None:
        against, peer = open_peer(path)
        rules = [parse_policy(rule) for rule in PEERS[against]]
        if against == FAST_DLLM and denoiser.head is not None:
            denoiser.head.weight.data.mul_(SURER)
    with torch.no_grad():
        states = denoiser.hidden(prompts)
    stats = torch.rand(*prompts.shape, 3, device=case.device)
    t = torch.full((case.batch,), case.steps - 1, device=case.device)
    arguments = states, stats, prompts == denoiser.mask_token_id, t, None, torch.full_like(t, case.steps)
    for mode in modes:
        compiled = mode != "eager"
        wrap = partial(torch.compile, dynamic=False) if compiled else lambda module: module
        trunk, select = partial(wrap(denoiser.hidden), prompts, None), partial(wrap(selector), *arguments)
        if compiled:
            trunk, select = graphed(trunk, case.device), graphed(select, case.device)
        calls = 20 if case.device == "cuda" else 1
        trunk_ms, selector_ms = (milliseconds(run, case.repeats, calls) for run in (trunk, select))
        for policy in rules:
            if only and policy.name not in only:
                continue
            cached = isinstance(policy, Blocks) and not compiled
            adaptive = isinstance(inner(policy), Threshold | Factor)  # it takes the steps that it needs
            most = case.response if adaptive else case.steps
            engine = Engine(denoiser, policy, most, compile=compiled, cache="prefix" if cached else "auto")
            ours = partial(engine.generate, prompts, seed=SEED)
            theirs_mode = "eager" if mode == "shipped" else mode
            if peer is None:
                theirs = reference(denoiser, policy, case.steps, prompts, theirs_mode)
            else:
                theirs = peer_loop(peer, denoiser, policy, case, prompts, theirs_mode)
            memory = plain_memory = None
            if compiled or case.device == "cuda":  # the first call compiles; and a CUDA graph takes its memory then
                memory, plain_memory = peak_bytes(ours, case.device), peak_bytes(theirs, case.device)
            times, plain_times = [], []
            for _ in range(case.repeats):
                seconds, out = timed(ours)
                times.append(seconds)
                seconds, expected = timed(theirs)
                plain_times.append(seconds)
            steps = int(out.num_steps.max())
            step_ms, plain_ms = (1000 * statistics.median(all_of) / steps for all_of in (times, plain_times))
            yield {
                "case": name,
                "reference": against,
                "policy": policy.name,
                "mode": mode,
                # Of neighbours in time, under the same load.
                "ratio": round(statistics.median(b / a for a, b in zip(times, plain_times, strict=True)), 3),
                "step_ms": round(step_ms, 3),
                "trunk_ms": round(trunk_ms, 3),
                "tokens_per_s": round(case.batch * case.response / statistics.median(times)),
                "peak_bytes": memory,
                "device": device_name(prompts.device),
                "reference_step_ms": round(plain_ms, 3),
                "reference_peak_bytes": plain_memory,
                "selector_ms": round(selector_ms, 3),
                "steps": steps,
                "same_tokens": round(float((out.tokens == expected).double().mean()), 6),
                "dtype": str(case.dtype).removeprefix("torch."),
                "torch": torch.__version__,
                "revision": revision(),
            }


HEADINGS = [
    *("policy", "mode", "ratio", "bar", "step ms", "reference", "trunk", "step / trunk", "bar"),
    *("selector / trunk", "tokens/s", "peak GiB", "reference"),
]


def least_ratio(row: dict[str, Any]) -> float:
    """The bar for `ratio`."""
    case, peers = CASES[row["case"]], row["reference"] != "the plain loop"
    if row["mode"] == "shipped":
        return 6.0 if case.batch == 1 else 2.0
    if row["mode"] == "compiled" or (case.device == "cpu" and not peers):
        return case.bars.get(row["policy"], case.bars["top-prob"])
    return (1.8 if row["case"] == "cpu" else 1.1) if peers else 1.0


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table, under HEADINGS."""
    case, compiled, peers = CASES[row["case"]], row["mode"] == "compiled", row["reference"] != "the plain loop"
    least = least_ratio(row)
    most = case.step_bars.get(row["policy"]) if compiled else None
    over_trunk, selector = row["step_ms"] / row["trunk_ms"], row["selector_ms"] / row["trunk_ms"]
    memory = (row["peak_bytes"] or 0) / (row["reference_peak_bytes"] or 1)

    def against(text: str, missed: bool) -> str:
        return f"{text} (missed)" if missed else text

    return [
        row["policy"],
        row["mode"],
        against(f"**{row['ratio']:.2f}x**", row["ratio"] < least),
        f"{least:.2f}x",
        f"{row['step_ms']:.2f}",
        f"{row['reference_step_ms']:.2f}",
        f"{row['trunk_ms']:.2f}",
        against(f"{over_trunk:.2f}", bool(most) and over_trunk > (most or 0)),
        f"{most:.2f}" if most else "",
        against(f"{selector:.3f}", compiled and row["case"] == "h200-85m" and selector > 0.06),
        f"{row['tokens_per_s']:,}",
        against(f"{row['peak_bytes'] / 2**30:.2f}", not peers and case.memory_bar < memory)
        if row["peak_bytes"]
        else "",
        f"{row['reference_peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "",
    ]


def line(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"


INTRODUCTION = """# Decoding speed

**Verdict.** Against LLaDA's own sampler, as its authors ship it, the engine is 1.3 to 2.2 times as fast eagerly on a
GPU and 1.1 to 1.5 times on a CPU. With `compile=True` on a GPU it is 2.4 to 2.5 times as fast in batches, and 2.0 to
10.2 times at batch 1. Missed: 1.8 on `cpu`, by 0.27 (median of five runs; a step of nothing but the trunk would have
1.6 to 2.1); and 6 on `h200-wide-one`, where the trunk alone takes 0.7 ms of the sampler's 2.4. The 10.2 of `h200-one`
is against a sampler that took 8.8 ms per step; in the eager run it took 4.8, and against that it would be 5.6. With
fixed steps on a CPU the engine is 1.07 to 1.69 times as fast as Fast-dLLM's loop and 1.07 to 1.41 times as fast as
dLLM's, below the bars of 1.1 and 1.8 too; batches with a threshold or a factor end earlier, 1.9 to 6.5 times as fast.

Written by `python benchmarks/decode.py table` from the records in `results/decode/`, which these commands made:

```
python benchmarks/decode.py cpu --json > results/decode/cpu.jsonl
python benchmarks/decode.py h200-85m --json > results/decode/h200-85m.jsonl      # and h200-one, h200-wide
python benchmarks/decode.py h200-85m --peer LLaDA/generate.py --mode eager --mode shipped --json \\
    > results/decode/h200-85m-llada.jsonl                                        # and the others; on a CPU eager
python benchmarks/decode.py cpu --peer Fast-dLLM/v1/llada/generate.py --mode eager --json \\
    > results/decode/cpu-fast-dllm.jsonl                          # and cpu-1k; and --peer dllm/core/samplers/mdlm.py
python benchmarks/decode.py check                                                # the same tokens?
```

Both sides run alternately in one process on the same weights, dtype, prompts and draws. Times are medians, ratios are
medians of neighbouring pairs.

- **Plain loop**: what LLaDA's and dLLM's samplers do: full [B, L, V] logits, a float32 log-softmax, a top-k per row and
  step. Its random draws cost it nothing. **LLaDA's generate.py**: its authors' sampler on the same weights.
- **Fast-dLLM's generate.py** (v1, from a fork) and **dLLM's mdlm.py**: their authors' samplers on the same weights. For
  Fast-dLLM's, logits are multiplied by 24, so that thresholds are met; `threshold` and `factor` take the passes that
  they need, and the engine drops finished sequences, which Fast-dLLM does not: a gain that depends on the weights.
  `blocks` are with its prefix cache, and ours where eager. The rows with fixed steps on `cpu-1k` are of a second run;
  the first had other load.
- **Trunk**: a denoiser's pass without its projection to the vocabulary. The engine runs the last MLP only where it
  reads.
- `eager`: both eager. `compiled`: the loop's model under torch.compile, the engine with `compile=True` (on a GPU one
  CUDA graph per step). `shipped`: the engine so, the loop eager. `graphs`: the loop's model in "reduce-overhead" mode.
- **Peak memory** is that of the first call and includes the weights.
- **Bars** stand beside the figures. Also: peak memory on `h200-wide` below 0.45 of the plain loop's, the selector on
  `h200-85m` below 6% of the trunk.

"""

CLOSING = """
The engine projects to the vocabulary only where the rule reads (masked positions of unfinished sequences), in chunks:
[B, L, V] never exists. The last layer's MLP runs there alone too, unless the rule looks at hidden states. At batch 1
an eager step is bound by kernel launches: so a pass is replayed as one CUDA graph. On the GPU, the records against the
plain loop are from before both, and `compiled` ones against LLaDA's sampler from before the first.

`same_tokens` in the records is the share of tokens that agree: all in float64; in float32 all but those that follow two
scores within 1e-5 of each other (`check` fails otherwise). In compiled bfloat16 a few differ from the plain loop's,
because torch.compile fuses the two sides differently. Of LLaDA's, all agree in float32; in bfloat16 67 to 72% do, the
prompts' half included. Of Fast-dLLM's and dLLM's all agree in float32 but for `factor`: where all masks but the last
clear their bars, Fast-dLLM reveals that one too. dLLM rounds each step's share where we, LLaDA and Fast-dLLM put the
remainder first: the same if the steps divide the masks.
"""


def write_page() -> None:
    text = INTRODUCTION
    for path in sorted(set(RECORDS.glob("*.jsonl")) - set(RECORDS.glob("throughput-*"))):
        rows = [json.loads(record) for record in path.read_text().splitlines()]
        case, row = CASES[rows[0]["case"]], rows[0]
        revisions = ", ".join(dict.fromkeys(each["revision"] for each in rows))
        text += (
            f"### {row['case']}, against {row['reference']}\n\n"
            f"Width {case.width}, {case.layers} layers, vocabulary {case.vocabulary:,}, batch "
            f"{case.batch}, {case.prompt} + {case.response} tokens, {case.steps} steps, {row['dtype']}; "
            f"{row['device']}, torch {row['torch']}, revision {revisions}.\n\n"
        )
        text += "\n".join([line(HEADINGS), "|---" * len(HEADINGS) + "|", *(line(cells(row)) for row in rows)]) + "\n\n"
    PAGE.write_text(text.rstrip() + "\n" + CLOSING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=[*CASES, "check", "table"], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--mode", action="append", choices=MODES, help="some of the modes only")
    parser.add_argument("--policy", action="append", default=[], help="some of the policies only")
    parser.add_argument("--peer", type=Path, help="the file with a peer's own loop, to compare with instead")
    arguments = parser.parse_args()
    measured = [name for name in arguments.cases if name in CASES]
    if arguments.peer and not arguments.peer.is_file():
        parser.error(f"--peer {arguments.peer}: no such file; give a peer's own, such as LLaDA's generate.py")
    rules = PEERS[open_peer(arguments.peer)[0]] if arguments.peer else RULES
    if unknown := [rule for rule in arguments.policy if rule not in rules]:
        parser.error(f"--policy {unknown[0]}: give one of {', '.join(rules)}")
    if "check" in arguments.cases:
        check("cuda" if torch.cuda.is_available() else "cpu")
    for name in measured:
        if CASES[name].device == "cuda" and not torch.cuda.is_available():
            parser.error(f"{name} needs a CUDA device: run `python benchmarks/decode.py cpu` here")
        if not arguments.json:
            print(f"{name}\n\n{line(HEADINGS)}\n" + "|---" * len(HEADINGS) + "|", flush=True)
        for row in measure(name, arguments.mode or ["eager", "compiled"], arguments.policy, arguments.peer):
            print(json.dumps(row) if arguments.json else line(cells(row)), flush=True)
    if "table" in arguments.cases:
        write_page()


if __name__ == "__main__":
    main()
