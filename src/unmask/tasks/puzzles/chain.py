"""A sparse Markov chain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unmask.tasks.puzzles.puzzle import LETTERS, Puzzle, unpadded
from unmask.tasks.task import LONGEST, Examples, check_range


@dataclass(frozen=True)
class Chain(Puzzle):
    """A Markov chain in which every symbol has few successors:

        p(x) = 1/symbols * prod_{n >= 2} P[x_{n-1}, x_n],    P[s, s'] > 0 for `branching` symbols s' only.

    Given one token its two sides are independent, so step k can reveal the middles of all 2^(k-1) gaps at once:
    2^k - 1 tokens in k steps.
    """

    length: int = 16
    symbols: int = 8
    branching: int = 2

    name = "chain"
    unconditional = True

    def __post_init__(self) -> None:
        check_range(self, "length", 1, LONGEST)
        check_range(self, "symbols", 2, len(LETTERS))
        check_range(self, "branching", 2, self.symbols)  # with one successor the first token determines the rest

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return LETTERS[: self.symbols]

    @property
    def min_steps(self) -> int:
        return self.length.bit_length()  # ceil(log2(length + 1))

    @cached_property
    def _successors(self) -> Tensor:
        """[symbols, branching]: distinct; one of each symbol's lies on a cycle through all symbols, so all are met."""
        cycle = self.structure_uniforms(0, self.symbols).argsort()
        preference = self.structure_uniforms(1, self.symbols, self.symbols)
        preference[cycle, cycle.roll(-1)] = 1.0  # above every uniform
        return preference.topk(self.branching).indices

    @cached_property
    def _probabilities(self) -> Tensor:
        """[symbols, branching]: of the successors, in their order; no two differ by more than a factor of three."""
        weights = 0.5 + self.structure_uniforms(2, self.symbols, self.branching)
        return weights / weights.sum(-1, keepdim=True)

    @cached_property
    def _transitions(self) -> Tensor:
        """P: [symbols, symbols]."""
        empty = torch.zeros(self.symbols, self.symbols, dtype=torch.float64)
        return empty.scatter(1, self._successors, self._probabilities)

    @property
    def entropy(self) -> float:
        # H(x) = log symbols + sum_{n >= 2} sum_s p(x_{n-1} = s) H(P[s])
        branch_entropy = torch.special.entr(self._probabilities).sum(-1)  # [symbols]
        marginal = torch.full_like(branch_entropy, 1 / self.symbols)
        total = math.log(self.symbols)
        for _ in range(1, self.length):
            total += float(marginal @ branch_entropy)
            marginal = marginal @ self._transitions
        return total

    def examples(self, ids: Tensor, split: str) -> Examples:
        u = self.example_uniforms(split, ids, self.length)
        # Inverse CDF over the successors alone, without its last value: rounding can never choose an impossible one.
        thresholds = self._probabilities.cumsum(-1)[:, :-1]
        tokens = [(u[:, 0] * self.symbols).long()]
        for n in range(1, self.length):
            branch = (u[:, n, None] >= thresholds[tokens[-1]]).sum(-1)
            tokens.append(self._successors[tokens[-1], branch])
        return unpadded(torch.stack(tokens, dim=-1))

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return self.log_likelihood(tokens, examples).isfinite()

    def log_likelihood(self, tokens: Tensor, examples: Examples) -> Tensor:
        known = tokens.clamp(0, self.symbols - 1)
        log_p = self._transitions.log()[known[:, :-1], known[:, 1:]].sum(-1) - math.log(self.symbols)
        return torch.where((known == tokens).all(-1), log_p, -torch.inf)

    def log_posterior(self, tokens: Tensor) -> Tensor:
        """p(x_n) ~ f_n(x_n) b_n(x_n), where f_n follows from the left of n and b_n from its right:

            f_n = P' f_{n-1},    b_n = P b_{n+1},    but e(x_n) where n is revealed, uniform beyond the ends.

        A revealed token separates its two sides.  Where two of them have no path between them, f_n alone.
        """
        revealed, P = (tokens < self.symbols)[..., None], self._transitions.to(tokens.device)
        known = torch.nn.functional.one_hot(tokens, self.symbols + 1)[..., :-1].to(P.dtype)  # [B, L, V]

        def followed(places: range, step: Tensor) -> list[Tensor]:
            message, found = torch.full_like(known[:, 0], 1 / self.symbols), list[Tensor]()
            for n in places:
                message = torch.where(revealed[:, n], known[:, n], message @ step if found else message)
                message = message / message.sum(-1, keepdim=True)
                found.append(message)
            return found

        forward = torch.stack(followed(range(self.length), P), dim=1)
        backward = torch.stack(followed(range(self.length)[::-1], P.mT)[::-1], dim=1)
        p = forward * backward
        p = torch.where(p.sum(-1, keepdim=True) > 0, p, forward)
        return (p / p.sum(-1, keepdim=True)).log()
