"""Problems solved per second at no less than the accuracy of one token per step on the dev split, on one device.

    python benchmarks/throughput.py RUN --out results/decode/throughput-h200-30m.jsonl       a run with an order
    python benchmarks/throughput.py RUN --dev test --split test --problems 40 --batch 8      a puzzle, on a CPU

    plain, one token      a plain loop, as most samplers are written: a padded batch of fixed size, all logits
                          [B, L, V] at every step, the most probable token of the most certain position; N steps
    plain, threshold      the same, but all positions with c_n >= c*, and the rest at the last of the steps that are
                          allowed; a batch ends when its last row is finished
    engine, threshold     `Engine` with the same rule: a finished row makes room for the next problem
    engine, learned       the same with the order of the run at a price, read greedily; left out if it has none

Each way gets the setting that evaluates the fewest rows on the dev split among those that solve no fewer problems there
than the first way, and the batch that is the fastest there; on a GPU the engine is compiled if that is faster.  Then
all are timed in turn on the same problems of another split, after a warm-up: from prompts on the host to tokens on the
host; checking the answers is left out.  The plain loop is eager; the trunk is bfloat16 for all where the run's recipe
says so.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.decoding.denoiser import AnyDenoiser
from unmask.decoding.generate import Engine
from unmask.decoding.policies import Learned, Policy, Threshold
from unmask.errors import UserError
from unmask.evaluation.evaluate import BATCH, HalfTrunk, check_examples, device_name, half_selector, revision
from unmask.models.networks import Denoiser, Selector
from unmask.models.packing import Layout
from unmask.runtime import precision_on
from unmask.tasks.task import Examples, Task
from unmask.training.run import load_run

THRESHOLDS = [0.9, 0.95, 0.98, 0.99, 0.995]
CAPS = [8, 12, 16, 24]  # the most steps: a rule that is cut off may be as accurate in fewer
PRICES = 8  # log-spaced in the range of the order


class Written(NamedTuple):
    tokens: Tensor  # [B, L]
    steps: Tensor  # [B]: until its last token
    rows: int  # that the denoiser evaluated


Write = Callable[[Examples], Written]


class Setting(NamedTuple):
    value: float  # a threshold or a price
    max_steps: int


class Mode(NamedTuple):
    """How a way runs, whatever it writes."""

    batch: int
    compiled: bool = False


@torch.inference_mode()
def plain_loop(
    denoiser: AnyDenoiser, batch: int, setting: Setting, device: torch.device, examples: Examples
) -> Written:
    """Greedy tokens.  A threshold above 1 reveals one token per step; the last of `max_steps` reveals all."""
    found = []
    for rows in torch.arange(len(examples)).split(batch):
        chosen = examples.rows(rows).to(device)
        x = torch.where(chosen.response, denoiser.mask_token_id, chosen.tokens)
        # Padding is masked; given a mask, our own networks would leave it out.
        shape = (len(rows), x.shape[1])
        layout: Any = Layout(chosen.position.clamp(min=0), chosen.attention_mask[:, None, None], None, shape)
        steps = torch.zeros(len(rows), dtype=torch.long, device=device)
        passes = 0
        while (masked := x == denoiser.mask_token_id).any():
            logits = denoiser.logits(denoiser.hidden(x, layout))  # [B, L, V]
            c, token = logits.float().softmax(-1).max(-1)
            c = torch.where(masked, c, -1.0)
            most = torch.zeros_like(masked).scatter(-1, c.argmax(-1, keepdim=True), True)
            steps, passes = steps + masked.any(-1), passes + 1
            x = torch.where(masked & (most | (c >= setting.value) | (passes == setting.max_steps)), token, x)
        found.append(Written(x.cpu(), steps.cpu(), passes * len(rows)))
    tokens, counts, evaluated = zip(*found, strict=True)
    return Written(torch.cat(tokens), torch.cat(counts), sum(evaluated))


def engine_loop(engine: Engine, device: torch.device, examples: Examples) -> Written:
    canvas = torch.where(examples.response, engine.denoiser.mask_token_id, examples.tokens).to(device)
    attended = None if bool(examples.attention_mask.all()) else examples.attention_mask.to(device)
    out = engine.generate(canvas, attention_mask=attended)
    return Written(out.tokens.cpu(), out.num_steps.cpu(), out.num_forwards)


@dataclass(frozen=True)
class Way:
    """One way to write, and its settings to choose from."""

    name: str
    settings: Sequence[Setting]
    make: Callable[[Setting, Mode], Write]
    can_compile: bool = True


def ways(
    denoiser: AnyDenoiser,
    own: AnyDenoiser,
    selector: Selector | None,
    max_steps: int,
    thresholds: Sequence[float],
    prices: Sequence[float],
    device: torch.device,
) -> list[Way]:
    """denoiser: that of the rules.  own: that of the learned order, the same unless it learned along."""

    def plain(setting: Setting, mode: Mode) -> Write:
        return partial(plain_loop, denoiser, mode.batch, setting, device)

    def with_rule(used: AnyDenoiser, rule: Callable[[float], Policy], setting: Setting, mode: Mode) -> Write:
        policy = rule(setting.value)
        policy = half_selector(policy) if isinstance(used, HalfTrunk) else policy
        engine = Engine(used, policy, setting.max_steps, batch_size=mode.batch, compile=mode.compiled)
        return partial(engine_loop, engine, device)

    caps = sorted({min(cap, max_steps) for cap in CAPS})
    rules = [Setting(c, cap) for c in thresholds for cap in caps]
    found = [
        Way("plain, one token", [Setting(math.inf, max_steps)], plain, can_compile=False),
        Way("plain, threshold", rules, plain, can_compile=False),
        Way("engine, threshold", rules, partial(with_rule, denoiser, Threshold)),
    ]
    if selector is not None:
        order = partial(with_rule, own, lambda price: Learned(selector, price=price, deterministic=True))
        orders = [Setting(0.0, selector.budget)]
        if selector.prices:
            low, high = selector.prices
            asked = prices or [low * (high / low) ** (i / (PRICES - 1)) for i in range(PRICES)]
            orders = [Setting(price, cap) for price in asked for cap in {min(cap, selector.budget) for cap in caps}]
        found.append(Way("engine, learned", orders, order))
    return found


class Choice(NamedTuple):
    """A way's setting, with its share of right answers on dev."""

    way: Way
    setting: Setting
    accuracy: float
    enough: bool  # no less than the first way


