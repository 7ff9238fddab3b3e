"""A pass without gradients as CUDA graphs: the host launches one graph instead of a hundred kernels.

Beside a denoiser that is not trained, an order step does a third of the device's work and nearly all of the host's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unmask.models.backbone import Attend, Spans

Shape = tuple[int, int, int, torch.dtype]  # places, ends, the longest sequence


class Replayed:
    """`Backbone.run`, recorded for shapes that come again and again.

    The weights may change, but must stay where they are in memory.
    """

    AFTER = 2  # passes of a shape before it is recorded: they compile it, and most shapes of a teacher's walk are rare
    MOST = 64  # graphs

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor, Attend], Tensor]) -> None:
        self.run = run
        self.passes: Counter[Shape] = Counter()
        self.graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}
        self.pool: Any = None  # of memory, shared by the graphs: no two of them run at once

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if torch.is_grad_enabled() or not x.is_cuda or not isinstance(attend, Spans):
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
        return hidden.clone()

    def _record(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Spans
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]:
        """The graph, what it reads and what it writes."""
        inputs = x.clone(), cos.clone(), sin.clone(), attend.ends.clone()
        x, cos, sin, ends = inputs
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the next batch is made by another thread meanwhile, and may ask for memory.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            hidden = self.run(x, cos, sin, Spans(ends, attend.longest))
        return graph, inputs, hidden
