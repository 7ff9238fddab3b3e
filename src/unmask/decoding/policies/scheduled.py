"""As many masks as the schedule says, whatever the denoiser is sure of.

iid reveals each of them with the same probability; the others reveal the k_i with the largest score, where `count` says
what k_i is: even (LLaDA), floor (Dream, SMDM) or cosine (MaskGIT), see `schedules.reveal_count`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import torch
from torch import Tensor

from unmask.decoding.policies.rule import Decision, Policy, Step, as_text, descending, first, highest
from unmask.decoding.schedules import CountKind
from unmask.errors import require

ConfidenceKind = Literal["max", "sampled"]  # c_n = max_v p_n(v), or p_n(x_n) of the token proposed


@dataclass(frozen=True)
class IID(Policy):
    """Random positions, a random number of them at each step.

    Each mask independently with probability 1 / (S - i): ancestral sampling, linear schedule (MDLM, MD4, SMDM).
    """

    key = "iid"

    def decide(self, step: Step) -> Decision:
        left = step.max_steps - step.index
        return Decision(step.uniforms()[:, :-1] * left[:, None] < 1)


class ByConfidence(Policy):
    """Looks at c_n."""

    confidence: ConfidenceKind

    def __post_init__(self) -> None:
        require(self.confidence in ("max", "sampled"), f"confidence must be max or sampled, got {self.confidence!r}")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"log_top" if self.confidence == "max" else "log_proposal"})

    def log_c(self, step: Step) -> Tensor:
        """[b, L]."""
        return step.stats["log_top"] if self.confidence == "max" else step.stats["log_proposal"]


class Ranked(Policy):
    """Reveals the k_i masks with the largest score.  Rules that need an order take one of these."""

    count: CountKind

    def __post_init__(self) -> None:
        check_count(self.count)

    def score(self, step: Step) -> Tensor:
        """[b, L]: the largest are revealed first."""
        raise NotImplementedError

    def weight(self, step: Step) -> Tensor:
        """[b, L]: the score on the scale that a temperature divides."""
        return self.score(step)

    def decide(self, step: Step) -> Decision:
        return Decision(first(descending(self.score(step), step.masked), step.count(self.count)))


@dataclass(frozen=True)
class TopProbability(ByConfidence, Ranked):
    """The positions of which the denoiser is surest.

    The k_i largest c_n = max_v p_n(v) (MaskGIT; LLaDA's `low_confidence`).
    """

    key = "top-prob"
    _: KW_ONLY
    confidence: ConfidenceKind = "max"
    count: CountKind = "even"

    def __post_init__(self) -> None:
        ByConfidence.__post_init__(self)
        Ranked.__post_init__(self)

    def score(self, step: Step) -> Tensor:
        return self.log_c(step)

    def weight(self, step: Step) -> Tensor:
        return self.score(step).exp()  # c, as Dream's `alg_temp` divides it, not log c


@dataclass(frozen=True)
class Margin(Ranked):
    """The positions where the first choice is furthest ahead of the second.

    The k_i largest p_n(1st) - p_n(2nd) (Kim et al. 2025).
    """

    key = "margin"
    reads = frozenset({"margin"})
    _: KW_ONLY
    count: CountKind = "even"

    def score(self, step: Step) -> Tensor:
        return step.stats["margin"]


@dataclass(frozen=True)
class Entropy(Ranked):
    """The positions where the denoiser wavers least between all tokens.

    The k_i smallest entropies H_n (Dream's `entropy`; beware: two public codes rank by +H).
    """

    key = "entropy"
    reads = frozenset({"entropy"})
    _: KW_ONLY
    count: CountKind = "even"

    def score(self, step: Step) -> Tensor:
        return -step.stats["entropy"]


@dataclass(frozen=True)
class LeftToRight(Ranked):
    """From left to right.

    The k_i leftmost masks: the autoregressive limit.
    """

    key = "left-to-right"
    _: KW_ONLY
    count: CountKind = "even"

    def score(self, step: Step) -> Tensor:
        return -step.place().double()


@dataclass(frozen=True)
class PCSampler(Ranked):
    """The positions of which the denoiser is sure, early ones first and those of frequent tokens last.

    The k_i largest exp(-decay j) min(clip, -p_n(x_n) log(f(x_n) + 1e-9)): frequent tokens wait (PC-sampler).

    j: the place in the response, inside `blocks` in the block.
    f [V]: the share of each token in a background text.  On the command line that is the task's training examples.
    """

    key = "pc-sampler"
    reads = frozenset({"log_proposal"})
    frequencies: Tensor = field(repr=False, compare=False)
    decay: float = 0.25
    clip: float = 10.0
    _: KW_ONLY
    count: CountKind = "even"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.decay < float("inf"), f"pc-sampler: decay must not be negative, got {self.decay}")
        require(0 < self.clip < float("inf"), f"pc-sampler: clip must be above 0, got {self.clip}")
        f = self.frequencies
        shares = isinstance(f, Tensor) and f.ndim == 1 and f.is_floating_point() and bool(((f >= 0) & (f <= 1)).all())
        require(shares, "pc-sampler: frequencies must be [V] shares from 0 to 1: divide counts by their sum")

    def check_logits(self, logits: Tensor) -> None:
        f, V = self.frequencies, logits.shape[-1]
        require(len(f) == V, f"pc-sampler: there are frequencies of {len(f)} tokens, and the denoiser writes {V}")
        elsewhere = f"pc-sampler: the frequencies are on {f.device}: move them to {logits.device}, as the denoiser"
        require(f.device == logits.device, elsewhere)

    def score(self, step: Step) -> Tensor:
        p = step.stats["log_proposal"].double().exp()
        x = torch.where(step.masked, step.proposal, 0)  # elsewhere the mask token may stand, which has no frequency
        surprise = -p * torch.log(self.frequencies[x].double() + 1e-9)
        return torch.exp(-self.decay * step.place().double()) * surprise.clamp(max=self.clip)


@dataclass(frozen=True)
class Stochastic(Policy):
    """Random positions, the likelier the higher another rule ranks them.

    k_i masks drawn without replacement with weights softmax(score / temperature) (Dream's `alg_temp`).

    k_i is that of the order: `stochastic(entropy(count=floor),0.1)`.
    By Gumbel-top-k: the k largest of  score_n / temperature - log(-log u_n)  are such a draw.
    """

    key = "stochastic"
    order: Ranked
    temperature: float

    def __post_init__(self) -> None:
        require(isinstance(self.order, Ranked), f"stochastic needs an order such as margin, not {as_text(self.order)}")
        check_temperature("stochastic", self.temperature)

    @property
    def reads(self) -> frozenset[str]:
        return self.order.reads

    def check_logits(self, logits: Tensor) -> None:
        self.order.check_logits(logits)

    def decide(self, step: Step) -> Decision:
        u = step.uniforms()[:, :-1]
        perturbed = self.order.weight(step).double() / self.temperature - torch.log(-torch.log(u))
        return Decision(highest(perturbed, step.masked, step.count(self.order.count)))


@dataclass(frozen=True)
class Random(Policy):
    """Random positions, the same number at each step.

    k_i masks, uniformly (LLaDA's `random`).
    """

    key = "random"
    _: KW_ONLY
    count: CountKind = "even"

    def __post_init__(self) -> None:
        check_count(self.count)

    def decide(self, step: Step) -> Decision:
        return Decision(highest(step.uniforms()[:, :-1], step.masked, step.count(self.count)))


def check_count(count: str) -> None:
    require(count in ("even", "floor", "cosine"), f"count must be even, floor or cosine, got {count!r}")


def check_temperature(rule: str, temperature: float) -> None:
    """A score divided by less would be infinite, and all infinities are alike."""
    require(1e-9 <= temperature < float("inf"), f"{rule}: temperature must be at least 1e-9, got {temperature}")