def choose(way: Way, mode: Mode, task: Task, examples: Examples, least: float) -> Choice:
    """Of the settings that are right in at least the share `least`, the one with the fewest rows evaluated; if there is
    none, the most accurate."""
    found = []
    for setting in way.settings:
        out = way.make(setting, mode)(examples)
        accuracy = float(task.valid(out.tokens, examples).double().mean())
        found.append((accuracy >= least, (-out.rows if accuracy >= least else accuracy), accuracy, setting))
        each = f"{way.name:>20} {setting.value:<6.4g} {setting.max_steps:>3} {accuracy:.4f} right in "
        each += f"{float(out.steps.double().mean()):.2f} steps"
        print(f"dev: {each}, {out.rows} rows evaluated", flush=True)
    enough, _, accuracy, setting = max(found)
    return Choice(way, setting, accuracy, enough)


class Timed(NamedTuple):
    seconds: float
    out: Written


def timed(write: Write, examples: Examples) -> Timed:
    started = time.perf_counter()
    out = write(examples)
    return Timed(time.perf_counter() - started, out)


def warm(choice: Choice, examples: Examples, modes: Sequence[Mode]) -> tuple[Write, Mode]:
    """The way with its setting, warmed up, and how: of `modes` the fastest on these examples."""
    found = []
    for mode in modes:
        few = examples.rows(torch.arange(min(len(examples), 2 * mode.batch + 1)))  # so many that rows are exchanged
        write = choice.way.make(choice.setting, mode)
        write(few)
        found.append((min(timed(write, examples).seconds for _ in range(2)), mode, write))
        how = f"{'compiled' if mode.compiled else 'eager'} in batches of {mode.batch}"
        print(f"dev: {choice.way.name:>20} {how} {found[-1][0]:.3f} s", flush=True)
    _, mode, write = min(found, key=lambda each: each[0])
    return write, mode


