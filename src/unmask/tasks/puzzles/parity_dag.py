"""Levels of bits, each the parities of the level above."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import combinations, cycle, islice
from operator import xor

import torch
from torch import Tensor

from unmask.errors import require
from unmask.tasks.puzzles.puzzle import Puzzle, unpadded
from unmask.tasks.task import Examples, check_range

_MOST_PARENT_SETS = 20_000  # all of them are listed


@dataclass(frozen=True)
class ParityDag(Puzzle):
    """Level 0 is uniform bits, and every token below is the XOR of `parents` tokens of the level above it:

        x_{l,j} = XOR over i in parents(l, j) of x_{l-1,i},    p(x) = 2^-width on consistent x.

    Level 0 determines the rest, so a perfect denoiser needs two steps; one too shallow to compute parities of parities
    needs one step per level.  Which positions form a level is hidden: they are scrambled.
    """

    levels: int = 4
    width: int = 4
    parents: int = 2

    name = "parity-dag"
    vocabulary = ("0", "1")
    unconditional = True
    min_steps = 2

    def __post_init__(self) -> None:
        check_range(self, "levels", 2, 256)
        check_range(self, "width", 2, 256)
        check_range(self, "parents", 1, self.width)
        few = math.comb(self.width, self.parents) <= _MOST_PARENT_SETS
        require(few, f"task {self.name}: set width or parents lower, {self.width} and {self.parents} is too much")

    @property
    def length(self) -> int:
        return self.levels * self.width

    @property
    def entropy(self) -> float:
        return self.width * math.log(2)

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(level) for level in self._positions.view(self.levels, self.width).tolist())

    @cached_property
    def _positions(self) -> Tensor:
        """[L]: where each token stands, level by level."""
        return self.structure_uniforms(0, self.length).argsort()

    @cached_property
    def _parents(self) -> Tensor:
        """[levels - 1, width, parents]: random sets, no two alike in a level where there are enough.

        Different sets can still have equal parities, (a+b)+(b+c) = (a+d)+(d+c), and a parity of equals is constant.  So
        sets are taken in random order, those with a new parity first and those with a constant one last.
        """
        sets = list(combinations(range(self.width), self.parents))
        above = [1 << i for i in range(self.width)]  # each token as a parity of level 0: the bit mask of its terms
        chosen = []
        for level in range(1, self.levels):
            candidates = []  # (worst last, parity, parents)
            seen: set[int] = set()
            for k in self.structure_uniforms(level, len(sets)).argsort().tolist():
                parity = reduce(xor, (above[i] for i in sets[k]))
                candidates.append(((parity == 0, parity in seen), parity, sets[k]))
                seen.add(parity)
            candidates.sort(key=lambda candidate: candidate[0])  # stable: random order within each kind
            taken = list(islice(cycle(candidates), self.width))
            above = [parity for _, parity, _ in taken]
            chosen.append([parents for _, _, parents in taken])
        return torch.tensor(chosen)

    def _from_level_0(self, bits: Tensor) -> Tensor:
        """All levels [B, L], unscrambled, from level 0 [B, width]."""
        levels = [bits]
        for parents in self._parents:
            levels.append(levels[-1][:, parents].sum(-1) % 2)
        return torch.cat(levels, dim=-1)

    def examples(self, ids: Tensor, split: str) -> Examples:
        bits = (self.example_uniforms(split, ids, self.width) * 2).long()
        return unpadded(self._from_level_0(bits)[:, self._positions.argsort()])

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        levels = tokens[:, self._positions]
        # `& 1` reads a token outside the vocabulary (a mask) as a bit, from which it differs: never right.
        return (self._from_level_0(levels[:, : self.width] & 1) == levels).all(-1)
