"""A scheduler for diffusers' pipelines of discrete text (LLaDA2) that any rule or learned order of unmask drives.

pipeline = LLaDA2Pipeline(model, UnmaskScheduler("threshold:0.9"), tokenizer)
pipeline = LLaDA2Pipeline(model, UnmaskScheduler("learned(price=0.1)", run="runs/order"), tokenizer)
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_block_refinement import BlockRefinementScheduler, BlockRefinementSchedulerOutput
from torch import Tensor

from unmask import rng
from unmask.decoding.canvas import Canvas, blank_canvas
from unmask.decoding.confidence import log_probabilities
from unmask.decoding.policies import parse_policy
from unmask.decoding.stepper import Stepper
from unmask.decoding.tokens import TokenChoice
from unmask.errors import require
from unmask.models.order_model import load_selector


class UnmaskScheduler(BlockRefinementScheduler):
    """Each step of a block is one of `unmask.generate`: the same rule, the same draws, the same tokens.

    policy: a rule, as `--policy` takes it.  run: for `learned`, the run folder of an order that reads logits.
    num_inference_steps: the most steps of a block; all that is left is revealed at the last.
    seed: of the draws, unless a step is given a generator.

    A rule sees the block alone.  An order was learned on prompt and response together: give it blocks as long as both.
    Of the pipeline's own rule, threshold, minimal_topk and editing_threshold are not read.
    """

    @register_to_config
    def __init__(
        self,
        policy: str = "threshold:0.9",
        run: str = "",
        block_length: int = 32,
        num_inference_steps: int = 32,
        seed: int = 0,
    ) -> None:
        self.network = load_selector(run) if run else None
        self.policy = parse_policy(policy, self.network)
        placed = f"a scheduler is given logits alone, and {policy} asks for passes of its own: give another rule"
        require(not self.policy.shadows, placed)
        reads_hidden = self.network is not None and self.network.read_hidden is not None
        require(not reads_hidden, "a scheduler is given logits alone: train with model.selector.reads = 'logits'")
        self.set_timesteps(num_inference_steps, block_length=block_length)

    def set_timesteps(self, num_inference_steps: int, device: Any = None, block_length: int | None = None) -> None:
        super().set_timesteps(num_inference_steps, device, block_length)
        self.blocks = 0  # begun since

    @torch.no_grad()
    def step(  # type: ignore[override]  # which names the settings of its own rule
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        *,
        mask_token_id: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        sampling_method: str = "auto",
        generator: torch.Generator | None = None,
        return_dict: bool = True,
        **of_another_rule: Any,
    ) -> BlockRefinementSchedulerOutput | tuple[Tensor, ...]:
        """One step of a block of B sequences: logits [B, L, V] for tokens [B, L]; timestep 0 begins the next block."""
        require(mask_token_id is not None, "give mask_token_id: a rule needs a mask token")
        assert mask_token_id is not None
        if int(timestep) == 0:
            greedy = sampling_method == "greedy" or temperature == 0
            choice = TokenChoice() if greedy else TokenChoice(temperature, top_p or 1.0, top_k or 0)
            self._begin(sample, mask_token_id, choice, generator)
        canvas = self.canvas
        # The pipeline may have left some of the last step out, where a sequence has ended.
        canvas.tokens, canvas.masked = sample, canvas.response & (sample == mask_token_id)
        if canvas.live.any():
            self.given.output = model_output
            if self.network is not None:
                self.network.to(sample.device)
            over, _ = self.stepper.advance(canvas, canvas.index.tolist(), 0)
            canvas.live = canvas.live & ~torch.tensor(over, device=sample.device)
        written = canvas.tokens
        transfer = (sample == mask_token_id) & (written != mask_token_id)
        changed = (sample != written) & ~transfer
        known = written.clamp(max=model_output.shape[-1] - 1)[..., None]
        probability = log_probabilities(model_output).gather(-1, known)[..., 0].exp()
        found: Any = (written, transfer, changed, written, probability, model_output)
        return BlockRefinementSchedulerOutput(*found) if return_dict else found

    def check_block_should_continue(self, *, finished: Tensor, **of_another_rule: Any) -> bool:  # type: ignore[override]
        """Until every sequence of the block is written, or has ended before it."""
        return bool((self.canvas.live & ~finished).any())

    def _begin(
        self, sample: Tensor, mask_token_id: int, choice: TokenChoice, generator: torch.Generator | None
    ) -> None:
        ids = torch.arange(len(sample), device=sample.device) + (self.blocks << 32)  # no two blocks share draws
        self.canvas: Canvas = blank_canvas(sample, None, ids, mask_token_id)
        self.policy.check(self.num_inference_steps, self.canvas.num_response)
        self.canvas.memory = self.policy.init_state(len(sample), sample.shape[1], sample.device)
        self.given, longest = _Given(mask_token_id), int(self.canvas.num_response.max())
        settings = self.given, self.policy, self.num_inference_steps, choice, self.canvas, longest
        self.stepper = Stepper(*settings, static=False, compile=False)
        self.stepper.skips = False  # the pipeline has asked the model already, for all sequences
        seed: int = self.config["seed"]
        if generator is not None:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        self.canvas.seed.fill_(rng.signed(seed))
        self.blocks += 1


class _Given:
    """Stands for a denoiser whose logits [B, L, V] somebody else has computed."""

    output: Tensor

    def __init__(self, mask_token_id: int) -> None:
        self.mask_token_id = mask_token_id

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.output

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden
