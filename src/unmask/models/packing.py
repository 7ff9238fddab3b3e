"""Sequences of different lengths in one row, without their padding.

Legend: B sequences, L positions, M tokens that are no padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_PADDING_STAYS = ContextVar("padding stays", default=False)


@contextmanager
def padding_stays() -> Iterator[None]:
    """In here padding is masked, not left out: the shapes of products do not follow the lengths of the sequences."""
    before = _PADDING_STAYS.set(True)
    try:
        yield
    finally:
        _PADDING_STAYS.reset(before)


class Spans(NamedTuple):
    """Sequences of different lengths one behind the other: sequence i has the places ends[i] to ends[i + 1] - 1."""

    ends: Tensor  # [B + 1] int32, from 0
    longest: int  # at most


Attend = Tensor | Spans | None  # who may be looked at: a mask for SDPA, one's own sequence, or everybody


class Layout(NamedTuple):
    """How B sequences of L places go through the blocks: as they are, or packed into one row without their padding.

    A position does not count padding: a sequence gets the same ones alone as next to longer ones, padded on either
    side.
    """

    positions: Tensor  # [B or 1, L], packed [1, M]
    attend: Attend
    at: Tensor | None  # [M]: the places of the flattened [B, L] that are no padding; None: not packed
    shape: tuple[int, int]  # B, L
    num_tokens: int = 0  # where packed: of the M, those that are not there to fill up

    @classmethod
    def of(
        cls, tokens: Tensor, attention_mask: Tensor | None, dtype: torch.dtype, num_tokens: int | None = None
    ) -> Layout:
        """Of tokens [B, L] and attention_mask [B, L], or [B, L, L]: which positions each one that is no padding sees.

        `num_tokens` is M; where the caller does not know it, the device is waited for.

        A compiled program cannot wait, and CUDA's variable-length attention is for dtypes of 16 bits: elsewhere padding
        is masked.
        """
        B, L = tokens.shape
        if attention_mask is None:
            return cls(torch.arange(L, device=tokens.device)[None], None, None, (B, L))
        if attention_mask.ndim == 3:
            positions = (attention_mask.diagonal(dim1=-2, dim2=-1).long().cumsum(-1) - 1).clamp(min=0)
            return cls(positions, with_itself(attention_mask)[:, None], None, (B, L))
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        compiling = torch.compiler.is_compiling()
        if compiling or _PADDING_STAYS.get() or (tokens.is_cuda and dtype.itemsize != 2):
            return cls(positions, attention_mask[:, None, None, :], None, (B, L))
        num_tokens = int(attention_mask.sum()) if num_tokens is None else num_tokens
        M = packed_length(num_tokens, tokens.device)
        at, spare = places(attention_mask, num_tokens), M - num_tokens
        ends = pad(attention_mask.sum(-1).cumsum(0), (1, 0))
        if rows := spare_rows(B, L, spare, tokens.device):  # sequences that nobody looks at: copies of the first place
            at = pad(at, (0, spare))
            first = num_tokens + L
            more = torch.arange(first, first + L * rows, L, device=ends.device).clamp(max=M)  # full, the rest, empty
            ends = torch.cat([ends, more])
        ends = ends.int()
        return cls(positions.flatten()[at][None], Spans(ends, L), at, (B, L), num_tokens)

    @property
    def attended(self) -> Tensor | None:
        """[B, L] bool: False on padding; None: no padding."""
        if self.at is not None:
            return self.put(torch.ones_like(self.positions, dtype=torch.bool))
        return self.attend[:, 0, 0] if isinstance(self.attend, Tensor) else None

    def take(self, values: Tensor) -> Tensor:
        """[1, M, ...] from values [B, L, ...] where packed."""
        return values if self.at is None else values.flatten(0, 1)[self.at][None]

    def put(self, values: Tensor) -> Tensor:
        """[B, L, ...] from values [1, M, ...] where packed; 0 on padding."""
        if self.at is None:
            return values
        return scatter(values[0, : self.num_tokens], self.at[: self.num_tokens], self.shape)


def with_itself(sees: Tensor) -> Tensor:
    """The mask [B, L, L], in which padding sees itself too: a softmax over nothing is no number."""
    return sees | torch.eye(sees.shape[-1], dtype=torch.bool, device=sees.device)


def packed_length(num_tokens: int, device: torch.device) -> int:
    """How many places a row gets for so many tokens: on a GPU a few more, by less than 1/64.

    The matrix library plans every product of a new shape, which takes the host several times as long as a known
    one, and every batch would have a shape of its own.
    """
    if device.type != "cuda":
        return num_tokens
    multiple = 1 << max(0, (num_tokens // 64).bit_length() - 1)
    return -(-num_tokens // multiple) * multiple


def spare_rows(rows: int, length: int, spare: int, device: torch.device) -> int:
    """How many sequences of at most `length` to add behind `rows`, to hold the spare places of a packed row.

    On a GPU there are empty ones too, up to a multiple of 64: a recorded pass (`Replayed`) needs the same shapes again.
    """
    needed = -(-spare // max(1, length))
    return needed if device.type != "cuda" else needed + -(rows + needed) % 64


def places(where: Tensor, count: int | None) -> Tensor:
    """[M]: the True places of the flattened `where`.  A known count M spares the host from waiting for the device."""
    flat = where.flatten()
    return (flat.nonzero() if count is None else flat.nonzero_static(size=count))[:, 0]


def scatter(values: Tensor, at: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values [M, ...] at the places `at` [M] of a flattened canvas of this shape, 0 elsewhere; differentiable."""
    canvas = values.new_zeros(math.prod(shape), *values.shape[1:]).index_copy(0, at, values)
    return canvas.view(*shape, *values.shape[1:])


def stream_dtype(weight: Tensor) -> torch.dtype:
    """What the residual stream is kept in: autocast's dtype where it applies, else that of the weights."""
    kind = weight.device.type
    autocast = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64  # which it leaves alone
    return torch.get_autocast_dtype(kind) if autocast else weight.dtype
