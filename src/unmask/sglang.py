"""SGLang's diffusion language models with a learned order: a sketch.  No server has run it.

It fills in `DllmAlgorithm.step` as SGLang 0.5.23 has it.  The step is tested with a stand-in for SGLang.
It finds algorithms in its own package only: copy this file into sglang/srt/dllm/algorithm/, and start the server
with `--dllm-algorithm Unmask` and an algorithm config of `run`, `price` and `max_steps`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.dllm.algorithm.base import DllmAlgorithm
from torch import Tensor

from unmask.decoding.confidence import confidence, log_probabilities
from unmask.decoding.policies import Learned
from unmask.decoding.policies.rule import Step
from unmask.errors import require
from unmask.models.networks import without_mask
from unmask.models.order_model import load_selector


class Unmask(DllmAlgorithm):
    """An order that reads logits, greedily: `learned(deterministic)` on each block of n positions."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        given = config.algorithm_config
        self.network = load_selector(given["run"])
        require(self.network.read_hidden is None, "SGLang gives logits alone: set model.selector.reads = 'logits'")
        require(not self.network.drawn, "SGLang writes greedily: train without model.selector.drawn")
        self.policy = Learned(self.network, price=given.get("price", 0.0), deterministic=True)
        self.steps = given.get("max_steps", self.network.budget)

    def max_steps(self, block_size: int) -> int:
        return self.steps + 1  # the last finds all written, and leaves its keys and values behind

    @torch.no_grad()
    def step(self, forward_batch: Any, full_logits: Tensor, states: list[Any]) -> list[bool]:
        """Logits [B n, V] of tokens [B n], which change in place.  [B]: which blocks were written before this pass.

        states: [B], the steps that each block has taken; None: none.
        """
        tokens = forward_batch.input_ids.view(-1, self.block_size)  # [B, n]
        self.network.to(tokens.device)
        masked = tokens == self.mask_id
        if forward_batch.dllm_prompt_mask is not None:
            masked = masked & ~forward_batch.dllm_prompt_mask
        index = torch.tensor([taken or 0 for taken in states], device=tokens.device)
        logits = without_mask(full_logits, self.mask_id).view(*tokens.shape, -1)
        step = Step(
            index=index,
            max_steps=torch.full_like(index, self.steps),
            tokens=tokens,
            masked=masked,
            response=masked,
            num_response=masked.sum(-1),
            attention_mask=None,
            uniforms=lambda: torch.empty(0),
            memory={},
            states=lambda: logits[..., :0],
            stats=confidence(log_probabilities(logits)),
        )
        reveal = masked & (self.policy.decide(step).reveal | (index >= self.steps - 1)[:, None])
        forward_batch.input_ids.copy_(torch.where(reveal, logits.argmax(-1), tokens).view(-1))
        states[:] = (index + 1).tolist()
        return (~masked.any(-1)).tolist()


Algorithm = Unmask  # by which SGLang finds it
