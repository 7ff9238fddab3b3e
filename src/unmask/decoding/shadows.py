"""What the denoiser would say at revealed positions if their tokens were masked, for all of them in one pass (WINO).

The shadow of a position n is one more mask with the position id of n.  It sees the other shadows and every token but
that at n.  No token sees a shadow, so what the denoiser says elsewhere stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unmask.decoding.canvas import Canvas
from unmask.errors import require


def hidden_with_shadows(
    hidden_with: Callable[[Tensor, Tensor, Tensor], Tensor],  # the denoiser's
    tokens: Tensor,  # [b, L]
    canvas: Canvas,
    at: Tensor,  # [b, L] bool: the positions that have a shadow, such as those of a block
    most: int,  # W: as many in a row, at most
    mask_token_id: int,
) -> Tensor:
    """Hidden states [b, L, D], at the revealed positions `at` those of their shadows."""
    b, L = tokens.shape
    of = at.long().argsort(dim=-1, descending=True, stable=True)[:, :most]  # [b, W]: the position of each shadow
    there = at.gather(-1, of)  # [b, W] bool: False where a row has fewer
    W, device = of.shape[1], tokens.device
    attended = torch.ones_like(at) if canvas.attention_mask is None else canvas.attention_mask
    others = attended[:, None] & (torch.arange(L, device=device) != of[..., None])  # [b, W, L]
    shadows = there[:, None] | torch.eye(W, dtype=torch.bool, device=device)  # itself always: no softmax is empty
    by_tokens = torch.cat([attended, torch.zeros_like(there)], dim=-1)[:, None].expand(b, L, L + W)
    attend = torch.cat([by_tokens, torch.cat([others, shadows], dim=-1)], dim=1)  # [b, L + W, L + W]
    position = canvas.position.clamp(min=0)
    hidden = hidden_with(
        torch.cat([tokens, torch.full_like(of, mask_token_id)], dim=-1),
        attend,
        torch.cat([position, position.gather(-1, of)], dim=-1),
    )
    sound = torch.is_tensor(hidden) and hidden.ndim == 3 and hidden.shape[:2] == (b, L + W)
    require(sound, "the denoiser's `hidden_with` must be [B, L, D] from tokens [B, L]")
    states, said = hidden[:, :L], hidden[:, L:]
    revealed, index = (there & ~canvas.masked.gather(-1, of))[..., None], of[..., None].expand_as(said)
    return states.scatter(1, index, torch.where(revealed, said, states.gather(1, index)))
