"""The networks of a training compiled, for as long as it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from unmask.models.backbone import Backbone, Block
from unmask.models.cuda_graphs import Replayed
from unmask.models.networks import Denoiser, Selector

DEEP = 24  # layers; to compile more of them as one program takes minutes, as one block used again and again seconds


@contextmanager
def compiled_networks(owner: nn.Module, replay: bool = True) -> Iterator[None]:
    """The heavy parts of all networks in `owner` compiled, whatever the number of their tokens.

    replay: passes of a denoiser without gradients, beside an order or for its teacher, are recorded as CUDA graphs;
    the weights must then stay where they are in memory.
    """
    modules = list(owner.modules())
    try:
        for module in modules:
            if isinstance(module, Backbone) and len(module.blocks) > DEEP:
                for block in module.blocks:
                    block.forward = torch.compile(block.forward, dynamic=True)
            elif isinstance(module, Backbone | Selector):
                module.run = torch.compile(module.run, dynamic=True)  # type: ignore[method-assign, assignment]
        for module in modules:
            if isinstance(module, Denoiser) and replay:
                module.backbone.run = Replayed(module.backbone.run)  # type: ignore[method-assign]
        yield
    finally:
        for module in modules:
            if isinstance(module, Backbone | Selector):
                vars(module).pop("run", None)
            elif isinstance(module, Block):
                vars(module).pop("forward", None)
