"""The three networks: which token (denoiser), which positions now (selector), which order explains x_0 (scorer)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from unmask.errors import UserError, require
from unmask.models.backbone import Backbone, BackboneConfig, Block, RMSNorm, rotary_angles, small_init
from unmask.models.packing import Attend, Layout, stream_dtype
from unmask.variational.posterior import full_precision
from unmask.variational.selection import NonEmpty, Selection


class Denoiser(nn.Module):
    """mu_theta: a categorical over the V tokens at every position.

    The mask token has the id V: the embedding knows it and the head does not, so it never gets mass.
    There is no time input (as SMDM and LLaDA): how much is masked says it.

    `shift`: the distribution at n is read from the hidden state of the token before it, as in a causal language model,
    whose state at n - 1 predicts token n.  Only the first token of a sequence is read from its own state.
    """

    keeps_no_tensors = True  # no pass leaves a tensor behind in the module: safe in inference mode

    def __init__(self, config: BackboneConfig, vocab_size: int, tied_head: bool = False, shift: bool = False) -> None:
        super().__init__()
        self.vocab_size, self.shift = vocab_size, shift
        self.backbone = Backbone(config, vocab_size + 1)
        self.head = None if tied_head else nn.Linear(config.width, vocab_size, bias=False)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=small_init(config.width))

    @property
    def mask_token_id(self) -> int:
        return self.vocab_size

    def hidden(self, tokens: Tensor, attention_mask: Tensor | Layout | None = None) -> Tensor:
        """Hidden states [B, L, D] of tokens [B, L]: at each position the one that `logits` reads its token from."""
        if self.shift and not isinstance(attention_mask, Layout):
            attention_mask = Layout.of(tokens, attention_mask, stream_dtype(self.backbone.embedding.weight))
        hidden: Tensor = self.backbone(tokens, attention_mask)
        return shift_right(hidden, attention_mask) if isinstance(attention_mask, Layout) and self.shift else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] from hidden states [..., D]; project only the positions that you need."""
        if self.head is not None:
            projected: Tensor = self.head(hidden)
            return projected
        return hidden @ self.backbone.embedding.weight[: self.vocab_size].T

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.logits(self.hidden(tokens, attention_mask))


def shift_right(hidden: Tensor, layout: Layout) -> Tensor:
    """[B, L, D]: at each position the hidden state of the position before it; a sequence's first token keeps its own.

    Padding on either side is skipped: the first token is the first one that is attended to.
    """
    first = layout.put(layout.positions[..., None] == 0)  # [B or 1, L, 1]
    return torch.where(first, hidden, hidden.roll(1, dims=1))


@dataclass(frozen=True)
class SelectorConfig:
    """A narrow transformer on the denoiser's hidden states, trained for a budget of T steps.

    `positions` > 0 gives it learned absolute positions of its own, up to that length: on a canvas that is all mask, the
    denoiser's last layer says the same everywhere and need not remember where it is, but an order must start somewhere.
    """

    width: int
    layers: int
    heads: int
    budget: int  # T
    positions: int = 0

    def __post_init__(self) -> None:
        require(self.positions >= 0, f"positions must be 0 (none) or the longest sequence, got {self.positions}")
        require(self.budget >= 1, f"a selector needs a budget T >= 1, got {self.budget}")
        self.shape  # noqa: B018  # checks width and heads

    @property
    def shape(self) -> BackboneConfig:
        return BackboneConfig(self.width, self.layers, self.heads, intermediate=2 * self.width)


