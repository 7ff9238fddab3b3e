"""Whether samples are as varied as they should be: a model that repeats itself can still be always valid."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from unmask.errors import UserError
from unmask.tasks.task import Task

_FIRST_ID = 2**40  # evaluation counts test examples from 0
_CHUNK = 2**16  # examples made at a time, to bound memory
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, odd, as int64


def distinct_range(task: Task, num_samples: int, draws: int = 400, level: float = 0.99) -> tuple[int, int]:
    """The central range, both ends included, of the number of distinct sequences among true samples.

    Simulated: `draws` times `num_samples` independent examples of the task, and the quantiles (1 - level) / 2 and
    (1 + level) / 2 of the `draws` numbers of distinct sequences.
    """
    if not task.unconditional:
        raise UserError(f"task {task.name}: distinct sequences are counted only where examples have no prompt")
    ids = _FIRST_ID + torch.arange(draws * num_samples)
    codes = torch.cat([sequence_codes(task.examples(chunk, "test").tokens) for chunk in ids.split(_CHUNK)])
    ordered = codes.view(draws, num_samples).sort(dim=-1).values
    counts = 1 + (ordered.diff(dim=-1) != 0).sum(-1)  # [draws]
    low = counts.double().quantile((1 - level) / 2, interpolation="lower")
    high = counts.double().quantile((1 + level) / 2, interpolation="higher")
    return int(low), int(high)


def sequence_codes(tokens: Tensor) -> Tensor:
    """[M]: one int64 for each sequence of [M, L], sum_n x_n * GOLDEN^n modulo 2^64.

    Two different sequences share a code with probability about 2^-64.  The base is odd and large: powers of a
    vocabulary of 8 would be 0 modulo 2^64 from the 22nd position on.
    """
    powers = torch.full((tokens.shape[1],), _GOLDEN).cumprod(-1)  # int64 wraps around, as meant
    return (tokens * powers).sum(-1)


def entropy(words: Sequence[Hashable]) -> float:
    """- sum_w f_w log f_w in nats, f the shares of the words."""
    counts = Counter(words)
    return sum(-count / len(words) * math.log(count / len(words)) for count in counts.values())


def distinct(texts: Sequence[Sequence[Hashable]], n: int) -> float:
    """Different runs of n words / all of them; 0 where no text is long enough."""
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def one_of_each(answers: Sequence[str]) -> list[float]:
    """Equal answers count 1 together, "" nothing: the mean is the part of valid and different ones."""
    copies = Counter(answers)
    return [1 / copies[answer] if answer else 0.0 for answer in answers]


def binned(place: Tensor, places: Tensor, bins: int) -> Tensor:
    """[E, bins], rows of sum 1: how much of the interval [place, place + 1) / places lies in each bin of [0, 1).

    Lines of different n share the bins; where all have as many places as there are bins, each lies in one.
    """
    edges, number = torch.arange(bins + 1, dtype=torch.float64) / bins, places.double()[:, None]  # [E, 1]
    low, high = place[:, None] / number, (place[:, None] + 1) / number
    return (high.minimum(edges[1:]) - low.maximum(edges[:-1])).clamp(min=0) * number


def total_variation(share: Tensor) -> float:
    """TV = 1/2 sum_b |h_b - 1/bins|, h the mean of share [E, bins]: a uniform choice has 0.

    Of E true draws it is about sqrt(bins / (2 pi E)): 0.05 for 16 and 1000.
    """
    return round(float((share.mean(0) - 1 / share.shape[1]).abs().sum()) / 2, 6)


def overlap_parts(share: Tensor) -> Tensor:
    """v [E], whose mean is the overlap with a uniform choice; share [E, bins] has rows of sum 1, of wrong answers 0.

        1 - TV = sum_b min(h_b, 1/bins)      h_b = mean_e share_eb; a wrong answer is one more outcome
        v_e    = sum_{b: h_b < 1/bins} share_eb + sum_{b: h_b >= 1/bins} 1/bins

    v_e - (1 - TV) is what one more draw like e changes, so the spread of v tells the sampling error of the overlap;
    where most h_b are near 1/bins it is too wide.
    """
    is_scarce = share.mean(0) < 1 / share.shape[1]
    return share @ is_scarce.double() + (~is_scarce).double().mean()
