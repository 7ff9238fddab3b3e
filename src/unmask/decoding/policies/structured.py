"""By position: dilated unmasking, and any rule inside blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.decoding.blocks import block_causal, block_numbers
from unmask.decoding.policies.rule import Decision, NetworkPolicy, Policy, SelectorNetwork, Step
from unmask.errors import UserError, require


@dataclass(frozen=True)
class Dilated(Policy):
    """Round r = i + 1: the masks j with j mod stride = 0, stride = max(1, floor(N / 2^r)) (DUS).

    j counts the response from 0; over after ceil(log2 N) rounds at most (N = 1: one).  Inside `blocks`, N is the block.
    """

    key = "dus"

    def decide(self, step: Step) -> Decision:
        rounds = (step.index + 1).clamp(max=62)  # a shift by 63 is no number any more
        stride = (step.num_response >> rounds).clamp(min=1)
        return Decision(step.place() % stride[:, None] == 0)


@dataclass(frozen=True)
class Blocks(Policy):
    """A rule inside ceil(N / size) blocks of the response, left to right (LLaDA's semi-autoregressive decoding).

    b blocks get S div b steps each, one more for the first S mod b; the rule sees the block as its whole response, with
    its own i, S and N; its memory covers the whole response.  A block that finishes early starts the next at once.
    On a block-causal denoiser the size is that of the model, and a learned order runs inside its blocks.
    Only the current block's masks are projected to the vocabulary, or all where the rule declares `reads_ahead`.
    """

    key = "blocks"
    holds_back = True
    size: int
    inner: Policy

    def __post_init__(self) -> None:
        require(type(self.size) is int and self.size >= 1, f"blocks: the size must be at least 1, got {self.size!r}")
        require(isinstance(self.inner, Policy), f"blocks needs a rule such as margin, not {self.inner!r}")
        revises = self.inner.remasks or self.inner.reads_revealed
        network = isinstance(self.inner, NetworkPolicy) and getattr(self.inner.network, "block_size", 0) != self.size
        inside = not (revises or isinstance(self.inner, Blocks) or network)
        wanted = "give one that never re-masks, reads masks only and needs no network but one learned for such blocks"
        require(inside, f"blocks cannot hold {self.inner.name}: {wanted}")

    @property
    def reads(self) -> frozenset[str]:
        return self.inner.reads

    @property
    def most_read(self) -> int | None:
        return None if self.inner.reads_ahead else self.size

    @property
    def fuses(self) -> bool:
        return self.inner.fuses

    def fuse(self, logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.fuse(logits, kept)

    def looks_at(self, masked: Tensor, place: Tensor) -> Tensor:
        return masked if self.inner.reads_ahead else masked & self._current(masked, place)[1]

    def _current(self, masked: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Which block is written now [b], that of the leftmost mask, and where it is [b, L]."""
        block = place // self.size
        current = torch.where(masked, block, block.shape[-1]).amin(-1)
        return current, block == current[:, None]

    def check(self, max_steps: int, num_response: Tensor) -> None:
        size, smallest, largest = self.size, int(num_response.min()), int(num_response.max())
        large = f"blocks of {size} are larger than a response of {smallest} tokens"
        require(smallest >= size, f"{large}: give smaller ones")
        blocks = -(-largest // size)
        enough = f"give at least {blocks} steps, not {max_steps}"
        require(max_steps >= blocks, f"a response of {largest} tokens has {blocks} blocks of {size}: {enough}")
        if isinstance(self.inner, NetworkPolicy):
            self.inner.check(max_steps, num_response)

    def init_state(self, rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
        block = torch.full((rows,), -1, device=device)
        return {"block": block, "used": torch.zeros_like(block)} | self.inner.init_state(rows, length, device)

    def decide(self, step: Step) -> Decision:
        current, inside = self._current(step.masked, step.place())
        used = torch.where(current == step.memory["block"], step.memory["used"], 0)
        blocks = (step.num_response + self.size - 1) // self.size
        steps = step.max_steps // blocks + (current < step.max_steps % blocks).long()
        inside = step.response & inside
        masked = step.masked & inside
        here = replace(step, index=used, max_steps=steps, masked=masked, response=inside, num_response=inside.sum(-1))
        if isinstance(self.inner, NetworkPolicy):  # it sees what the denoiser sees
            block = block_numbers(step.response, self.size)
            here = replace(here, attention_mask=block_causal(block, step.attention_mask))
        decision = self.inner.decide(here.offered())
        last = (used >= steps - 1)[:, None]
        memory = (decision.memory or {}) | {"block": current, "used": used + 1}
        return decision._replace(reveal=masked & (decision.reveal | last), memory=memory)


def in_blocks(policy: Policy, size: int) -> Policy:
    """The rule on a denoiser that was trained for blocks of this size; 0: for none.  A network's own goes inside."""
    if isinstance(policy, NetworkPolicy) and size:
        policy = Blocks(size, policy)
    if size and not (isinstance(policy, Blocks) and policy.size == size):
        inner = policy.inner if isinstance(policy, Blocks) else policy
        wanted = f"give the rule as blocks({size},{inner.name}), not {policy.name}"
        raise UserError(f"the denoiser is block-causal and was trained for blocks of {size}: {wanted}")
    return policy


def network_of(policy: Policy) -> SelectorNetwork | None:
    """The network that decides, inside blocks or not."""
    inner = policy.inner if isinstance(policy, Blocks) else policy
    return inner.network if isinstance(inner, NetworkPolicy) else None


def trained_steps(network: SelectorNetwork | None, num_response: int) -> int | None:
    """The max_steps that a network was trained for on a response of so many tokens: T, or T for each of its blocks."""
    if network is None or network.budget is None:
        return None
    size = getattr(network, "block_size", 0)
    return network.budget * (-(-num_response // size) if size else 1)
