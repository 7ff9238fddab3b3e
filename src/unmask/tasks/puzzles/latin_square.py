"""Latin squares to complete from clues."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from unmask.tasks.puzzles.puzzle import Puzzle, unpadded
from unmask.tasks.task import Examples, check_range, prompt_kept

_SIDE = 4
_CELLS = _SIDE * _SIDE


@cache
def latin_squares() -> Tensor:
    """[576, 16]: all squares whose rows and columns are permutations of 0..3, row by row."""
    rows = torch.tensor(list(permutations(range(_SIDE))))  # [24, 4]
    squares = rows[:, None]  # [S, height, 4]
    for _ in range(1, _SIDE):
        fits = (squares[:, None] != rows[:, None]).all(-1).all(-1)  # [S, 24]: the row differs from all above it
        square, row = fits.nonzero(as_tuple=True)
        squares = torch.cat([squares[square], rows[row, None]], dim=1)
    return squares.flatten(1)


@dataclass(frozen=True)
class LatinSquare(Puzzle):
    """A uniform 4 x 4 Latin square of which `clues` cells, chosen uniformly, are the prompt:

        p(response | clues) = 1 / #{squares that agree with the clues}.

    The count differs from example to example, so the entropy is known in advance only where there are no clues.
    """

    clues: int = 6

    name = "latin-square"
    vocabulary = ("1", "2", "3", "4")
    length = _CELLS
    layout = tuple(tuple(range(start, start + _SIDE)) for start in range(0, _CELLS, _SIDE))
    grid = (_SIDE, _SIDE)

    def __post_init__(self) -> None:
        check_range(self, "clues", 0, _CELLS - 1)

    @property
    def unconditional(self) -> bool:
        return self.clues == 0

    @property
    def entropy(self) -> float | None:
        return math.log(len(latin_squares())) if self.clues == 0 else None

    def examples(self, ids: Tensor, split: str) -> Examples:
        u = self.example_uniforms(split, ids, 1 + _CELLS)
        tokens = latin_squares()[(u[:, 0] * len(latin_squares())).long()]
        is_clue = u[:, 1:].argsort(dim=-1) < self.clues  # a random permutation of 0..15 in each row: `clues` of them
        return unpadded(tokens, ~is_clue)

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return _agreeing(tokens, examples.attention_mask).any(-1) & prompt_kept(tokens, examples)

    def log_likelihood(self, tokens: Tensor, examples: Examples) -> Tensor:
        count = _agreeing(examples.tokens, ~examples.response).sum(-1)  # [B]
        return torch.where(self.valid(tokens, examples), -count.double().log(), -torch.inf)


def _agreeing(tokens: Tensor, cells: Tensor) -> Tensor:
    """[B, 576]: the squares that equal `tokens` [B, 16] on the cells [B, 16], by counting agreements.

    sum over cells and digits of [token = digit] [square = digit] is a matrix product: no [B, 576, 16] is ever made.
    """
    digits = torch.arange(_SIDE)
    given = ((tokens[..., None] == digits) & cells[..., None]).flatten(1).float()  # [B, 64]
    squares = (latin_squares()[..., None] == digits).flatten(1).float()  # [576, 64]
    return given @ squares.T == cells.sum(-1, keepdim=True)
