"""The objective of a block-causal denoiser.

Legend: B sequences, L positions, N response positions of a sequence in K blocks, N_b of them in block b = 1..K.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unmask.decoding.blocks import block_causal, block_numbers
from unmask.errors import UserError
from unmask.models.networks import Denoiser
from unmask.models.packing import Layout, places, scatter, with_itself
from unmask.rng import Purpose, uniforms
from unmask.tasks.task import Examples, to_device
from unmask.training.objectives import DenoiseObjective, Outcome
from unmask.training.reading import as_word, log_likelihood


class BlockDenoiseObjective(DenoiseObjective):
    """Block diffusion (BD3-LM, Arriola et al. 2025): blocks from left to right, each by masked diffusion.

        log P(x_0) = sum_b log P(x_b | x_<b),    and by the bound of `DenoiseObjective` for every block,

        NELBO = sum_b E_{m ~ U{1..N_b}} E_{mask of b, |mask| = m} [ N_b/m sum_{n masked} -log mu^n(x_<b, masked x_b) ]

    All blocks come from one pass over two copies of the sequence, x_0 clean and x noised, every block with its own m:

        clean n sees clean m      where block(m) <= block(n)
        noised n sees noised m    where block(m) =  block(n),    and clean m where block(m) < block(n)

    The noised copy starts at the first column with a response: a prompt before it is there once.
    """

    def forward(self, examples: Examples, ids: Tensor, u: Tensor) -> Outcome:
        """examples [B]; ids [B], which name their draws; u [B] stratified uniforms, from which the counts m come."""
        if not isinstance(self.denoiser, Denoiser):
            raise UserError("adapters of a block-causal denoiser cannot be trained: leave model.lora out")
        size, device = self.denoiser.block_size, next(self.denoiser.parameters()).device
        counts, sizes = block_mask_counts(u.cpu(), examples.num_response, size, self.seed)  # [B, K] each
        num_masked = int(counts.sum())
        examples, N = examples.to(device), to_device(examples.num_response, device)
        block = block_numbers(examples.response, size)
        at = (block - 1).clamp(min=0)
        count, of = (to_device(part, device).gather(-1, at) for part in (counts, sizes))  # [B, L]: m and N_b there
        masked = mask_blocks(examples, block, count, to_device(ids, device), size, self.seed)
        log_mu = block_log_mu(self.denoiser, examples, block, masked, num_masked, self.likelihood)
        loss = -((log_mu * of / count.clamp(min=1)).sum(-1) / N).mean()
        return Outcome(loss, {"elbo": -loss.detach()})


def block_mask_counts(u: Tensor, num_response: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """m = 1 + floor(u_b N_b) and N_b: [B, K] each, 0 where a sequence has fewer blocks; u and num_response are [B].

    u_1 = u, which is stratified over the batch; every other u_b is a hash of it.
    """
    blocks = torch.arange(-(-int(num_response.max()) // size))
    sizes = (num_response[:, None] - size * blocks).clamp(0, size)
    hashed = uniforms(seed, Purpose.BLOCK, as_word(u)[:, None], blocks, dtype=torch.float64)
    return torch.where(sizes > 0, 1 + (torch.where(blocks == 0, u[:, None], hashed) * sizes).long(), 0), sizes


def mask_blocks(examples: Examples, block: Tensor, count: Tensor, ids: Tensor, size: int, seed: int) -> Tensor:
    """[B, L] bool: `count` of the positions of each block, every choice equally likely; all arguments [B, L]."""
    draw = uniforms(seed, Purpose.MASKING, ids[:, None], examples.position, dtype=torch.float64)
    rank = torch.where(examples.response, block + draw, torch.inf).argsort(-1).argsort(-1)  # by block, then by draw
    return examples.response & (rank - (block - 1) * size < count)


def block_log_mu(
    denoiser: Denoiser,
    examples: Examples,
    block: Tensor,
    masked: Tensor,
    num_masked: int | None = None,
    likelihood: Callable[[Tensor, Tensor], Tensor] = log_likelihood,
) -> Tensor:
    """[B, L]: log mu^n(x_<b, masked x_b) of the true token where `masked` [B, L], else 0; all blocks in one pass.

    The noised copy has the columns from `first` on, which hold the whole response.
    """
    tokens, attended, first = examples.tokens, examples.attention_mask, examples.first
    B, L = tokens.shape
    noised = torch.where(masked, denoiser.mask_token_id, tokens)
    clean = block_causal(block, attended)  # [B, L, L]
    own = clean & clean.mT  # the same block
    earlier = (clean & ~own)[:, first:]
    nothing = torch.zeros_like(clean[:, :, first:])
    sees = torch.cat([torch.cat([clean, nothing], -1), torch.cat([earlier, own[:, first:, first:]], -1)], 1)
    positions = examples.position.clamp(min=0)
    positions = torch.cat([positions, positions[:, first:]], -1)
    layout = Layout(positions, with_itself(sees)[:, None], None, (B, positions.shape[1]))
    hidden = denoiser.hidden(torch.cat([tokens, noised[:, first:]], -1), layout)[:, L:]
    at = places(masked[:, first:], num_masked)
    truth = tokens[:, first:].flatten()[at]
    found = likelihood(denoiser.logits(hidden.flatten(0, 1)[at]), truth)
    return torch.nn.functional.pad(scatter(found, at, (B, L - first)), (first, 0))
