"""Hidden groups of positions, each ruled by one symbol."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unmask.tasks.puzzles.puzzle import LETTERS, Puzzle, unpadded
from unmask.tasks.task import Examples, check_range


@dataclass(frozen=True)
class Groups(Puzzle):
    """Every group g of positions draws one uniform symbol s_g, and position n shows it through its own permutation:

        x_n = pi_n(s_{g(n)}),    p(x) = symbols^-groups on consistent x.

    Groups are independent and a group is known from any one of its tokens, so two steps suffice: one token of each
    group, then all the others.  Which positions form a group is hidden: they are scrambled.
    """

    groups: int = 4
    group_size: int = 4
    symbols: int = 8

    name = "groups"
    unconditional = True
    min_steps = 2

    def __post_init__(self) -> None:
        check_range(self, "groups", 1, 256)
        check_range(self, "group_size", 2, 256)  # a group of one has nothing to agree with
        check_range(self, "symbols", 2, len(LETTERS))

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return LETTERS[: self.symbols]

    @property
    def length(self) -> int:
        return self.groups * self.group_size

    @property
    def entropy(self) -> float:
        return self.groups * math.log(self.symbols)

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple((self._group_of == g).nonzero()[:, 0].tolist()) for g in range(self.groups))

    @cached_property
    def _group_of(self) -> Tensor:
        """g(n): [L]."""
        return self.structure_uniforms(0, self.length).argsort() // self.group_size

    @cached_property
    def _shown(self) -> Tensor:
        """pi_n(s): [L, symbols]."""
        return self.structure_uniforms(1, self.length, self.symbols).argsort(dim=-1)

    def _show(self, symbols: Tensor) -> Tensor:
        """The sequence [B, L] that the symbols s_g [B, groups] rule."""
        return self._shown[torch.arange(self.length), symbols[:, self._group_of]]

    def examples(self, ids: Tensor, split: str) -> Examples:
        return unpadded(self._show((self.example_uniforms(split, ids, self.groups) * self.symbols).long()))

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        # Read each group's symbol from its first member and show it again.  A token outside the vocabulary (a mask) is
        # read as its neighbour inside, and never shown again.
        first = torch.tensor([group[0] for group in self.layout])
        symbols = self._shown.argsort(dim=-1)[first, tokens[:, first].clamp(0, self.symbols - 1)]  # [B, groups]
        return (self._show(symbols) == tokens).all(-1)
