"""The one thread that runs the model: requests wait in a queue, join a batch between two steps, and leave it finished.

Requests that agree in model, rule, steps, choice of tokens and length share a batch.  Batches take their steps in turn.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.decoding.generate import Engine
from unmask.decoding.open_batch import OpenBatch
from unmask.errors import UserError
from unmask.models.packing import padding_stays

MOST_LANES = 8  # batches at once; a rule may keep N x V numbers for each of its rows


GAP = 0.01  # seconds without a request after which no more are expected


class QueueFull(Exception):
    """No request more can wait."""


class State(NamedTuple):
    """What stands of one sequence after a step."""

    tokens: list[int]  # [L]
    masked: list[bool]  # [L]
    reveal_step: list[int]  # [L]
    steps: int
    passes: int
    finished: bool
    queued: float  # seconds until the first step
    seconds: float  # from there on


@dataclass(eq=False)
class Job:
    """One sequence to write."""

    lane: tuple[object, ...]  # jobs that are equal here share a batch
    engine: Callable[[int], Engine]  # from the number of rows, with fixed shapes
    prompt: Tensor  # [L]
    attention_mask: Tensor | None  # [L] bool; None: no padding
    seed: int
    id: int
    device: torch.device
    watched: bool  # every step is told, not the last alone
    tell: Callable[[State | Exception], None]  # called by the worker's thread
    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    gone: bool = False  # nobody waits for it any more


class Lane:
    """A batch, and whose its rows are."""

    def __init__(self, job: Job, rows: int) -> None:
        padded = job.attention_mask is not None
        self.batch = OpenBatch(job.engine(rows), len(job.prompt), padded, job.device)
        self.jobs: dict[int, Job] = {}

    def join(self, jobs: list[Job]) -> None:
        masks = [job.attention_mask for job in jobs if job.attention_mask is not None]
        prompts, seeds, ids = (
            torch.stack([job.prompt for job in jobs]),
            [job.seed for job in jobs],
            [j.id for j in jobs],
        )
        rows = self.batch.join(prompts, seeds, ids, torch.stack(masks) if masks else None)
        self.jobs |= dict(zip(rows, jobs, strict=True))
        for job in jobs:
            job.started = time.perf_counter()

    def leave(self, rows: list[int]) -> None:
        self.batch.leave(rows)
        for row in rows:
            del self.jobs[row]

    def drop_gone(self) -> None:
        if gone := [row for row, job in self.jobs.items() if job.gone]:
            self.leave(gone)

    def step(self) -> None:
        """One step; who is finished is told and leaves, and who watches is told."""
        over = self.batch.step()
        rows = [row for row, job in self.jobs.items() if job.watched or row in over]
        if not rows:
            return
        out, now = self.batch.result(rows), time.perf_counter()
        parts = out.tokens, out.masked, out.reveal_step, out.num_steps, out.num_passes
        states = zip(*(part.tolist() for part in parts), strict=True)
        for row, (tokens, masked, reveal_step, steps, passes) in zip(rows, states, strict=True):
            job, counts = self.jobs[row], (steps, passes, row in over)
            told = State(tokens, masked, reveal_step, *counts, job.started - job.submitted, now - job.started)
            job.tell(told)
        if over:
            self.leave(over)


class Worker:
    """Takes jobs from any thread."""

    def __init__(self, rows: int, queue: int) -> None:
        """rows: of a batch.  queue: how many jobs may wait for one."""
        self.rows, self.queue = rows, queue
        self.lanes: dict[tuple[object, ...], Lane] = {}
        self.waiting = deque[Job]()
        self.closing = False
        self.steps = self.row_steps = 0  # taken by batches, and by the sequences in them
        self.ended, self.seconds = 0, 0.0  # sequences that the last steps finished, and how long these took
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="unmask-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self.closing

    @property
    def running(self) -> int:
        """How many jobs are in a batch."""
        return sum(len(lane.jobs) for lane in list(self.lanes.values()))

    def submit(self, job: Job) -> None:
        with self._changed:
            if len(self.waiting) >= self.queue or self.closing:
                raise QueueFull
            self.waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: it leaves the queue now, or its batch before the next step."""
        with self._changed:
            job.gone = True
            if job in self.waiting:
                self.waiting.remove(job)

    def close(self, patience: float = 5.0) -> None:
        """Write what has been taken on, for so many seconds at most."""
        with self._changed:
            self.closing = True
            self._changed.notify()
        self._thread.join(patience)

    def _run(self) -> None:
        with padding_stays():  # or what else is in a batch would show in a result's last bits
            while True:
                with self._changed:
                    while not (self.waiting or self.running or self.closing):
                        self._changed.wait()
                    if not (self.waiting or self.running):
                        return
                    self._gather()
                    joining = self._admitted()
                started, self.ended = time.perf_counter(), 0
                for key, jobs in joining.items():
                    self._guarded(key, lambda lane, jobs=jobs: lane.join(jobs), jobs)  # type: ignore[misc]
                for key, lane in list(self.lanes.items()):
                    if lane.jobs:
                        self._guarded(key, self._step, [])
                self.seconds = time.perf_counter() - started

    def _gather(self) -> None:
        """Where several have just been answered, more are on their way: they are waited for while they keep coming, at
        most as long as the last steps took.  Who is alone waits for nobody."""
        until = time.perf_counter() + self.seconds
        before = -1
        while self.ended > 1 and before < len(self.waiting) < self.rows and time.perf_counter() < until:
            before = len(self.waiting)
            self._changed.wait(GAP)

    def _step(self, lane: Lane) -> None:
        lane.drop_gone()
        if rows := len(lane.jobs):
            self.steps, self.row_steps = self.steps + 1, self.row_steps + rows
            lane.step()
            self.ended += rows - len(lane.jobs)

    def _admitted(self) -> dict[tuple[object, ...], list[Job]]:
        """Which jobs join which batch now.

        First come, first served: a job that finds its batch full lets others pass, who go elsewhere.  One that would
        need a batch too many lets nobody pass, or it might wait for ever.
        """
        joining: dict[tuple[object, ...], list[Job]] = {}
        for job in list(self.waiting):
            taken = joining.get(job.lane, [])
            lane = self.lanes.get(job.lane)
            if lane is None and not taken:
                idle = [key for key, other in self.lanes.items() if not other.jobs and key not in joining]
                if len({*self.lanes, *joining}) >= MOST_LANES and not idle:
                    break
                if len({*self.lanes, *joining}) >= MOST_LANES:
                    del self.lanes[idle[0]]
            if len(taken) < (self.rows if lane is None else lane.batch.room):
                joining[job.lane] = [*taken, job]
                self.waiting.remove(job)
        return joining

    def _guarded(self, key: tuple[object, ...], act: Callable[[Lane], None], joining: list[Job]) -> None:
        """Whatever goes wrong in a batch ends its jobs, not the worker."""
        try:
            if key not in self.lanes:
                self.lanes[key] = Lane(joining[0], self.rows)
            act(self.lanes[key])
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exc()
            lane = self.lanes.pop(key, None)
            for job in {*joining, *(lane.jobs.values() if lane else ())}:
                job.tell(error)
