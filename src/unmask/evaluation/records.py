"""A record: what an evaluation was asked, and what came of it.

RUN/results.jsonl    one record per line: {"key": ..., "spec": {...}, "outcome": {...}}
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from unmask.evaluation.verdicts import VerdictFile, Verdicts
from unmask.jsonl import ResultsError, append_jsonl, read_jsonl

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def _compared(label: str = "") -> dict[str, Any]:
    """Records are compared only where they agree in this field; `label` names it where the rows of a table differ."""
    return {"compared": True, "label": label}


@dataclass(frozen=True)
class EvaluationSpec:
    """What was asked: all that a result may depend on, but for the machine and the version of the program."""

    task: str = field(metadata=_compared())
    model: str
    policy: str
    trained_budget: int | None  # the T that an order was learned for; null for heuristics
    budget: int
    temperature: float = field(metadata=_compared("temperature"))
    top_p: float = field(metadata=_compared("top-p"))
    top_k: int = field(metadata=_compared("top-k"))
    guidance: float = field(metadata=_compared("guidance"))
    eos_policy: str = field(metadata=_compared("EOS"))
    seed: int = field(metadata=_compared("seed"))  # of the sampling
    num_examples: int = field(metadata=_compared("examples"))
    split: str = field(metadata=_compared("split"))
    precision: str = field(metadata=_compared("precision"))  # bf16: autocast of the trunk, newer: the selector too
    trained_seed: int | None = field(metadata={"label": "order of seed"})  # of the learning; null for heuristics
    selector: str | None  # the selector's form; null for heuristics
    selector_weights: str | None  # their hash; null for heuristics and in records from before they were noted
    denoiser: str  # hash of the weights that chose the tokens
    plain_denoiser: str | None  # of a learned order: hash of the denoiser on which its rivals run
    examples: str | None  # hash of the first examples; null in records from before it was noted
    cache: str = field(default="none", metadata=_compared("cache"))  # prefix: an approximate one; none in older records

    @cached_property
    def key(self) -> str:
        """The first 12 hex digits of the SHA-256 of the canonical JSON: keys sorted, no spaces, no cache of none."""
        asked = {name: value for name, value in asdict(self).items() if (name, value) != ("cache", "none")}
        text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def setting(self) -> tuple[object, ...]:
        """What two records must have in common to be compared, in the order of COMPARED."""
        return tuple(getattr(self, name) for name in COMPARED)

    @property
    def learned(self) -> bool:
        """Whether the rule decides by a trained selector."""
        return self.trained_budget is not None

    @property
    def joint(self) -> bool:
        """Whether the denoiser was trained together with the order, so that the rivals run on another one."""
        return self.plain_denoiser not in (None, self.denoiser)


COMPARED = tuple(f.name for f in fields(EvaluationSpec) if f.metadata.get("compared"))
LABELS = {f.name: f.metadata["label"] for f in fields(EvaluationSpec) if f.metadata.get("label")}


@dataclass(frozen=True)
class Outcome:
    """What came of it, and how it ran; null where a field does not apply."""

    score: float  # the fraction of valid answers
    ci_low: float  # 95% Wilson interval
    ci_high: float
    mean_steps: float  # per sequence
    fewest_steps: int
    most_steps: int
    num_forwards: int  # denoiser rows evaluated
    mean_passes: float | None  # denoiser passes per sequence, guidance included
    mean_revisions: float | None  # re-maskings per response position; null for rules that never re-mask
    nothing_selected: float | None  # steps in which a selector chose nothing, as a fraction of its steps
    distinct: int | None  # different valid answers; null for tasks with a prompt
    distinct_low: int | None  # 99% range of that number for as many draws from the true distribution
    distinct_high: int | None
    metrics: dict[str, float]  # the task's own: means over examples, and figures of the whole
    seconds: float
    device: str
    compile: bool
    revision: str
    checked: bool = True  # False: nothing checks the answers, and `score` is how many equal the example

    @property
    def is_varied(self) -> bool:
        """Whether the valid answers are as varied as true ones."""
        if self.distinct is None or self.distinct_low is None or self.distinct_high is None:
            return True
        return self.distinct_low <= self.distinct <= self.distinct_high


@dataclass(frozen=True)
class Record:
    """One policy at one budget, with the verdicts that it sums up where they were kept."""

    spec: EvaluationSpec
    outcome: Outcome
    verdicts: Verdicts | None = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def mean_steps(self) -> float:
        """Exact where the verdicts are here; outcomes round it to four digits."""
        if self.verdicts is None:
            return self.outcome.mean_steps
        return int(self.verdicts.steps.sum()) / len(self.verdicts.steps)


@dataclass(frozen=True)
class RecordLine:
    """A record as results.jsonl has it."""

    key: str
    spec: EvaluationSpec
    outcome: Outcome


def record_lines(records: Sequence[Record]) -> list[RecordLine]:
    return [RecordLine(record.key, record.spec, record.outcome) for record in records]


def append_records(path: Path, records: Sequence[Record]) -> None:
    append_jsonl(path, record_lines(records))


def read_records(path: Path, verdicts: VerdictFile | None = None) -> list[Record]:
    """The records of a file, with the verdicts that are kept for them; of several with one key the last counts."""
    if not path.exists():
        raise ResultsError(f"{path} is missing: run `unmask evaluate {path.parent}` first")
    found = {}
    for number, line in enumerate(read_jsonl(path, RecordLine), start=1):
        spec, outcome = line.spec, line.outcome
        if spec.key != line.key:
            raise ResultsError(f"{path}, line {number}: the key is not that of the spec; take the line out")
        kept = verdicts.of(spec.key, outcome.device, outcome.compile) if verdicts else None
        whole = kept is not None and len(kept.valid) == spec.num_examples
        found[spec.key] = Record(spec, outcome, kept if whole else None)
    return list(found.values())


def read_run(folder: Path) -> list[Record]:
    """All records of a run, with their verdicts."""
    return read_records(folder / "results.jsonl", VerdictFile(folder / "verdicts.jsonl"))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, in the order of their first ones."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95% score interval of a proportion (Wilson 1927), which has a width also at 0 and 1.

    (p + z^2 / 2n  +-  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)  with  p = successes / n
    """
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)
