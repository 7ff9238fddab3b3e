"""Permutations: the puzzle that no order can parallelise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.tasks.puzzles.puzzle import LETTERS, Puzzle, unpadded
from unmask.tasks.task import Examples, check_range


@dataclass(frozen=True)
class Permutation(Puzzle):
    """A uniform permutation of `length` symbols, p(x) = 1 / length! where all tokens differ.

    Any two tokens still masked exclude each other, whatever is known, so every token needs a step of its own.
    """

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

    def examples(self, ids: Tensor, split: str) -> Examples:
        return unpadded(self.example_uniforms(split, ids, self.length).argsort(dim=-1))

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return (tokens.sort(dim=-1).values == torch.arange(self.length)).all(-1)
