"""As many masks as the denoiser is sure of, at least one."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from unmask.decoding.policies.rule import Decision, Policy, Step, above, as_text, descending, first, highest, rounding
from unmask.decoding.policies.scheduled import (
    ByConfidence,
    ConfidenceKind,
    LeftToRight,
    PCSampler,
    Ranked,
    TopProbability,
)
from unmask.decoding.policies.structured import Blocks
from unmask.errors import require


def prefix(order: Tensor, fits: Tensor) -> Tensor:
    """[b, L] bool: the longest beginning of `order` [b, L] all of which `fits` [b, L]."""
    return first(order, fits.long().cumprod(-1).sum(-1))


@dataclass(frozen=True)
class Threshold(ByConfidence):
    """All positions of which the denoiser is sure enough.

    All masks with c_n >= threshold; if there is none, the one with the largest c_n (Fast-dLLM).

    `paced`: at least the ceil(|M| / (S - i)) with the largest c_n, so that the last step is not left with the rest.
    """

    key = "threshold"
    threshold: float = 0.9
    _: KW_ONLY
    confidence: ConfidenceKind = "max"
    paced: bool = False

    def __post_init__(self) -> None:
        require(0 < self.threshold <= 1, f"threshold must be above 0 and at most 1, got {self.threshold}")
        super().__post_init__()

    def decide(self, step: Step) -> Decision:
        log_c = self.log_c(step)
        least = torch.ones_like(step.index)
        if self.paced:
            least = -(-step.masks() // (step.max_steps - step.index).clamp(min=1))  # rounded up
        best = highest(log_c, step.masked, least)
        return Decision(best | (step.masked & (log_c >= math.log(self.threshold) - rounding(log_c))))


@dataclass(frozen=True)
class Factor(ByConfidence):
    """As many as are sure enough together: the more at once, the surer each must be.

    c sorted from the largest: the longest prefix whose r-th (r >= 2) has c >= 1 - f / (r + 1) (Fast-dLLM).

    The first is always revealed.  c falls and the bar rises with r, so the prefix ends where the bar is first missed.
    """

    key = "factor"
    factor: float = 1.0
    _: KW_ONLY
    confidence: ConfidenceKind = "max"

    def __post_init__(self) -> None:
        require(0 < self.factor < float("inf"), f"factor must be above 0, got {self.factor}")
        super().__post_init__()

    def decide(self, step: Step) -> Decision:
        log_c = self.log_c(step)
        order = descending(log_c, step.masked)
        c = log_c.gather(-1, order).exp()  # [b, L]: from the largest
        r = torch.arange(1, c.shape[-1] + 1, dtype=c.dtype, device=c.device)
        sure = (c >= 1 - self.factor / (r + 1) - rounding(c)) | (r == 1)
        return Decision(step.masked & prefix(order, sure))


@dataclass(frozen=True)
class EntropyBounded(Policy):
    """As many of the surest positions as a limit on their uncertainty together allows.

    In the order of c (or of margin, or of entropy): the longest prefix with (sum of H) - (max of H) <= gamma.

    At least one (Ben-Hamu et al. 2025).  The difference bounds what writing the prefix in parallel can lose, and it
    never falls as the prefix grows.
    """

    key = "eb"
    gamma: float = 0.1
    _: KW_ONLY
    order: Ranked = field(default_factory=TopProbability)

    def __post_init__(self) -> None:
        require(0 <= self.gamma < float("inf"), f"eb: gamma must not be negative, got {self.gamma}")
        allowed = isinstance(self.order, Ranked) and not isinstance(self.order, LeftToRight | PCSampler)
        require(allowed, f"eb orders by top-prob, margin or entropy, not by {as_text(self.order)}")
        require(self.order.count == "even", "eb reveals as many as its bound allows: leave count out of its order")

    @property
    def reads(self) -> frozenset[str]:
        return self.order.reads | {"entropy"}

    def decide(self, step: Step) -> Decision:
        order = descending(self.order.score(step), step.masked)
        H = torch.where(step.masked, step.stats["entropy"], 0.0).gather(-1, order)  # [b, L]
        lost = H.cumsum(-1) - H.cummax(-1).values
        alone = torch.arange(H.shape[-1], device=H.device) == 0
        return Decision(step.masked & prefix(order, (lost <= self.gamma + rounding(H)) | alone))


@dataclass(frozen=True)
class KLStable(ByConfidence):
    """The positions that are sure and no longer change.

    All masks with c_n > tau and KL(p_n now || p_n at the pass before) < eps at each of the last h passes (KLASS).

    No position is stable before pass h + 1.  If there is none: top probability with k_i.
    Inside `blocks` all masks of the response are compared at every pass: a new block starts with its history, and
    h - 1 of its own passes go by before a mask counts as stable.
    It keeps the last pass's distribution: N x V floats a sequence.
    """

    key = "klass"
    reads_ahead = True
    tau: float = 0.9
    eps: float = 0.01
    h: int = 2
    _: KW_ONLY
    confidence: ConfidenceKind = "max"

    def __post_init__(self) -> None:
        require(0 <= self.tau < 1, f"klass: tau must be at least 0 and below 1, got {self.tau}")
        require(0 < self.eps < float("inf"), f"klass: eps must be above 0, got {self.eps}")
        require(type(self.h) is int and self.h >= 1, f"klass: h must be at least 1, got {self.h!r}")
        super().__post_init__()

    @property
    def reads(self) -> frozenset[str]:
        return super().reads | {"change"}

    def init_state(self, rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
        return {"stable": torch.zeros(rows, length, dtype=torch.long, device=device)}  # passes in a row with KL < eps

    def decide(self, step: Step) -> Decision:
        log_c = self.log_c(step)
        stable = torch.where(step.stats["change"] < self.eps, step.memory["stable"] + 1, 0)
        settled = (stable >= self.h) & (step.index >= self.h - 1)[:, None]
        sure = step.masked & above(log_c, self.tau) & settled
        counted = highest(log_c, step.masked, step.count())
        return Decision(torch.where(sure.any(-1, keepdim=True), sure, counted), memory={"stable": stable})


@dataclass(frozen=True)
class Credit(ByConfidence):
    """All positions of which the denoiser is sure enough, what it preferred at earlier steps included.

    `threshold` on fused logits: + alpha log(1 + C_n), C_n the decayed votes of the passes (CreditDecoding).

    At every pass, for every mask of the response:  C_n <- beta C_n,  C_n(v) += p_n(v)^gamma at v = arg max p_n.
    It keeps C_n: N x V floats a sequence.
    """

    key = "credit"
    reads_ahead = True
    threshold: float = 0.9
    alpha: float = 0.7
    beta: float = 0.8
    gamma: float = 0.2
    _: KW_ONLY
    confidence: ConfidenceKind = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.threshold <= 1, f"credit: threshold must be above 0 and at most 1, got {self.threshold}")
        sound = min(self.alpha, self.gamma) >= 0 and 0 <= self.beta < 1
        require(sound, "credit: alpha and gamma must not be negative, beta at least 0 and below 1")

    @property
    def fuses(self) -> bool:
        return True

    def fuse(self, logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        log_top, best = logits.log_softmax(-1, dtype=kept.dtype).max(-1, keepdim=True)
        credit = (self.beta * kept).scatter_add(-1, best, (self.gamma * log_top).exp())
        return logits + self.alpha * credit.log1p(), credit

    def decide(self, step: Step) -> Decision:
        return Threshold(self.threshold, confidence=self.confidence).decide(step)


@dataclass(frozen=True)
class Prophet(Policy):
    """A few positions at each step, and all that is left once the answer is clear.

    Everything once g >= 7.5, 5 or 2.5 at progress (i+1)/S < 1/3, < 2/3 or later; until then the order with k_i.

    g = mean of (first - second logit) over the answer: the `size` response positions from place `start` on (size 0: all
    from there on), revealed or not (Li et al. 2025).  One that may hold a single token only (`allowed`) does not count.
    The order may be inside blocks, `order=blocks(32,top-prob)`; what is left is revealed in all of them.
    """

    key = "prophet"
    reads_revealed = True
    start: int = 0
    size: int = 0
    _: KW_ONLY
    order: Policy = field(default_factory=TopProbability)

    def __post_init__(self) -> None:
        whole = all(type(value) is int and value >= 0 for value in (self.start, self.size))
        require(whole, f"prophet: start and size must be 0 or more, got {self.start!r} and {self.size!r}")
        order = self.order.inner if isinstance(self.order, Blocks) else self.order
        require(isinstance(order, Ranked), f"prophet needs an order such as margin, not {as_text(order)}")
        object.__setattr__(self, "holds_back", self.order.holds_back)

    @property
    def reads(self) -> frozenset[str]:
        return self.order.reads | {"gap"}

    def check(self, max_steps: int, num_response: Tensor) -> None:
        smallest = int(num_response.min())
        require(self.start < smallest, f"prophet: a response of {smallest} tokens has no place {self.start}")
        self.order.check(max_steps, num_response)

    def init_state(self, rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
        return self.order.init_state(rows, length, device)

    def check_logits(self, logits: Tensor) -> None:
        self.order.check_logits(logits)

    def decide(self, step: Step) -> Decision:
        place = step.place()
        gap = step.stats["gap"]
        answer = step.response & (place >= self.start) & torch.isfinite(gap)
        if self.size:
            answer = answer & (place < self.start + self.size)
        g = torch.where(answer, gap, 0.0).sum(-1) / answer.sum(-1)  # NaN, which is no g, where all are forced
        done = 3 * (step.index + 1)  # three times the progress, in steps
        bar = torch.where(done < step.max_steps, 7.5, torch.where(done < 2 * step.max_steps, 5.0, 2.5))
        sure = (g >= bar - rounding(g))[:, None]
        decision = self.order.decide(step)
        return decision._replace(reveal=(step.offered().masked & sure) | (step.masked & decision.reveal))
