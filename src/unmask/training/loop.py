"""One training loop for both objectives, on Hugging Face Accelerate.

Data order, times and random streams are functions of the seed, the stage, the update and the place in its batch alone,
never of a hidden state: what update 1,000 does can be said without running the 999 before it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from enum import IntEnum
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from unmask.errors import Stopped, UserError
from unmask.progress import progress
from unmask.recipe import Optimisation
from unmask.rng import Purpose, integers, stratified
from unmask.tasks.task import Examples, Task, to_device
from unmask.training.checkpoint import warn
from unmask.training.checkpointer import Checkpointer
from unmask.training.metrics import Metrics
from unmask.training.state import StageState
from unmask.training.tensors import gathered

Rates = dict[str, tuple[nn.Module, float]]  # a network by name: its module and its learning rate


class Stage(IntEnum):
    """The stages of a run.  A number names a stage's examples, times and draws: no two stages share any."""

    DENOISE = 0
    ORDER = 1
    BASELINE = 2
    DENOISE_FURTHER = 3  # the run that `init` names may have seen the examples of DENOISE
    ORDER_FURTHER = 4  # and those of ORDER

    @property
    def label(self) -> str:
        """What messages, metrics and folders call it: `denoise`, `order` or `baseline`."""
        return self.name.partition("_")[0].lower()


class NonFiniteError(UserError):
    """The loss or a gradient was not finite too often; the weights are those of the last good update."""


