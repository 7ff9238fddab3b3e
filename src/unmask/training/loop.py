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
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unmask.errors import UserError
from unmask.progress import progress
from unmask.recipe import Optimisation
from unmask.rng import Purpose, integers, stratified
from unmask.tasks.task import Examples, Task, to_device
from unmask.training.checkpoint import warn
from unmask.training.checkpointer import Checkpointer, Stopped
from unmask.training.collapse import ADVICE, CollapseGuard
from unmask.training.metrics import Metrics
from unmask.training.state import StageState

Rates = dict[str, tuple[nn.Module, float]]  # a network by name: its module and its learning rate


class NonFiniteError(UserError):
    """The loss or a gradient was not finite too often; the weights are those of the last good update."""


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
    *,
    checkpointer: Checkpointer | None = None,
    guard: CollapseGuard | None = None,
) -> None:
    """Minimise `objective` for `stage.updates` updates, less those that the keeper's checkpoint has behind it.

    rates: for each network by name, its module and learning rate; 0 freezes it.  Each network is clipped by its own
    norm, so a spike in the scorer's noisy gradient does not shrink the others' steps.
    begin_update: called before every update with the fraction of the stage that lies behind it.
    """
    shares = accelerator.num_processes * stage.accumulate
    if stage.batch < shares:
        raise UserError(
            f"{name}: batch = {stage.batch} is too small for {accelerator.num_processes} processes with accumulate = "
            f"{stage.accumulate}: raise it to {shares} at least, or start fewer processes"
        )
    networks = {key: module for key, (module, rate) in rates.items() if rate > 0}
    for module, rate in rates.values():
        module.requires_grad_(rate > 0)
    groups = [
        {"params": list(module.parameters()), "lr": rates[key][1], "name": key} for key, module in networks.items()
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=stage.weight_decay, fused=True)
    # Accelerate's wrapping of the optimiser, for float16 and for accumulation (`_backward` does that), is left out.
    run, _ = accelerator.prepare(objective, adamw)
    state = StageState(objective, adamw, stage.ema, guard)
    if checkpointer is not None:
        checkpointer.begin(state)

    objective.train()
    started = time.perf_counter() - state.seconds
    # A GPU is kept busy by reading the numbers of an update when the next one is already under way.
    behind = 1 if accelerator.device.type == "cuda" and stage.max_bad > 1 else 0
    pending: deque[tuple[int, float, _Numbers]] = deque()
    smooth: dict[str, float] = {}
    with progress(name, stage.updates, state.update, visible=accelerator.is_main_process) as advance:

        def read(late: int) -> None:
            """Read all but the `late` newest numbers, and do what they call for."""
            stop = due = False
            while len(pending) > late:
                update, factor, numbers = pending.popleft()
                recorded = numbers.read()
                stop, due = stop or recorded.pop("stop") > 0, due or recorded.pop("due") > 0
                advance(said=_said(smooth, recorded))
                wrong = [key for key, value in recorded.items() if not math.isfinite(value)]
                events = _judge(state, wrong, recorded)
                state.seconds = time.perf_counter() - started
                if accelerator.is_main_process:
                    for event in events:
                        warn(f"{name}, update {update}: {event['event']}")
                        metrics.write(stage=name, update=update, **event)
                    if not wrong and (update % 20 == 0 or update == stage.updates - 1):
                        norms = {key: recorded.pop(_norm(key)) for key in networks}
                        metrics.write(
                            stage=name,
                            update=update,
                            **recorded,
                            gradient_norm=norms,
                            rate_factor=round(factor, 6),
                            seconds=round(state.seconds, 3),
                        )
                if state.in_a_row == stage.max_bad:
                    _give_up(name, state, stage, wrong, batch_ids(seed, index, update, stage, task), checkpointer)
                if state.in_a_row or stop or due:
                    late = 0  # look closely: what is saved must be all that has happened, and nothing more
            if checkpointer is not None and (stop or due):
                checkpointer.save(name, state)
            if stop:
                done = f"stage {name} is saved after update {state.update} of {stage.updates}"
                raise Stopped(f"stopped by SIGTERM; {done}")

        updates = range(state.update, stage.updates)
        batches = _ahead(_micro_batches(update, index, stage, task, seed, accelerator) for update in updates)
        for update, micro_batches in zip(updates, batches, strict=True):
            factor = state.rate_factor * learning_rate_factor(update, stage)
            for group in adamw.param_groups:
                group["lr"] = rates[group["name"]][1] * factor
            begin_update(update / stage.updates)
            state.update = update + 1
            recorded = _backward(run, micro_batches, stage.batch, accelerator)
            wishes = {
                "stop": checkpointer is not None and checkpointer.stop.came,
                "due": checkpointer is not None and checkpointer.due(update + 1),
            }
            norms = {
                _norm(group["name"]): accelerator.clip_grad_norm_(group["params"], stage.clip)
                for group in adamw.param_groups
            }
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
    zeros = [_plain((0 * p.detach()).sum()) for p in state.parameters.values()]
    if zeros and not torch.stack(zeros).isfinite().all():
        raise NonFiniteError(
            f"{name}: the weights are not finite after the last update, so they are not saved; the checkpoints are as "
            "they were: go on from there with a smaller learning rate and --allow-change, or begin anew with --force"
        )
    objective.eval()
    accelerator.free_memory()


def batch_ids(seed: int, index: int, update: int, stage: Optimisation, task: Task) -> Tensor:
    """[B]: the examples of an update, over all processes and micro-batches."""
    return task.order(seed, index, update * stage.batch + torch.arange(stage.batch))


