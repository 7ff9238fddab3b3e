"""A batch that sequences join and leave between its steps: continuous batching for prompts that come one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unmask import rng
from unmask.decoding.canvas import blank_canvas
from unmask.decoding.generate import Engine, Generation, generation
from unmask.decoding.stepper import Stepper
from unmask.errors import require


class OpenBatch:
    """The rows of one engine with fixed shapes, each busy with a sequence of L positions or idle.

    A sequence gets what it gets alone, bit for bit: what `engine.generate` writes for the same prompt, seed and id.
    """

    def __init__(self, engine: Engine, length: int, padded: bool, device: torch.device) -> None:
        """padded: whether its sequences have padding; all of them or none."""
        require(
            engine.fixed_shapes and engine.batch_size is not None, "an open batch needs fixed_shapes and batch_size"
        )
        assert engine.batch_size is not None
        self.engine, self.device, B = engine, device, engine.batch_size
        self.sizes: list[int | None] = [None] * B  # N of the sequence in each row; None: it idles
        self.steps, self.masks = [0] * B, 0  # steps taken by each row, masks left in all of them
        with engine.mode():
            nothing = torch.full((B, length), engine.denoiser.mask_token_id, device=device)
            self.canvas = blank_canvas(nothing, None, None, engine.denoiser.mask_token_id)
            self.canvas.live[:], self.canvas.masked[:] = False, False
            if padded:
                self.canvas.attention_mask = torch.ones_like(self.canvas.response)
            self.canvas.memory = engine.policy.init_state(B, length, device)
        settings = engine.denoiser, engine.policy, engine.max_steps, engine.choice
        self.stepper = Stepper(*settings, self.canvas, length, static=True, compile=engine.compile)

    @property
    def busy(self) -> list[int]:
        """The rows that hold a sequence."""
        return [row for row, size in enumerate(self.sizes) if size is not None]

    @property
    def room(self) -> int:
        """How many rows idle."""
        return self.sizes.count(None)

    def join(
        self, prompts: Tensor, seeds: Sequence[int], ids: Sequence[int], attention_mask: Tensor | None = None
    ) -> list[int]:
        """The rows that k sequences [k, L] get, from the next step on.

        attention_mask: [k, L] bool if the batch is padded, else None.
        """
        rows = [row for row, size in enumerate(self.sizes) if size is None][: len(prompts)]
        require(len(rows) == len(prompts), f"{len(prompts)} sequences cannot join: {len(rows)} rows idle")
        device = self.device
        with self.engine.mode():
            attended = None if attention_mask is None else attention_mask.to(device)
            entering = self.engine.canvas(prompts.to(device), 0, torch.tensor(ids, device=device), attended)
            slots = torch.tensor(rows, device=device)
            entering.row, entering.seed = slots, torch.tensor([rng.signed(seed) for seed in seeds], device=device)
            entering.memory = self.engine.policy.init_state(len(rows), prompts.shape[1], device)
            self.canvas.put(slots, entering)
            sizes = entering.num_response.tolist()
        for row, size in zip(rows, sizes, strict=True):
            self.sizes[row], self.steps[row] = size, 0
        self.masks += sum(sizes)
        return rows

    def leave(self, rows: Sequence[int]) -> None:
        """Finished or not."""
        with self.engine.mode():
            slots = torch.tensor(rows, dtype=torch.long, device=self.device)
            self.masks -= int(self.canvas.masked[slots].sum())
            self.canvas.masked[slots] = False
            self.canvas.live[slots] = False
        for row in rows:
            self.sizes[row] = None

    def step(self) -> list[int]:
        """One step of all busy rows; those that are finished by it."""
        busy = self.busy
        to_read = self.engine.to_read([size for size in self.sizes if size is not None], self.masks)
        with self.engine.mode():
            over, self.masks = self.stepper.advance(self.canvas, self.steps, to_read)
        self.steps = [step + 1 for step in self.steps]
        return [row for row in busy if over[row]]

    def result(self, rows: Sequence[int]) -> Generation:
        """What stands in some rows."""
        with self.engine.mode():
            canvas = self.canvas.take(torch.tensor(rows, device=self.device))
        return generation(canvas, self.stepper, 0)
