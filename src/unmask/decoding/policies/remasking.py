"""Rules that may mask again or replace what was revealed.  They run all S = max_steps steps, or until they say that a
sequence is finished."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from unmask.decoding.policies.rule import Decision, Policy, Step, above, highest, rounding
from unmask.decoding.policies.scheduled import ByConfidence, ConfidenceKind
from unmask.errors import require


@dataclass(frozen=True)
class RDM(Policy):
    """At each step the positions of which the denoiser is surest; it masks the others again.

    Proposals everywhere; L = the floor(N r_i) response positions with the lowest p_n(x_n) (Zheng et al. 2023).

    r_i = cos(pi/2 (i+1)/S), or 1 - (i+1)/S with `linear`.  Masked outside L: revealed.  Revealed in L: masked again;
    with `cond` only if its proposal is the token that stands there and p_n(x_n) has fallen since it was revealed.
    """

    key = "rdm"
    remasks = reads_revealed = True
    reads = frozenset({"log_proposal"})
    schedule: Literal["cosine", "linear"] = "cosine"
    revise: Literal["uncond", "cond"] = "uncond"

    def __post_init__(self) -> None:
        require(self.schedule in ("cosine", "linear"), f"rdm: schedule must be cosine or linear, got {self.schedule!r}")
        require(self.revise in ("uncond", "cond"), f"rdm: give uncond or cond, got {self.revise!r}")

    def decide(self, step: Step) -> Decision:
        log_p, N, S = step.stats["log_proposal"], step.num_response, step.max_steps
        if self.schedule == "linear":
            count = N * (S - 1 - step.index) // S
        else:  # cos(pi/3) is 1/2 up to a rounding, and floor would take a rounding for a whole position
            count = (N * torch.cos(math.pi / 2 * (step.index + 1).double() / S) + 1e-9).floor().long()
        low = highest(-log_p, step.response, count)
        doubted = low & ~step.masked
        if self.revise == "cond":
            doubted = doubted & (step.proposal == step.tokens) & (log_p < step.log_reveal)
        return Decision(step.masked & ~low, remask=doubted)


@dataclass(frozen=True)
class P2(Policy):
    """The positions of which the denoiser is surest; it masks again what it doubts.

    Score p_n(token) where revealed, p_n(x_n) where masked; the (N (S-1-i)) div S lowest are (or stay) masked.

    The other masks are revealed (path planning with the denoiser as its own planner, Peng et al. 2025).
    """

    key = "p2"
    remasks = reads_revealed = True
    reads = frozenset({"log_proposal", "log_current"})

    def decide(self, step: Step) -> Decision:
        score = torch.where(step.masked, step.stats["log_proposal"], step.stats["log_current"])
        count = step.num_response * (step.max_steps - 1 - step.index) // step.max_steps
        low = highest(-score, step.response, count)
        return Decision(step.masked & ~low, remask=low & ~step.masked)


class _ReMDM(Policy):
    """ReMDM (Wang et al. 2025).  alpha_t = i/S, alpha_s = (i+1)/S, sigma_max = min(1, (1 - alpha_s) / alpha_t).

    sigma_max is 1 at i = 0.
    revealed:  masked again with probability sigma
    masked:    revealed with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t)
    """

    remasks = True

    def sigma(self, step: Step, sigma_max: Tensor) -> Tensor:
        """[b, L] from sigma_max [b, 1]."""
        raise NotImplementedError

    def decide(self, step: Step) -> Decision:
        i, S = step.index[:, None].double(), step.max_steps[:, None].double()
        now, soon = i / S, (i + 1) / S
        sigma_max = torch.where(i > 0, ((S - i - 1) / i.clamp(min=1)).clamp(max=1.0), 1.0)
        sigma = self.sigma(step, sigma_max)
        u = step.uniforms()[:, :-1]
        reveal = u < (soon - (1 - sigma) * now) / (1 - now)
        return Decision(reveal, remask=u < sigma)


@dataclass(frozen=True)
class ReMDMCap(_ReMDM):
    """Random positions; it masks tokens again at random, all with the same small probability.

    ReMDM (Wang et al. 2025) with sigma = min(eta, sigma_max): every revealed token is doubted alike.
    """

    key = "remdm-cap"
    eta: float = 0.008

    def __post_init__(self) -> None:
        require(0 <= self.eta <= 1, f"remdm-cap: eta must lie in [0, 1], got {self.eta}")

    def sigma(self, step: Step, sigma_max: Tensor) -> Tensor:
        return sigma_max.clamp(max=self.eta).expand(step.masked.shape)


@dataclass(frozen=True)
class ReMDMRescale(_ReMDM):
    """Random positions; it masks tokens again at random, each less likely towards the end.

    ReMDM (Wang et al. 2025) with sigma = eta sigma_max.
    """

    key = "remdm-rescale"
    eta: float = 0.015

    def __post_init__(self) -> None:
        require(0 <= self.eta <= 1, f"remdm-rescale: eta must lie in [0, 1], got {self.eta}")

    def sigma(self, step: Step, sigma_max: Tensor) -> Tensor:
        return (self.eta * sigma_max).expand(step.masked.shape)


@dataclass(frozen=True)
class ReMDMConf(_ReMDM):
    """Random positions; it masks tokens again at random, most of all those that were unsure when revealed.

    ReMDM (Wang et al. 2025), sigma_n = sigma_max softmax over the revealed of (-p_n at reveal), 0 at the masked.
    """

    key = "remdm-conf"
    reads = frozenset({"log_proposal"})  # remembered as log_reveal

    def sigma(self, step: Step, sigma_max: Tensor) -> Tensor:
        revealed = step.response & ~step.masked
        score = torch.where(revealed, -step.log_reveal.double().exp(), -torch.inf)
        share = torch.where(revealed, score.softmax(-1), 0.0)  # a row with nothing revealed is NaN before `where`
        return sigma_max * share


@dataclass(frozen=True)
class JointThreshold(Policy):
    """All positions of which the denoiser is sure enough; it replaces a token where it is sure of another.

    All masks with c_n > tau, else the best; a revealed token becomes x_n where that differs and p_n(x_n) > tau_e.

    After the last mask it goes on until a pass changes nothing, or for 16 passes (LLaDA2.1).
    """

    key = "joint-threshold"
    remasks = reads_revealed = True
    reads = frozenset({"log_top", "log_proposal"})
    MOST = 16  # passes after the last mask
    tau: float = 0.7
    tau_e: float = 0.5

    def __post_init__(self) -> None:
        for name in ("tau", "tau_e"):
            value = getattr(self, name)
            require(0 <= value < 1, f"joint-threshold: {name} must be at least 0 and below 1, got {value}")

    def init_state(self, rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
        return {"after": torch.zeros(rows, dtype=torch.long, device=device)}  # passes without a mask

    def decide(self, step: Step) -> Decision:
        log_c, log_p = step.stats["log_top"], step.stats["log_proposal"]
        sure = step.masked & above(log_c, self.tau)
        best = highest(log_c, step.masked, torch.ones_like(step.index))
        revealed = step.response & ~step.masked
        edit = revealed & (step.proposal != step.tokens) & above(log_p, self.tau_e)
        full = ~step.masked.any(-1)
        after = torch.where(full, step.memory["after"] + 1, 0)  # a new block begins with masks
        finished = full & (~edit.any(-1) | (after >= self.MOST))
        return Decision(sure | best, edit=edit, finished=finished, memory={"after": after})


@dataclass(frozen=True)
class Saber(Policy):
    """The positions that are surer than earlier ones were; it masks again those that have become less sure.

    Masks with p_n(x_n) above the mean of p(x) at the reveals so far, at least the n best; then some are doubted.

    Of what is revealed now or before, the max(n div 2, ceil(r / mu)) positions, at most r - 1, whose p(x) has fallen
    most since the pass before are masked again, r being the number of reveals (Saber; p(x) is that of the proposal,
    also where a token stands, and 0 before the first pass).  A sequence without masks is finished.
    """

    key = "saber"
    remasks = reads_revealed = True
    reads = frozenset({"log_proposal"})
    n: int = 2
    mu: int = 8

    def __post_init__(self) -> None:
        whole = all(type(value) is int and value >= 1 for value in (self.n, self.mu))
        require(whole, f"saber: n and mu must be at least 1, got {self.n!r} and {self.mu!r}")

    def init_state(self, rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
        p = torch.zeros(rows, length, dtype=torch.float64, device=device)
        return {"before": p, "at_reveal": torch.full_like(p, -1.0)}  # -1: never revealed

    def decide(self, step: Step) -> Decision:
        p, at_reveal = step.stats["log_proposal"].double().exp(), step.memory["at_reveal"]
        known = at_reveal >= 0
        mean = torch.where(known, at_reveal, 0.0).sum(-1) / known.sum(-1).clamp(min=1)
        mean = torch.where(known.any(-1), mean, 1.0)[:, None]
        sure = step.masked & (p > mean + rounding(step.stats["log_proposal"]))
        few = (sure.sum(-1) < self.n)[:, None]
        reveal = torch.where(few, highest(p, step.masked, torch.full_like(step.index, self.n)), sure)
        r = reveal.sum(-1).clamp(min=self.n)
        full = (step.masked == reveal).all(-1)  # nothing is left, and nothing is doubted
        doubts = torch.minimum((-(-r // self.mu)).clamp(min=self.n // 2), r - 1) * ~full
        written = step.response & ~(step.masked & ~reveal)
        doubted = highest(step.memory["before"] - p, written, doubts)
        memory = {
            "before": torch.where(step.response, p, 0.0),
            "at_reveal": torch.where(reveal, p, at_reveal),
        }
        return Decision(reveal & ~doubted, remask=doubted & ~step.masked, finished=full, memory=memory)


@dataclass(frozen=True)
class WINO(ByConfidence):
    """Many positions at once; it masks again the tokens that the rest of the text speaks against.

    Masks with c_n > tau, at most 0.7 |M| in 5..20, else the best; tokens with p_n < tau_back are masked again.

    p_n of a token is what its shadow says, a mask in its place that sees all but the token (`decoding.shadows`): one
    longer pass.  Masked again are the lowest, at most one fewer than the step before revealed (30 at the first), and
    only if this step reveals more than one (Hong et al. 2025).  A sequence without masks is finished.
    """

    key = "wino"
    remasks = reads_revealed = shadows = True
    FIRST = 30  # what counts as the reveals before the first step
    tau: float = 0.6
    tau_back: float = 0.9
    _: KW_ONLY
    confidence: ConfidenceKind = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.tau < 1, f"wino: tau must be at least 0 and below 1, got {self.tau}")
        require(0 < self.tau_back <= 1, f"wino: tau_back must be above 0 and at most 1, got {self.tau_back}")

    @property
    def reads(self) -> frozenset[str]:
        return super().reads | {"log_current"}

    def init_state(self, rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
        return {"revealed": torch.zeros(rows, dtype=torch.long, device=device)}  # by the step before

    def decide(self, step: Step) -> Decision:
        log_c, log_p = self.log_c(step), step.stats["log_current"]
        sure, masks = (step.masked & above(log_c, self.tau)).sum(-1), step.masked.sum(-1)
        most = (7 * masks // 10).clamp(5, 20)
        # No sum of `reveal`: torch 2.13 compiles two choices of which one counts the other in the wrong order.
        revealed = torch.minimum(torch.minimum(sure, most).clamp(min=1), masks)
        reveal = highest(log_c, step.masked, revealed)
        before = torch.where(step.index == 0, self.FIRST, step.memory["revealed"])
        doubted = step.response & ~step.masked & (log_p < math.log(self.tau_back) - rounding(log_p))
        remask = highest(-log_p, doubted, torch.where(revealed > 1, before - 1, 0))
        finished = torch.ones_like(revealed, dtype=torch.bool)
        return Decision(reveal, remask=remask, finished=finished, memory={"revealed": revealed})
