"""The number of distinct samples, against its expectation in closed form."""

from __future__ import annotations

import pytest
import torch

from unmask.tasks.diversity import distinct_range, sequence_codes
from unmask.tasks.puzzles.addition import Addition
from unmask.tasks.puzzles.chain import Chain
from unmask.tasks.puzzles.groups import Groups
from unmask.tasks.puzzles.latin_square import LatinSquare
from unmask.tasks.puzzles.permutation import Permutation


def num_distinct(tokens):
    """The number of different rows."""
    return len(sequence_codes(tokens).unique())


def test_expectation_lies_in_the_range():
    for task, values, num_samples in (
        (Groups(), 8**4, 1000),
        (Groups(groups=2), 8**2, 100),
        (Addition(digits=2), 10**4, 500),
        (LatinSquare(clues=0), 576, 300),
        (Permutation(length=5), 120, 200),
    ):
        low, high = distinct_range(task, num_samples)
        expected = values * (1 - (1 - 1 / values) ** num_samples)
        assert low < expected < high, task
        assert high - low < 0.3 * expected
        assert low <= num_distinct(task.examples(torch.arange(num_samples), "train").tokens) <= high


def test_repetition_lies_outside():
    task = Groups()
    low, high = distinct_range(task, 1000)
    once = task.examples(torch.zeros(1000, dtype=torch.int64), "test").tokens
    half = task.examples(torch.arange(1000) // 2, "test").tokens
    assert num_distinct(once) == 1 < num_distinct(half) < low <= high


def test_range_widens_with_the_level():
    task = Chain(length=6)
    narrow, wide = distinct_range(task, 200, level=0.5), distinct_range(task, 200, level=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert wide == distinct_range(task, 200, level=0.99)


def test_every_sample_is_new_where_there_are_enough():
    assert distinct_range(Permutation(length=26), 50, draws=20) == (50, 50)
    assert distinct_range(Groups(), 1, draws=20) == (1, 1)


def test_every_position_counts():
    """Long sequences over a vocabulary of a power of two: their mixed radix would overflow to zero."""
    tokens = torch.cat([torch.zeros(1, 200, dtype=torch.int64), torch.eye(200, dtype=torch.int64) * 4])
    assert num_distinct(tokens) == 201
    assert num_distinct(tokens.repeat(3, 1)) == 201


def test_prompts_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"\Atask latin-square: [^\n]+\Z"):
        distinct_range(LatinSquare(clues=6), 10)
