"""Tensors that processes may share: gathered, cut again and copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from unmask.errors import UserError


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor, where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor on the CPU."""
    return gathered(tensor.detach()).cpu()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, cut and placed as `other` is."""
    tensor = tensor.to(other.device, other.dtype)
    return distribute_tensor(tensor, other.device_mesh, other.placements) if isinstance(other, DTensor) else tensor


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Raises UserError unless the names and shapes agree."""
    if odd := sorted(targets.keys() ^ sources.keys()):
        raise UserError(f"{odd[0]} is in one and not in the other")
    for name, target in targets.items():
        source = sources[name]
        if source.shape != target.shape:
            raise UserError(f"{name} has shape {list(source.shape)}, not {list(target.shape)}")
        target.copy_(source if isinstance(source, DTensor) else like(source, target))
