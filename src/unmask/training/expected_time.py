"""How long a recipe for a GPU would take without one, told before it starts."""

from __future__ import annotations

import torch

from unmask.display import say
from unmask.models.order_model import OrderModel
from unmask.recipe import Recipe
from unmask.runtime import matrix_speed
from unmask.tasks.task import Task

WORTH_TELLING = 60  # seconds


def warn_of_time(recipe: Recipe, model: OrderModel, task: Task, device: torch.device, precision: str) -> None:
    """One line on stderr where a recipe for a GPU (bf16, compilation) takes minutes on a CPU, in this precision.

    6 operations a parameter and token, as many tokens as a full canvas has, at the speed of one matrix product here.
    The truth may be several times as much; it says whether to wait for minutes or for months.
    """
    if device.type != "cpu" or not (recipe.compile or recipe.precision == "bf16"):
        return
    sequences = recipe.denoise.updates * recipe.denoise.batch if recipe.denoise else 0
    if recipe.order:
        further = recipe.order.updates * recipe.order.batch * recipe.order.trajectories
        own_baseline = recipe.order.denoiser_rate > 0 and not recipe.order.continued  # which learns as much
        sequences += 2 * further if own_baseline else further
    parameters = sum(parameter.numel() for parameter in model.denoiser.parameters())
    speed = matrix_speed(torch.bfloat16 if precision == "bf16" else torch.float32)
    seconds = 6.0 * parameters * task.length * sequences / speed
    if seconds < WORTH_TELLING:
        return
    instead = ", in float32, since bfloat16 is slower here" if precision != recipe.precision else ""
    say(
        f"unmask: this recipe is meant for a GPU; on this CPU it would take {in_words(seconds)} or more "
        f"({sequences:,} sequences of {task.length} tokens, {parameters / 1e6:.3g}M parameters{instead})",
        err=True,
    )


def in_words(seconds: float) -> str:
    for unit, length, enough in (("seconds", 1, 100), ("minutes", 60, 100), ("hours", 3600, 72), ("days", 86400, 1e9)):
        if seconds < length * enough:
            return f"about {seconds / length:,.0f} {unit}"
    return "years"
