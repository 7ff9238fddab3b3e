"""An unmasking rule as a teacher: its order, with the true tokens filled in, is where the posterior starts.

The rule decides as it would in generation, but what it reveals is x_0's own token.  With l_n the step, counted from 0,
at which it reveals n, the scores start at

    alpha_n = e + (1 - 2 e) (1 - l_n / max_m l_m),      e = 1/20,

as far apart as they can be: the least is blurred by the temperature.  What is revealed at one step ties, and has q = 1
together.  A rule decides by the confidences that the selector reads, so the selector can follow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unmask.decoding.confidence import Confidence
from unmask.decoding.policies import Policy, Step
from unmask.models.networks import Denoiser
from unmask.tasks.task import Examples, to_device
from unmask.training.reading import read_denoiser, selector_features, with_layout

EDGE = 1 / 20  # e


@torch.no_grad()
def reveal_steps(
    rule: Policy,
    denoiser: Denoiser,
    examples: Examples,
    budget: int,
    features: Callable[[Tensor], Tensor] = selector_features,
) -> Tensor:
    """l [B, L]: the step at which the rule reveals each response position of x_0, 0 outside the response.

    The last of the budget's steps reveals all that is left.  features may be the same compiled.
    """
    masked = examples.response.clone()  # [B, L]
    steps = torch.zeros_like(examples.tokens)
    for index in range(budget - 1):
        num_masked = masked.sum(-1).cpu()  # [B]: the device is waited for
        rows = num_masked.nonzero()[:, 0]
        if not len(rows):
            break
        left, layout = with_layout(examples.rows(rows), denoiser)
        there = to_device(rows, masked.device)
        at = masked[there]  # [R, L]
        reading = read_denoiser(denoiser, left.tokens, at, layout, int(num_masked.sum()))
        top, margin, entropy = reading.spread(features(reading.logits)).unbind(-1)
        ones = torch.ones_like(left.tokens[:, 0])
        step = Step(
            index * ones,
            budget * ones,
            left.tokens,
            at,
            left.response,
            left.response.sum(-1),
            left.attention_mask,
            uniforms=_nothing_drawn,
            memory={},
            stats=Confidence(log_top=top.log(), margin=margin, entropy=entropy),
        )
        masked[there] = at & ~rule.decide(step).reveal
        steps += masked
    return steps


def _nothing_drawn() -> Tensor:
    raise AssertionError("a teacher draws nothing")


def first_logits(steps: Tensor, response: Tensor) -> Tensor:
    """logit alpha [B, L] in float32 from l [B, L]."""
    last = torch.where(response, steps, 0).amax(-1, keepdim=True).clamp(min=1)
    return torch.logit(EDGE + (1 - 2 * EDGE) * (1 - steps / last))
