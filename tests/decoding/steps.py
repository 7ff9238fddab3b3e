"""Steps for the rules to decide on, as tensors and, row by row, as plain numbers to read a definition with.

Token v has probability w / PARTS at a position, with w a whole number: c and margins tie exactly, and often, and the
rules are given the very floats that the slow readings compare.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product

import torch
from torch import Tensor

from unmask.decoding.confidence import Confidence
from unmask.decoding.policies import Entropy, Margin, Policy, Step, TopProbability

PARTS = 23  # a prime above 2 L: no c equals a bar such as 1 - 1/(r + 1) but for its rounding
V = 4
MASK = V
FREQUENCIES = torch.tensor([0.7, 0.2, 0.1, 0.0], dtype=torch.float64)  # of the tokens, for pc-sampler


@dataclass
class Row:
    """One sequence at one step, as POLICIES.md speaks of it.  Positions are 0..L-1 of the canvas."""

    i: int
    S: int
    response: list[int]
    masked: list[int]
    weights: list[list[int]]  # [L][V], each position's sum to `parts`
    tokens: list[int]
    proposal: list[int]
    at_reveal: list[int]  # [L]: w of the token when it was revealed
    u: list[float]  # [L + 1]
    parts: int = PARTS

    @property
    def N(self) -> int:
        return len(self.response)

    @property
    def revealed(self) -> list[int]:
        return [n for n in self.response if n not in self.masked]

    @property
    def k(self) -> int:
        """N div S, plus one for the first N mod S steps."""
        return self.N // self.S + (1 if self.i < self.N % self.S else 0)

    def c(self, n: int, confidence: str = "max") -> float:
        return (max(self.weights[n]) if confidence == "max" else self.weights[n][self.proposal[n]]) / self.parts

    def margin(self, n: int) -> float:
        first, second = sorted(self.weights[n], reverse=True)[:2]
        return (first - second) / self.parts

    def gap(self, n: int) -> float:
        first, second = sorted(self.weights[n], reverse=True)[:2]
        return math.log(first) - log(second)

    def entropy(self, n: int) -> float:
        """Summed in one order whatever the order of the tokens: shuffled copies tie."""
        p = sorted(w / self.parts for w in self.weights[n] if w)
        return -sum(value * math.log(value) for value in p)

    def p(self, n: int, token: int) -> float:
        return self.weights[n][token] / self.parts


SCORES = {  # the orders that rules may follow, and what ranks a position
    "top-prob": (TopProbability(), lambda row, n: row.c(n)),  # c, not log c
    "top-prob sampled": (TopProbability(confidence="sampled"), lambda row, n: row.c(n, "sampled")),
    "margin": (Margin(), lambda row, n: row.margin(n)),
    "entropy": (Entropy(), lambda row, n: -row.entropy(n)),
}


@dataclass
class Case:
    """The same rows for the rule and for the slow reading."""

    step: Step
    rows: list[Row] = field(default_factory=list)


def best(score: Callable[[int], float], among: Iterable[int], count: int) -> set[int]:
    """Take the best position `count` times; one further right must be strictly better to win."""
    left, taken = sorted(among), set()
    while left and len(taken) < count:
        champion = left[0]
        for n in left:
            if score(n) > score(champion):
                champion = n
        taken.add(champion)
        left.remove(champion)
    return taken


def ordered(score: Callable[[int], float], among: Iterable[int]) -> list[int]:
    """From the best on, ties to the leftmost."""
    left, order = set(among), []
    while left:
        order += best(score, left, 1)
        left -= {order[-1]}
    return order


def blocks_of(response: Sequence[int], size: int, S: int) -> list[tuple[list[int], int]]:
    """The positions of each block, and how many of S steps it gets."""
    b = math.ceil(len(response) / size)
    return [(list(response[k * size : (k + 1) * size]), S // b + (1 if k < S % b else 0)) for k in range(b)]


def log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s))


def product_law(p: dict[int, float]) -> dict[frozenset[int], float]:
    """{set of positions: probability} for independent reveals with probabilities p {position: probability}."""
    law = {}
    for choice in product((False, True), repeat=len(p)):
        chosen = frozenset(n for n, is_chosen in zip(p, choice, strict=True) if is_chosen)
        law[chosen] = math.prod(p[n] if n in chosen else 1 - p[n] for n in p)
    return law


def random_weights(rng: random.Random, parts: int = PARTS, vocab: int = V) -> list[int]:
    """From hardly any preference to certainty."""
    favourite, share = rng.randrange(vocab), rng.choice([0.0, 0.5, 0.8, 0.95, 1.0])
    weights = [0] * vocab
    for _ in range(parts):
        weights[favourite if rng.random() < share else rng.randrange(vocab)] += 1
    return weights


def random_row(rng: random.Random, L: int) -> Row:
    """Any step of any budget, the last too; prompts between the response; nothing masked, some, or all of it."""
    S = rng.randint(1, 9)
    response = [n for n in range(L) if rng.random() < 0.8] or [rng.randrange(L)]
    share = rng.choice([0.0, 0.4, 0.7, 0.7, 1.0])
    masked = [n for n in response if rng.random() < share]
    weights = [random_weights(rng) for _ in range(L)]
    for n in range(L):
        if rng.random() < 0.4:  # a tie, of c and margin and entropy
            weights[n] = rng.sample(weights[rng.randrange(L)], V)
    return Row(
        i=rng.randrange(S),
        S=S,
        response=response,
        masked=masked,
        weights=weights,
        tokens=[MASK if n in masked else rng.randrange(V) for n in range(L)],
        proposal=[rng.choice([v for v in range(V) if w[v]]) for w in weights],
        at_reveal=[rng.choice([max(w), rng.randint(1, PARTS)]) for w in weights],
        u=[rng.random() for _ in range(L + 1)],
    )


def case_of(rows: Sequence[Row], reads_revealed: bool = False, seed: int = 0) -> Case:
    """`reads_revealed`: the rule may look at the whole response.  Where it may not, junk stands."""
    rng, L = random.Random(seed), len(rows[0].weights)

    def shown(value: Callable[[Row, int], float]) -> Tensor:
        junk = [[rng.choice([-99.0, 0.0, 99.0]) for _ in range(L)] for _ in rows]
        for row, values in zip(rows, junk, strict=True):
            for n in row.response if reads_revealed else row.masked:
                values[n] = value(row, n)
        return tensor(junk)

    stats: Confidence = {
        "log_top": shown(lambda row, n: log(row.c(n))),
        "margin": shown(Row.margin),
        "gap": shown(Row.gap),
        "entropy": shown(Row.entropy),
        "log_proposal": shown(lambda row, n: log(row.c(n, "sampled"))),
        "log_current": shown(lambda row, n: log(row.p(n, row.tokens[n])) if n not in row.masked else 99.0),
    }
    u = tensor([row.u for row in rows])
    hidden = torch.randn(len(rows), L, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    step = Step(
        index=torch.tensor([row.i for row in rows]),
        max_steps=torch.tensor([row.S for row in rows]),
        tokens=torch.tensor([row.tokens for row in rows]),
        masked=places([row.masked for row in rows], L),
        response=places([row.response for row in rows], L),
        num_response=torch.tensor([row.N for row in rows]),
        attention_mask=None,
        uniforms=lambda: u,
        memory={},
        proposal=torch.tensor([row.proposal for row in rows]),
        stats=stats,
        states=lambda: hidden,
        log_reveal=tensor([[math.log(w / row.parts) for w in row.at_reveal] for row in rows]),
    )
    return Case(step, list(rows))


def random_case(seed: int, rows: int = 150, L: int = 10, reads_revealed: bool = False) -> Case:
    rng = random.Random(seed)
    return case_of([random_row(rng, L) for _ in range(rows)], reads_revealed, seed)


def plain_row(weights: list[list[int]], i: int = 0, S: int = 1, parts: int = PARTS, **changes: list[int]) -> Row:
    """All of it response, all of it masked, the most probable token proposed, token 0 where revealed."""
    L = len(weights)
    everything, likeliest = list(range(L)), [w.index(max(w)) for w in weights]
    row = Row(i, S, everything, everything, weights, [], likeliest, [parts] * L, [0.5] * (L + 1), parts)
    for name, value in changes.items():
        setattr(row, name, value)
    row.tokens = row.tokens or [MASK if n in row.masked else 0 for n in everything]
    return row


def repeated(step: Step, rows: int, u: Tensor) -> Step:
    """The first row of a step `rows` times, each with its own draws u [rows, L + 1]."""
    same = {}
    for each in fields(step):
        value = getattr(step, each.name)
        if isinstance(value, Tensor):
            same[each.name] = value[:1].expand(rows, *value.shape[1:])
    stats = {name: values[:1].expand(rows, -1) for name, values in step.stats.items()}
    return replace(step, **same, stats=stats, uniforms=lambda: u)


def tensor(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def places(rows: Sequence[Iterable[int]], L: int) -> Tensor:
    """[rows, L] bool."""
    return torch.tensor([[n in row for n in range(L)] for row in map(set, rows)])


def positions(row: Tensor) -> set[int]:
    return {n for n, is_true in enumerate(row.tolist()) if is_true}


def reveals(policy: Policy, case: Case) -> list[set[int]]:
    """What the loop would reveal, one set of positions a row."""
    return [positions(row) for row in policy.decide(case.step).reveal & case.step.masked]


def remasks(policy: Policy, case: Case) -> list[set[int]]:
    """What the loop would mask again."""
    remask = policy.decide(case.step).remask
    assert remask is not None
    return [positions(row) for row in remask & case.step.response & ~case.step.masked]


@dataclass(frozen=True)
class CountingDenoiser:
    """What it says at a position depends on how many masks are left: logits [L + 1, L, V] of (masks, position).

    A hidden state is that pair, so that `logits` can look up what it is asked for.
    """

    table: Tensor

    @property
    def mask_token_id(self) -> int:
        return self.table.shape[-1]

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        masks = (tokens == self.mask_token_id).sum(-1, keepdim=True).expand_as(tokens)
        return torch.stack([masks, torch.arange(tokens.shape[1]).expand_as(tokens)], dim=-1).double()

    def logits(self, hidden: Tensor) -> Tensor:
        masks, position = hidden.long().unbind(-1)
        return self.table[masks, position]

    def p(self, masks: int, n: int) -> list[float]:
        weights = [math.exp(logit) for logit in self.table[masks, n].tolist()]
        return [weight / sum(weights) for weight in weights]


def counting_denoiser(L: int, seed: int = 0, scale: float = 2.0, vocab: int = V) -> CountingDenoiser:
    generator = torch.Generator().manual_seed(seed)
    return CountingDenoiser(scale * torch.randn(L + 1, L, vocab, dtype=torch.float64, generator=generator))
