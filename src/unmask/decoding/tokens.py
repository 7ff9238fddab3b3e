"""Which token a position gets: greedy, temperature, top-k, top-p, guidance, and what is done about the end of sequence.

Position choice is another matter (`policies`).  Rules read the denoiser's own distribution p_n.  Temperature, top-k and
top-p only sample the proposal x_n from it.  Guidance and a forbidden EOS change p_n itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from unmask.errors import require


@dataclass(frozen=True)
class TokenChoice:
    """How tokens are chosen; the same for every rule of a comparison.

    temperature: 0 takes the most probable token, 1 samples from the denoiser's own distribution.
    top_k, top_p: sample among the k most probable (0: all), then among the fewest of those that hold p of the mass.
    guidance: w > 0 adds a pass with the prompt masked, and reads  un + (1 + w) (cond - un)  for the logits.
    min_length: EOS is forbidden at the first `min_length` positions of the response.
    stop_at_eos: a sequence whose remaining masks all lie behind a revealed EOS is finished; they become EOS.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    guidance: float = 0.0
    eos_token_id: int | None = None
    min_length: int = 0
    stop_at_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("top_k", "min_length"):
            value = getattr(self, name)
            require(type(value) is int and value < 2**31, f"{name} must be a whole number, got {value!r}")
        for name in ("temperature", "top_p", "guidance"):
            value = getattr(self, name)
            require(isinstance(value, Real), f"{name} must be a number, got {value!r}")
            finite = name == "top_p" or 0 <= value < float("inf")
            require(finite, f"{name} must not be negative and must be finite, got {value}")
        eos = self.eos_token_id
        require(eos is None or type(eos) is int, f"eos_token_id must be a whole number, got {eos!r}")
        require(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}")
        require(self.top_k >= 0, f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        require(self.min_length >= 0, f"min_length must not be negative, got {self.min_length}")
        needs_eos = self.min_length or self.stop_at_eos
        require(eos is not None or not needs_eos, "min_length and stop_at_eos need an EOS token: give eos_token_id")
        samples = self.top_p < 1 or self.top_k
        require(self.temperature > 0 or not samples, "top_p and top_k choose among samples: give a temperature above 0")

    @property
    def eos_policy(self) -> str:
        """What records say: `none`, `min-length:20`, `stop`, or `min-length:20,stop`."""
        parts = [f"min-length:{self.min_length}"] * bool(self.min_length) + ["stop"] * self.stop_at_eos
        return ",".join(parts) or "none"

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Tokens [M] at a temperature above 0 from logits [M, V] and one uniform each [M], by inverse CDF.

        p_v^(1/temperature) / Z over the tokens kept.  A token of probability zero is never chosen, and of equally
        probable ones top_k and top_p keep those with the lowest ids.
        """
        logits = logits.double()
        # Relative to the most probable before the division, or a tiny temperature takes every token to -inf.
        p = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if not self.top_k and self.top_p == 1:
            return inverse_cdf(p, uniforms)
        p, order = p.sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            p = p[:, : self.top_k] / p[:, : self.top_k].sum(-1, keepdim=True)
        before = p.cumsum(-1) - p  # a token is kept while those before it hold less than top_p
        p = torch.where(before < self.top_p, p, 0.0)
        return order.gather(-1, inverse_cdf(p, uniforms)[:, None])[:, 0]


def inverse_cdf(p: Tensor, uniforms: Tensor) -> Tensor:
    """Indices [M] drawn from weights p [M, V], which need not sum to one; a weight of zero is never drawn."""
    cdf = p.cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=p.shape[-1] - 1)  # NaN is past the end
