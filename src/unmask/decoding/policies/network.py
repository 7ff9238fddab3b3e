"""A network decides, from the denoiser's hidden states and confidences."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from unmask.decoding.policies.rule import Decision, NetworkPolicy, SelectorNetwork, Step, highest
from unmask.decoding.policies.scheduled import check_temperature
from unmask.errors import require
from unmask.variational.selection import Bernoulli, NonEmpty, OneByOne


@dataclass(frozen=True)
class Learned(NetworkPolicy):
    """The order that was learned.

    r ~ P_psi(r_t | x_{t+1}) with t = S - 1 - i, where S is the budget that the selector was trained for (ours).

    A selector that was trained with prices takes any S, and the price of a step in nats (or in reward): the higher, the
    fewer the steps.

    `nonempty`: sampled from the product conditioned on r != 0.  With tokens sampled from the denoiser's own
    distribution (token temperature 1, no top-k, top-p or guidance) this is exactly the model of the bound; with greedy
    tokens, or a selector that reads the drawn ones, it is not.
    `bernoulli`: r_n ~ Bern(p_n); where none is selected, the most probable position, and the result counts it (the
    model of the bound reveals nothing then).
    `one`: one position per step, from softmax(s); deterministic reveals the arg-max.

    Knobs that need no retraining; with any of them set, it is no longer the model of the bound:
    temperature divides the logits, floor is the least p_n, cap the most reveals per step (the most probable of those
    selected), deterministic reveals p_n >= 1/2 instead of sampling.
    """

    key = "learned"
    network: SelectorNetwork = field(repr=False)
    _: KW_ONLY
    price: float = 0.0
    temperature: float = 1.0
    floor: float = 0.0
    cap: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_temperature("learned", self.temperature)
        require(0 <= self.price < math.inf, f"learned: price must be 0 or more, got {self.price}")
        require(0 <= self.floor < 1, f"learned: floor must be at least 0 and below 1, got {self.floor}")
        require(self.cap >= 0, f"learned: cap must be 0 (none) or more, got {self.cap}")

    def decide(self, step: Step) -> Decision:
        scores = self.logits(step)
        logits = scores / self.temperature if self.temperature != 1 else scores
        if self.floor:
            logits = logits.clamp(min=math.log(self.floor / (1 - self.floor)))
        alone = isinstance(self.network.selection, OneByOne)
        if self.deterministic and alone:
            reveal = highest(logits, step.masked, torch.ones_like(step.index))
        elif self.deterministic:
            reveal = step.masked & (logits >= 0)
        else:
            reveal = self.network.selection.sample(logits, step.masked, step.uniforms())
        if self.cap:
            reveal = highest(logits, reveal, torch.full_like(step.index, self.cap))
        if alone or (isinstance(self.network.selection, NonEmpty) and not self.deterministic):
            return Decision(reveal, scores=scores)  # something is always selected
        return _or_most_probable(reveal, logits, step, scores)


@dataclass(frozen=True)
class OneAtATime(NetworkPolicy):
    """The order that was learned, one position at a time.

    One mask per step, from softmax(order logits over M) (LO-ARM, Wang et al. 2025).
    """

    key = "lo-arm"
    network: SelectorNetwork = field(repr=False)

    def decide(self, step: Step) -> Decision:
        scores = self.logits(step)
        u = step.uniforms()[:, :-1]
        perturbed = scores.double() - torch.log(-torch.log(u))  # its largest is a draw from softmax(scores)
        return Decision(highest(perturbed, step.masked, torch.ones_like(step.index)), scores=scores)


@dataclass(frozen=True)
class RewardTrained(NetworkPolicy):
    """The order that was learned by reward, each position drawn on its own.

    r_n ~ Bern(sigmoid(b_n / temperature)); none: the most probable, counted (Jazbec et al. 2025).
    """

    key = "reward"
    network: SelectorNetwork = field(repr=False)
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_temperature("reward", self.temperature)

    def decide(self, step: Step) -> Decision:
        scores = self.logits(step)
        reveal = Bernoulli().sample(scores / self.temperature, step.masked, step.uniforms())
        return _or_most_probable(reveal, scores, step, scores)


def _or_most_probable(reveal: Tensor, logits: Tensor, step: Step, scores: Tensor) -> Decision:
    """What is selected; where nothing is, the most probable mask, which the result counts."""
    empty = step.masked.any(-1) & ~reveal.any(-1)
    fallback = empty[:, None] & highest(logits, step.masked, torch.ones_like(step.index))
    return Decision(reveal | fallback, nothing_selected=empty, scores=scores)
