"""What the generated puzzles share.

The streams of a puzzle are (seed, DATA, word, ...): word 0 is the hidden structure, the others are the splits, so that
no example ever shares a draw with the structure or with the other split.  Draws are float64: 24 bits would tie in an
argsort and bias an integer (u * k).long(); with 53 bits u * k < k holds.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.errors import require
from unmask.rng import Purpose, uniforms
from unmask.tasks.task import Examples, Task, check_split

LETTERS = tuple(string.ascii_lowercase)  # the vocabulary of puzzles whose symbols mean nothing

_WORDS = {"structure": 0, "train": 1, "test": 2}


@dataclass(frozen=True)
class Puzzle(Task):
    """A task whose examples are computed, in most cases uniformly from all right answers."""

    seed: int = 0

    def structure_uniforms(self, part: int | Tensor, *shape: int) -> Tensor:
        """Uniforms that fix a hidden part of the puzzle, or several parts [P]; an argsort makes them permutations."""
        count, parts = torch.arange(torch.Size(shape).numel()), torch.as_tensor(part)
        words = Purpose.DATA, _WORDS["structure"], parts[..., None], count
        return uniforms(self.seed, *words, dtype=torch.float64).view(*parts.shape, *shape)

    def example_uniforms(self, split: str, ids: Tensor, count: int) -> Tensor:
        """[B, count]: the uniforms of each example, a function of (seed, split, id) alone."""
        check_split(split)
        return uniforms(self.seed, Purpose.DATA, _WORDS[split], ids[:, None], torch.arange(count), dtype=torch.float64)

    def prompted(self, prompt: str) -> Examples:
        """The names of all tokens side by side, with `_` for each that is to be written."""
        names, known = prompt.split(), {name: token for token, name in enumerate(self.vocabulary)}
        some = " ".join(self.vocabulary[:12])
        how = f"write {self.length} of {some} and _ with spaces between; _ stands for what is to be written"
        right = len(names) == self.length and "_" in names and set(names) <= {"_", *known}
        require(right, f"{prompt[:40]!r} is no prompt of task {self.name}: {how}")
        tokens = torch.tensor([[known.get(name, 0) for name in names]])
        return unpadded(tokens, torch.tensor([[name == "_" for name in names]]))

    def log_likelihood(self, tokens: Tensor, examples: Examples) -> Tensor:
        """log p = -H = -log(number of right answers) for a right answer, -inf for a wrong one."""
        assert self.entropy is not None
        return torch.where(self.valid(tokens, examples), -torch.tensor(self.entropy, dtype=torch.float64), -torch.inf)


def unpadded(tokens: Tensor, response: Tensor | None = None) -> Examples:
    """Examples without padding, in which every position is generated unless `response` [B, L] says which are."""
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    return Examples(tokens, everywhere.clone() if response is None else response, attention_mask=everywhere)
