"""Commands as processes of their own, several at once."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from unmask.display import in_markup
from unmask.errors import UserError
from unmask.training.checkpointer import Stopped, stop_signal

PAUSE = 0.1  # seconds between two looks at what is running


class JobError(UserError):
    """A job failed; the message has the last line that it wrote."""


class Job(NamedTuple):
    name: str
    command: list[str]
    after: frozenset[str]  # the names of the jobs that it waits for
    log: Path  # what it writes is added here


class Ended(NamedTuple):
    code: int
    started: float  # seconds since the epoch
    seconds: float


class _Running:
    def __init__(self, job: Job) -> None:
        self.job, self.started, self.clock = job, time.time(), time.perf_counter()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            log.write(f"$ {shlex.join(job.command)}\n".encode())
            log.flush()
            # In a process group of its own: Ctrl-C goes to all of a terminal's group, and would end it unsaved.
            self.process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.clock

    def ended(self) -> Ended:
        return Ended(self.process.wait(), self.started, self.seconds)


def run_jobs(
    jobs: Sequence[Job], at_once: int, began: Callable[[Job], None], ended: Callable[[Job, Ended], None]
) -> None:
    """Run all jobs, at most `at_once` at a time, each when those that it waits for have ended.

    Where one fails, those under way are waited for, no other is started, and JobError is raised.  On SIGTERM and on
    Ctrl-C those under way get SIGTERM and are waited for; then Stopped or KeyboardInterrupt is raised.
    """
    waiting, running, failure = list(jobs), list[_Running](), ""
    with stop_signal() as stop, _Line() as line:
        try:
            while running or (waiting and not failure):
                for job in [] if failure else list(waiting):
                    unfinished = {other.name for other in waiting} | {other.job.name for other in running}
                    if len(running) < at_once and not job.after & unfinished:
                        line.hide()
                        began(job)
                        running.append(_Running(job))
                        waiting.remove(job)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    how = one.ended()
                    line.hide()
                    ended(one.job, how)
                    failure = failure or (_failure(one.job, how.code) if how.code else "")
                if stop.came:
                    raise Stopped("stopped by SIGTERM; the same command goes on where it stopped")
                if running:
                    line.show(_said(running, len(waiting)))
                    time.sleep(PAUSE)
        finally:
            for one in running:
                one.process.terminate()
            for place, one in enumerate(running):
                line.show(f"stopping: {len(running) - place} to be saved")
                how = one.ended()
                line.hide()
                ended(one.job, how)
    if failure:
        raise JobError(failure)


def _failure(job: Job, code: int) -> str:
    lines = [
        line.strip() for line in job.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
    ]
    said = lines[-1].removeprefix("unmask: ")
    return f"{job.name} failed with exit code {code}: {said} (all that it wrote is in {job.log})"


def _said(running: Sequence[_Running], waiting: int) -> str:
    times = ", ".join(f"{one.job.name} {one.seconds // 60:.0f}:{one.seconds % 60:02.0f}" for one in running)
    return f"{len(running)} running: {times}" + (f"; {waiting} to come" if waiting else "")


class _Line:
    """A line at the bottom of the terminal; nothing where there is none."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self.status = console.status("") if console.is_terminal else None

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *error: object) -> None:
        self.hide()

    def show(self, text: str) -> None:
        if self.status is not None:
            self.status.update(in_markup(text))
            self.status.start()

    def hide(self) -> None:
        """Before anything else is printed."""
        if self.status is not None:
            self.status.stop()