def draw_names(seed: int, index: int, positions: Tensor) -> Tensor:
    """[B]: the words that name the random draws of the sequences at these positions [B] of a stage.

    No other position and no other stage has them: an example that comes again gets other masks and trajectories.
    """
    return integers(seed, Purpose.EXAMPLE, index, positions)


MicroBatch = tuple[Examples, Tensor, Tensor]  # examples, the names of their draws [b], stratified uniforms [b]


def _micro_batches(
    update: int, index: int, stage: Optimisation, task: Task, seed: int, accelerator: Accelerator
) -> list[MicroBatch]:
    """What this process sees at an update, a function of (seed, stage, update) alone."""
    found = []
    # Strided, so that every micro-batch has its share of every stratum of t.
    mine = torch.arange(accelerator.process_index, stage.batch, accelerator.num_processes)
    for micro in range(stage.accumulate):
        slots = mine[micro :: stage.accumulate]
        ids = batch_ids(seed, index, update, stage, task)[slots]
        examples = task.examples(ids, "train")
        if not (examples.num_response > 0).all():
            empty = int(ids[examples.num_response == 0][0])
            raise UserError(
                f"task {task.name}: training example {empty} has an empty response, so nothing to learn from"
            )
        names = draw_names(seed, index, update * stage.batch + slots)
        u = stratified(seed, Purpose.TIME, index, update, slots=slots, total=stage.batch)
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


def _backward(
    run: Callable[..., Any], micro_batches: list[MicroBatch], batch: int, accelerator: Accelerator
) -> dict[str, Tensor]:
    """Accumulate the gradient of one update over its micro-batches.

    Returns this process's share of the update's mean metrics, on the device: they add up over the processes.  Gradients
    are averaged over the processes, hence the factor of their number: however the batch is divided among processes and
    micro-batches, it is the gradient of the mean over the batch.
    """
    total: dict[str, Tensor] = {}
    for number, micro_batch in enumerate(micro_batches, start=1):
        share = len(micro_batch[1]) / batch
        last = number == len(micro_batches)
        with nullcontext() if last else accelerator.no_sync(run):  # processes exchange gradients once an update
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
        stacked = torch.cat([stacked, torch.stack([_plain(value) for value in same.values()])])  # in float64
        self.any_bad = (~stacked.isfinite().all()).float()  # 1 or 0, on the device
        self.values = stacked.to("cpu", non_blocking=True)
        self.ready = torch.cuda.Event() if stacked.is_cuda else None
        if self.ready is not None:
            self.ready.record()

    def read(self) -> dict[str, float]:
        if self.ready is not None:
            self.ready.synchronize()
        return {**self.wishes, **dict(zip(self.names, self.values.tolist(), strict=True))}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _norm(network: str) -> str:
    return f"gradient of the {network}"


def _judge(state: StageState, wrong: list[str], recorded: dict[str, float]) -> list[dict[str, Any]]:
    """Count a skipped update, ask the collapse guard about one that was made; what there is to report."""
    if wrong:
        state.skipped, state.in_a_row = state.skipped + 1, state.in_a_row + 1
        return [{"event": f"skipped, {', '.join(wrong)} not finite", "skipped": state.skipped}]
    state.in_a_row = 0
    guard = state.guard
    if guard is None:
        return []
    why = guard.watch(recorded)
    if guard.restored_rate and guard.at_best:
        state.keep_candidate()
    elif guard.in_doubt:
        state.candidate = {}  # it may have been taken just as they fell
    if why is None:
        return []
    said = f"THE {guard.what.upper()} HAS COLLAPSED: {why}"
    if state.best:
        state.restore_best(guard.restored_rate)
        said += f"; the best {guard.what} is restored, learning rates times {state.rate_scale:g}"
    else:
        said += f"; try {ADVICE[guard.what]}"
        said += (
            f": there is no better {guard.what} to restore" if guard.restored_rate else ", or on_collapse = 'restore'"
        )
    return [{"event": said}]


def _give_up(
    name: str, state: StageState, stage: Optimisation, wrong: list[str], ids: Tensor, checkpointer: Checkpointer | None
) -> None:
    """Save the state before the updates that went wrong, which skipped ones left as it was, and say which those are."""
    last = state.update - 1
    state.update, state.skipped, state.in_a_row = state.update - stage.max_bad, state.skipped - stage.max_bad, 0
    saved = ""
    if checkpointer is not None:
        checkpointer.save(name, state)
        saved = f"; the state before update {state.update} is saved"
    times = f"{stage.max_bad} updates in a row" if stage.max_bad > 1 else "once, and max_bad is 1"
    raise NonFiniteError(
        f"{name}, update {last}: {', '.join(wrong)} not finite, {times}; the last batch held the examples "
        f"{', '.join(map(str, ids.tolist()))}{saved}; try a smaller learning rate"
    )


_LABELS = {"elbo": "bound", "reconstruction": "recon", "order_kl": "KL", "q_steps": "Q steps"}


def _said(smooth: dict[str, float], recorded: dict[str, float]) -> str:
    """What the progress line says of the metrics: their moving averages, kept in `smooth`."""
    for key in recorded:
        smooth[key] = 0.95 * smooth.get(key, recorded[key]) + 0.05 * recorded[key]
    return " ".join(f"{label} {smooth[key]:.3f}" for key, label in _LABELS.items() if key in smooth)
