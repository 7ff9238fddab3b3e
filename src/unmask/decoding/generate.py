"""The one generation loop: a denoiser, a rule, a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unmask import streams
from unmask.decoding.confidence import Confidence, confidence, log_probabilities, spread
from unmask.decoding.policies import Policy, Step


class Denoiser(Protocol):
    """What generation asks of a model.  `logits` gives the mask token no mass."""

    @property
    def mask_token_id(self) -> int: ...

    def hidden(self, tokens: Tensor, attention: Tensor | None = None) -> Tensor:
        """[B, L, D] from tokens [B, L] and attention [B, L] bool (False on padding)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] from hidden states [M, D]."""


@dataclass(frozen=True)
class Generation:
    """B sequences of L positions.  Steps are counted per sequence, from 0."""

    tokens: Tensor  # [B, L]
    reveal_step: Tensor  # [B, L]: the step that revealed each response token, -1 on prompt and padding
    num_steps: Tensor  # [B]: denoiser passes that this sequence took part in
    nothing_selected: Tensor  # [B]: steps in which a `bernoulli` selector chose nothing
    attention: Tensor  # [B, L] bool: False on padding
    num_forwards: int  # denoiser rows evaluated, all sequences together


@torch.no_grad()
def generate(
    denoiser: Denoiser,
    prompts: Tensor | Sequence[Tensor],
    policy: Policy,
    max_steps: int,
    *,
    seed: int = 0,
    ids: Tensor | None = None,
    temperature: float = 0.0,
    attention: Tensor | None = None,
) -> Generation:
    """Fill in the mask tokens of `prompts` in at most `max_steps` parallel steps.

    prompts: [B, L] with the mask token wherever something is to be written (any set of positions), or a list of such
        sequences of different lengths, which are padded on the left.
    attention: [B, L] bool, False on padding; only with a [B, L] tensor of prompts.
    ids: [B], what names a sequence's random stream; by default its place in `prompts`.  A sequence's result depends on
        itself, its id and the seed, never on the batch around it.
    temperature: 0 takes the most probable token, 1 samples from the denoiser's own distribution.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must not be negative and must be finite, got {temperature}")
    policy.check(max_steps)
    tokens, attention = _canvas(prompts, attention, denoiser.mask_token_id)
    response = (tokens == denoiser.mask_token_id) & attention
    if not response.any(-1).all():
        empty = int((~response.any(-1)).nonzero()[0, 0])
        raise ValueError(f"prompt {empty} has an empty response: put the mask token where something is to be written")
    B, device = len(tokens), tokens.device
    ids = torch.arange(B, device=device) if ids is None else ids.to(device)
    if ids.shape != (B,):
        raise ValueError(f"ids must name each of the {B} prompts once, got shape {list(ids.shape)}")
    num_response = response.sum(-1)
    position = attention.long().cumsum(-1) - 1  # [B, L]: names a draw, whatever the padding

    masked = response.clone()
    reveal_step = torch.full_like(tokens, -1)
    num_steps = torch.zeros_like(num_response)
    nothing_selected = torch.zeros_like(num_response)
    for i in range(max_steps):
        rows = masked.any(-1).nonzero()[:, 0]  # finished sequences take part in no further pass
        if len(rows) == 0:
            break
        at = masked[rows]  # [b, L]
        hidden = denoiser.hidden(tokens[rows], attention[rows])
        log_p = log_probabilities(denoiser.logits(hidden[at]))  # [M, V], the masked positions only
        if torch.isnan(log_p).any():
            sequence = int(rows[at.nonzero()[torch.isnan(log_p).any(-1)][0, 0]])
            raise ValueError(f"the denoiser's logits are not finite for sequence {sequence} at step {i}")
        words = ids[rows, None], position[rows]
        token_uniforms = streams.uniforms(seed, streams.Purpose.TOKEN, i, *words, dtype=torch.float64)[at]
        proposal = choose_tokens(log_p, temperature, token_uniforms)  # [M]

        if i == max_steps - 1:
            reveal = at
        else:
            said = Confidence(*(spread(value, at) for value in confidence(log_p)))
            step = Step(
                index=i,
                max_steps=max_steps,
                masked=at,
                num_response=num_response[rows],
                confidence=said,
                hidden=hidden,
                attention=attention[rows],
                uniforms=partial(_reveal_uniforms, seed, i, *words),
            )
            decision = policy.decide(step)
            reveal = decision.reveal & at
            if decision.nothing_selected is not None:
                nothing_selected[rows] += decision.nothing_selected

        tokens[rows] = torch.where(reveal, spread(proposal, at), tokens[rows])
        reveal_step[rows] = torch.where(reveal, i, reveal_step[rows])
        masked[rows] = at & ~reveal
        num_steps[rows] += 1
    return Generation(tokens, reveal_step, num_steps, nothing_selected, attention, int(num_steps.sum()))


def choose_tokens(log_p: Tensor, temperature: float, uniforms: Tensor) -> Tensor:
    """Tokens [M] from log-probabilities [M, V]: the arg-max at temperature 0, else by inverse CDF, one uniform each.

    p_v^(1/temperature) / Z; a token of probability zero is never chosen.
    """
    if temperature == 0:
        return log_p.argmax(-1)
    log_p = log_p.double()
    # Relative to the most probable before the division, or a tiny temperature takes every token to -inf.
    cdf = ((log_p - log_p.amax(-1, keepdim=True)) / temperature).softmax(-1).cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True)[:, 0]


def _canvas(prompts: Tensor | Sequence[Tensor], attention: Tensor | None, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, L] and attention [B, L]; sequences of different lengths are padded on the left."""
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or len(prompts) == 0:
            raise ValueError(f"prompts must be [B, L] with B >= 1, got shape {list(prompts.shape)}")
        attention = torch.ones_like(prompts) if attention is None else attention.to(prompts.device)
        if attention.shape != prompts.shape:
            raise ValueError(f"attention has shape {list(attention.shape)}, the prompts have {list(prompts.shape)}")
        return prompts.to(torch.long, copy=True), attention.bool()  # tokenizers give 0 and 1
    if len(prompts) == 0:
        raise ValueError("the list of prompts is empty")
    if attention is not None:
        raise ValueError("a list of prompts is padded here: leave attention out")
    length = max(len(prompt) for prompt in prompts)
    # What stands on the padding is never attended to; the mask token is the one id that is sure to exist.
    tokens = torch.full((len(prompts), length), mask_token_id, device=prompts[0].device)
    attention = torch.zeros_like(tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        attention[row, length - len(prompt) :] = True
    return tokens, attention


def _reveal_uniforms(seed: int, step: int, ids: Tensor, position: Tensor) -> Tensor:
    """[b, L + 1]: one draw a position, and under the position -1 one for the whole sequence."""
    words = torch.cat([position, torch.full_like(position[:, :1], -1)], dim=-1)
    return streams.uniforms(seed, streams.Purpose.REVEAL, step, ids, words, dtype=torch.float64)
