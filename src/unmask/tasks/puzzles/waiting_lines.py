"""Waiting lines: lists of names that are copied, sorted, or changed at a given or a random place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unmask.errors import did_you_mean, require
from unmask.tasks.diversity import binned, overlap_parts, total_variation
from unmask.tasks.puzzles.puzzle import Puzzle, unpadded
from unmask.tasks.task import Examples, check_choice, check_range, prompt_kept

_ALPHABETICAL = (
    "Abel Ada Alma Amos Anna Asa Bea Ben Boris Cara Carl Clara Dan Dora Dov Ed Ella Emil Eva Finn Flora Fred Gina "
    "Greta Gus Hal Hana Hugo Ian Ida Ines Iris Jack Jane Joel Juan Kai Kate Kim Lars Lea Lena Liam Lola Marc Mary Max "
    "Mia Nora Olaf Omar Otto Paul Pia Quinn Rosa Ruth Sam Sara Tess Theo Uma Vera Zoe"
)
NAMES = tuple(_ALPHABETICAL.split())
OPERATIONS = (
    *("copy", "reverse", "sort", "insert-index", "remove-index", "replace-index"),
    *("insert-random", "remove-random", "replace-random", "shuffle"),
)
_LINE = 3  # where the line starts: behind the operation, the place and the name


@dataclass(frozen=True)
class WaitingLines(Puzzle):
    """A line of n different names after one of OPERATIONS (the rule-graded tasks of ParallelBench, Kang et al. 2025).

        prompt     operation, place or ".", name or ".", the n names and "." up to max_n of them
        response   the names of the new line: n, one less after a removal, one more after an insertion
        p          = 1 / (number of right answers): as many as there are places to remove, insert or replace a name at
                   random, n! - 1 for `shuffle` (every order but the old one), otherwise 1

    The operation is uniform among the chosen ones and n from min_n to max_n.  In `remove-random` the middle tells which
    half holds the gap and so settles the other half: a binary search, ceil(log2 n) steps.
    Held out are `test`, each operation by itself, and each at one n, such as remove-random-16.
    """

    operations: str = "all"  # or some, with commas between them
    min_n: int = 4
    max_n: int = 32
    names: int = 40
    held_out: str = "test"

    name = "waiting-lines"

    def __post_init__(self) -> None:
        for word in self._chosen:
            nearest = did_you_mean(word, OPERATIONS)
            known = f"{nearest}choose all or some of {', '.join(OPERATIONS)}"
            require(word in OPERATIONS, f"task {self.name}: unknown operation {word!r}; {known}")
        check_range(self, "max_n", 3, len(NAMES) - 1)
        check_range(self, "min_n", 3, len(NAMES) - 1)
        low, high = self.min_n, self.max_n
        require(low <= high, f"task {self.name}: min_n = {low} must be at most max_n = {high}")
        check_range(self, "names", self.max_n + 1, len(NAMES))  # one more than in a line: it may be inserted
        check_choice(self, "held_out", self.held_out_splits)

    @cached_property
    def _chosen(self) -> tuple[str, ...]:
        some = tuple(dict.fromkeys(word.strip() for word in self.operations.split(",")))
        return OPERATIONS if self.operations == "all" else some

    @cached_property
    def held_out_splits(self) -> tuple[str, ...]:
        sizes = [n for n in (4, 8, 16, 32) if self.min_n <= n <= self.max_n]
        return ("test", *self._chosen, *(f"{word}-{n}" for word in self._chosen for n in sizes))

    def _asked(self, split: str) -> tuple[tuple[str, ...], int, int]:
        """The operations of the split, its least and its greatest n."""
        if split == "train" or self.held_out == "test":
            return self._chosen, self.min_n, self.max_n
        if self.held_out in OPERATIONS:
            return (self.held_out,), self.min_n, self.max_n
        word, _, n = self.held_out.rpartition("-")
        return (word,), int(n), int(n)

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Names in alphabetical order, then operations, places from 1, and what fills an empty position."""
        places = tuple(str(place + 1) for place in range(self.max_n + 1))
        return (*NAMES[: self.names], *OPERATIONS, *places, ".")

    @property
    def _start(self) -> int:
        """The first position of the response."""
        return _LINE + self.max_n

    @property
    def length(self) -> int:
        return self._start + max(_size(operation, self.max_n) for operation in self._chosen)

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        return tuple(range(self._start)), tuple(range(self._start, self.length))

    @property
    def min_steps(self) -> int:
        """Of the held-out operation that needs most, at its greatest n; tokens that depend on each other are never
        written at once.

        remove-random   each step halves the n possible gaps: ceil(log2 n)
        insert-random   a step finds the place or halves the n + 1, and the last settled tokens are a step of their own
        replace-random  a token that is not the new one says nothing of where that is: one at a time, as in `shuffle`
        """
        operations, _, n = self._asked("test")
        steps = {"remove-random": (n - 1).bit_length(), "insert-random": (n + 1).bit_length()}
        return max({"replace-random": n, "shuffle": n, **steps}.get(operation, 1) for operation in operations)

    @property
    def entropy(self) -> float:
        operations, least, most = self._asked("test")
        logs = [math.log(_num_answers(word, n)) for word in operations for n in range(least, most + 1)]
        return math.fsum(logs) / len(logs)

    def examples(self, ids: Tensor, split: str) -> Examples:
        u, blank = self.example_uniforms(split, ids, 3 + self.names), len(self.vocabulary) - 1
        operations, least, most = self._asked(split)
        numbers = torch.tensor([OPERATIONS.index(word) for word in operations])
        operation = self.names + numbers[(u[:, 0] * len(numbers)).long()]
        n = least + (u[:, 1] * (most - least + 1)).long()
        place = (u[:, 2] * (n + self._is(operation, "insert"))).long()
        drawn = u[:, 3:].argsort(-1)  # [B, names]: the line, and a name that is not in it
        told = torch.where(self._is(operation, "index"), self.names + len(OPERATIONS) + place, blank)
        new = torch.where(self._is(operation, "insert", "replace"), drawn[:, self.max_n], blank)
        line = torch.where(torch.arange(self.max_n) < n[:, None], drawn[:, : self.max_n], blank)
        prompt = torch.cat([torch.stack([operation, told, new], dim=-1), line], dim=-1)
        response = self._written(prompt, place[:, None])[:, 0]
        unchanged, draws = self._is(operation, "shuffle"), 3 + self.names
        while unchanged.any():  # shuffle again until no line is as it was
            draws += self.max_n
            u = self.example_uniforms(split, ids, draws)[:, -self.max_n :]
            order = torch.where(line < blank, u, 1.0).argsort(-1)  # the blanks stay behind
            response[unchanged, : self.max_n] = line.gather(-1, order)[unchanged]
            unchanged &= (response[:, : self.max_n] == line).all(-1)
        tokens = torch.cat([prompt, response], dim=-1)
        return unpadded(tokens, (tokens < self.names) & (torch.arange(self.length) >= self._start))

    def _is(self, operation: Tensor, *words: str) -> Tensor:
        """[B]: whether the names of these operations [B], as tokens, have one of the words."""
        has = [any(word in name.split("-") for word in words) for name in OPERATIONS]
        return torch.tensor(has, device=operation.device)[operation - self.names]

    def _n(self, tokens: Tensor) -> Tensor:
        """n [B] of each prompt."""
        return (tokens[:, _LINE : self._start] < self.names).sum(-1)

    def _written(self, prompt: Tensor, place: Tensor) -> Tensor:
        """[B, K, R]: the new line for each prompt [B, start], if changed at each place [B, K]; `shuffle` copies."""
        operation, new, line = prompt[:, 0], prompt[:, 2, None, None], prompt[:, _LINE:]
        line = torch.where(self._is(operation, "sort")[:, None], line.sort(-1).values, line)  # blanks: the highest id
        line = torch.nn.functional.pad(line, (0, 1), value=len(self.vocabulary) - 1)
        words = ("insert", "remove", "replace", "reverse")
        inserts, removes, replaces, reverses = (self._is(operation, word)[:, None, None] for word in words)
        j, at, n = torch.arange(self.length - self._start, device=line.device), place[..., None], self._n(prompt)
        source = j - (inserts & (j > at)).long() + (removes & (j >= at)).long()  # [B, K, R]: where in the old line
        source = torch.where(reverses & (j < n[:, None, None]), n[:, None, None] - 1 - j, source)
        old = line[:, None].expand(-1, place.shape[1], -1).gather(-1, source.clamp(0, self.max_n))
        return torch.where((inserts | replaces) & (j == at), new, old)

    def _right(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """The responses [B, K, R] for all K places, and which of them are right answers [B, K]; none for `shuffle`."""
        operation = prompt[:, 0]
        place = torch.arange(self.max_n + 1, device=prompt.device).expand(len(prompt), -1)
        told = (prompt[:, 1] - self.names - len(OPERATIONS)) * self._is(operation, "index")  # 0 where none is told
        places = self._n(prompt) + self._is(operation, "insert")
        right = torch.where(self._is(operation, "random")[:, None], place < places[:, None], place == told[:, None])
        return self._written(prompt, place), right & ~self._is(operation, "shuffle")[:, None]

    def _place(self, tokens: Tensor, examples: Examples) -> Tensor:
        """[B]: where a right answer changed the line (0 where it had no choice), -1 for a wrong answer.

        Of a shuffle it is where the first name went: uniform too, but for about 1 / n! of the line that is left out.
        """
        prompt, response = examples.tokens[:, : self._start], tokens[:, self._start :]
        written, right = self._right(prompt)
        equal = right & (written == response[:, None]).all(-1)  # [B, K]
        line = written[:, 0]  # of a shuffle: as it was
        moved = (response.sort(-1).values == line.sort(-1).values).all(-1) & (response != line).any(-1)
        shuffles = self._is(prompt[:, 0], "shuffle")
        place = torch.where(shuffles, (response == line[:, :1]).long().argmax(-1), equal.long().argmax(-1))
        return torch.where((equal.any(-1) | (moved & shuffles)) & prompt_kept(tokens, examples), place, -1)

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return self._place(tokens, examples) >= 0

    def log_likelihood(self, tokens: Tensor, examples: Examples) -> Tensor:
        logs = [[math.log(_num_answers(word, n)) for n in range(self.max_n + 1)] for word in OPERATIONS]
        exact = -torch.tensor(logs, dtype=torch.float64)[examples.tokens[:, 0] - self.names, self._n(examples.tokens)]
        return torch.where(self.valid(tokens, examples), exact, -torch.inf)

    def log_posterior(self, tokens: Tensor) -> Tensor:
        """Every right answer that agrees with what is revealed counts alike; where none does, all of them."""
        instead = "leave it out of task.operations, as --set task.operations=remove-random does"
        unknown = f"task {self.name}: the exact posterior of shuffle is not known: {instead}"
        require("shuffle" not in self._chosen, unknown)
        response, (written, right) = tokens[:, self._start :], self._right(tokens[:, : self._start])
        masked = response == len(self.vocabulary)
        agrees = right & (masked[:, None] | (written == response[:, None])).all(-1)  # [B, K]
        weight = torch.where(agrees.any(-1, keepdim=True), agrees, right).double()
        share = (weight / weight.sum(-1, keepdim=True))[:, None].expand(-1, written.shape[-1], -1)  # [B, R, K]
        p = share.new_zeros(*tokens.shape, len(self.vocabulary))
        p[:, self._start :].scatter_add_(-1, written.transpose(1, 2), share)
        return p.log()

    def codes(self, tokens: Tensor, examples: Examples) -> list[int]:
        """The operation, n, and the place from 1 (0: a wrong answer), two decimal digits each."""
        operation = examples.tokens[:, 0] - self.names
        return ((operation * 100 + self._n(examples.tokens)) * 100 + 1 + self._place(tokens, examples)).tolist()

    def overall(self, codes: list[int]) -> dict[str, float]:
        """The total variation of random places from uniform; with several operations also the valid part of each."""
        figures = {}
        for word, asked, right, share in self._by_operation(codes):
            which = f" {word}" if len(self._chosen) > 1 else ""
            if which and asked.any():
                figures[f"valid{which}"] = int(right.sum()) / int(asked.sum())
            if share is not None:
                figures[f"TV{which}"] = total_variation(share)
        return figures

    def diverse(self, codes: list[int]) -> list[float] | None:
        if not any(map(_is_random, self._chosen)):
            return None
        parts = torch.zeros(len(codes), dtype=torch.float64)
        for _, asked, right, share in self._by_operation(codes):
            if share is None:
                parts[right] = 1.0
            else:
                of_all = share.new_zeros(len(codes), share.shape[1])
                of_all[right] = share
                parts[asked] = overlap_parts(of_all[asked])
        return parts.tolist()

    def _by_operation(self, codes: list[int]) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
        """The codes of which the operation was asked [E], which of them are right [E], and of those the bins of random
        places [R, bins]; None: there are none."""
        code = torch.tensor(codes)
        operation, n, place = code // 10_000, code // 100 % 100, code % 100 - 1
        for word in self._chosen:
            asked = operation == OPERATIONS.index(word)
            right, places = asked & (place >= 0), n + int("insert" in word)
            drawn = _is_random(word) and bool(right.any())
            yield word, asked, right, binned(place[right], places[right], int(places[asked].min())) if drawn else None


def _is_random(operation: str) -> bool:
    return operation == "shuffle" or "random" in operation


def _num_answers(operation: str, n: int) -> int:
    """How many right answers there are, all equally likely."""
    numbers = {"insert-random": n + 1, "remove-random": n, "replace-random": n, "shuffle": math.factorial(n) - 1}
    return max(1, numbers.get(operation, 1))


def _size(operation: str, n: int) -> int:
    """The length of the new line."""
    return n + ("insert" in operation) - ("remove" in operation)
