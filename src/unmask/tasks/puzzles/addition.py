"""Additions, digit by digit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.tasks.puzzles.puzzle import Puzzle, unpadded
from unmask.tasks.task import Examples, check_choice, check_range, prompt_kept


@dataclass(frozen=True)
class Addition(Puzzle):
    """The digits of a, b and c = a + b, most significant first, with no signs between them.

    a and b are uniform below 10^digits and c has one digit more.  With ask = "all" the three numbers are generated:
    a and b in one step, then c.  With ask = "sum" a and b are the prompt, and c follows in one step.
    """

    digits: int = 3
    ask: str = "all"

    name = "addition"
    vocabulary = tuple("0123456789")

    def __post_init__(self) -> None:
        check_range(self, "digits", 1, 1000)
        check_choice(self, "ask", ("all", "sum"))

    @property
    def length(self) -> int:
        return 3 * self.digits + 1

    @property
    def unconditional(self) -> bool:
        return self.ask == "all"

    @property
    def min_steps(self) -> int:
        return 2 if self.ask == "all" else 1

    @property
    def entropy(self) -> float:
        return 2 * self.digits * math.log(10) if self.ask == "all" else 0.0

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        a, b, c = range(self.digits), range(self.digits, 2 * self.digits), range(2 * self.digits, self.length)
        return tuple(a), tuple(b), tuple(c)

    def _with_sum(self, terms: Tensor) -> Tensor:
        """The digits a b [B, 2 * digits] followed by those of their sum: [B, L]."""
        carry, total = torch.zeros_like(terms[:, 0]), []  # least significant first
        for j in reversed(range(self.digits)):
            column = terms[:, j] + terms[:, self.digits + j] + carry
            total.append(column % 10)
            carry = column // 10
        return torch.cat([terms, torch.stack([carry, *total[::-1]], dim=-1)], dim=-1)

    def examples(self, ids: Tensor, split: str) -> Examples:
        terms = (self.example_uniforms(split, ids, 2 * self.digits) * 10).long()
        response = torch.arange(self.length) >= (0 if self.ask == "all" else 2 * self.digits)
        return unpadded(self._with_sum(terms), response.repeat(len(ids), 1))

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        # Clamped, a token outside the vocabulary (a mask) differs from the digit it is read as: never right.
        right = self._with_sum(tokens[:, : 2 * self.digits].clamp(0, 9))
        return (right == tokens).all(-1) & prompt_kept(tokens, examples)
