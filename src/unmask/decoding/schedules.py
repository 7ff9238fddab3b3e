"""How many positions to reveal, where a rule needs a number."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

CountKind = Literal["even", "floor", "cosine"]


def reveal_count(
    num_response: Tensor,  # [B]: N
    step: int | Tensor,
    max_steps: int | Tensor,
    kind: CountKind = "even",
    masks: Tensor | int = 0,  # [B]: how many are left, |M|
) -> Tensor:
    """k_i [B].

    even:    N div S, plus one for the first N mod S steps (LLaDA's reference count): (N + S - 1 - i) div S
    floor:   floor(|M| (1 - s/t)) with times t = 1 - i (1 - eps) / S, s the next, eps = 1/1000 (Dream), which is
             |M| 999 div (1000 S - 999 i).  A step may reveal nothing.  SMDM has eps = 1e-5: the same up to N = 512.
    cosine:  floor(N cos(pi/2 (i+1)/S)) are left behind the step, and at least one is revealed (MaskGIT)
    """
    if kind == "floor":
        return masks * 999 // (1000 * max_steps - 999 * torch.as_tensor(step))
    if kind == "cosine":  # cos(pi/3) is 1/2 up to a rounding, and floor would take a rounding for a whole position
        left = num_response * torch.cos(math.pi / 2 * (torch.as_tensor(step) + 1).double() / max_steps) + 1e-9
        return (masks - left.floor().long()).clamp(min=1)
    return (num_response + (max_steps - 1 - step)) // max_steps
