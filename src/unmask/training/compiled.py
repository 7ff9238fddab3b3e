"""The networks of a training made faster while it lasts: compiled, and passes without gradients as CUDA graphs.

Of a graph the host launches one instead of a hundred kernels.  Beside a denoiser that is not trained, an order step
does a third of the device's work and nearly all of the host's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unmask.models.backbone import Backbone, Block
from unmask.models.networks import Denoiser, Selector
from unmask.models.packing import Attend, Spans

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
                module.run = torch.compile(module.run, dynamic=True)  # type: ignore[method-assign]
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


Shape = tuple[int, int, int, torch.dtype]  # places, ends, the longest sequence


class Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]  # x, cos, sin and ends, where the graph reads them
    hidden: Tensor  # where it writes


class Replayed:
    """`Backbone.run`, recorded for shapes that come again and again.

    The weights may change, but must stay where they are in memory.  No two graphs run at once: they share all their
    memory, which is that of the largest.  A result holds until the next pass; `Layout.put` copies it at once.
    """

    AFTER = 2  # passes of a shape before it is recorded: they compile it, and most shapes of a teacher's walk are rare
    MOST = 256  # graphs

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor, Attend], Tensor]) -> None:
        self.run = run
        self.passes: Counter[Shape] = Counter()
        self.graphs: dict[Shape, Recorded] = {}
        self.pool: Any = None  # of the memory inside the graphs
        self.rooms: dict[str, Tensor] = {}  # by name: the memory of what goes in and out

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if torch.is_grad_enabled() or not isinstance(attend, Spans) or not self._on_gpu(x):
            return self.run(x, cos, sin, attend)
        shape = (x.shape[1], len(attend.ends), attend.longest, x.dtype)
        if shape not in self.graphs:
            self.passes[shape] += 1
            if self.passes[shape] <= self.AFTER or len(self.graphs) == self.MOST:
                return self.run(x, cos, sin, attend)
            self.graphs[shape] = self._record(x, cos, sin, attend)
        graph, inputs, hidden = self.graphs[shape]
        for place, given in zip(inputs, (x, cos, sin, attend.ends), strict=True):
            place.copy_(given)
        graph.replay()
        return hidden

    def _on_gpu(self, x: Tensor) -> bool:
        return x.is_cuda

    def _record(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Spans) -> Recorded:
        inputs = self._room("x", x), self._room("cos", cos), self._room("sin", sin), self._room("ends", attend.ends)
        hidden = self._room("hidden", x)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the next batch is made by another thread meanwhile, and may ask for memory.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            hidden.copy_(self.run(*inputs[:3], Spans(inputs[3], attend.longest)))
        return Recorded(graph, inputs, hidden)

    def _room(self, name: str, like: Tensor) -> Tensor:
        """Memory for a tensor like this one; with some to spare, so that larger ones to come find it large enough."""
        room = self.rooms.get(name)
        if room is None or room.numel() < like.numel():
            room = self.rooms[name] = like.new_empty(like.numel() * 5 // 4)
        return room[: like.numel()].view(like.shape)
