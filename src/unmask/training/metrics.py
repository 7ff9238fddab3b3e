"""RUN/metrics.jsonl: one object a line, with neither a gap nor a line twice, however often a run was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unmask import files
from unmask.jsonl import sealed, unsealed
from unmask.training.checkpoint import CheckpointError, reason, warn


class Metrics:
    """Lines are only ever added, but for what a run takes back that resumes from an earlier update.

    track: an experiment tracker, called with named numbers and the updates done before them over all stages.
    first: for each stage, the updates of the stages before it.
    """

    def __init__(
        self,
        path: Path,
        track: Callable[[dict[str, float], int], None] | None = None,
        first: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.path, self.track, self.first = path, track, first

    def write(self, **values: Any) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(sealed(values) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self.path} could not be written ({reason(error)}): mend that and give the same command again"
            ) from None
        if self.track is not None and "loss" in values:
            stage, step = values["stage"], self.first[values["stage"]] + values["update"]
            numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
            norms = {f"gradient_norm/{key}": value for key, value in values["gradient_norm"].items()}
            self.track({f"{stage}/{key}": value for key, value in {**numbers, **norms}.items()}, step)

    def sync(self) -> None:
        """Before a checkpoint or a finished stage: no line of the updates that it counts may be lost after it."""
        if self.path.exists():
            files.sync(self.path)

    def rewind(self, finished: Collection[str], stage: str, update: int) -> None:
        """Keep the lines of the `finished` stages and those of `stage` before `update`; damaged ones are reported."""
        if not self.path.exists():
            return
        text, kept, damaged = self.path.read_text(encoding="utf-8", errors="replace"), [], []
        for number, line in enumerate(text.split("\n")[:-1], start=1):  # what is behind the last one was cut off
            try:
                values = unsealed(line)
                if values["stage"] in finished or (values["stage"] == stage and values["update"] < update):
                    kept.append(f"{line}\n")
            except (ValueError, KeyError, TypeError):
                damaged.append(str(number))
        if damaged:
            warn(f"{self.path}: line {', '.join(damaged)} is damaged and left out; the rest is kept")
        if text != "".join(kept):
            files.write_text(self.path, "".join(kept))
