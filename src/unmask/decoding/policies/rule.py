"""What a rule is told, what it answers, and what it declares about itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from unmask.decoding.confidence import DRAWN, FEATURES, Confidence, features
from unmask.decoding.schedules import CountKind, reveal_count
from unmask.errors import UserError, require
from unmask.variational.selection import Selection


@dataclass(frozen=True)
class Step:
    """What a rule may look at: b sequences of L positions, each at its own step."""

    index: Tensor  # [b]: i
    max_steps: Tensor  # [b]: S
    tokens: Tensor  # [b, L]
    masked: Tensor  # [b, L] bool: M
    response: Tensor  # [b, L] bool: the N positions that are written, masked or not
    num_response: Tensor  # [b]: N
    attention_mask: Tensor | None  # [b, L] bool; None: no padding
    uniforms: Callable[[], Tensor]  # [b, L + 1] in (0, 1) on call: one per position, one for the whole sequence
    memory: dict[str, Tensor]  # what the rule kept from the step before
    # From the denoiser's pass; absent for a rule that declares `reads = frozenset()`.
    proposal: Tensor = field(default_factory=lambda: torch.empty(0))  # [b, L]: x_n where the rule may look
    stats: Confidence = field(default_factory=lambda: Confidence())  # [b, L] each: what the rule declares in `reads`
    states: Callable[[], Tensor] = lambda: torch.empty(0)  # on call: `hidden`
    log_reveal: Tensor = field(default_factory=lambda: torch.empty(0))  # [b, L]: log p(x_n) when n was revealed
    held_back: Tensor | None = None  # [b, L] bool: masks that wait for all others (`eos_last`); None: nothing

    @property
    def hidden(self) -> Tensor:
        """The denoiser's hidden states [b, L, D]."""
        return self.states()

    def offered(self) -> Step:
        """Without the masks that are held back, where there are others."""
        if self.held_back is None:
            return self
        waiting, others = self.masked & self.held_back, self.masked & ~self.held_back
        return replace(self, masked=torch.where(others.any(-1, keepdim=True), others, self.masked), held_back=waiting)

    def masks(self) -> Tensor:
        """|M| [b], with those that are held back."""
        return (self.masked if self.held_back is None else self.masked | self.held_back).sum(-1)

    def count(self, kind: CountKind = "even") -> Tensor:
        """k_i [b]."""
        masks = self.masks() if kind != "even" else 0
        return reveal_count(self.num_response, self.index, self.max_steps, kind, masks)

    def place(self) -> Tensor:
        """j [b, L]: which response position of its sequence each one is, from 0; meaningless outside the response."""
        return self.response.long().cumsum(-1) - 1


class Decision(NamedTuple):
    """What a rule answers.  `reveal` counts where masked, `remask` and `edit` where revealed; the rest is ignored."""

    reveal: Tensor  # [b, L] bool
    remask: Tensor | None = None  # [b, L] bool
    nothing_selected: Tensor | None = None  # [b] bool: rows in which a selector chose nothing and the rule fell back
    scores: Tensor | None = None  # [b, L]: a network's; the loop refuses them where masked and not finite
    memory: dict[str, Tensor] | None = None  # what to keep for the next step
    edit: Tensor | None = None  # [b, L] bool: the proposal takes the place of the token; a revision where they differ
    finished: Tensor | None = None  # [b] bool: rows of a rule that re-masks which are over once they hold no mask


RULES: dict[str, type[Policy]] = {}  # every rule by its key, in the order of definition


