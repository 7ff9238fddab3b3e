"""The three networks: which token (denoiser), which positions now (selector), which order explains x_0 (scorer)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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

    The mask token has the id V: the embedding knows it and the head does not, so it never gets mass.  In a model of
    other people it may be one of the V (`mask_token_id`): then its logit is -inf.
    There is no time input (as SMDM and LLaDA): how much is masked says it.

    `shift`: the distribution at n is read from the hidden state of the token before it, as in a causal language model,
    whose state at n - 1 predicts token n.  Only the first token of a sequence is read from its own state.
    """

    keeps_no_tensors = True  # no pass leaves a tensor behind in the module: safe in inference mode
    same_kernels = True  # a pass without padding launches the same ones whatever the tokens: see `decoding.recorded`
    eos_token_id: int | None = None  # its task knows it
    tokenizer: Any = None  # set by `load_denoiser`: of tokenizers, or of transformers

    def __init__(
        self,
        config: BackboneConfig,
        vocab_size: int,
        tied_head: bool = False,
        shift: bool = False,
        mask_token_id: int | None = None,
    ) -> None:
        super().__init__()
        whole = "a block-causal model reads each token from its own hidden state"
        require(not (shift and config.block_size), f"{whole}: set shift = false, or block_size = 0")
        self.vocab_size, self.shift = vocab_size, shift
        self.mask_token_id = vocab_size if mask_token_id is None else mask_token_id
        self.backbone = Backbone(config, max(vocab_size, self.mask_token_id + 1))
        self.head = None if tied_head else nn.Linear(config.width, vocab_size, bias=False)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=small_init(config.width))

    @property
    def context_length(self) -> int:
        return self.backbone.config.max_length

    @property
    def block_size(self) -> int:
        return self.backbone.config.block_size

    @property
    def can_cache(self) -> bool:
        return not self.shift

    def new_cache(self, rows: int, length: int) -> Tensor:
        return self.backbone.new_cache(rows, length)

    def cached(
        self, tokens: Tensor, at: Tensor, sees: Tensor, cache: Tensor, rows: Tensor, finish: bool = True
    ) -> Tensor:
        return self.backbone.cached(tokens, at, sees, cache, rows, finish)

    def hidden(self, tokens: Tensor, attention_mask: Tensor | Layout | None = None, finish: bool = True) -> Tensor:
        """Hidden states [B, L, D] of tokens [B, L]: at each position the one that `logits` reads its token from."""
        if self.shift and not isinstance(attention_mask, Layout):
            attention_mask = Layout.of(tokens, attention_mask, stream_dtype(self.backbone.embedding.weight))
        hidden: Tensor = self.backbone(tokens, attention_mask, finish)
        return shift_right(hidden, attention_mask) if isinstance(attention_mask, Layout) and self.shift else hidden

    def finish(self, states: Tensor) -> Tensor:
        return self.backbone.finish(states)

    @property
    def hidden_with(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """See `PlacingDenoiser`.  A model with shift has none: the state before a token has seen too much."""
        if self.shift:
            raise AttributeError("hidden_with")
        return self._hidden_with

    def _hidden_with(self, tokens: Tensor, attend: Tensor, positions: Tensor) -> Tensor:
        """[B, L, D] from tokens [B, L] at `positions` [B, L], where i sees j if attend [B, L, L] bool holds at i, j."""
        hidden: Tensor = self.backbone.at(tokens, positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] from hidden states [..., D]; project only the positions that you need."""
        if self.head is not None:
            return without_mask(self.head(hidden), self.mask_token_id)
        return without_mask(hidden @ self.backbone.embedding.weight[: self.vocab_size].T, self.mask_token_id)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.logits(self.hidden(tokens, attention_mask))


def without_mask(logits: Tensor, mask_token_id: int) -> Tensor:
    """Logits [..., V] with no mass on the mask token, for a head that has it."""
    if mask_token_id >= logits.shape[-1]:
        return logits
    at = torch.full((1,), mask_token_id, device=logits.device)  # no copy from the host, which a CUDA graph forbids
    return logits.index_fill(-1, at, -torch.inf)


def shift_right(hidden: Tensor, layout: Layout) -> Tensor:
    """[B, L, D]: at each position the hidden state of the position before it; a sequence's first token keeps its own.

    Padding on either side is skipped: the first token is the first one that is attended to.
    """
    first = layout.put(layout.positions[..., None] == 0)  # [B or 1, L, 1]
    return torch.where(first, hidden, hidden.roll(1, dims=1))


@dataclass(frozen=True)
class SelectorConfig:
    """A narrow transformer on the denoiser's hidden states, trained for a budget of T steps.

    `reads`: "logits" leaves the hidden states out, for denoisers and engines that give none.
    `drawn` > 0: it also reads the token that was drawn at each mask, and how probable it is: what does not fit together
    waits, and is drawn anew.
    `prices`: it reads the price of a step, was trained for this range of it, and with budgets drawn up to T.
    `start`: the rule that it is before it has learned anything (`Selector`).

    `positions` > 0 gives it learned absolute positions of its own, up to that length: on a canvas that is all mask, the
    denoiser's last layer says the same everywhere and need not remember where it is, but an order must start somewhere.
    """

    width: int
    layers: int
    heads: int
    budget: int  # T
    positions: int = 0
    prices: tuple[float, ...] = ()  # the lowest and the highest; empty: none
    start: Literal["iid", "threshold", "paced", "eb"] = "iid"
    thresholds: tuple[float, ...] = (0.995, 0.6)  # of the start: c*, or gamma, at the lowest and at the highest price
    spread: float = 0.0  # standard deviation of f at the start
    reads: Literal["hidden", "logits"] = "hidden"
    drawn: int = 0  # the number of token ids; 0: it does not look at them
    block_size: int = 0  # of a block-causal denoiser: T is the budget of a block, and it sees what the denoiser sees

    def __post_init__(self) -> None:
        require(self.reads in ("hidden", "logits"), f"reads must be hidden or logits, got {self.reads!r}")
        require(self.positions >= 0, f"positions must be 0 (none) or the longest sequence, got {self.positions}")
        require(self.budget >= 1, f"a selector needs a budget T >= 1, got {self.budget}")
        ordered = not self.prices or (len(self.prices) == 2 and 0 < self.prices[0] < self.prices[1])
        require(ordered, f"prices must be two, above 0, the lower one first, got {list(self.prices)}")
        known = self.start in ("iid", "threshold", "paced", "eb")
        require(known, f"start must be iid or threshold or paced or eb, got {self.start!r}")
        priced = self.start == "iid" or bool(self.prices)
        require(priced, f"start = {self.start!r} takes its threshold from the price: set order.least_budget, such as 2")
        self.shape  # noqa: B018  # checks width and heads

    @property
    def shape(self) -> BackboneConfig:
        return BackboneConfig(self.width, self.layers, self.heads, intermediate=2 * self.width)


class Selector(nn.Module):
    """p_psi^{t,n}(x_{t+1}) = sigmoid(s_n): should position n be revealed now, with t further steps to come?

        s_n = f(hidden_n, confidences_n, logit c_n, masked_n, t, T, lambda) + start_n,      f = 0 at first

        iid          start_n = -log t                               each mask with probability 1 / (t + 1)
        threshold    start_n = beta (logit c_n - logit c*(lambda))  read greedily, it is `threshold:c*`
        paced        the same with min(c*, c_(k)) for c*            read greedily, it is `threshold(c*,paced)`
        eb           start_n = beta (log gamma(lambda) - log l_n)   read greedily, it is `eb:gamma`

    c* falls from the first of `thresholds` at the lowest price to the second at the highest, its log-odds linearly
    in log lambda; gamma rises, its logarithm linearly.  l_n = (sum of H) - (max of H) over the masks up to n in the
    order of the top probability, the surest first, H the entropy.  c_(k) is the k-th largest c of the M masks on
    offer, k = ceil(M / (t + 1)), which ends in time at an even pace; of equal ones the leftmost count as larger.  c
    is the top probability; of a selector that reads the drawn tokens, theirs (`confidence=sampled`).
    With a `spread` f has that standard deviation at first: where all positions look alike, f = 0 is a saddle.
    The log-odds of the top probability c tell 0.999 from 0.9999, which are the same number in bfloat16.
    """

    TIME_FEATURES = 4
    BETA = 2.0
    TIE = 1e-3  # by which what is not due lies below what is, where both have the same c
    READ = 5  # top probability, margin, entropy; the log-odds of the first; masked or not.  And log p of what was drawn
    NEAREST_TO_ONE = 1e-6  # beyond, log-odds end
    LEAST_LOST = 1e-6  # below, log l ends

    def __init__(self, config: SelectorConfig, denoiser_width: int, selection: Selection | None = None) -> None:
        super().__init__()
        self.config = config
        self.selection = selection or NonEmpty()
        D = config.width
        self.shape = shape = config.shape
        self.read_hidden = nn.Linear(denoiser_width, D) if config.reads == "hidden" else None
        self.read_confidences = nn.Linear(self.READ + bool(config.drawn), D)
        self.read_drawn = nn.Embedding(config.drawn, D) if config.drawn else None
        time_features = self.TIME_FEATURES + bool(config.prices)
        self.read_time = nn.Sequential(nn.Linear(time_features, D), nn.SiLU(), nn.Linear(D, D))
        self.positions = nn.Embedding(config.positions, D) if config.positions else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(config.layers))
        self.norm = RMSNorm(D)
        self.out = nn.Linear(D, 1)
        if self.read_drawn is not None:
            nn.init.normal_(self.read_drawn.weight, std=small_init(D))
        nn.init.normal_(self.out.weight, std=config.spread / D**0.5)
        nn.init.zeros_(self.out.bias)

    @property
    def budget(self) -> int:
        return self.config.budget

    @property
    def prices(self) -> tuple[float, ...]:
        return self.config.prices

    @property
    def drawn(self) -> bool:
        return self.config.drawn > 0

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def forward(
        self,
        hidden: Tensor,  # [B, L, denoiser width]; not looked at where it reads logits
        confidences: Tensor,  # [B, L, 3 or 4]: see `features`; 0 where not masked
        masked: Tensor,  # [B, L] bool
        t: Tensor,  # [B], t >= 1 matters; at t = 0 everything is revealed and nobody asks
        attention_mask: Tensor | Layout | None = None,  # [B, L] bool
        max_steps: Tensor | None = None,  # [B]; None: T
        price: Tensor | None = None,  # [B]; None: the lowest
        drawn: Tensor | None = None,  # [B, L]: tokens, those drawn where masked; where it reads them
    ) -> Tensor:
        """Logits s [B, L]."""
        if self.read_hidden is None:
            hidden = hidden[..., :0]
        elif hidden.shape[-1] != self.read_hidden.in_features:
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
        left = t = t.clamp(min=1).to(torch.promote_types(hidden.dtype, torch.float32))  # bfloat16 would round log t
        total = torch.full_like(t, self.budget)
        if max_steps is not None:  # with more steps than T, all but the last T are as the first of T
            total = torch.minimum(total, max_steps)
            t = torch.minimum(t, (total - 1).clamp(min=1))
        words = [t, total]
        if self.prices:
            words.append(torch.full_like(t, self.prices[0]) if price is None else price.clamp(*self.prices).to(t.dtype))
        asked = torch.stack(words, dim=-1)[:, None].expand(*masked.shape, -1)  # [B, L, 2 or 3]
        seen = layout.take(torch.cat([full_precision(confidences), masked[..., None], asked], dim=-1))
        tokens = None if drawn is None else layout.take(drawn)
        f = layout.put(self.run(layout.take(hidden).to(dtype), seen, layout.positions, layout.attend, tokens))
        return f + self.start_logits(confidences, masked, left if self.config.start == "paced" else t, price)

    def run(
        self, hidden: Tensor, seen: Tensor, positions: Tensor, attend: Attend, drawn: Tensor | None = None
    ) -> Tensor:
        """f, which is all that is worth compiling: one number per place from what is known there.

        seen [..., 6 to 8]: three confidences or four, masked or not, t, T and the price.
        """
        confidences, masked, t, total, price = seen.split([3 + self.drawn, 1, 1, 1, len(self.prices) // 2], dim=-1)
        log_odds = self._log_odds(confidences[..., :1], masked > 0)
        read = torch.cat([confidences, log_odds, masked], dim=-1)
        time = torch.cat([t / total, 1 / t, t.log(), total.log(), price.log()], dim=-1)
        x = self.read_confidences(read.to(hidden.dtype))
        x = x if self.read_hidden is None else self.read_hidden(hidden) + x
        x = x + self.read_time(time.to(hidden.dtype))
        if self.read_drawn is not None:
            x = x + self.read_drawn(drawn).to(x.dtype)
        if self.positions is not None:
            x = x + self.positions(positions).to(x.dtype)
        rotary = rotary_angles(positions, self.shape)
        for block in self.blocks:
            x = block(x, rotary, attend)
        return _in_full_precision(self.out, self.norm(x))

    def start_logits(self, confidences: Tensor, masked: Tensor, t: Tensor, price: Tensor | None) -> Tensor:
        """start_n [B, L]: the rule alone, f = 0.  The arguments are those of `forward`."""
        confidences = full_precision(confidences)
        t = t.clamp(min=1).to(confidences.dtype)
        if self.config.start == "iid":
            return -t.log()[:, None].expand_as(masked)
        price = torch.full_like(t, self.prices[0]) if price is None else price.clamp(*self.prices).to(t.dtype)
        low, high = (math.log(end) for end in self.prices)
        bounded = self.config.start == "eb"
        first, last = (math.log(end if bounded else end / (1 - end)) for end in self.config.thresholds)
        bar = first + (last - first) * (price.log() - low) / (high - low)  # [B]: logit c*, or log gamma
        if bounded:
            return self.BETA * torch.where(masked, bar[:, None] - self._log_lost(confidences, masked), 0.0)
        c = confidences[..., 3:].exp() if self.drawn else confidences[..., :1]
        above = self._log_odds(c, masked[..., None])[..., 0] - bar[:, None]
        if self.config.start == "paced":
            k = torch.ceil(masked.sum(-1) / (t + 1)).long().clamp(min=1)[:, None]
            ranked, order = torch.where(masked, above, -math.inf).sort(dim=-1, descending=True, stable=True)
            due = torch.zeros_like(masked).scatter(-1, order, torch.arange(masked.shape[-1], device=k.device) < k)
            short = ranked.gather(-1, k - 1).clamp(max=0.0)  # [B, 1]: logit c_(k) - logit c*, where that is below 0
            paced = torch.where(masked, above - short, 0.0)
            above = torch.where(due | (short == 0), paced, paced.clamp(max=-self.TIE))
        return self.BETA * above

    def _log_lost(self, confidences: Tensor, masked: Tensor) -> Tensor:
        """log l_n [B, L]."""
        order = torch.where(masked, confidences[..., 0], -math.inf).argsort(dim=-1, descending=True, stable=True)
        H = torch.where(masked, confidences[..., 2], 0.0).gather(-1, order)
        lost = (H.cumsum(-1) - H.cummax(-1).values).clamp(min=self.LEAST_LOST)
        return torch.zeros_like(lost).scatter(-1, order, lost.log())

    def _log_odds(self, c: Tensor, masked: Tensor) -> Tensor:
        """logit c of the same shape; 0 where not masked."""
        return torch.where(masked, torch.logit(c, eps=self.NEAREST_TO_ONE), 0.0)


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
