"""RUN/verdicts.jsonl: the verdict on every example, a line a chunk of examples.

An evaluation that was interrupted goes on after its last line, and rules are compared example by example.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from unmask.jsonl import ResultsError, append_jsonl, read_jsonl

if TYPE_CHECKING:
    from unmask.evaluation.evaluate import Record


@dataclass(frozen=True)
class EvaluationSpec:
    """What an evaluation was asked to do, as against what came out of it; records lack `compile` and the hashes."""

    task: str
    split: str
    model: str
    policy: str
    trained_budget: int | None
    budget: int
    num_examples: int
    temperature: float
    top_p: float
    top_k: int
    guidance: float
    eos_policy: str
    selector: str | None
    denoiser: str
    seed: int
    device: str
    compile: bool
    selector_weights: str | None  # their hash: another order learned on the same denoiser is another evaluation
    examples: str  # hash of the first examples: so is another task of the same name
    # What files of older versions lack; the defaults are what they did.
    trained_seed: int | None = None
    plain_denoiser: str | None = None
    precision: str = "no"


# What tells two records apart; where all of it is the same, the later record replaces the earlier one.
IDENTITY = tuple(
    field.name
    for field in fields(EvaluationSpec)
    if field.name not in ("device", "compile", "selector_weights", "examples")
)


@dataclass(frozen=True)
class Chunk:
    """What came of the examples `first`, `first + 1`, ... of an evaluation: a line of verdicts.jsonl."""

    spec: EvaluationSpec
    first: int
    valid: str  # a 0 or a 1 for each example
    steps: list[int]  # of each example
    answers: list[int] | None  # a code for each valid answer, equal where the answers are; null for tasks with a prompt
    reveal_step: list[list[int]]  # of those among the first few examples of all, for the picture
    num_forwards: int
    num_passes: int
    nothing_selected: int
    num_revisions: int | None
    num_positions: int  # of the responses
    seconds: float
    revision: str
    flexible: str | None = None  # as `valid`, by the task's second way to score; null where it has none


def joined(parts: list[Chunk]) -> Chunk:
    """One chunk of parts that follow one another, and that were worked on side by side."""
    first = parts[0]
    counts = ("num_forwards", "num_passes", "nothing_selected", "num_positions")
    return replace(
        first,
        valid="".join(part.valid for part in parts),
        steps=[count for part in parts for count in part.steps],
        answers=None if first.answers is None else [code for part in parts for code in part.answers or []],
        reveal_step=[row for part in parts for row in part.reveal_step],
        num_revisions=None if first.num_revisions is None else sum(part.num_revisions or 0 for part in parts),
        seconds=max(part.seconds for part in parts),
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
    )


class Verdicts(NamedTuple):
    """What came of each example; E examples."""

    valid: np.ndarray  # [E] bool
    steps: np.ndarray  # [E]


def verdicts_in(chunks: list[Chunk]) -> Verdicts:
    return Verdicts(
        np.array([mark == "1" for chunk in chunks for mark in chunk.valid], dtype=bool),
        np.array([count for chunk in chunks for count in chunk.steps], dtype=np.int64),
    )


class VerdictFile:
    """The chunks of a file by the evaluation that they belong to.  Of several processes, one `writes`."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self._evaluations: dict[EvaluationSpec, list[Chunk]] = {}
        for number, chunk in enumerate(read_jsonl(path, Chunk) if path.exists() else [], start=1):
            if not (len(chunk.valid) == len(chunk.steps) > 0 and not chunk.valid.strip("01")):
                raise ResultsError(
                    f"{path}, line {number}: not what this version writes; move the file away and evaluate again"
                )
            self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        """The first examples start an evaluation anew; a chunk that does not continue what is there is passed over."""
        if chunk.first == 0:
            self._evaluations.pop(chunk.spec, None)
        chunks = self._evaluations.setdefault(chunk.spec, [])
        if chunk.first == sum(len(earlier.valid) for earlier in chunks):
            chunks.append(chunk)

    def append(self, chunk: Chunk) -> None:
        if self.writes:
            append_jsonl(self.path, [chunk])
        self._add(chunk)

    def chunks(self, spec: EvaluationSpec) -> list[Chunk]:
        """What there is of an evaluation, from its first example on without a gap."""
        return list(self._evaluations.get(spec, []))

    def of(self, record: Record) -> Verdicts | None:
        """The verdicts that a record sums up; None where they are not here, as for records of older versions."""
        wanted = {name: getattr(record, name) for name in (*IDENTITY, "device")}
        for spec, chunks in reversed(self._evaluations.items()):
            if wanted.items() <= asdict(spec).items():
                found = verdicts_in(chunks)
                if len(found.valid) == record.num_examples and found.valid.sum() / len(found.valid) == record.score:
                    return found
        return None
