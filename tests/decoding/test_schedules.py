import math
from fractions import Fraction

import torch

from unmask.decoding.schedules import reveal_count


def test_counts_add_up_and_the_first_steps_take_the_remainder():
    sizes = torch.arange(1, 41)
    for S in range(1, 50):  # N a multiple of S, not a multiple, and smaller than S
        counts = torch.stack([reveal_count(sizes, i, S) for i in range(S)], dim=-1).tolist()  # [N][S]
        for N, row in zip(sizes.tolist(), counts, strict=True):
            assert sum(row) == N
            more = N % S
            assert row == [N // S + 1] * more + [N // S] * (S - more)


def test_other_counts_follow_their_definitions():
    """Floor in fractions; cosine against what is left; both of sequences that follow them from the beginning."""
    for S in (1, 2, 3, 5, 8, 16, 40):
        for N in (1, 2, 7, 16, 40, 1000):
            masks = {"floor": N, "cosine": N}
            for i in range(S - 1):
                size = torch.tensor([N])
                floor, cosine = (
                    reveal_count(size, i, S, kind, torch.tensor([masks[kind]])).item() for kind in ("floor", "cosine")
                )
                t, s = (1 - Fraction(999, 1000) * Fraction(j, S) for j in (i, i + 1))
                assert floor == math.floor(masks["floor"] * (1 - s / t))
                left = math.floor(N * math.cos(math.pi / 2 * (i + 1) / S) + 1e-9)
                assert cosine == max(1, masks["cosine"] - left)
                masks = {"floor": masks["floor"] - floor, "cosine": max(0, masks["cosine"] - cosine)}
    assert reveal_count(torch.tensor([8]), 0, 8, "floor", torch.tensor([8])).item() == 0  # the wasted pass at S = N
    assert [
        reveal_count(torch.tensor([12]), i, 3, "cosine", torch.tensor([m])).item() for i, m in ((0, 12), (1, 10))
    ] == [2, 4]
