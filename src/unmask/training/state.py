"""All that an update changes, as tensors and facts: what a checkpoint holds and a resumed stage starts from.

Examples, times, masks and trajectories are functions of (seed, stage, update, example id), and the learning rate is one
of the update, so the number of updates done says where the data and the random streams are.  Tensors are stored whole,
whatever the number of processes that share them: a checkpoint of n processes is one for m.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from unmask.errors import UserError
from unmask.training.checkpoint import Checkpoint, CheckpointError
from unmask.training.collapse import PATIENCE, CollapseGuard
from unmask.variational.estimators import MovingAverage


class WeightAverage:
    """average_1 = w_1,  average_j = d average_{j-1} + (1 - d) w_j  over the weights w_j after each update."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay, self.parameters = decay, parameters
        self.values: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        if not self.values:
            self.values = copied(self.parameters)
        else:
            torch._foreach_lerp_(list(self.values.values()), list(self.parameters.values()), 1 - self.decay)

    def apply(self) -> None:
        copy_into(self.parameters, self.values)


class StageState:
    """The trainable weights of an objective, its optimiser and everything beside them that goes from update to update.

    Weights that are frozen are not in it: they are those of the stage before, which has a folder of its own.
    """

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: float,
        guard: CollapseGuard | None = None,
    ) -> None:
        self.parameters = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        self.optimizer, self.guard = optimizer, guard
        baseline = getattr(objective, "baseline", None)
        self.baseline = baseline if isinstance(baseline, MovingAverage) else None
        self.average = WeightAverage(self.parameters, ema) if ema else None
        # Where the guard may restore weights: those that have proved good, and later ones that have yet to.
        self.best: dict[str, Tensor] = {}
        self.candidate: dict[str, Tensor] = {}
        self.candidate_at = 0  # the update that they are from
        self.update = 0  # updates done: the position in the data and in every random stream
        self.skipped = 0  # of these, how many were skipped because a number was not finite
        self.in_a_row = 0  # skipped ones without a good one since
        self.rate_scale = 1.0  # below 1 once weights were restored
        self.restored_at: int | None = None  # the update after which that was, the last time
        self.seconds = 0.0  # spent on the stage so far, over all its processes' lives

    def keep_candidate(self) -> None:
        """The weights do well.  They become the best when they still do so `PATIENCE` updates later.

        A bound is that of the weights before its update, and on a GPU it is read an update late: when it says that all
        is well, the weights may have been lost in between.
        """
        if self.candidate:
            if self.update - self.candidate_at < PATIENCE:
                return
            self.best = self.candidate
        self.candidate, self.candidate_at = copied(self.parameters), self.update

    def restore_best(self, rate_scale: float) -> None:
        """The weights at their best, without momentum, to go on at a smaller learning rate, which rises to its size."""
        copy_into(self.parameters, self.best)
        self.candidate = {}
        self.optimizer.state.clear()
        if self.average is not None:
            self.average.values = {}  # of the weights that are given up; it begins anew
        self.rate_scale *= rate_scale
        self.restored_at = self.update
        if self.guard is not None:
            self.guard.reset()

    @property
    def rate_factor(self) -> float:
        """Of the learning rates, beside their schedule: after a restoration they warm up again."""
        if self.restored_at is None:
            return 1.0
        return self.rate_scale * min(1.0, (self.update - self.restored_at + 1) / PATIENCE)

    def tensors(self) -> dict[str, Tensor]:
        """Whole tensors on the CPU.  Every process must take part where they are sharded."""
        return {name: whole(tensor) for name, tensor in self._named()}

    def facts(self) -> dict[str, Any]:
        return {
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rate_scale": self.rate_scale,
            "restored_at": self.restored_at,
            "candidate_at": self.candidate_at,
            "seconds": self.seconds,
            "guard": self.guard.facts() if self.guard is not None else None,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError in one line where the checkpoint is of another model or recipe."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in checkpoint.tensors.items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = tensor
        try:
            facts = checkpoint.facts
            self.update, self.skipped, self.in_a_row = facts["update"], facts["skipped"], facts["in_a_row"]
            self.rate_scale, self.seconds = float(facts["rate_scale"]), float(facts["seconds"])
            self.restored_at, self.candidate_at = facts.get("restored_at"), facts.get("candidate_at", 0)
            if self.guard is not None and facts["guard"] is not None:
                self.guard.load(facts["guard"])
            copy_into(self.parameters, parts.get("weights", {}))
            self._load_moments(parts.get("moments", {}))
            if self.average is not None and "average" in parts:
                self.average.values = copied(self.parameters)
                copy_into(self.average.values, parts["average"])
            for part in ("best", "candidate"):
                if part in parts:
                    setattr(self, part, copied(self.parameters))
                    copy_into(getattr(self, part), parts[part])
            if self.baseline is not None:
                copy_into(self.baseline.state(), parts.get("baseline", {}))
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            said = str(error).splitlines()[0]
            raise CheckpointError(
                f"checkpoint {checkpoint.path} does not fit the recipe ({said}): "
                "give the recipe of the run, or --force to begin anew"
            ) from None

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            yield f"weights/{name}", parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"moments/{name}/{key}", value
        for part, values in (
            ("average", self.average.values if self.average is not None else {}),
            ("best", self.best),
            ("candidate", self.candidate),
            ("baseline", self.baseline.state() if self.baseline is not None else {}),
        ):
            for name, value in values.items():
                yield f"{part}/{name}", value

    def _load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Through the optimiser's own load_state_dict, which knows where each of its numbers belongs."""
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        index = {id(parameter): number for number, parameter in enumerate(ordered)}
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in moments.items():
            owner, _, key = name.rpartition("/")
            parameter = self.parameters[owner]
            shaped = like(tensor, parameter) if tensor.shape == parameter.shape and tensor.ndim else tensor
            found.setdefault(index[id(parameter)], {})[key] = shaped
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": found})


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor on the CPU, gathered where processes share it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, cut and placed as `other` is."""
    tensor = tensor.to(other.device, other.dtype)
    if isinstance(other, DTensor):
        return distribute_tensor(tensor, other.device_mesh, other.placements)
    return tensor


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the names and shapes agree."""
    if odd := sorted(targets.keys() ^ sources.keys()):
        raise UserError(f"{odd[0]} is in one and not in the other")
    for name, target in targets.items():
        source = sources[name]
        if source.shape != target.shape:
            raise UserError(f"{name} has shape {list(source.shape)}, not {list(target.shape)}")
        target.copy_(source if isinstance(source, DTensor) else like(source, target))
