"""One rule for every test of a sampler: Pearson's chi-square, which fails by chance with probability FAILURE_RATE."""

from collections.abc import Sequence

import torch

FAILURE_RATE = 1e-6  # of each test; all draws have fixed seeds, so a test that passes once passes always
FEWEST = 10  # outcomes expected fewer times than this are thrown together


def assert_follows(observed: Sequence[float], expected: Sequence[float]) -> None:
    """Counts of outcomes against their expected counts; an outcome expected 0 times must not occur."""
    assert all(seen == 0 for seen, wanted in zip(observed, expected, strict=True) if wanted == 0), "impossible outcome"
    cells = [(seen, wanted) for seen, wanted in zip(observed, expected, strict=True) if wanted >= FEWEST]
    rare = [(seen, wanted) for seen, wanted in zip(observed, expected, strict=True) if 0 < wanted < FEWEST]
    if sum(wanted for _, wanted in rare) >= FEWEST:
        cells.append((sum(seen for seen, _ in rare), sum(wanted for _, wanted in rare)))
    assert len(cells) > 1, "too few draws for a test"
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    half_freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    by_chance = torch.special.gammaincc(half_freedom, torch.tensor(chi_square / 2, dtype=torch.float64)).item()
    assert by_chance > FAILURE_RATE, f"chi-square {chi_square:.1f} with {len(cells)} cells: p = {by_chance:.1e}"