@dataclass(frozen=True)
class Policy:
    """An unmasking rule: a frozen dataclass whose fields are its parameters.  One with a `key` registers itself.

    `name` is how the command line writes it: positional parameters always, keyword-only ones where they differ from
    their default.  `parse_policy(rule.name)` gives the rule back.
    """

    key: ClassVar[str]
    remasks: ClassVar[bool] = False  # it masks again or edits: it runs all S steps, or until it says `finished`
    reads_revealed: ClassVar[bool] = False  # it also looks at what is already revealed: the whole response is projected
    holds_back: ClassVar[bool] = False  # it applies `Step.offered` itself, to a part of the response
    reads_ahead: ClassVar[bool] = False  # inside `blocks` it also looks at the masks of the blocks to come
    reads_hidden: ClassVar[bool] = False  # it looks at `Step.hidden`: to do so undeclared costs a second last MLP
    shadows: ClassVar[bool] = False  # what it reads where a token stands is what a mask in its place says (`shadows`)

    def __init_subclass__(cls) -> None:
        if "key" in vars(cls):
            known = RULES.setdefault(cls.key, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise UserError(f"{cls.__name__}: the key {cls.key!r} is that of {known.__name__}: choose another")
            RULES[cls.key] = cls  # a class that is defined again replaces itself

    @property
    def reads(self) -> frozenset[str]:
        """The keys of `Confidence` that it looks at.  None: it decides before the pass, and only what it reveals is
        projected to the vocabulary."""
        return frozenset()

    @property
    def most_read(self) -> int | None:
        """The most positions of a sequence that `looks_at` gives; None: any number."""
        return None

    @property
    def fuses(self) -> bool:
        """Whether `fuse` changes p_n itself; the loop keeps N x V numbers a sequence for it."""
        return False

    def fuse(self, logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """What takes the place of the denoiser's logits [m, V], and what to keep of it; `kept` [m, V] is 0 at first."""
        raise NotImplementedError

    def looks_at(self, at: Tensor, place: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """[b, L] bool: where it looks now, of the masks (with `reads_revealed` of the response) `at` [b, L].

        `place` [b, L] is that of `Step.place`, `memory` what it kept from the step before.
        """
        return at

    @property
    def name(self) -> str:
        shown, parameters = [], fields_of(type(self))
        for parameter in parameters:
            value = getattr(self, parameter.name)
            if not parameter.kw_only:
                shown.append(as_text(value))
            elif value != default_of(parameter):
                shown.append(parameter.name if value is True else f"{parameter.name}={as_text(value)}")
        if len(shown) == 1 and not parameters[0].kw_only:
            return f"{self.key}:{shown[0]}"
        return f"{self.key}({','.join(shown)})" if shown else self.key

    def check(self, max_steps: int, num_response: Tensor) -> None:
        """Raise UserError where the rule cannot run with `max_steps` on responses of these sizes [B]."""

    def check_logits(self, logits: Tensor) -> None:
        """Raise UserError where the rule cannot run on a denoiser that gives such logits [1, V]."""

    def init_state(self, rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
        """What it keeps between steps, as it is before the first: tensors [rows, ...]."""
        return {}

    def decide(self, step: Step) -> Decision:
        """Which masks to reveal at this step, and what to mask again.  Tensors only: nothing may wait for the device.

        A row at its last step may be asked too, and is overruled.
        """
        raise NotImplementedError


class SelectorNetwork(Protocol):
    """Logits [b, L] from the denoiser's hidden states and confidences [b, L, 3] at time t [b].

    With an attribute `drawn` that is true, confidences are [b, L, 4] (`features`), and the last argument is the tokens
    [b, L], those that were drawn where masked.
    """

    selection: Selection  # its form: `bernoulli` or `nonempty`

    @property
    def budget(self) -> int | None:
        """The max_steps that it was trained for; None: it takes any."""

    @property
    def prices(self) -> tuple[float, ...]:
        """The lowest and the highest price of a step that it was trained for, and then any max_steps; empty: none."""

    def __call__(
        self,
        hidden: Tensor,
        confidences: Tensor,
        masked: Tensor,
        t: Tensor,
        attention_mask: Tensor | None,
        max_steps: Tensor,
        price: Tensor | None,
        /,
        *drawn: Tensor,
    ) -> Tensor: ...


class NetworkPolicy(Policy):
    """What the rules that a network decides have in common."""

    network: SelectorNetwork
    price: float = 0.0  # of a step; 0: the lowest that the network was trained for
    reads_hidden = True

    @property
    def reads(self) -> frozenset[str]:
        return FEATURES | DRAWN if getattr(self.network, "drawn", False) else FEATURES

    def check(self, max_steps: int, num_response: Tensor) -> None:
        T, prices = self.network.budget, self.network.prices
        size = getattr(self.network, "block_size", 0)
        times = sorted({-(-n // size) for n in num_response.tolist()}) if size else [1]
        trained = bool(prices) or T is None or all(T * blocks == max_steps for blocks in times)
        each = f" in each block of {size}, of which there are {' or '.join(map(str, times))}" if size else ""
        require(trained, f"the learned order was trained for T = {T}{each}, not for {max_steps} steps")
        require(not self.price or bool(prices), "the learned order was trained without prices: leave price out")
        if self.price and not prices[0] <= self.price <= prices[1]:
            warnings.warn(
                f"price {self.price:g} is outside the range that was trained, {prices[0]:g} to {prices[1]:g}: "
                "the nearest in it is taken",
                stacklevel=2,
            )

    def logits(self, step: Step) -> Tensor:
        """[b, L] at t = S - 1 - i."""
        read = cast(Confidence, {name: step.stats[name] for name in self.reads})  # type: ignore[literal-required]
        stats = torch.where(step.masked[..., None], features(read), 0.0)
        t = step.max_steps - 1 - step.index
        price = torch.full_like(stats[:, 0, 0], self.price) if self.price else None
        drawn = [torch.where(step.masked, step.proposal, step.tokens)] if self.reads >= DRAWN else []
        return self.network(step.hidden, stats, step.masked, t, step.attention_mask, step.max_steps, price, *drawn)


def fields_of(rule: type[Policy]) -> list[Field[Any]]:
    """What a string may say about a rule: all of its fields but the network."""
    return [parameter for parameter in fields(rule) if parameter.repr]


def default_of(parameter: Field[Any]) -> Any:
    """The default of a field, MISSING where it has none."""
    return parameter.default if parameter.default_factory is MISSING else parameter.default_factory()


def as_text(value: object) -> str:
    """A parameter's value as the command line writes it."""
    if isinstance(value, Policy):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def descending(score: Tensor, among: Tensor) -> Tensor:
    """[b, L]: the positions `among` by falling score (above -inf), ties to the leftmost, and behind them the others."""
    return torch.where(among, score, -torch.inf).sort(dim=-1, descending=True, stable=True).indices


def first(order: Tensor, count: Tensor) -> Tensor:
    """[b, L] bool: the first `count` [b] positions of `order` [b, L]."""
    early = torch.arange(order.shape[-1], device=order.device) < count[:, None]
    return torch.empty_like(early).scatter_(-1, order, early)  # a permutation: every place is written


def highest(score: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """[b, L] bool: the `count` [b] positions `among` [b, L] with the largest score, ties to the leftmost."""
    lowest = torch.finfo(score.dtype).min  # a position that counts is above all others, even with a score of -inf
    return among & first(descending(score.clamp(min=lowest), among), count)


def rounding(values: Tensor) -> float:
    """What is equal up to this is equal: p = 0.9 comes out of a softmax as 0.9 minus a rounding."""
    return 8 * torch.finfo(values.dtype).eps


def above(log_p: Tensor, bar: float) -> Tensor:
    """bool: p > bar, and not by a rounding."""
    return log_p > (math.log(bar) if bar else -math.inf) + rounding(log_p)
