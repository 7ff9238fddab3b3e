"""What the tests of training, evaluation and the command line share: a tiny recipe, small models, a fixed task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.jsonl import unsealed
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer
from unmask.tasks.task import Examples, Task

# Two groups of two positions and three symbols: the smallest puzzle that wants an order.
TINY_RECIPE = """
seed = 0
threads = 1

[task]
name = "groups"
groups = 2
group_size = 2
symbols = 3

[model]
width = 16
layers = 1
heads = 2
intermediate = 16
absolute_positions = true

[model.selector]
width = 8
heads = 2

[model.scorer]
width = 8
layers = 1
heads = 2

[denoise]
updates = 3
batch = 8
warmup = 1

[order]
budget = 2
trajectories = 2
batch = 4
updates = 3
warmup = 1

[evaluate]
examples = 20
policies = ["iid", "top-prob"]
budgets = [2, 4]
"""


def small_model(
    *,
    vocab_size: int = 3,
    longest: int = 8,
    budget: int = 3,
    selection: str = "nonempty",
    tau: float = 0.3,
    teacher: str = "",
    prices: tuple[float, ...] = (),
    seed: int = 0,
) -> OrderModel:
    """A random float64 model, far from uniform.  Every weight is random: at zero, a selector says nothing."""
    shape = BackboneConfig(width=16, layers=1, heads=2, intermediate=16, max_length=longest, absolute_positions=True)
    config = OrderModelConfig(
        vocab_size,
        shape,
        selector=SelectorConfig(8, 1, 2, budget, positions=longest, prices=prices),
        scorer=shape,
        teacher=teacher,
        selection=selection,
        tau=tau,
    )
    model = OrderModel(config, word_level_tokenizer([f"w{i}" for i in range(vocab_size)])).double()
    return randomised(model, seed=seed)


@torch.no_grad()
def randomised(module: Any, std: float = 0.4, seed: int = 0) -> Any:
    """The network itself, with other weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.normal_(std=std, generator=generator)
    return module


def padded(sequences: list[list[int]], responses: list[list[bool]], left: bool = False, extra: int = 0) -> Examples:
    """Examples of different lengths in one batch, padded on one side, by `extra` more than needed."""
    length = max(map(len, sequences)) + extra
    shape = (len(sequences), length)
    tokens, response, attention_mask = (
        torch.zeros(shape, dtype=torch.long),
        torch.zeros(shape).bool(),
        torch.zeros(shape),
    )
    for row, (sequence, where) in enumerate(zip(sequences, responses, strict=True)):
        place = slice(length - len(sequence), length) if left else slice(len(sequence))
        tokens[row, place] = torch.tensor(sequence)
        response[row, place] = torch.tensor(where)
        attention_mask[row, place] = 1
    return Examples(tokens, response, attention_mask.bool())


def single(examples: Examples, row: int) -> tuple[Tensor, Tensor]:
    """The tokens and the response of one row without its padding."""
    real = examples.attention_mask[row]
    return examples.tokens[row][real], examples.response[row][real]


@dataclass(frozen=True)
class FixedTask(Task):
    """A task whose example i is row i modulo B of given examples."""

    rows: Examples
    entropy: float | None = None
    name: str = "fixed"
    vocabulary: tuple[str, ...] = ("w0", "w1", "w2")

    @property
    def length(self) -> int:
        return self.rows.tokens.shape[1]

    def examples(self, ids: Tensor, split: str) -> Examples:
        row = ids % len(self.rows)
        return Examples(self.rows.tokens[row], self.rows.response[row], self.rows.attention_mask[row])

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return (tokens == examples.tokens).all(-1)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every weight."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def json_lines(path: Path) -> list[dict]:
    return [unsealed(line) for line in path.read_text().splitlines()]
