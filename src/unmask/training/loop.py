"""One training loop for both objectives, on Hugging Face Accelerate.

Data order, times and random streams are functions of the seed, the update and the example's id alone, never of a
hidden state: what update 1,000 does can be said without running the 999 before it.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from unmask.streams import Purpose, integers, stratified
from unmask.tasks.task import Examples, Task, sent
from unmask.training.recipe import Optimisation

Rates = dict[str, tuple[nn.Module, float]]  # a network by name: its module and its learning rate


class NonFiniteError(ValueError):
    """The loss or a gradient was not finite; the weights are those of the last good update."""


class Metrics:
    """Append-only JSONL, one object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def learning_rate_factor(update: int, stage: Optimisation) -> float:
    """Linear warm-up to 1, then a cosine that reaches `final_rate` as the stage ends."""
    if update < stage.warmup:
        return (update + 1) / (stage.warmup + 1)
    progress = (update - stage.warmup) / max(1, stage.updates - stage.warmup)
    return stage.final_rate + (1 - stage.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def run_stage(
    name: str,
    index: int,
    objective: nn.Module,
    rates: Rates,
    stage: Optimisation,
    task: Task,
    seed: int,
    accelerator: Accelerator,
    metrics: Metrics,
    begin_update: Callable[[float], None] = lambda progress: None,
) -> None:
    """Minimise `objective` for `stage.updates` updates.

    rates: for each network by name, its module and learning rate; 0 freezes it.  Each network is clipped by its own
    norm, so a spike in the scorer's noisy gradient does not shrink the others' steps.
    begin_update: called before every update with the fraction of the stage that lies behind it.
    """
    networks = {key: module for key, (module, rate) in rates.items() if rate > 0}
    for module, rate in rates.values():
        module.requires_grad_(rate > 0)
    groups = [
        {"params": list(module.parameters()), "lr": rates[key][1], "name": key} for key, module in networks.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=stage.weight_decay, fused=True)
    adamw = optimizer  # itself, before Accelerate wraps it
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: learning_rate_factor(update, stage))
    run, optimizer = accelerator.prepare(objective, optimizer)
    average = AveragedModel(objective, multi_avg_fn=get_ema_multi_avg_fn(stage.ema)) if stage.ema else None

    objective.train()
    started = time.perf_counter()
    # A GPU is kept busy by reading the numbers of an update when the next one is already under way.
    behind = 1 if accelerator.device.type == "cuda" else 0
    pending: deque[tuple[int, _Numbers]] = deque()
    with _progress(name, stage.updates, accelerator.is_main_process) as advance:

        def read(late: int) -> None:
            while len(pending) > late:
                update, numbers = pending.popleft()
                recorded = numbers.read()
                _check_finite(recorded, name, update)
                advance(recorded)
                if accelerator.is_main_process and (update % 20 == 0 or update == stage.updates - 1):
                    norms = {key: recorded.pop(_norm(key)) for key in networks}
                    metrics.write(
                        stage=name,
                        update=update,
                        **recorded,
                        gradient_norm=norms,
                        rate_factor=round(learning_rate_factor(update, stage), 6),
                        seconds=round(time.perf_counter() - started, 3),
                    )

        batches = _ahead(
            _micro_batches(update, index, stage, task, seed, accelerator) for update in range(stage.updates)
        )
        for update, micro_batches in enumerate(batches):
            begin_update(update / stage.updates)
            recorded = _backward(run, micro_batches, accelerator)
            for key, module in networks.items():
                recorded[_norm(key)] = accelerator.clip_grad_norm_(module.parameters(), stage.clip)
            numbers = _Numbers(recorded)
            adamw.found_inf = numbers.any_bad  # type: ignore[attr-defined]  # the fused step is left out where it is 1
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if average is not None:
                average.update_parameters(objective)
            pending.append((update, numbers))
            read(behind)
        read(0)
    if average is not None:
        objective.load_state_dict(average.module.state_dict())
    objective.eval()


