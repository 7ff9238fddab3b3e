"""What a task is: examples in, verdict out."""

from __future__ import annotations

import dataclasses
import string
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from unmask.errors import UserError, did_you_mean
from unmask.rng import Purpose, uniforms


@dataclass(frozen=True)
class Examples:
    """Clean sequences x_0.  Legend: B sequences, L positions (prompt, response and padding together)."""

    tokens: Tensor  # [B, L] int64
    response: Tensor  # [B, L] bool: the positions that are generated; any set, the rest is prompt or padding
    attention_mask: Tensor  # [B, L] bool: False on padding, which is never attended to

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def position(self) -> Tensor:
        """[B, L]: the place of each token in its own sequence, whatever the padding; it names a random draw."""
        return self.attention_mask.long().cumsum(-1) - 1

    def only(self, row: int) -> Examples:
        """One example, as a batch of one."""
        return self.rows(torch.tensor([row]))

    def rows(self, rows: Tensor) -> Examples:
        """Some of the examples, in the order of `rows` [R], on the CPU; any of them may come several times."""
        there = to_device(rows, self.tokens.device)
        chosen = Examples(*(part[there] for part in (self.tokens, self.response, self.attention_mask)))
        vars(chosen).update(num_tokens=self.num_tokens[rows], num_response=self.num_response[rows])
        return chosen

    @cached_property
    def num_tokens(self) -> Tensor:
        """[B], on the CPU: without padding."""
        return self.attention_mask.sum(-1).cpu()

    @cached_property
    def num_response(self) -> Tensor:
        """N [B], on the CPU."""
        return self.response.sum(-1).cpu()

    def to(self, device: torch.device | str) -> Examples:
        """On the device; the host keeps what it would otherwise have to wait for."""
        there = Examples(*(to_device(part, device) for part in (self.tokens, self.response, self.attention_mask)))
        vars(there).update(num_tokens=self.num_tokens, num_response=self.num_response)
        return there


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device; a GPU gets it without anybody waiting: from pinned memory, in its turn."""
    if tensor.is_cpu and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Task(Protocol):
    """A source of examples with an exact checker.  Example `i` of a split is a pure function of (split, i)."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The tokens, in the order of their ids.  The mask token is not among them: its id is len(vocabulary)."""

    @property
    def length(self) -> int:
        """L, the same for every example."""

    @property
    def unconditional(self) -> bool:
        """Whether every example has the same prompt (or none), so that distinct samples can be counted."""

    @property
    def min_steps(self) -> int | None:
        """The fewest parallel steps in which a perfect denoiser can sample the task exactly, where known."""

    @property
    def entropy(self) -> float | None:
        """Expected -log p(response | prompt) of an example in nats, where known exactly."""

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """The positions arranged for pictures: groups of positions that belong together, side by side."""

    def examples(self, ids: Tensor, split: str) -> Examples:
        """The examples with these ids ([B] int64, any non-negative values) of the split `train` or `test`."""

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        """[B] bool: whether each row of `tokens` [B, L] is a right answer to the prompt of the same row."""

    def log_likelihood(self, tokens: Tensor, examples: Examples) -> Tensor | None:
        """[B] exact log p(response | prompt) in nats (-inf where impossible), or None where it is not known."""


def held_out_split(task: Task) -> str:
    """What the split `test` of a task is: its optional `held_out` says so where it has several, as gsm8k does."""
    return str(getattr(task, "held_out", "test"))


def on_split(task: Task, split: str) -> Task:
    """The same task with another held-out split, one of its optional `held_out_splits`."""
    choices = getattr(task, "held_out_splits", (held_out_split(task),))
    if split not in choices:
        raise UserError(
            f"task {task.name} has no held-out split {split!r}; {did_you_mean(split, choices)}choose from "
            f"{', '.join(choices)}"
        )
    if split == held_out_split(task):
        return task
    return dataclasses.replace(task, held_out=split)  # type: ignore[type-var]


def check_task(task: Task) -> None:
    """Raises a ValueError of one line where a task breaks the contract in a way that would fail only later."""
    name = getattr(task, "name", type(task).__name__)
    for member in (
        "name",
        "vocabulary",
        "length",
        "unconditional",
        "min_steps",
        "entropy",
        "layout",
        "examples",
        "valid",
    ):
        if not hasattr(task, member):
            raise UserError(f"task {name} has no {member!r}: see unmask.tasks.task.Task for what a task needs")
    examples = task.examples(torch.arange(2), "train")
    shape = (2, task.length)
    for field in ("tokens", "response", "attention_mask"):
        if tuple(getattr(examples, field).shape) != shape:
            found = list(getattr(examples, field).shape)
            raise UserError(f"task {name}: examples of 2 ids have {field} of shape {found}, expected {list(shape)}")
    low, high = int(examples.tokens.min()), int(examples.tokens.max())
    if low < 0 or high >= len(task.vocabulary):
        size = len(task.vocabulary)
        raise UserError(f"task {name}: tokens run from {low} to {high}, but the vocabulary has the ids 0 to {size - 1}")


# What the generated puzzles share.  Their streams are (seed, DATA, word, ...): word 0 is the hidden structure of the
# puzzle, the others are the splits, so that no example ever shares a draw with the structure or with the other split.
# Draws are float64: 24 bits would tie in an argsort and bias an integer (u * k).long(); with 53 bits u * k < k holds.

LONGEST = 65_536  # tokens of a sequence
LETTERS = tuple(string.ascii_lowercase)  # the vocabulary of puzzles whose symbols mean nothing

_STRUCTURE = 0
_SPLITS = {"train": 1, "test": 2}


def structure_uniforms(seed: int, part: int, *shape: int) -> Tensor:
    """Uniforms of the given shape that fix a hidden part of a puzzle; an argsort makes them random permutations."""
    count = torch.Size(shape).numel()
    return uniforms(seed, Purpose.DATA, _STRUCTURE, part, torch.arange(count), dtype=torch.float64).view(shape)


def example_uniforms(seed: int, split: str, ids: Tensor, count: int) -> Tensor:
    """[B, count]: the uniforms of each example, a function of (seed, split, id) alone."""
    if split not in _SPLITS:
        raise UserError(f"unknown split {split!r}: use {' or '.join(_SPLITS)}")
    return uniforms(seed, Purpose.DATA, _SPLITS[split], ids[:, None], torch.arange(count), dtype=torch.float64)


def without_prompt(tokens: Tensor) -> Examples:
    """Examples in which every position is generated."""
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    return Examples(tokens, response=everywhere, attention_mask=everywhere.clone())


def prompt_kept(tokens: Tensor, examples: Examples) -> Tensor:
    """[B]: whether every position outside the response is as it was given."""
    return ((tokens == examples.tokens) | examples.response).all(-1)


def uniform_log_likelihood(valid: Tensor, log_count: float | Tensor) -> Tensor:
    """[B]: log p = -log(number of right answers) for a right answer, -inf for a wrong one."""
    return torch.where(valid, -torch.as_tensor(log_count, dtype=torch.float64), -torch.inf)


def check_range(task: Task, option: str, low: int, high: int) -> None:
    """Raises a ValueError of one line unless low <= option <= high."""
    value = getattr(task, option)
    if not low <= value <= high:
        raise UserError(f"task {task.name}: set {option} between {low} and {high}, not {value}")
