"""How many positions to reveal, where a rule needs a number."""

from __future__ import annotations

from torch import Tensor


def reveal_count(num_response: Tensor, step: int | Tensor, max_steps: int | Tensor) -> Tensor:
    """k_i = N div S, plus one for the first N mod S steps [B] (LLaDA's reference count): (N + S - 1 - i) div S."""
    return (num_response + (max_steps - 1 - step)) // max_steps
