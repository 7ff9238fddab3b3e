"""Permutations: the puzzle that no order can parallelise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.tasks.task import (
    LETTERS,
    Examples,
    check_range,
    example_uniforms,
    uniform_log_likelihood,
    without_prompt,
)


@dataclass(frozen=True)
class Permutation:
    """A uniform permutation of `length` symbols, p(x) = 1 / length! where all tokens differ.

    Any two tokens still masked exclude each other, whatever is known, so every token needs a step of its own.
    """

    seed: int = 0
    length: int = 8

    name = "permutation"
    unconditional = True

    def __post_init__(self) -> None:
        check_range(self, "length", 2, len(LETTERS))

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return LETTERS[: self.length]

    @property
    def min_steps(self) -> int:
        return self.length

    @property
    def entropy(self) -> float:
        return math.log(math.factorial(self.length))

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(self.length)),)

    def examples(self, ids: Tensor, split: str) -> Examples:
        return without_prompt(example_uniforms(self.seed, split, ids, self.length).argsort(dim=-1))

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return (tokens.sort(dim=-1).values == torch.arange(self.length)).all(-1)

    def log_likelihood(self, tokens: Tensor, examples: Examples) -> Tensor:
        return uniform_log_likelihood(self.valid(tokens, examples), self.entropy)
