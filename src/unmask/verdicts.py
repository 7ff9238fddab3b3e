"""RUN/verdicts.jsonl: the verdict on every example, a line a chunk of examples.

An evaluation that was interrupted goes on after its last line, and rules are compared example by example.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from unmask.jsonl import ResultsError, append_jsonl, read_jsonl

if TYPE_CHECKING:
    from unmask.evaluation import Record


@dataclass(frozen=True)
class Asked:
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
    field.name for field in fields(Asked) if field.name not in ("device", "compile", "selector_weights", "examples")
)


@dataclass(frozen=True)
class Chunk:
    """What came of the examples `first`, `first + 1`, ... of an evaluation: a line of verdicts.jsonl."""

    asked: Asked
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
    """The chunks of a file by the evaluation that they belong to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._evaluations: dict[Asked, list[Chunk]] = {}
        rows = read_jsonl(path, Chunk) if path.exists() else []
        for number, row in enumerate(rows, start=1):
            try:
                chunk = Chunk(**{**row, "asked": Asked(**row["asked"])})
                in_step = len(chunk.valid) == len(chunk.steps) > 0 and not chunk.valid.strip("01")
            except (TypeError, AttributeError):
                in_step = False
            if not in_step:
                raise ResultsError(
                    f"{path}, line {number}: not what this version writes; move the file away and evaluate again"
                )
            self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        """The first examples start an evaluation anew; a chunk that does not continue what is there is passed over."""
        if chunk.first == 0:
            self._evaluations.pop(chunk.asked, None)
        chunks = self._evaluations.setdefault(chunk.asked, [])
        if chunk.first == sum(len(earlier.valid) for earlier in chunks):
            chunks.append(chunk)

    def append(self, chunk: Chunk) -> None:
        append_jsonl(self.path, [chunk])
        self._add(chunk)

    def chunks(self, asked: Asked) -> list[Chunk]:
        """What there is of an evaluation, from its first example on without a gap."""
        return list(self._evaluations.get(asked, []))

    def of(self, record: Record) -> Verdicts | None:
        """The verdicts that a record sums up; None where they are not here, as for records of older versions."""
        wanted = {name: getattr(record, name) for name in (*IDENTITY, "device")}
        for asked, chunks in reversed(self._evaluations.items()):
            if wanted.items() <= asdict(asked).items():
                found = verdicts_in(chunks)
                if len(found.valid) == record.num_examples and found.valid.sum() / len(found.valid) == record.score:
                    return found
        return None
