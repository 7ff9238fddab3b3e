"""Which positions to reveal: one small class a rule.  Exact definitions are in the docstrings.

Notation: step i = 0..S-1 of a budget of S, M = the masked positions of one sequence, N = the size of its response,
p_n = the denoiser's distribution at n.  Ties go to the leftmost position.  Everything is per sequence: no rule looks at
another row.  The last step reveals all that is left, and the generation loop sees to that, not the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from unmask.decoding.confidence import Confidence
from unmask.decoding.schedules import reveal_count
from unmask.variational.selection import Selection


@dataclass(frozen=True)
class Step:
    """What a rule may look at: the unfinished rows of a batch at one step.  b rows, L positions."""

    index: int  # i
    max_steps: int  # S
    masked: Tensor  # [b, L] bool: M
    num_response: Tensor  # [b]: N
    confidence: Confidence  # [b, L] each; read only where masked
    hidden: Tensor  # [b, L, D]
    attention: Tensor  # [b, L] bool
    uniforms: Callable[[], Tensor]  # [b, L + 1] on call: one a position, one for the whole sequence


class Decision(NamedTuple):
    """What a rule answers.  Positions outside the masks are ignored."""

    reveal: Tensor  # [b, L] bool
    nothing_selected: Tensor | None = None  # [b] bool: rows in which a selector chose nothing and the rule fell back


class Policy(Protocol):
    """An unmasking rule."""

    name: str

    def check(self, max_steps: int) -> None:
        """Raise ValueError where the rule cannot run with this budget."""

    def decide(self, step: Step) -> Decision:
        """Which masks to reveal at this step; never called at the last one."""


def highest(score: Tensor, masked: Tensor, count: Tensor) -> Tensor:
    """[b, L] bool: the `count` [b] masked positions with the largest score, ties to the leftmost."""
    lowest = torch.finfo(score.dtype).min  # a masked position is above all others, even with a score of -inf
    ranked = torch.where(masked, score.clamp(min=lowest), -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return masked & (rank < count[:, None])


def highest_counted(score: Tensor, step: Step) -> Decision:
    """Reveal the k_i masked positions with the largest score: what rules with a number have in common."""
    return Decision(highest(score, step.masked, reveal_count(step.num_response, step.index, step.max_steps)))


class IID:
    """Each n in M independently with probability 1 / (S - i): ancestral sampling with a linear schedule (MDLM, MD4)."""

    name = "iid"

    def check(self, max_steps: int) -> None:
        """Any budget will do."""

    def decide(self, step: Step) -> Decision:
        return Decision(step.uniforms()[:, :-1] < 1 / (step.max_steps - step.index))


class TopProbability:
    """The k_i positions with the largest c_n = max_v p_n(v) (MaskGIT; LLaDA's `low_confidence`)."""

    name = "top-prob"

    def check(self, max_steps: int) -> None:
        """Any budget will do."""

    def decide(self, step: Step) -> Decision:
        return highest_counted(step.confidence.log_top, step)


class Margin:
    """The k_i positions with the largest p_n(1st) - p_n(2nd) (Kim et al. 2025)."""

    name = "margin"

    def check(self, max_steps: int) -> None:
        """Any budget will do."""

    def decide(self, step: Step) -> Decision:
        return highest_counted(step.confidence.margin, step)


class SelectorNetwork(Protocol):
    """Logits s [b, L] from (hidden, confidences, masked, t [b], budget, attention)."""

    selection: Selection  # its form

    @property
    def budgets(self) -> tuple[int, ...]: ...

    def __call__(
        self, hidden: Tensor, confidences: Tensor, masked: Tensor, t: Tensor, budget: int, attention: Tensor | None
    ) -> Tensor: ...


class Learned:
    """r ~ P_psi(r_t | x_{t+1}) with t = S - 1 - i, where S is a budget that the selector was trained for.

    `nonempty`: drawn from the product conditioned on r != 0, exactly the model of the bound.
    `bernoulli`: r_n ~ Bern(p_n); where none is selected, the most probable position, and the result counts it.
    """

    name = "learned"

    def __init__(self, selector: SelectorNetwork) -> None:
        self.selector = selector

    def check(self, max_steps: int) -> None:
        if max_steps not in self.selector.budgets:
            budgets = ", ".join(map(str, self.selector.budgets))
            raise ValueError(f"the learned order was trained for T = {budgets} only, not for {max_steps} steps")

    def decide(self, step: Step) -> Decision:
        t = torch.full_like(step.num_response, step.max_steps - 1 - step.index)
        features = torch.where(step.masked[..., None], step.confidence.features(), 0.0)
        logits = self.selector(step.hidden, features, step.masked, t, step.max_steps, step.attention)
        if not torch.isfinite(logits[step.masked]).all():
            raise ValueError(f"the selector's logits are not finite at step {step.index}")
        reveal = self.selector.selection.sample(logits, step.masked, step.uniforms())
        empty = ~reveal.any(-1)
        fallback = highest(logits, step.masked, torch.ones_like(t))
        return Decision(torch.where(empty[:, None], fallback, reveal), nothing_selected=empty)
