"""The sequences being written, and everything that is counted about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unmask import rng
from unmask.decoding.tokens import Allowed, TokenChoice
from unmask.errors import UserError, require


@dataclass
class Canvas:
    """b sequences of L positions, each at its own step."""

    row: Tensor  # [b]: its place among the prompts
    seed: Tensor  # [b]: with the id, it names its random streams
    id: Tensor  # [b]
    slot: Tensor  # [b]: its place in the batch, for what the loop keeps beside the canvas
    live: Tensor  # [b] bool: False where a batch of fixed size has nothing to do any more
    tokens: Tensor  # [b, L]
    column: Tensor  # [b, L]: where each position stands in the prompts, which may have padding anywhere
    attention_mask: Tensor | None  # [b, L] bool: False on padding, which is on the right; None: no padding anywhere
    position: Tensor  # [b, L]: names a draw, whatever the padding
    response: Tensor  # [b, L] bool: what is written
    place: Tensor  # [b, L]: which response position each one is, from 0
    num_response: Tensor  # [b]: N
    masked: Tensor  # [b, L] bool
    index: Tensor  # [b]: i, the steps taken
    passes: Tensor  # [b]: those of them that needed the denoiser, where that can differ
    reveal_step: Tensor  # [b, L]: the step of the last reveal or edit, -1 before it
    revisions: Tensor  # [b, L]: how often it was masked again or edited
    nothing_selected: Tensor  # [b]: steps in which a selector chose nothing
    log_reveal: Tensor  # [b, L]: log p of the token when it was revealed, where the rule asks for it
    memory: dict[str, Tensor]  # [b, ...] each: the rule's own

    def __len__(self) -> int:
        return len(self.row)

    def take(self, rows: Tensor | slice) -> Canvas:
        """A copy of some rows."""
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        copies: dict[str, Any] = {name: value[rows].clone() for name, value in tensors.items()}
        return replace(self, **copies, memory={name: kept[rows].clone() for name, kept in self.memory.items()})

    def put(self, rows: Tensor | slice, other: Canvas) -> None:
        """Overwrite rows in place; the slots stay."""
        for name, value in vars(self).items():
            if torch.is_tensor(value) and name != "slot":
                value[rows] = getattr(other, name)
        for name, kept in self.memory.items():
            kept[rows] = other.memory[name]

    def record(self, finished: Canvas, rows: Tensor) -> None:
        """What some rows of another canvas have come to, where they belong among the prompts."""
        for name in ("tokens", "masked", "reveal_step", "revisions", "index", "passes", "nothing_selected"):
            getattr(self, name)[finished.row[rows]] = getattr(finished, name)[rows]


def blank_canvas(
    prompts: Tensor | Sequence[Tensor],
    attention_mask: Tensor | None,
    ids: Tensor | None,
    mask_token_id: int,
    num_tokens: int | None = None,  # ids from here on do not exist; None: not known
    seed: int = 0,
) -> Canvas:
    """Prompts as a canvas, with padding on the right: a denoiser that counts positions from the left, as BERT does,
    then gives every sequence those that it has alone."""
    tokens, attended = _rectangle(prompts, attention_mask, mask_token_id)
    column = attended.long().argsort(dim=-1, descending=True, stable=True)  # what is no padding comes first, in order
    tokens, attended = tokens.gather(-1, column), attended.gather(-1, column)
    B, device = len(tokens), tokens.device
    ids = torch.arange(B, device=device) if ids is None else _whole_numbers(ids, "ids").to(device)
    require(ids.shape == (B,), f"ids must be one number for each of the {B} prompts, got shape {list(ids.shape)}")
    outside = tokens < 0 if num_tokens is None else (tokens < 0) | (tokens >= num_tokens)
    if outside.any():
        known = "on" if num_tokens is None else f"to {num_tokens - 1}"
        raise UserError(f"prompts hold token ids from 0 {known}, got {int(tokens[outside][0])}")
    response = (tokens == mask_token_id) & attended
    num_response = response.sum(-1)
    if not num_response.all():
        empty = int((num_response == 0).nonzero()[0, 0])
        raise UserError(f"prompt {empty} has an empty response: put the mask token where something is to be written")
    rows = torch.arange(B, device=device)
    return Canvas(
        row=rows,
        seed=torch.full_like(rows, rng.signed(seed)),
        id=ids,
        slot=rows.clone(),
        live=torch.ones_like(rows, dtype=torch.bool),
        tokens=tokens,
        column=column,
        attention_mask=None if attended.all() else attended,
        position=attended.long().cumsum(-1) - 1,
        response=response,
        place=response.long().cumsum(-1) - 1,
        num_response=num_response,
        masked=response.clone(),
        index=torch.zeros_like(rows),
        passes=torch.zeros_like(rows),
        reveal_step=torch.full_like(tokens, -1),
        revisions=torch.zeros_like(tokens),
        nothing_selected=torch.zeros_like(rows),
        log_reveal=torch.zeros(tokens.shape, dtype=torch.float64, device=device),
        memory={},
    )


def checked_allowed(allowed: Any, whole: Canvas, choice: TokenChoice, mask_token_id: int) -> Allowed:
    """As booleans [L, V] or [B, L, V] that leave every response position a token, or as the function that it is."""
    if callable(allowed) and not isinstance(allowed, Tensor):
        return cast(Allowed, allowed)
    if isinstance(allowed, Sequence):
        masks = [_tensor(mask, "each mask of allowed must be booleans [L, V]") for mask in allowed]
        own = (whole.position.amax(-1) + 1).tolist()
        fit = all(mask.ndim == 2 and mask.shape[1] == masks[0].shape[1] for mask in masks)
        require(fit and [len(mask) for mask in masks] == own, "give each prompt a mask [L, V]")
        allowed = pad_sequence(masks, True, 0, "left")
    allowed = _tensor(allowed, "allowed must be booleans [L, V] or [B, L, V], or a function")
    B, L = whole.tokens.shape
    require(allowed.dtype == torch.bool, f"allowed must be booleans, got {allowed.dtype}")
    fits = allowed.ndim in (2, 3) and tuple(allowed.shape[:-1]) in ((L,), (B, L))
    require(fits, f"allowed must be [{L}, V] or [{B}, {L}, V], got {list(allowed.shape)}")
    allowed = allowed.to(whole.tokens.device)
    never = [token for token in {*choice.suppress_tokens, mask_token_id} if token < allowed.shape[-1]]
    left = allowed.sum(-1) - allowed[..., never].sum(-1)
    left = left.expand(B, L).gather(-1, whole.column)  # [B, L], as the canvas stands
    if choice.min_length:
        eos = [token for token in choice.eos_ids if token < allowed.shape[-1] and token not in never]
        early = whole.place < choice.min_length
        left = left - torch.where(early, allowed[..., eos].sum(-1).expand(B, L).gather(-1, whole.column), 0)
    empty = whole.response & (left == 0)
    if empty.any():
        row, place = empty.nonzero()[0].tolist()
        raise no_token(int(whole.position[row, place]), row)
    return cast(Tensor, allowed)


def no_token(position: int, sequence: int) -> UserError:
    where = f"no token is allowed at position {position} of sequence {sequence}"
    return UserError(f"{where}: allow one there that suppress_tokens and min_length leave")


def _rectangle(prompts: Tensor | Sequence[Tensor], mask: Tensor | None, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, L] and attention_mask [B, L] bool."""
    if not isinstance(prompts, Sequence):
        prompts = _whole_numbers(prompts, "prompts")
        shape = list(prompts.shape)
        require(len(shape) == 2 and shape[0] > 0, f"prompts must be [B, L] with B >= 1, got shape {shape}")
        attended = torch.as_tensor(torch.ones_like(prompts) if mask is None else mask)
        given = list(attended.shape)
        require(given == shape, f"attention_mask has shape {given}, the prompts have {shape}")
        return prompts.clone(), attended.to(prompts.device, torch.bool)  # tokenizers give 0 and 1
    require(len(prompts) > 0, "the list of prompts is empty: give at least one")
    require(mask is None, "a list of prompts is padded here: leave attention_mask out")
    prompts = [_whole_numbers(prompt, "a prompt") for prompt in prompts]
    one_each = all(prompt.ndim == 1 for prompt in prompts)
    require(one_each, "a list of prompts holds one sequence of token ids each; give a [B, L] tensor instead")
    # What stands on the padding is never attended to; the mask token is the one id that is sure to exist.
    tokens = pad_sequence(prompts, True, mask_token_id, "left")
    return tokens, pad_sequence([torch.ones_like(prompt, dtype=torch.bool) for prompt in prompts], True, 0, "left")


def _whole_numbers(values: Any, what: str) -> Tensor:
    """As int64: a hash of narrower integers would wrap elsewhere."""
    numbers = _tensor(values, f"{what} must be whole numbers")
    if numbers.numel() and (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool):
        raise UserError(f"{what} must be whole numbers, got {numbers.dtype}")
    return numbers.long()


def _tensor(values: Any, wanted: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{wanted}, got {type(values).__name__}") from None
