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
    """Positions far apart first, then those between them.

    Round r = i + 1: the masks j with j mod stride = 0, stride = max(1, floor(N / 2^r)) (DUS).

    j counts the response from 0; over after ceil(log2 N) rounds at most (N = 1: one).  Inside `blocks`, N is the block.
    """

    key = "dus"

    def decide(self, step: Step) -> Decision:
        rounds = (step.index + 1).clamp(max=62)  # a shift by 63 is no number any more
        stride = (step.num_response >> rounds).clamp(min=1)
        return Decision(step.place() % stride[:, None] == 0)


@dataclass(frozen=True)
class Blocks(Policy):
    """Another rule inside blocks of the response, one block after the other from left to right.

    ceil(N / size) blocks, whose masks are all revealed before the next begins (LLaDA's semi-autoregressive decoding).

    b blocks get S div b steps each, one more for the first S mod b; the rule sees the block as its whole response, with
    its own i, S and N; its memory covers the whole response.  A block that finishes early starts the next at once.
    A rule that re-masks or edits does so in its block alone, until the block's steps are taken or the rule is finished.
    On a block-causal denoiser the size is that of the model, and a learned order runs inside its blocks.
    Only what is read of the current block is projected to the vocabulary, or all masks where it declares `reads_ahead`.
    """

    key = "blocks"
    holds_back = True
    of_denoiser = False  # whether the size is that of a block-causal denoiser, which nobody can choose
    size: int
    inner: Policy

    def __post_init__(self) -> None:
        require(type(self.size) is int and self.size >= 1, f"blocks: the size must be at least 1, got {self.size!r}")
        require(isinstance(self.inner, Policy), f"blocks needs a rule such as margin, not {self.inner!r}")
        whole = self.inner.reads_revealed and not self.inner.remasks  # such as prophet, whose answer may lie anywhere
        network = isinstance(self.inner, NetworkPolicy) and getattr(self.inner.network, "block_size", 0) != self.size
        inside = not (whole or network or isinstance(self.inner, Blocks))
        wanted = (
            "give one that is no blocks, needs no network of other blocks and, unless it re-masks, reads masks only"
        )
        if self.inner.key == "prophet":
            wanted = f"it decides about the whole response: write prophet(order=blocks({self.size},top-prob))"
        require(inside, f"blocks cannot hold {self.inner.name}: {wanted}")
        for name in ("remasks", "reads_revealed", "reads_hidden", "shadows"):
            object.__setattr__(self, name, getattr(self.inner, name))

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

    def check_logits(self, logits: Tensor) -> None:
        self.inner.check_logits(logits)

    def looks_at(self, at: Tensor, place: Tensor, memory: dict[str, Tensor]) -> Tensor:
        return at if self.inner.reads_ahead else at & self._current(at, place, memory)[1]

    def _current(self, masked: Tensor, place: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Which block is written now [b], and where it is [b, L].

        That of the leftmost mask; of a rule that re-masks or edits, the one that it is not yet done with.
        """
        block = place // self.size
        current = memory["block"] if self.inner.remasks else torch.where(masked, block, block.shape[-1]).amin(-1)
        return current, block == current[:, None]

    def check(self, max_steps: int, num_response: Tensor) -> None:
        size, smallest, largest = self.size, int(num_response.min()), int(num_response.max())
        large = f"blocks of {size} are larger than a response of {smallest} tokens"
        require(smallest >= size or self.of_denoiser, f"{large}: give smaller ones")
        blocks = -(-largest // size)
        enough = f"give at least {blocks} steps, not {max_steps}"
        require(max_steps >= blocks, f"a response of {largest} tokens has {blocks} blocks of {size}: {enough}")
        if isinstance(self.inner, NetworkPolicy):
            self.inner.check(max_steps, num_response)

    def init_state(self, rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
        block = torch.zeros(rows, dtype=torch.long, device=device)
        return {"block": block, "used": torch.zeros_like(block)} | self.inner.init_state(rows, length, device)

    def inside(self, step: Step) -> tuple[Tensor, Step]:
        """Which block is written now [b], and the step as the rule inside sees it."""
        current, inside = self._current(step.masked, step.place(), step.memory)
        used = torch.where(current == step.memory["block"], step.memory["used"], 0)
        blocks = (step.num_response + self.size - 1) // self.size
        steps = step.max_steps // blocks + (current < step.max_steps % blocks).long()
        inside = step.response & inside
        masked, size = step.masked & inside, inside.sum(-1)
        here = replace(step, index=used, max_steps=steps, masked=masked, response=inside, num_response=size)
        if isinstance(self.inner, NetworkPolicy):  # it sees what the denoiser sees
            block = block_numbers(step.response, self.size)
            here = replace(here, attention_mask=block_causal(block, step.attention_mask))
        return current, here

    def decide(self, step: Step) -> Decision:
        current, here = self.inside(step)
        used, masked = here.index, here.masked
        offered = here.offered()
        decision = self.inner.decide(offered)
        last = (used >= here.max_steps - 1)[:, None]
        reveal = (offered.masked & decision.reveal) | (masked & last)
        memory = (decision.memory or {}) | {"block": current, "used": used + 1}
        if not self.inner.remasks:
            nothing = decision.nothing_selected  # a block's last step asks nobody
            nothing = None if nothing is None else nothing & ~last[:, 0]
            return decision._replace(reveal=reveal, memory=memory, nothing_selected=nothing)
        revisable = here.response & ~step.masked & ~last
        remask, edit = (None if where is None else where & revisable for where in (decision.remask, decision.edit))
        left = masked ^ reveal if remask is None else (masked ^ reveal) | remask
        blocks = (step.num_response + self.size - 1) // self.size
        done = last[:, 0] if decision.finished is None else last[:, 0] | (decision.finished & ~left.any(-1))
        memory |= {"block": current + done, "used": torch.where(done, 0, used + 1)}
        return Decision(reveal, remask=remask, edit=edit, finished=current + done >= blocks, memory=memory)


def in_blocks(policy: Policy, size: int) -> Policy:
    """The rule on a denoiser that was trained for blocks of this size; 0: for none.  A network's own goes inside."""
    if isinstance(policy, NetworkPolicy) and size:
        policy = Blocks(size, policy)
    if size and policy.shadows:
        raise UserError(f"{policy.name} reads shadows, which a block-causal denoiser does not take: give another rule")
    if size and not (isinstance(policy, Blocks) and policy.size == size):
        inner = policy.inner if isinstance(policy, Blocks) else policy
        Blocks(size, inner)  # or says why not
        wanted = f"give the rule as blocks({size},{inner.name}), not {policy.name}"
        raise UserError(f"the denoiser is block-causal and was trained for blocks of {size}: {wanted}")
    if size:
        policy = replace(policy)
        object.__setattr__(policy, "of_denoiser", True)
    return policy


def own_blocks(rule: str, denoiser: object) -> str:
    """How a rule that nobody chose is written: inside the blocks of a denoiser that is block-causal."""
    size = getattr(denoiser, "block_size", 0)
    return f"blocks({size},{rule})" if size else rule


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