def measure(
    choices: Sequence[Choice],
    task: Task,
    dev: Examples,
    examples: Examples,
    batches: Sequence[int],
    repeats: int,
    compiled: bool,
) -> list[dict[str, Any]]:
    """A record for each way; times are medians, and the fastest and the slowest."""
    eager = [Mode(batch) for batch in batches]
    both = [*eager, *(Mode(batch, True) for batch in batches)] if compiled else eager
    writes, modes = zip(
        *(warm(choice, dev, both if choice.way.can_compile else eager) for choice in choices), strict=True
    )
    runs = [timed(write, examples) for _ in range(repeats) for write in writes]
    rows, first = [], 0.0
    for place, choice in enumerate(choices):
        out, times = runs[place].out, [run.seconds for run in runs[place :: len(choices)]]
        right = int(task.valid(out.tokens, examples).sum())
        speed, share = [len(examples) / each for each in times], right / len(examples)
        solved = [share * each for each in speed]
        first = statistics.median(solved) if place == 0 else first
        rows.append(
            {
                "way": choice.way.name,
                "setting": None if math.isinf(choice.setting.value) else choice.setting.value,
                "max_steps": choice.setting.max_steps,
                "compiled": modes[place].compiled,
                "batch": modes[place].batch,
                "accuracy": round(share, 5),
                "mean_steps": round(float(out.steps.double().mean()), 4),
                "rows_evaluated": out.rows,
                "problems_per_s": round(statistics.median(speed), 2),
                "solved_per_s": round(statistics.median(solved), 2),
                "solved_per_s_range": [round(min(solved), 2), round(max(solved), 2)],
                "ratio": round(statistics.median(solved) / first, 3) if first else None,
                "dev_accuracy": round(choice.accuracy, 5),
                "enough_on_dev": choice.enough,
            }
        )
    return rows


HEADINGS = ["way", "setting", "accuracy", "mean steps", "problems/s", "solved/s", "range", "ratio"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS)]
    for row in rows:
        low, high = row["solved_per_s_range"]
        lines.append(
            [
                row["way"],
                "" if row["setting"] is None else f"{row['setting']:.4g}, {row['max_steps']} steps",
                f"{100 * row['accuracy']:.2f}" + ("" if row["enough_on_dev"] else " (less on dev)"),
                f"{row['mean_steps']:.2f}",
                f"{row['problems_per_s']:,.1f}",
                f"{row['solved_per_s']:,.1f}",
                f"{low:,.1f} to {high:,.1f}",
                "" if row["ratio"] is None else f"{row['ratio']:.1f}x",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--threshold", type=float, action="append", help="to choose from; may be repeated")
    parser.add_argument("--price", type=float, action="append", help="to choose from; may be repeated")
    parser.add_argument("--dev", default="new-numbers-dev", help="the split to choose on")
    parser.add_argument("--split", default="new-numbers", help="the split to time on")
    parser.add_argument("--problems", type=int, default=1000, help="to time; to choose on, as many where there are")
    parser.add_argument("--batch", type=int, action="append", help="each way has the fastest; may be repeated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="do not try the engine compiled, which takes minutes")
    parser.add_argument("--out", type=Path, help="add the records to this file, one object per line")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model, plain, recipe, task = load_run(options.run)
        dev, task = task.on_split(options.dev), task.on_split(options.split)
        check_examples(task, options.problems)
    except UserError as error:
        parser.error(str(error))
    half = precision_on("cpu" if device.type == "cpu" else "gpu", recipe.precision) == "bf16"

    def used(denoiser: Denoiser) -> AnyDenoiser:
        return HalfTrunk(denoiser) if half else denoiser

    model, plain = model.to(device), plain.to(device)
    to_time = task.examples(torch.arange(options.problems), "test")
    to_choose = dev.examples(torch.arange(min(options.problems, dev.test_examples or options.problems)), "test")
    all_ways = ways(
        used(plain.denoiser),
        used(model.denoiser),
        model.selector,
        int(to_time.num_response.max()),
        options.threshold or THRESHOLDS,
        options.price or [],
        device,
    )
    batches = options.batch or [BATCH]
    first = choose(all_ways[0], Mode(batches[0]), dev, to_choose, 0.0)
    choices = [first, *(choose(way, Mode(batches[0]), dev, to_choose, first.accuracy) for way in all_ways[1:])]
    compiled = torch.cuda.is_available() and not options.eager
    rows = measure(choices, task, to_choose, to_time, batches, options.repeats, compiled)
    print(table(rows), flush=True)
    about = {"run": options.run.name, "task": task.name, "split": options.split, "num_examples": options.problems}
    about |= {"precision": "bf16" if half else "no", "repeats": options.repeats}
    about |= {"device": device_name(device), "torch": torch.__version__, "revision": revision()}
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(row | about) + "\n" for row in rows)


if __name__ == "__main__":
    main()