def learning_rate_factor(update: int, how: Optimisation) -> float:
    """Linear warm-up to 1, then a cosine that reaches `final_rate` as the stage ends."""
    if update < how.warmup:
        return (update + 1) / (how.warmup + 1)
    progress = (update - how.warmup) / max(1, how.updates - how.warmup)
    return how.final_rate + (1 - how.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def run_stage(
    stage: Stage,
    objective: nn.Module,
    rates: Rates,
    how: Optimisation,
    task: Task,
    seed: int,
    accelerator: Accelerator,
    metrics: Metrics,
    *,
    on_update: Callable[[int], None] = lambda update: None,
    checkpointer: Checkpointer | None = None,
) -> None:
    """Minimise `objective` for `how.updates` updates, less those that the checkpoint to resume from has behind it.

    rates: for each network by name, its module and learning rate; 0 freezes it.  Each network is clipped by its own
    norm, so a spike in the scorer's noisy gradient does not shrink the others' steps.
    on_update: called before every update with its number.
    """
    name, shares = stage.label, accelerator.num_processes * how.accumulate
    if how.batch < shares:
        raise UserError(
            f"{name}: batch = {how.batch} is too small for {accelerator.num_processes} processes with accumulate = "
            f"{how.accumulate}: raise it to {shares} at least, or start fewer processes"
        )
    for module, rate in rates.values():
        module.requires_grad_(rate > 0)
    learning = {key: (module, rate) for key, (module, rate) in rates.items() if rate > 0}
    groups = [
        {"params": [p for p in module.parameters() if p.requires_grad], "name": key}
        for key, (module, _) in learning.items()
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=how.weight_decay, fused=True)
    # Accelerate's wrapping of the optimiser, for float16 and for accumulation (`backward` does that), is left out.
    run, _ = accelerator.prepare(objective, adamw)
    state = StageState(objective, adamw, how)
    if checkpointer is not None:
        checkpointer.begin(state)

    objective.train()
    started = time.perf_counter() - state.seconds
    # A GPU is kept busy by reading the numbers of an update when the next one is already under way.
    behind = 1 if accelerator.device.type == "cuda" and how.max_bad > 1 else 0
    pending: deque[tuple[int, float, _Numbers]] = deque()
    smooth: dict[str, float] = {}
    with progress(name, how.updates, state.update, visible=accelerator.is_main_process) as advance:

        def read(late: int) -> None:
            """Read all but the `late` newest numbers, and do what they call for."""
            stop = due = False
            while len(pending) > late:
                update, factor, numbers = pending.popleft()
                recorded = numbers.read()
                stop, due = stop or recorded.pop("stop") > 0, due or recorded.pop("due") > 0
                advance(note=_progress_text(smooth, recorded))
                wrong = [key for key, value in recorded.items() if not math.isfinite(value)]
                event = state.judge(wrong, recorded)
                state.seconds = time.perf_counter() - started
                if accelerator.is_main_process:
                    if event:
                        warn(f"{name}, update {update}: {event['event']}")
                        metrics.write(stage=name, update=update, **event)
                    if not wrong and (update % 20 == 0 or update == how.updates - 1):
                        norms = {key: recorded.pop(_norm(key)) for key in learning}
                        rest = {"rate_factor": round(factor, 6), "seconds": round(state.seconds, 3)}
                        metrics.write(stage=name, update=update, **recorded, gradient_norm=norms, **rest)
                if state.in_a_row == how.max_bad:
                    _give_up(name, state, how, wrong, batch_ids(seed, stage, update, how, task), checkpointer)
                if state.in_a_row or stop or due:
                    late = 0  # look closely: what is saved must be all that has happened, and nothing more
            if checkpointer is not None and (stop or due):
                checkpointer.save(name, state)
            if stop:
                done = f"stage {name} is saved after update {state.update} of {how.updates}"
                raise Stopped(f"stopped by SIGTERM; {done}")

        updates = range(state.update, how.updates)
        batches = _ahead(micro_batches(update, stage, how, task, seed, accelerator) for update in updates)
        for update, batch in zip(updates, batches, strict=True):
            factor = state.guard.rate_factor(update) * learning_rate_factor(update, how)
            for group in adamw.param_groups:
                group["lr"] = rates[group["name"]][1] * factor
            on_update(update)
            state.update = update + 1
            recorded = backward(run, batch, how.batch, accelerator)
            wishes = {
                "stop": checkpointer is not None and checkpointer.stop.is_set(),
                "due": checkpointer is not None and checkpointer.due(update + 1),
            }
            clip = accelerator.clip_grad_norm_
            norms = {_norm(group["name"]): clip(group["params"], how.clip) for group in adamw.param_groups}
            numbers = _Numbers(recorded, wishes, norms, accelerator)
            adamw.found_inf = numbers.any_bad  # type: ignore[attr-defined]  # the fused step is left out where it is 1
            adamw.step()
            adamw.zero_grad(set_to_none=True)
            if state.average is not None:
                state.average.update()
            if state.baseline is not None:
                state.baseline.fold(lambda sums: accelerator.reduce(sums.to(accelerator.device), "sum").cpu())
            pending.append((update, factor, numbers))
            read(0 if state.in_a_row else behind)
        read(0)
    if state.average is not None:
        state.average.apply()
    # 0 w is 0 where w is finite, else not a number; a sum holds for an empty shard too.
    zeros = [gathered((0 * p.detach()).sum()) for p in state.parameters.values()]
    if zeros and not torch.stack(zeros).isfinite().all():
        raise NonFiniteError(
            f"{name}: the weights are not finite after the last update, so they are not saved; the checkpoints are as "
            "they were: resume from there with a smaller learning rate and --allow-change, or start over with --force"
        )
    objective.eval()
    accelerator.free_memory()


def batch_ids(seed: int, stage: Stage, update: int, how: Optimisation, task: Task) -> Tensor:
    """[B]: the examples of an update, over all processes and micro-batches."""
    return task.order(seed, stage, update * how.batch + torch.arange(how.batch))


def draw_names(seed: int, stage: Stage, positions: Tensor) -> Tensor:
    """[B]: the words that name the random draws of the sequences at these positions [B] of a stage.

    No other position and no other stage has them: an example that comes again gets other masks and trajectories.
    """
    return integers(seed, Purpose.EXAMPLE, stage, positions)


MicroBatch = tuple[Examples, Tensor, Tensor]  # examples, the names of their draws [b], stratified uniforms [b]


def micro_batches(
    update: int, stage: Stage, how: Optimisation, task: Task, seed: int, accelerator: Accelerator
) -> list[MicroBatch]:
    """What this process sees at an update, a function of (seed, stage, update) alone."""
    found = []
    # Strided, so that every micro-batch has its share of every stratum of t.
    mine = torch.arange(accelerator.process_index, how.batch, accelerator.num_processes)
    for micro in range(how.accumulate):
        slots = mine[micro :: how.accumulate]
        ids = batch_ids(seed, stage, update, how, task)[slots]
        examples = task.examples(ids, "train")
        for empty in ids[examples.num_response == 0].tolist():
            what = f"training example {empty} has an empty response"
            raise UserError(f"task {task.name}: {what}, so nothing to learn from")
        names = draw_names(seed, stage, update * how.batch + slots)
        u = stratified(seed, Purpose.TIME, stage, update, slots=slots, total=how.batch)
        found.append((examples.to(accelerator.device), to_device(names, accelerator.device), u))
    return found


T = TypeVar("T")


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, the next one made by a second thread while the last is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


def backward(
    run: Callable[..., Any], micro_batches: list[MicroBatch], batch: int, accelerator: Accelerator
) -> dict[str, Tensor]:
    """Accumulate the gradient of one update over its micro-batches.

    Returns this process's share of the update's mean metrics, on the device: they add up over the processes.  Gradients
    are averaged over the processes, hence the factor of their number: however the batch is divided among processes and
    micro-batches, it is the gradient of the mean over the batch.  Only order.distinct compares within a micro-batch.
    """
    total: dict[str, Tensor] = {}
    for number, micro_batch in enumerate(micro_batches, start=1):
        share = len(micro_batch[1]) / batch
        last = number == len(micro_batches)
        with nullcontext() if last else accelerator.no_sync(run):  # processes exchange gradients once per update
            with accelerator.autocast():
                outcome = run(*micro_batch)
            accelerator.backward(outcome.loss * (share * accelerator.num_processes))
        for key, value in {"loss": outcome.loss.detach(), **outcome.metrics}.items():
            total[key] = total.get(key, 0.0) + value * share
    return total


class _Numbers:
    """Named scalars on their way from the device; `read` waits for what made them, and for nothing that came later.

    shares: added up over the processes.  wishes: above zero if a process has one.  same: the same on all of them.
    All processes thus see the same numbers, and decide alike.
    """

    def __init__(
        self, shares: dict[str, Tensor], wishes: dict[str, bool], same: dict[str, Tensor], accelerator: Accelerator
    ) -> None:
        self.wishes = {name: float(wish) for name, wish in wishes.items()}
        stacked = torch.stack(list(shares.values())).double()
        if accelerator.num_processes > 1:
            wished = to_device(torch.tensor(list(self.wishes.values()), dtype=torch.float64), stacked.device)
            stacked, summed = accelerator.reduce(torch.cat([stacked, wished]), "sum").tensor_split([len(shares)])
            same = {**same, **dict(zip(wishes, summed, strict=True))}
        self.names = (*shares, *same)
        stacked = torch.cat([stacked, torch.stack([gathered(value) for value in same.values()])])  # in float64
        self.any_bad = (~stacked.isfinite().all()).float()  # 1 or 0, on the device
        self.values = stacked.to("cpu", non_blocking=True)
        self.ready = torch.cuda.Event() if stacked.is_cuda else None
        if self.ready is not None:
            self.ready.record()

    def read(self) -> dict[str, float]:
        if self.ready is not None:
            self.ready.synchronize()
        return {**self.wishes, **dict(zip(self.names, self.values.tolist(), strict=True))}


def _norm(network: str) -> str:
    return f"gradient of the {network}"


def _give_up(
    name: str, state: StageState, how: Optimisation, wrong: list[str], ids: Tensor, checkpointer: Checkpointer | None
) -> None:
    """Save the state before the updates that went wrong, which skipped ones left as it was, and name those."""
    last = state.update - 1
    state.update, state.skipped, state.in_a_row = state.update - how.max_bad, state.skipped - how.max_bad, 0
    saved = ""
    if checkpointer is not None:
        checkpointer.save(name, state)
        saved = f"; the state before update {state.update} is saved"
    times = f"{how.max_bad} updates in a row" if how.max_bad > 1 else "once, and max_bad is 1"
    raise NonFiniteError(
        f"{name}, update {last}: {', '.join(wrong)} not finite, {times}; the last batch held the examples "
        f"{', '.join(map(str, ids.tolist()))}{saved}; try a smaller learning rate"
    )


def _progress_text(smooth: dict[str, float], recorded: dict[str, float]) -> str:
    """The moving averages of the metrics, which are kept in `smooth`."""
    labels = {"elbo": "bound", "reconstruction": "recon", "order_kl": "KL", "reward": "reward", "valid": "valid"}
    labels["q_steps"] = "Q steps"
    for key in recorded:
        smooth[key] = 0.95 * smooth.get(key, recorded[key]) + 0.05 * recorded[key]
    return " ".join(f"{label} {smooth[key]:.3f}" for key, label in labels.items() if key in smooth)
