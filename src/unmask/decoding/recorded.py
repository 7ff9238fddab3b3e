"""A denoiser's pass as one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

Trunk = Callable[[Tensor, Tensor | None], Tensor]  # states [b, L, D] of tokens [b, L] and an attention mask
FEW = 2048  # tokens of a pass that keeps the host busier than the device


def recordable(denoiser: Any) -> bool:
    """Whether a pass launches the same kernels whatever the tokens, and nobody listens to what its modules compute.

    A denoiser's class must say so itself: a derived one may do something else, and so may a method that was replaced,
    and weights that are no ordinary parameters, such as quantised ones.
    """
    if not vars(type(denoiser)).get("same_kernels", False) or not isinstance(denoiser, nn.Module):
        return False
    if {"hidden", "cached", "finish"} & vars(denoiser).keys():
        return False
    if any(type(weight) is not nn.Parameter for weight in denoiser.parameters()):
        return False
    heard = any(module._forward_hooks or module._forward_pre_hooks for module in denoiser.modules())
    return not (heard or _has_any_global_hook())  # type: ignore[no-untyped-call]


class Recorded:
    """`hidden` of a recordable denoiser, on a GPU: over few tokens without padding, a CUDA graph from the third pass of
    the same shape on.

    A pass launches about twelve kernels per layer, one after the other from the host.  A graph is one launch, but
    recording it takes as long as a pass.  It knows the addresses of the weights: where one has moved, it begins again.
    """

    def __init__(self, denoiser: Any, hidden: Trunk) -> None:
        self.hidden = hidden  # the denoiser's own, finished or not
        self.weights: list[Tensor] = [*denoiser.parameters(), *denoiser.buffers()]
        self.alike: Any = None  # shape and addresses of the weights at the last pass
        self.passes = 0  # that had these in a row
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tokens, self.states = torch.empty(0), torch.empty(0)  # what the graph reads [b, L] and writes [b, L, D]

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        few = tokens.is_cuda and attention_mask is None and tokens.numel() <= FEW
        if not few or torch.is_autocast_enabled("cuda"):  # whose copies of the weights do not last
            return self.hidden(tokens, attention_mask)
        alike = tokens.shape, [weight.data_ptr() for weight in self.weights]
        if alike != self.alike:
            self.alike, self.passes, self.graph = alike, 0, None
        self.passes += 1
        if self.passes < 3:
            return self.hidden(tokens, None)
        if self.graph is None:
            self._record(tokens)
        assert self.graph is not None
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.states.clone()  # the next pass writes there too

    def _record(self, tokens: Tensor) -> None:
        graph, self.tokens = torch.cuda.CUDAGraph(), tokens.clone()
        with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]  # another GPU's stream records nothing
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.states = self.hidden(self.tokens, None)
                finally:  # while it records, the allocator gives nothing back
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(side)
        self.graph = graph
