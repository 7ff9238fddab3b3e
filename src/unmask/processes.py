"""The processes that `torchrun` or `accelerate launch` started for one command: one, unless they did."""

from __future__ import annotations

import os
from typing import TypeVar

import torch

Item = TypeVar("Item")


class Processes:
    """Who shares the work, and how what they found comes together.  Accelerate is imported where there are many."""

    def __init__(self, cpu: bool = False) -> None:
        self.index, self.count = 0, 1
        self.device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            state = PartialState(cpu=cpu)
            self.index, self.count, self.device = state.process_index, state.num_processes, state.device

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def share(self, ids: torch.Tensor) -> torch.Tensor:
        """The part of `ids` that this process works on: neighbours stay together."""
        return ids.tensor_split(self.count)[self.index]

    def gather(self, item: Item) -> list[Item]:
        """The item of every process, in their order, on all of them."""
        if self.count == 1:
            return [item]
        from accelerate.utils import gather_object

        gathered: list[Item] = gather_object([item])
        return gathered
