"""When a run saves, and when it stops: after so many seconds or updates, and when a cluster sends SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from unmask.recipe import SavingRecipe
from unmask.training.checkpoint import Checkpoint, CheckpointFolder
from unmask.training.metrics import Metrics
from unmask.training.state import StageState


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM sets instead of ending the process; Python allows this in the main thread only."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


class Checkpointer:
    """Saves the state of a stage, and knows when it is time to."""

    def __init__(
        self,
        folder: CheckpointFolder,
        saving: SavingRecipe,
        metrics: Metrics,
        stop: threading.Event,
        facts: Mapping[str, Any],
        writes: bool = True,
    ) -> None:
        self.folder, self.saving, self.metrics, self.stop, self.facts = folder, saving, metrics, stop, facts
        self.writes = writes  # one of the processes does; all take part in gathering
        self.resume: Checkpoint | None = None  # what the next stage starts from
        self.begun: Callable[[int], None] = lambda update: None  # called when it has, with the updates behind it
        self.saved_at = time.monotonic()
        self.saved_update = -1

    def begin(self, state: StageState) -> None:
        """Continue from the checkpoint, if there is one."""
        if self.resume is not None:
            state.load(self.resume)
        self.begun(state.update)
        self.resume, self.saved_update, self.saved_at = None, state.update, time.monotonic()

    def due(self, update: int) -> bool:
        every = self.saving.every_updates
        return (every > 0 and update % every == 0) or time.monotonic() - self.saved_at > self.saving.every_seconds

    def save(self, stage: str, state: StageState) -> None:
        if state.update == self.saved_update:
            return  # nothing has happened since
        tensors = state.tensors()
        if self.writes:
            self.metrics.sync()
            self.folder.save(stage, state.update, tensors, {**state.facts(), **self.facts})
        self.saved_at, self.saved_update = time.monotonic(), state.update
