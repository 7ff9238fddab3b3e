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

from unmask.errors import UserError
from unmask.recipe import Optimisation
from unmask.training.checkpoint import Checkpoint, CheckpointError
from unmask.training.collapse import CollapseGuard
from unmask.training.tensors import copied, copy_into, like, whole
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
    """The trainable weights of an objective, its optimiser and everything else that an update changes.

    Weights that are frozen are not in it: they are those of the stage before, which has a folder of its own.
    """

    def __init__(self, objective: nn.Module, optimizer: torch.optim.Optimizer, how: Optimisation) -> None:
        self.parameters = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        self.optimizer = optimizer
        restored_rate = how.restored_rate if how.on_collapse == "restore" else 0.0
        self.guard = CollapseGuard(self.parameters, optimizer, getattr(objective, "budget", None), restored_rate)
        baseline = getattr(objective, "baseline", None)
        self.baseline = baseline if isinstance(baseline, MovingAverage) else None
        self.average = WeightAverage(self.parameters, how.ema) if how.ema else None
        self.update = 0  # updates done: the position in the data and in every random stream
        self.skipped = 0  # of these, how many were skipped because a number was not finite
        self.in_a_row = 0  # skipped ones without a good one since
        self.seconds = 0.0  # spent on the stage so far, over all its processes' lives

    def judge(self, wrong: list[str], recorded: dict[str, float]) -> dict[str, Any] | None:
        """Count a skipped update, ask the collapse guard about one that was made; what there is to report."""
        if wrong:
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            return {"event": f"skipped, {', '.join(wrong)} not finite", "skipped": self.skipped}
        self.in_a_row = 0
        restored_at = self.guard.restored_at
        event = self.guard.after_update(self.update, recorded)
        if self.average is not None and self.guard.restored_at != restored_at:
            self.average.values = {}  # of the weights that are given up; it starts over
        return {"event": event} if event else None

    def tensors(self) -> dict[str, Tensor]:
        """Whole tensors on the CPU.  Every process must take part where they are sharded."""
        return {name: whole(tensor) for name, tensor in self._named()}

    def facts(self) -> dict[str, Any]:
        counters = {name: getattr(self, name) for name in ("skipped", "in_a_row", "seconds")}
        return {**counters, "guard": self.guard.facts()}

    def load(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError in one line where the checkpoint is of another model or recipe."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in checkpoint.tensors.items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = tensor
        try:
            facts = checkpoint.facts
            self.update, self.skipped, self.in_a_row = facts["update"], facts["skipped"], facts["in_a_row"]
            self.seconds = float(facts["seconds"])
            self.guard.load(facts["guard"], parts.get("best", {}), parts.get("candidate", {}))
            copy_into(self.parameters, parts.get("weights", {}))
            self._load_moments(parts.get("moments", {}))
            if self.average is not None and "average" in parts:
                self.average.values = copied(self.parameters)
                copy_into(self.average.values, parts["average"])
            if self.baseline is not None:
                copy_into(self.baseline.state(), parts.get("baseline", {}))
        except UserError as error:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} does not fit the recipe ({str(error).splitlines()[0]}): "
                "give the recipe of the run, or --force to start over"
            ) from None

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            yield f"weights/{name}", parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"moments/{name}/{key}", value
        average = self.average.values if self.average is not None else {}
        baseline = self.baseline.state() if self.baseline is not None else {}
        parts = {"average": average, "best": self.guard.best, "candidate": self.guard.candidate, "baseline": baseline}
        for part, values in parts.items():
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
