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
