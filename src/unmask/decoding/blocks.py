"""Blocks of the response, and which positions see which in a block-causal model.

    block(n) = 0 where n is given, else 1 + floor(j / size),  n the j-th position of the response, j from 0
    n sees m   where   block(m) <= block(n):  its own block and what came before, the prompt included

Nothing that is given sees the response, and no block a later one: keys and values of finished blocks stay as they are.
"""

from __future__ import annotations

from torch import Tensor


def block_numbers(response: Tensor, size: int) -> Tensor:
    """block(n) [B, L] from response [B, L] bool."""
    return response * (1 + (response.long().cumsum(-1) - 1) // size)


def block_causal(block: Tensor, attended: Tensor | None) -> Tensor:
    """[B, L, L] bool: which positions (last dimension) each one sees.  Padding, where not `attended`, takes no part."""
    sees = block[:, None, :] <= block[:, :, None]
    return sees if attended is None else sees & attended[:, None, :] & attended[:, :, None]
