"""Which token a position gets: greedy, temperature, top-k, top-p, guidance, what is forbidden, and where it ends.

Position choice is another matter (`policies`).  Rules read the denoiser's own distribution p_n.  Temperature, top-k and
top-p only sample the proposal x_n from it.  All else changes the logits, and with them p_n itself, in this order:
guidance, repetition_penalty, what is forbidden (suppress_tokens, EOS before min_length), processors, and the tokens
allowed per position (`unmask.generate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from unmask.errors import require

Processor = Callable[[Tensor, Tensor], Tensor]  # (input_ids [m, L], scores [m, V]) -> scores [m, V]
# bool [L, V] or [B, L, V], or a function (sequences [m, L], rows [m], positions [m]) -> bool [m, V]
Allowed = Tensor | Callable[[Tensor, Tensor, Tensor], Tensor]


class Decodes(Protocol):
    """The one thing that is asked of a tokenizer."""

    def decode(self, token_ids: list[int], /) -> str: ...


@dataclass(frozen=True)
class TokenChoice:
    """How tokens are chosen; the same for every rule of a comparison.

    temperature: 0 takes the most probable token, 1 samples from the denoiser's own distribution.
    top_k, top_p: sample among the k most probable (0: all), then among the fewest of those that hold p of the mass.
    guidance: w > 0 adds a pass with the prompt masked, and reads  un + (1 + w) (cond - un)  for the logits.
    cfg_keep_tokens: tokens of the prompt that guidance does not mask, such as those of a chat template (dLLM).
    eos_token_id: the end of sequence, or several.  What a stop fills up becomes the first, also where suppress_tokens,
        min_length or `allowed` forbid it: they say what may be written, and this is padding behind the end.
    min_length: EOS is forbidden at the first `min_length` positions of the response.
    stop_at_eos: a sequence whose remaining masks all lie behind a revealed EOS is finished; they become EOS.
    eos_last: a mask whose proposal is EOS is not offered to the rule while there is another (inside `blocks`, another
        in the block): what LLaDA's `confidence_eos_eot_inf` is for.  Not with rules that re-mask or read nothing.
    suppress_tokens: never written.  Every EOS among them leaves stop_at_eos without an end, and is refused.
    repetition_penalty: r divides a positive logit and multiplies a negative one of every token that stands anywhere
        else in the sequence, prompt included (Hugging Face's definition).
    stop_strings: a sequence is finished when the text of its response up to the first mask holds one of them; the
        masks left become EOS.  Needs a tokenizer: anything with `decode(token_ids)`.
    processors: Hugging Face's LogitsProcessor: called with the sequence [m, L] and the scores [m, V] of m positions.
        Masks and padding are the mask token in it: one that reads the length or the last tokens sees padding.  Not
        compiled.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    guidance: float = 0.0
    eos_token_id: int | Sequence[int] | None = None
    min_length: int = 0
    stop_at_eos: bool = False
    eos_last: bool = False
    suppress_tokens: Sequence[int] = ()
    repetition_penalty: float = 1.0
    stop_strings: str | Sequence[str] = ()
    tokenizer: Decodes | None = None
    processors: Sequence[Processor] = ()
    cfg_keep_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("top_k", "min_length"):
            value = getattr(self, name)
            require(type(value) is int and value < 2**31, f"{name} must be a whole number, got {value!r}")
        for name in ("temperature", "top_p", "guidance"):
            value = getattr(self, name)
            require(isinstance(value, Real), f"{name} must be a number, got {value!r}")
            finite = name == "top_p" or 0 <= value < float("inf")
            require(finite, f"{name} must not be negative and must be finite, got {value}")
        if self.eos_token_id is not None:
            eos = _token_ids(self.eos_token_id, "eos_token_id must be one token id or several, from 0 on")
            object.__setattr__(self, "eos_token_id", eos)
        for name in ("suppress_tokens", "cfg_keep_tokens"):
            ids = getattr(self, name)
            require(isinstance(ids, Iterable), f"{name} must be token ids, got {ids!r}")
            object.__setattr__(self, name, _token_ids(ids, f"{name} must be token ids from 0 on"))
        if isinstance(self.processors, Iterable):  # an iterator would be empty when it is used
            object.__setattr__(self, "processors", tuple(self.processors))
        penalty = self.repetition_penalty
        sound = isinstance(penalty, Real) and 0 < penalty < float("inf")
        require(sound, f"repetition_penalty must be above 0 and finite, got {penalty!r}")
        several = isinstance(self.stop_strings, Iterable) and not isinstance(self.stop_strings, str)
        strings = list(self.stop_strings) if several else [self.stop_strings]
        require(all(isinstance(each, str) and each for each in strings), f"stop_strings must be texts, got {strings!r}")
        object.__setattr__(self, "stop_strings", tuple(strings))
        needs = "stop_strings need a tokenizer, anything with decode(token_ids): give tokenizer"
        require(not strings or hasattr(self.tokenizer, "decode"), needs)
        functions = isinstance(self.processors, tuple) and all(callable(each) for each in self.processors)
        require(functions, "processors must be a list of functions (input_ids, scores)")
        require(not self.cfg_keep_tokens or self.guidance > 0, "cfg_keep_tokens needs guidance: give it above 0")
        require(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}")
        require(self.top_k >= 0, f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        require(self.min_length >= 0, f"min_length must not be negative, got {self.min_length}")
        needs_eos = self.min_length or self.stop_at_eos or self.eos_last or strings
        what = "min_length, stop_at_eos, eos_last and stop_strings"
        require(bool(self.eos_ids) or not needs_eos, f"{what} need an EOS token: give eos_token_id")
        ends = not self.stop_at_eos or bool({*self.eos_ids} - {*self.suppress_tokens})
        require(ends, "stop_at_eos never stops where suppress_tokens holds every EOS: leave one of them out")
        samples = self.top_p < 1 or self.top_k
        require(self.temperature > 0 or not samples, "top_p and top_k choose among samples: give a temperature above 0")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.eos_token_id or ()  # type: ignore[return-value]  # a tuple, once it is checked

    def is_eos(self, tokens: Tensor) -> Tensor:
        """bool, of any shape."""
        found = tokens == self.eos_ids[0]
        for other in self.eos_ids[1:]:
            found = found | (tokens == other)
        return found

    @property
    def eos_policy(self) -> str:
        """What records say: `none`, `min-length:20`, `stop`, or `min-length:20,stop`."""
        parts = [f"min-length:{self.min_length}"] * bool(self.min_length) + ["stop"] * self.stop_at_eos
        return ",".join(parts + ["last"] * self.eos_last) or "none"

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


def _token_ids(given: Any, wanted: str) -> tuple[int, ...]:
    """One id or several, also of numpy or torch."""

    def plain(each: Any) -> Any:
        return each.tolist() if hasattr(each, "tolist") else each

    several = plain(given)
    ids = [plain(each) for each in several] if isinstance(several, Iterable) else [several]
    require(all(type(each) is int and each >= 0 for each in ids), f"{wanted}, got {given!r}")
    return tuple(ids)


def penalised(logits: Tensor, others: Tensor, penalty: float) -> Tensor:
    """repetition_penalty: logits [m, V]; others [m, V]: how often a token stands elsewhere in the sequence."""
    return torch.where(others > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def inverse_cdf(p: Tensor, uniforms: Tensor) -> Tensor:
    """Indices [M] drawn from weights p [M, V], which need not sum to one; a weight of zero is never drawn."""
    cdf = p.cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=p.shape[-1] - 1)  # NaN is past the end
