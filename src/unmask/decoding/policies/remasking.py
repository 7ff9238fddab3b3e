"""Rules that may mask again what was revealed.  They run all S = max_steps steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unmask.decoding.policies.rule import Decision, Policy, Step, highest
from unmask.errors import require


@dataclass(frozen=True)
class RDM(Policy):
    """Proposals everywhere; L = the floor(N r_i) response positions with the lowest p_n(x_n) (Zheng et al. 2023).

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
    """Score p_n(token) where revealed, p_n(x_n) where masked; the (N (S-1-i)) div S lowest are (or stay) masked.

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
    """ReMDM (Wang et al. 2025) with sigma = min(eta, sigma_max): every revealed token is doubted alike."""

    key = "remdm-cap"
    eta: float = 0.008

    def __post_init__(self) -> None:
        require(0 <= self.eta <= 1, f"remdm-cap: eta must lie in [0, 1], got {self.eta}")

    def sigma(self, step: Step, sigma_max: Tensor) -> Tensor:
        return sigma_max.clamp(max=self.eta).expand(step.masked.shape)


@dataclass(frozen=True)
class ReMDMRescale(_ReMDM):
    """ReMDM (Wang et al. 2025) with sigma = eta sigma_max."""

    key = "remdm-rescale"
    eta: float = 0.015

    def __post_init__(self) -> None:
        require(0 <= self.eta <= 1, f"remdm-rescale: eta must lie in [0, 1], got {self.eta}")

    def sigma(self, step: Step, sigma_max: Tensor) -> Tensor:
        return (self.eta * sigma_max).expand(step.masked.shape)


@dataclass(frozen=True)
class ReMDMConf(_ReMDM):
    """ReMDM (Wang et al. 2025), sigma_n = sigma_max softmax over the revealed of (-p_n at reveal), 0 at the masked."""

    key = "remdm-conf"
    reads = frozenset({"log_proposal"})  # remembered as log_reveal

    def sigma(self, step: Step, sigma_max: Tensor) -> Tensor:
        revealed = step.response & ~step.masked
        score = torch.where(revealed, -step.log_reveal.double().exp(), -torch.inf)
        share = torch.where(revealed, score.softmax(-1), 0.0)  # a row with nothing revealed is NaN before `where`
        return sigma_max * share
