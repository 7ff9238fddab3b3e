"""Keys, values and hidden states that are kept while a block is written.

Per sequence, with `block` as in `decoding.blocks` and c the block of its leftmost mask:

exact     for a block-causal denoiser.  A pass computes the blocks from the first one that has changed since the last
          pass up to c; all before them are as they were.  It gives what a pass over everything gives.
prefix    for a bidirectional one (Fast-dLLM's prefix cache, Wu et al. 2025).  The first pass of a block computes
          everything, the others only the blocks from c on, masks to come included: the prompt and the finished blocks
          keep the keys and values of that first pass, as if they did not see what is written since.  An approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from unmask.decoding.blocks import block_numbers
from unmask.decoding.canvas import Canvas
from unmask.decoding.denoiser import CachingDenoiser
from unmask.decoding.policies import Blocks, Policy
from unmask.errors import UserError, require

Cache = Literal["auto", "none", "prefix"]  # auto: exact where the denoiser is block-causal, else none


class Kept:
    """What is kept of the sequences of a canvas, row by row."""

    def __init__(self, denoiser: CachingDenoiser, policy: Blocks, canvas: Canvas) -> None:
        self.policy, self.exact = policy, bool(getattr(denoiser, "block_size", 0))
        self.cached: Callable[..., Tensor] = denoiser.cached  # what it gives is kept as it is, finished or not
        self.cache = denoiser.new_cache(*canvas.tokens.shape)
        self.hidden = torch.empty(0)  # [b, L, D]
        self.slot, self.row = canvas.slot.clone(), canvas.row.clone()  # [b]
        self.tokens = torch.full_like(canvas.tokens, -1)  # [b, L]: of which the kept states are
        self.block = torch.full_like(canvas.slot, -1)  # [b]: c at the last pass

    def passed(self, canvas: Canvas, rows: Tensor | None = None) -> Tensor:
        """Hidden states [r, L, D] of these rows [r], or of all, after a pass over what must be computed of them.

        What no rule may look at, such as the blocks to come, is as some earlier pass left it.
        """
        if len(canvas) < len(self.slot):  # finished rows have left
            left = torch.isin(self.slot, canvas.slot)
            self.cache, self.hidden = self.cache[:, :, left], self.hidden[left]
            self.slot, self.row = self.slot[left], self.row[left]
            self.tokens, self.block = self.tokens[left], self.block[left]
        entered = (canvas.index == 0) | (canvas.row != self.row)  # its first step may have needed no pass
        self.tokens[entered], self.block[entered], self.row = -1, -1, canvas.row.clone()
        block, tokens = block_numbers(canvas.response, self.policy.size), canvas.tokens
        attended = torch.ones_like(canvas.response) if canvas.attention_mask is None else canvas.attention_mask
        last = block.amax(-1)
        current = torch.where(canvas.masked, block, last[:, None]).amin(-1)  # [b]: c
        if self.policy.remasks:  # a block without masks may still be revised
            current = torch.minimum(current, 1 + canvas.memory["block"])
        compute = attended & self._to_compute(block, current, last, attended & (tokens != self.tokens))
        rows = torch.arange(len(canvas), device=tokens.device) if rows is None else rows
        widths = compute[rows].sum(-1)
        least = widths == widths.min()
        for group in (rows[least], rows[~least]):  # in one pass, the widest row would set the width of all
            if len(group):
                self._pass(group, tokens, block, attended, compute)
        self.tokens[rows] = torch.where(compute, tokens, self.tokens)[rows]
        self.block[rows] = current[rows]
        return self.hidden if len(rows) == len(canvas) else self.hidden[rows]

    def _to_compute(self, block: Tensor, current: Tensor, last: Tensor, changed: Tensor) -> Tensor:
        """[b, L] bool, from block and changed [b, L], current and last [b]."""
        if not self.exact:
            return (current != self.block)[:, None] | (block >= current[:, None])
        first = torch.minimum(torch.where(changed, block, last[:, None]).amin(-1), current)
        until = last if self.policy.inner.reads_ahead else current
        return (block >= first[:, None]) & (block <= until[:, None])

    def _pass(self, rows: Tensor, tokens: Tensor, block: Tensor, attended: Tensor, compute: Tensor) -> None:
        """Over the positions to compute of these rows; the first of them again where a row has fewer than another."""
        count = compute[rows].sum(-1)
        at = compute[rows].long().argsort(dim=-1, descending=True, stable=True)[:, : int(count.max())]  # [r, W]
        at = torch.where(torch.arange(at.shape[1], device=at.device) < count[:, None], at, at[:, :1])
        sees = attended[rows, None].expand(-1, at.shape[1], -1)  # [r, W, L]
        if self.exact:
            sees = sees & (block[rows, None] <= block[rows].gather(-1, at)[..., None])
        hidden = self.cached(tokens[rows].gather(-1, at), at, sees, self.cache, rows)
        if not self.hidden.numel():
            self.hidden = hidden.new_zeros(*tokens.shape, hidden.shape[-1])
        self.hidden[rows[:, None], at] = hidden


def check_cache(cache: str, denoiser: object, policy: Policy, guided: bool, static: bool) -> bool:
    """Whether a cache is used; UserError where the one asked for cannot be."""
    require(cache in ("auto", "none", "prefix"), f"cache must be auto, none or prefix, got {cache!r}")
    block_causal, able = bool(getattr(denoiser, "block_size", 0)), getattr(denoiser, "can_cache", False)
    if cache == "auto":
        return block_causal and able and not (guided or static)
    if cache == "none":
        return False
    if not able:
        why = f"{type(denoiser).__name__} keeps no keys and values"
        if getattr(denoiser, "shift", False):
            why = "a model with shift reads a token from the state before it, which may be in another block"
        raise UserError(f"cache = 'prefix': {why}: leave cache out")
    if not isinstance(policy, Blocks):
        why = "re-masks anywhere" if policy.remasks else "writes anywhere"
        try:
            inner = Blocks(32, policy).inner.name
        except UserError:  # not every rule runs inside blocks
            inner = "margin"
        raise UserError(
            f"cache = 'prefix': {policy.name} {why}, and keys and values are kept for finished blocks: "
            f"give a rule inside blocks, such as blocks(32,{inner})"
        )
    require(
        not policy.shadows, f"cache = 'prefix' does not go with {policy.name}, which reads shadows: leave cache out"
    )
    require(not guided, "cache = 'prefix' does not go with guidance: leave one of them out")
    require(not static, "cache = 'prefix' does not go with compile or fixed_shapes: leave one of them out")
    return True
