"""What a task is: examples in, verdicts out."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.errors import UserError, did_you_mean, require
from unmask.rng import Purpose, integers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST = 65_536  # tokens of a sequence


@dataclass(frozen=True)
class Examples:
    """Clean sequences x_0.  Legend: B sequences, L positions (prompt, response and padding together)."""

    tokens: Tensor  # [B, L] int64
    response: Tensor  # [B, L] bool: the positions that are generated; any set, the rest is prompt or padding
    attention_mask: Tensor  # [B, L] bool: False on padding, which is never attended to
    block: Tensor | None = None  # [B, L]: `decoding.blocks`, where the response is no more than one block of several

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Examples:
        block = None if self.block is None else change(self.block)
        return Examples(change(self.tokens), change(self.response), change(self.attention_mask), block)

    @property
    def position(self) -> Tensor:
        """[B, L]: the position of each token in its sequence without padding; it names a random draw."""
        return self.attention_mask.long().cumsum(-1) - 1

    def rows(self, rows: Tensor) -> Examples:
        """The examples of these rows [R], on the CPU; a row may come several times."""
        there = to_device(rows, self.tokens.device)
        chosen = self._each(lambda part: part[there])
        vars(chosen).update(num_tokens=self.num_tokens[rows], num_response=self.num_response[rows], first=self.first)
        return chosen

    @cached_property
    def num_tokens(self) -> Tensor:
        """[B], on the CPU: without padding."""
        return self.attention_mask.sum(-1).cpu()

    @cached_property
    def num_response(self) -> Tensor:
        """N [B], on the CPU."""
        return self.response.sum(-1).cpu()

    @cached_property
    def first(self) -> int:
        """No row has a response before this column."""
        return int(self.response.any(0).int().argmax())

    def to(self, device: torch.device | str) -> Examples:
        """On the device; the lengths stay on the host, which would have to wait for them."""
        there = self._each(lambda part: to_device(part, device))
        vars(there).update(num_tokens=self.num_tokens, num_response=self.num_response, first=self.first)
        return there


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device; the copy to a GPU is asynchronous, from pinned memory."""
    if tensor.is_cpu and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Task(ABC):
    """A source of examples with an exact checker.  Example `i` of a split is a pure function of (split, i).

    A task is a subclass of this class and a frozen dataclass, whose fields are the options that a recipe may set, each
    with a default.  Only `name`, `vocabulary`, `length`, `examples` and `valid` are required.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What records and messages call the task."""

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """The tokens, in the order of their ids.  The mask token is not among them: its id is len(vocabulary)."""

    @property
    @abstractmethod
    def length(self) -> int:
        """L, the same for every example."""

    @abstractmethod
    def examples(self, ids: Tensor, split: str) -> Examples:
        """The examples with these ids ([B] int64, any non-negative values) of the split `train` or `test`."""

    @abstractmethod
    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        """[B] bool: whether each row of `tokens` [B, L] is a right answer to the prompt of the same row."""

    def prompted(self, prompt: str) -> Examples:
        """One example with a prompt of the user's; what stands in its response is no answer."""
        raise UserError(f"task {self.name} takes no prompt of yours: leave out --prompt")

    @property
    def has_checker(self) -> bool:
        """False: `valid` is no more than equality with the example, and nothing to learn from or to report."""
        return True

    def metrics(self, tokens: Tensor, examples: Examples) -> dict[str, Tensor]:
        """Further verdicts on the same tokens, [B] bool each; records hold their means under these names."""
        return {}

    def codes(self, tokens: Tensor, examples: Examples) -> list[Any] | None:
        """A number or a text for each answer, which `overall` needs to know; not asked of an unconditional task."""
        return None

    def overall(self, codes: list[Any]) -> dict[str, float]:
        """Figures of a whole evaluation that are no means over examples; they stand beside the metrics."""
        return {}

    def diverse(self, codes: list[Any]) -> list[float] | None:
        """A number for each answer; their mean is the score of what is valid and diverse, and their spread tells about
        its sampling error.  None: there is no such score."""
        return None

    def log_likelihood(self, tokens: Tensor, examples: Examples) -> Tensor | None:
        """[B] exact log p(response | prompt) in nats (-inf where impossible), or None where it is not known."""
        return None

    def log_posterior(self, tokens: Tensor) -> Tensor | None:
        """[B, L, V] exact log p(x_n = v | what is not masked in `tokens` [B, L]) on the response, where known."""
        return None

    @property
    def entropy(self) -> float | None:
        """Expected -log p(response | prompt) of an example in nats, where known exactly."""
        return None

    @property
    def min_steps(self) -> int | None:
        """The fewest parallel steps in which a perfect denoiser can sample the task exactly, where known."""
        return None

    @property
    def unconditional(self) -> bool:
        """Whether every example has the same prompt (or none), so that distinct samples can be counted."""
        return False

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """The positions arranged for pictures: groups of positions that belong together, side by side."""
        return (tuple(range(self.length)),)

    @property
    def grid(self) -> tuple[int, int]:
        """The columns of the square in which the tokens stand, and of a box in it; (0, 0): they stand in a line."""
        return 0, 0

    def kind(self, token: int) -> str:
        """The class of a token, by which pictures sum up: digit, operator, word, other or EOS."""
        text = self.text([token]).strip()
        if token == self.eos_token_id:
            return "EOS"
        if text.isdigit():
            return "digit"
        if any(letter.isalpha() for letter in text):
            return "word"
        return "operator" if text and not set(text) - set("+-*/=<>%^()×÷") else "other"

    def drawing(self, tokens: Sequence[int]) -> str:
        """An SVG of what these tokens stand for, where that is more than a text; else ""."""
        return ""

    @property
    def test_examples(self) -> int | None:
        """The number of held-out examples; None: as many as are asked for."""
        return None

    @property
    def held_out(self) -> str:
        """What the split `test` is.  A task with several held-out splits has an option of this name."""
        return "test"

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        """The values that `held_out` may have."""
        return ("test",)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence and fills the rest of a response, where there is one."""
        return None

    @property
    def text_tokenizer(self) -> Tokenizer | None:
        """What turns text into the tokens of the task, where these are text."""
        return None

    def text(self, tokens: Sequence[int]) -> str:
        """How tokens read up to the first EOS; without a tokenizer, their names side by side."""
        ids = list(tokens)
        if self.eos_token_id in ids:
            ids = ids[: ids.index(self.eos_token_id)]
        if self.text_tokenizer is None:
            return " ".join(self.vocabulary[token] for token in ids)
        return self.text_tokenizer.decode(ids, skip_special_tokens=False)

    def order(self, seed: int, stage: int, positions: Tensor) -> Tensor:
        """[B]: the ids of the training examples at these positions [B] of a stage; here they are drawn at random."""
        return integers(seed, Purpose.EXAMPLE, stage, positions)

    def token_frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """[V]: the share of each token in the responses of 1,000 training examples, counted once at least."""
        examples = self.examples(self.order(0, 0, torch.arange(1000)), "train")
        written = examples.tokens[examples.response & examples.attention_mask]
        counts = torch.bincount(written, minlength=len(self.vocabulary)).clamp(min=1)
        return (counts / counts.sum()).to(device)

    def on_split(self, split: str) -> Task:
        """The same task with another held-out split."""
        splits, nearest = self.held_out_splits, did_you_mean(split, self.held_out_splits)
        known = f"{nearest}choose from {', '.join(splits)}"
        require(split in splits, f"task {self.name} has no held-out split {split!r}; {known}")
        return self if split == self.held_out else dataclasses.replace(self, held_out=split)  # type: ignore[type-var]

    def check(self) -> None:
        """Raise UserError where the examples break the contract in a way that would fail only later."""
        examples = self.examples(torch.arange(2), "train")
        kind = f"task {self.name}: examples must be unmask.tasks.task.Examples, not {type(examples).__name__}"
        require(isinstance(examples, Examples), kind)
        expected, last = [2, self.length], len(self.vocabulary) - 1
        for field in ("tokens", "response", "attention_mask"):
            shape = list(getattr(examples, field).shape)
            wrong = f"task {self.name}: examples of 2 ids have {field} of shape {shape}, expected {expected}"
            require(shape == expected, wrong)
        low, high = int(examples.tokens.min()), int(examples.tokens.max())
        wrong = f"task {self.name}: tokens run from {low} to {high}, but the vocabulary has the ids 0 to {last}"
        require(0 <= low <= high <= last, wrong)


def check_range(task: Task, option: str, low: int, high: int) -> None:
    """Raise UserError unless low <= option <= high."""
    value = getattr(task, option)
    require(low <= value <= high, f"task {task.name}: set {option} between {low} and {high}, not {value}")


def check_choice(task: Task, option: str, choices: Sequence[str]) -> None:
    """Raise UserError unless the option is one of the choices."""
    value, listed = getattr(task, option), f"{', '.join(choices[:-1])} or {choices[-1]}"
    require(value in choices, f"task {task.name}: set {option} to {listed}, not {value!r}")


def check_split(split: str) -> None:
    """Raise UserError unless the split is one that `examples` knows."""
    require(split in ("train", "test"), f"unknown split {split!r}: use train or test")


def asked(task: Task, prompt: Sequence[int], prompt_length: int) -> Examples:
    """One example with these tokens as its prompt, padded on the left to `prompt_length`, and room for a response."""
    size, place = len(prompt), torch.arange(task.length)[None]
    long = f"the prompt has {size} tokens, and task {task.name} has room for {prompt_length}: give a shorter prompt"
    require(size <= prompt_length, long)
    tokens = torch.full((1, task.length), task.eos_token_id or 0)
    tokens[0, prompt_length - size : prompt_length] = torch.tensor(prompt, dtype=torch.long)
    return Examples(tokens, place >= prompt_length, place >= prompt_length - size)


def check_no_mask(examples: Examples, mask_token_id: int, text: Callable[[list[int]], str]) -> None:
    """Raise UserError where a sequence holds the mask token itself: nothing tells it from what is to be written."""
    for row in (examples.tokens == mask_token_id).any(-1).nonzero()[:1, 0].tolist():
        shown = text(examples.tokens[row][examples.attention_mask[row]].tolist())
        raise UserError(f"take the mask token, which stands for what is to be written, out of the text {shown[:80]!r}")


def check_example(task: Task, number: int) -> None:
    """Raise UserError where the task has no held-out example of this number."""
    limit = task.test_examples
    known = number >= 0 and (limit is None or number < limit)
    require(known, f"examples are numbered from 0{'' if limit is None else f' to {limit - 1}'}, got {number}")


def prompt_kept(tokens: Tensor, examples: Examples) -> Tensor:
    """[B]: whether every position outside the response is as it was given."""
    return ((tokens == examples.tokens) | examples.response).all(-1)


def random_spans(u: Tensor, sizes: Tensor, length: int) -> Tensor:
    """[B, L] bool: a span of up to half of the first n positions, n from `sizes` [B], by the uniforms u [B, 2]."""
    span = 1 + (u[:, 0] * (sizes // 2)).long()
    start = (u[:, 1] * (sizes - span + 1)).long()
    place = torch.arange(length)
    return (place >= start[:, None]) & (place < (start + span)[:, None])


def around(task: Task, examples: Examples, row: int) -> tuple[str, str]:
    """The texts that are given before and behind the response of a row."""
    tokens, response = examples.tokens[row], examples.response[row]
    given, behind = examples.attention_mask[row] & ~response, response.cumsum(-1) > 0
    return task.text(tokens[given & ~behind].tolist()), task.text(tokens[given & behind].tolist())
