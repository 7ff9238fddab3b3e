"""RUN/verdicts.jsonl: the verdict on every example, one line per chunk of examples.

An interrupted evaluation resumes after its last line, and rules are compared example by example.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unmask.jsonl import ResultsError, append_jsonl, read_jsonl


@dataclass(frozen=True)
class Chunk:
    """What came of the examples `first`, `first + 1`, ... of an evaluation: a line of verdicts.jsonl."""

    key: str  # of the evaluation's record
    device: str
    compile: bool
    first: int
    valid: str  # a 0 or a 1 for each example
    steps: list[int]  # of each example
    metrics: dict[str, str]  # the task's own marks, each as `valid`
    answers: list[Any] | None  # a code for each valid answer, equal where the answers are; with a prompt: `Task.codes`
    reveal_step: list[list[int]]  # of those among the first few examples of all, for the picture
    num_forwards: int
    num_passes: int
    nothing_selected: int
    num_revisions: int
    num_positions: int  # of the responses
    seconds: float
    revision: str
    diverse: list[float] | None = None  # of all examples of the evaluation, on its last line: `Task.diverse`


def joined(parts: list[Chunk]) -> Chunk:
    """One chunk of consecutive parts that several processes worked on at the same time."""
    first = parts[0]
    counts = ("num_forwards", "num_passes", "nothing_selected", "num_revisions", "num_positions")
    return replace(
        first,
        valid="".join(part.valid for part in parts),
        steps=[count for part in parts for count in part.steps],
        metrics={name: "".join(part.metrics[name] for part in parts) for name in first.metrics},
        answers=None if first.answers is None else [code for part in parts for code in part.answers or []],
        reveal_step=[row for part in parts for row in part.reveal_step],
        seconds=max(part.seconds for part in parts),
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
    )


class Verdicts(NamedTuple):
    """What came of each example; E examples."""

    valid: np.ndarray  # [E] bool
    steps: np.ndarray  # [E]
    reveal_step: list[list[int]]  # of the first few: when each position was revealed, -1 for the prompt
    diverse: np.ndarray | None = None  # [E] `Task.diverse`; None: it has none, or these are not all examples


def verdicts_in(chunks: list[Chunk]) -> Verdicts:
    return Verdicts(
        np.array([mark == "1" for chunk in chunks for mark in chunk.valid], dtype=bool),
        np.array([count for chunk in chunks for count in chunk.steps], dtype=np.int64),
        [row for chunk in chunks for row in chunk.reveal_step],
        None if chunks[-1].diverse is None else np.array(chunks[-1].diverse),
    )


class VerdictFile:
    """The chunks of a file by key, device and compilation.  Of several processes, one `writes`."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self._evaluations: dict[tuple[str, str, bool], list[Chunk]] = {}
        for number, chunk in enumerate(read_jsonl(path, Chunk) if path.exists() else [], start=1):
            marks = [chunk.valid, *chunk.metrics.values()]
            if not chunk.steps or any(len(mark) != len(chunk.steps) or mark.strip("01") for mark in marks):
                raise ResultsError(
                    f"{path}, line {number}: not what this version writes; move the file away and evaluate again"
                )
            self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        """The first examples start an evaluation over; a chunk that does not continue what is there is ignored."""
        chunks = self._evaluations.setdefault((chunk.key, chunk.device, chunk.compile), [])
        if chunk.first == 0:
            chunks.clear()
        if chunk.first == sum(len(earlier.valid) for earlier in chunks):
            chunks.append(chunk)

    def append(self, chunk: Chunk) -> None:
        if self.writes:
            append_jsonl(self.path, [chunk])
        self._add(chunk)

    def chunks(self, key: str, device: str, compile: bool) -> list[Chunk]:
        """What there is of an evaluation, from its first example on without a gap."""
        return list(self._evaluations.get((key, device, compile), []))

    def of(self, key: str, device: str, compile: bool) -> Verdicts | None:
        chunks = self.chunks(key, device, compile)
        return verdicts_in(chunks) if chunks else None
