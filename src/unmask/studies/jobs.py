"""Commands as processes of their own, several at once."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from unmask.display import in_markup
from unmask.errors import Stopped, UserError
from unmask.training.checkpointer import stop_signal

PAUSE = 0.1  # seconds between two looks at what is running


class JobError(UserError):
    """A job failed; the message has the last line that it wrote to its log."""


class Job(NamedTuple):
    name: str
    command: list[str]
    after: frozenset[str]  # the names of the jobs that it waits for
    log: Path | None  # its output is appended here; None: it goes where this process writes


Ended = Callable[[Job, int, float, float], None]  # the exit code, when it started since the epoch, and the seconds


class _Running:
    """A job of several at once has its share of the cores: more threads than cores wait for each other."""

    def __init__(self, job: Job, at_once: int) -> None:
        self.job, self.started, self.clock = job, time.time(), time.perf_counter()
        if job.log is not None:
            job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab", buffering=0) if job.log else nullcontext() as log:
            if log is not None:
                log.write(f"$ {shlex.join(job.command)}\n".encode())
            # In a process group of its own: Ctrl-C goes to all of a terminal's group, and would end it unsaved.
            self.process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log and subprocess.STDOUT, process_group=0,
                env={"OMP_NUM_THREADS": f"{max(1, torch.get_num_threads() // at_once)}"} | os.environ,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.clock


def run_jobs(jobs: Sequence[Job], at_once: int, began: Callable[[Job], None], ended: Ended) -> None:
    """Run all jobs, at most `at_once` at a time, each when those that it waits for have ended.

    Where one fails, those under way are waited for, no other is started, and JobError is raised.  On SIGTERM and on
    Ctrl-C those under way get SIGTERM and are waited for; then Stopped or KeyboardInterrupt is raised.
    """
    waiting, running, failure = list(jobs), list[_Running](), ""
    status = Console(highlight=False).status("")  # below what is printed; nothing where there is no terminal

    def show(text: str) -> None:
        if all(one.job.log for one in running):  # else the terminal belongs to the job
            status.update(in_markup(text))
            status.start()

    def end(one: _Running) -> int:
        code = one.process.wait()
        running.remove(one)
        status.stop()
        ended(one.job, code, one.started, one.seconds)
        return code

    with stop_signal() as stop:
        try:
            while running or (waiting and not failure):
                for job in [] if failure else list(waiting):
                    unfinished = {other.name for other in waiting} | {other.job.name for other in running}
                    if len(running) < at_once and not job.after & unfinished:
                        status.stop()
                        began(job)
                        running.append(_Running(job, at_once))
                        waiting.remove(job)
                for one in [one for one in running if one.process.poll() is not None]:
                    if code := end(one):
                        failure = failure or _failure(one.job, code)
                if stop.is_set():
                    raise Stopped("stopped by SIGTERM; the same command resumes it")
                if running:
                    times = [f"{one.job.name} {one.seconds // 60:.0f}:{one.seconds % 60:02.0f}" for one in running]
                    more = f"; {len(waiting)} to come" if waiting else ""
                    show(f"{len(running)} running: {', '.join(times)}{more}")
                    time.sleep(PAUSE)
        finally:
            for one in running:
                one.process.terminate()
            while running:
                show(f"stopping: {len(running)} to be saved")
                end(running[0])
            status.stop()
    if failure:
        raise JobError(failure)


def _failure(job: Job, code: int) -> str:
    if job.log is None:
        return f"{job.name} failed with exit code {code}: what it wrote is above"
    lines = [line for line in job.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip().removeprefix("unmask: ")
    return f"{job.name} failed with exit code {code}: {last} (all that it wrote is in {job.log})"