class Selector(nn.Module):
    """p_psi^{t,n}(x_{t+1}) = sigmoid(s_n): should position n be revealed now, with t further steps to come?

        s_n = f(hidden_n, confidences_n, log(c_n / (1 - c_n)), masked_n, t, T) - log t,      f = 0 at the start

    The log-odds of the top probability c tell 0.999 from 0.9999, which are the same number in bfloat16.
    An untrained selector reveals each mask with probability 1 / (t + 1): the IID rule with a linear schedule.
    """

    TIME_FEATURES = 4
    READ = 5  # top probability, margin, entropy; the log-odds of the first; masked or not
    NEAREST_TO_ONE = 1e-6  # beyond, log-odds end

    def __init__(self, config: SelectorConfig, denoiser_width: int, selection: Selection | None = None) -> None:
        super().__init__()
        self.config = config
        self.selection = selection or NonEmpty()
        D = config.width
        self.shape = shape = config.shape
        self.read_hidden = nn.Linear(denoiser_width, D)
        self.read_confidences = nn.Linear(self.READ, D)
        self.read_time = nn.Sequential(nn.Linear(self.TIME_FEATURES, D), nn.SiLU(), nn.Linear(D, D))
        self.positions = nn.Embedding(config.positions, D) if config.positions else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(config.layers))
        self.norm = RMSNorm(D)
        self.out = nn.Linear(D, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    @property
    def budget(self) -> int:
        return self.config.budget

    def forward(
        self,
        hidden: Tensor,  # [B, L, denoiser width]
        confidences: Tensor,  # [B, L, 3]: top probability, margin, entropy in nats; 0 where not masked
        masked: Tensor,  # [B, L] bool
        t: Tensor,  # [B], t >= 1 matters; at t = 0 everything is revealed and nobody asks
        attention_mask: Tensor | Layout | None = None,  # [B, L] bool
    ) -> Tensor:
        """Logits s [B, L]."""
        if hidden.shape[-1] != self.read_hidden.in_features:
            raise UserError(
                f"the selector reads hidden states of width {self.read_hidden.in_features}, the denoiser gives "
                f"{hidden.shape[-1]}: take both from the same run"
            )
        if self.positions is not None and masked.shape[1] > self.config.positions:
            raise UserError(
                f"a sequence of {masked.shape[1]} tokens is longer than the selector's positions of "
                f"{self.config.positions}: shorten it or train with more"
            )
        dtype = stream_dtype(self.out.weight)
        layout = attention_mask if isinstance(attention_mask, Layout) else Layout.of(masked, attention_mask, dtype)
        t = t.clamp(min=1).to(torch.promote_types(hidden.dtype, torch.float32))  # log t must not be rounded to bfloat16
        times = torch.stack([t, torch.full_like(t, self.budget)], dim=-1)  # [B, 2]
        asked = times[:, None].expand(*masked.shape, -1)  # [B, L, 2]
        seen = layout.take(torch.cat([full_precision(confidences), masked[..., None], asked], dim=-1))
        return layout.put(self.run(layout.take(hidden).to(dtype), seen, layout.positions, layout.attend))

    def run(self, hidden: Tensor, seen: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All that is worth compiling: one number per place from what is known there.

        seen [..., 6]: three confidences, masked or not, t and T.
        """
        confidences, masked, t, total = seen.split([3, 1, 1, 1], dim=-1)
        log_odds = torch.where(masked > 0, torch.logit(confidences[..., :1], eps=self.NEAREST_TO_ONE), 0.0)
        read = torch.cat([confidences, log_odds, masked], dim=-1)
        time = torch.cat([t / total, 1 / t, t.log(), total.log()], dim=-1)
        x = self.read_hidden(hidden) + self.read_confidences(read.to(hidden.dtype))
        x = x + self.read_time(time.to(hidden.dtype))
        if self.positions is not None:
            x = x + self.positions(positions).to(x.dtype)
        rotary = rotary_angles(positions, self.shape.width // self.shape.heads, self.shape.rope_theta)
        for block in self.blocks:
            x = block(x, rotary, attend)
        return _in_full_precision(self.out, self.norm(x)) - t[..., 0].log()


class OrderScorer(nn.Module):
    """alpha_phi(x_0) in [0, 1]^L from one pass over the clean sequence, prompt included.

        alpha_n = sigmoid(g_n(x_0)),      or, with a teacher,      sigmoid(g_n(x_0) + start_n),      g = 0 at the start

    Without a teacher the last layer starts with logits of a standard deviation of 1: were all scores alike, every q
    would be near one, the first trajectories would end after a single step, and there would be nothing to learn from.
    """

    def __init__(self, config: BackboneConfig, vocab_size: int, taught: bool = False) -> None:
        super().__init__()
        self.backbone = Backbone(config, vocab_size + 1)
        self.out = nn.Linear(config.width, 1)
        nn.init.normal_(self.out.weight, std=0.0 if taught else 1 / config.width**0.5)
        nn.init.zeros_(self.out.bias)

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | Layout | None = None, start: Tensor | None = None
    ) -> Tensor:
        """Scores [B, L] in float32 at least; `start` [B, L] is what the teacher says."""
        logits = _in_full_precision(self.out, self.backbone(tokens, attention_mask))
        return torch.sigmoid(logits if start is None else logits + start)


def _in_full_precision(layer: nn.Linear, x: Tensor) -> Tensor:
    """One number per position [B, L] in float32 at least, autocast or not.

    A score rounded to bfloat16 has eight bits: neighbours would tie, and tied positions are revealed together.
    """
    with torch.autocast(x.device.type, enabled=False):
        return linear(full_precision(x), full_precision(layer.weight), full_precision(layer.bias))[..., 0]