MicroBatch = tuple[Examples, Tensor, Tensor]  # examples and their ids [b] on the device, stratified uniforms [b]


def _micro_batches(
    update: int, index: int, stage: Optimisation, task: Task, seed: int, accelerator: Accelerator
) -> list[MicroBatch]:
    """What this process sees at an update, a function of (seed, stage, update) alone."""
    found = []
    # Strided, so that every micro-batch has its share of every stratum of t.
    mine = torch.arange(accelerator.process_index, stage.batch, accelerator.num_processes)
    for micro in range(stage.accumulate):
        slots = mine[micro :: stage.accumulate]
        ids = integers(seed, Purpose.EXAMPLE, index, update * stage.batch + slots)
        examples = task.examples(ids, "train")
        if not (examples.num_response > 0).all():
            empty = int(ids[examples.num_response == 0][0])
            raise ValueError(
                f"task {task.name}: training example {empty} has an empty response, so nothing to learn from"
            )
        u = stratified(seed, Purpose.TIME, index, update, slots=slots, total=stage.batch)
        found.append((examples.to(accelerator.device), sent(ids, accelerator.device), u))
    return found


T = TypeVar("T")


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, the next one made by a second thread while the last is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


def _backward(run: Callable[..., Any], micro_batches: list[MicroBatch], accelerator: Accelerator) -> dict[str, Tensor]:
    """Accumulate the gradient of one update over its micro-batches; the update's mean metrics, on the device."""
    total: dict[str, Tensor] = {}
    parts = len(micro_batches)
    for micro_batch in micro_batches:
        with accelerator.autocast():
            outcome = run(*micro_batch)
        accelerator.backward(outcome.loss / parts)
        for key, value in {"loss": outcome.loss.detach(), **outcome.metrics}.items():
            total[key] = total.get(key, 0.0) + value / parts
    return total


class _Numbers:
    """Named scalars on their way from the device; `read` waits for what made them, and for nothing that came later."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.names = tuple(values)
        stacked = torch.stack([value.double() for value in values.values()])
        self.any_bad = (~stacked.isfinite().all()).float()  # 1 or 0, on the device
        self.values = stacked.to("cpu", non_blocking=True)
        self.ready = torch.cuda.Event() if stacked.is_cuda else None
        if self.ready is not None:
            self.ready.record()

    def read(self) -> dict[str, float]:
        if self.ready is not None:
            self.ready.synchronize()
        return dict(zip(self.names, self.values.tolist(), strict=True))


def _norm(network: str) -> str:
    return f"gradient of the {network}"


def _check_finite(recorded: dict[str, float], name: str, update: int) -> None:
    """Raise after an update whose step was left out, so that the weights are still good."""
    wrong = [key for key, value in recorded.items() if not math.isfinite(value)]
    if wrong:
        raise NonFiniteError(f"{name}, update {update}: {', '.join(wrong)} not finite; try a smaller learning rate")


@contextmanager
def _progress(name: str, updates: int, visible: bool) -> Iterator[Callable[[dict[str, float]], None]]:
    """A progress line: update, rate, time left, and smoothed metrics; all of them fit in 80 columns."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    smooth: dict[str, float] = {}
    columns = (
        TextColumn("{task.description:<8}"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[said]}"),
    )
    labels = {"elbo": "bound", "reconstruction": "recon", "order_kl": "KL", "q_steps": "Q steps"}
    with Progress(*columns, disable=not visible, refresh_per_second=4) as bar:
        line = bar.add_task(name, total=updates, said="", rate="")

        def advance(recorded: dict[str, float]) -> None:
            for key in recorded:
                smooth[key] = 0.95 * smooth.get(key, recorded[key]) + 0.05 * recorded[key]
            said = " ".join(f"{label} {smooth[key]:.3f}" for key, label in labels.items() if key in smooth)
            speed = bar.tasks[line].speed
            bar.update(line, advance=1, said=said, rate=f"{speed:.{0 if speed >= 10 else 1}f}/s" if speed else "")

        yield advance
