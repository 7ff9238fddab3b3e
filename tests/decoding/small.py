"""What the tests of generation share: small models, lookup tables, every rule, and prompts of every kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from unmask.decoding.generate import Generation
from unmask.decoding.policies import RULES, Blocks, Policy, parse_policy
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser, Selector, SelectorConfig
from unmask.variational.selection import Bernoulli, NonEmpty, Selection

V = 11
MASK = V


def small_denoiser(seed: int = 0) -> Denoiser:
    """Far from uniform, so that rules have something to choose by, and float64, so that batches cannot round apart."""
    torch.manual_seed(seed)
    config = BackboneConfig(width=16, layers=1, heads=2, intermediate=24, max_length=64, absolute_positions=True)
    denoiser = Denoiser(config, V).double().requires_grad_(False)
    for parameter in denoiser.parameters():
        parameter.normal_(std=0.8)  # top probabilities from 0.4 to 0.9
    return denoiser


DENOISER = small_denoiser()


def small_selector(budget: int, selection: Selection | None = None, seed: int = 1) -> Selector:
    """Every weight is random, the last layer's too: at zero it would be the IID rule whatever it reads."""
    torch.manual_seed(seed)
    config = SelectorConfig(width=8, layers=1, heads=2, budget=budget)
    selector = Selector(config, denoiser_width=16, selection=selection).double()
    for parameter in selector.requires_grad_(False).parameters():
        parameter.normal_(std=0.6)
    return selector


@dataclass(frozen=True)
class ReadsFirst:
    """A selector that reads the first 16 numbers of a hidden state: some denoisers below carry more in theirs.

    It takes any number of steps.
    """

    selector: Selector
    budget: int | None = None
    prices: tuple[float, ...] = ()

    @property
    def selection(self) -> Selection:
        return self.selector.selection

    def __call__(self, hidden: Tensor, *rest: Tensor) -> Tensor:
        logits: Tensor = self.selector(hidden[..., :16], *rest)
        return logits


@dataclass
class Recorded:
    """A denoiser that keeps the canvas of every pass, and how many positions were projected to the vocabulary."""

    denoiser: Denoiser
    passes: list[Tensor] = field(default_factory=list)
    projected: list[int] = field(default_factory=list)  # positions, of each call of `logits`
    calls: list[int] = field(default_factory=list)  # how many calls of `logits` had come before each pass
    guided: bool = False  # every second pass is without the prompt

    @property
    def mask_token_id(self) -> int:
        return self.denoiser.mask_token_id

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.passes.append(tokens.clone())
        self.calls.append(len(self.projected))
        return self.denoiser.hidden(tokens, attention_mask)

    def hidden_with(self, tokens: Tensor, attend: Tensor, positions: Tensor) -> Tensor:
        self.passes.append(tokens.clone())
        self.calls.append(len(self.projected))
        return self.denoiser.hidden_with(tokens, attend, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        self.projected.append(len(hidden))
        return self.denoiser.logits(hidden)

    def projected_after(self, first: int, last: int) -> int:
        """Positions projected between pass `first` and pass `last` (before the one after it)."""
        ends = [*self.calls, len(self.projected)]
        return sum(self.projected[ends[first] : ends[last + 1]])


@dataclass(frozen=True)
class TabularDenoiser:
    """theta [(V+1)^N, N, V]: logits for every position of every partly written sequence, as in `variational.tiny`.

    A hidden state is the pair (row of the table, position), so that `logits` can look up what it is asked for.
    """

    theta: Tensor

    @property
    def mask_token_id(self) -> int:
        return self.theta.shape[-1]

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        N = tokens.shape[1]
        row = (tokens * (self.mask_token_id + 1) ** torch.arange(N)).sum(-1, keepdim=True).expand(-1, N)
        return torch.stack([row, torch.arange(N).expand_as(row)], dim=-1).double()

    def logits(self, hidden: Tensor) -> Tensor:
        row, position = hidden.long().unbind(-1)
        return self.theta[row, position]


@dataclass(frozen=True)
class TabularSelector:
    """psi [T, (V+1)^N, N]: a logit for every time, partly written sequence and position."""

    psi: Tensor
    selection: Selection = field(default_factory=NonEmpty)

    prices: tuple[float, ...] = ()

    @property
    def budget(self) -> int:
        return len(self.psi)

    def __call__(self, hidden: Tensor, confidences: Tensor, masked: Tensor, t: Tensor, *rest: Tensor | None) -> Tensor:
        return self.psi[t, hidden[:, 0, 0].long()]


# --- every rule -------------------------------------------------------------------------------------------------------

BUILT_IN = {key: rule for key, rule in RULES.items() if rule.__module__.startswith("unmask.")}  # tests define others
ENDS_EARLY = ("joint-threshold", "saber", "wino")  # though it masks again or edits
BACKGROUND = torch.tensor([2.0**-n for n in range(V)], dtype=torch.float64) / 2
NONEMPTY = ReadsFirst(small_selector(13, NonEmpty()))
BERNOULLI = ReadsFirst(small_selector(13, Bernoulli()))
POLICIES: dict[str, Policy] = {
    text: parse_policy(text, NONEMPTY, lambda: BACKGROUND)  # type: ignore[arg-type]
    for text in (
        *("iid", "top-prob", "top-prob(confidence=sampled)", "margin", "entropy", "left-to-right"),
        *("margin(count=floor)", "stochastic(entropy(count=cosine),0.5)", "random"),
        *("stochastic(margin,0.5)", "threshold:0.7", "threshold(0.5,paced)", "factor(2,confidence=sampled)"),
        *("eb:0.6", "eb(1.5,order=entropy)", "klass", "klass(0.2,0.05,1)", "dus"),
        *("blocks(3,iid)", "blocks(3,top-prob)", "blocks(3,klass(0.2,0.05,1))", "blocks(2,stochastic(entropy,0.5))"),
        *("joint-threshold(0.6,0.3)", "saber", "prophet(0,2)", "credit:0.7", "blocks(3,credit:0.7)"),
        "prophet(order=blocks(3,margin))",
        *("rdm", "rdm(linear,cond)", "p2", "remdm-cap:0.5", "remdm-rescale:0.5", "remdm-conf"),
        *("pc-sampler", "blocks(3,pc-sampler(1,0.5))", "wino(0.4,0.5)", "blocks(3,wino(0.4,0.5))"),
        *("blocks(3,rdm)", "blocks(3,joint-threshold(0.6,0.3))", "blocks(3,saber)", "blocks(3,remdm-cap:0.5)"),
        *("learned", "learned(temperature=2,floor=0.2)", "learned(cap=2)", "learned(deterministic)"),
        *("lo-arm", "reward:3"),
    )
}
POLICIES["learned, bernoulli"] = parse_policy("learned", BERNOULLI)  # type: ignore[arg-type]

# One of each kind: properties of the engine are tested with these, what every rule must keep to (test_conformance.py)
# with all of them.
REPRESENTATIVE = {
    name: POLICIES[name]
    for name in (
        "iid",  # draws, reads nothing of the denoiser, may reveal nothing in a step
        "margin",  # reveals a fixed number per step
        "threshold:0.7",  # reveals as many as it likes
        "klass(0.2,0.05,1)",  # keeps the distributions of the step before
        "blocks(2,stochastic(entropy,0.5))",  # a rule in a rule, with steps and draws of its own
        "p2",  # masks again, reads revealed positions too
        "remdm-conf",  # masks again by draws and by what was known at the reveal
        "learned, bernoulli",  # asks a network, and falls back where nothing was selected
    )
}

m = MASK
PROMPTS = [
    torch.tensor(prompt)
    for prompt in (
        [3, 1, 4, m, m, m, m, m],  # a prefix
        [m, 5, m, m, 9, m, 2, m, m, 6, m, m],  # clues
        [10, m, 10],  # one token to write
        [m, m, m, m, m, m, m, m, m, m, m],  # nothing given
        [2, 7, m, m, m, 1, 8],  # infilling
        [m, m, 0],  # a suffix
        [0, 0, m, m, m, m, m, m, m, m, m, m, m, m, 4],  # the longest
    )
]
LONGER = {2: torch.tensor([10, m, m, 10, m]), 5: torch.tensor([m, m, m, m, 0])}  # what blocks of 3 need


def ends_early(policy: Policy) -> bool:
    """Whether a rule that masks again or edits may take fewer steps than there are."""
    return (policy.inner if isinstance(policy, Blocks) else policy).key in ENDS_EARLY


def writes_blocks(policy: Policy) -> bool:
    """Whether a response is written block by block, by the rule itself or by its order."""
    return isinstance(getattr(policy, "order", policy), Blocks)


def prompts_for(policy: Policy) -> list[Tensor]:
    """Seven of different lengths; no response is shorter than a block."""
    if writes_blocks(policy):
        return [LONGER.get(row, prompt) for row, prompt in enumerate(PROMPTS)]
    return PROMPTS


def results(out: Generation, row: int) -> dict[str, object]:
    """All that is reported of one sequence, padding left out."""
    here = out.attention_mask[row]
    return {
        "tokens": out.tokens[row, here].tolist(),
        "reveal_step": out.reveal_step[row, here].tolist(),
        "revisions": out.revisions[row, here].tolist(),
        "num_steps": out.num_steps[row].item(),
        "num_passes": out.num_passes[row].item(),
        "nothing_selected": out.nothing_selected[row].item(),
    }


def all_results(out: Generation) -> list[dict[str, object]]:
    return [results(out, row) for row in range(len(out.tokens))]


# --- what happened, from what the denoiser saw ------------------------------------------------------------------------


def needs_pass(policy: Policy, before: Tensor, after: Tensor, is_last: bool) -> bool:
    """A step that reveals nothing needs the denoiser only where the rule asks it, which is not at the last step."""
    reveals = bool(((before == MASK) & (after != MASK)).any())
    return reveals or bool(policy.reads and not is_last)


def histories(
    denoiser: Recorded, out: Generation, policy: Policy, max_steps: int, batch_size: int | None = None
) -> list[list[Tensor]]:
    """The canvases of each sequence without padding: one a step, and what came out, from `out.history`.

    The denoiser must have seen exactly these, where it was needed.  It follows the batch by `num_steps` alone: the next
    prompt takes the place of one that is finished, and when none waits, rows leave.  A batch that is not as full as
    that, and a row that the denoiser saw for nothing, is an assertion error.
    """
    B, passes = len(out.tokens), 2 if denoiser.guided else 1
    here = [out.attention_mask[row] for row in range(B)]
    canvases = [list(out.history[row, : out.num_steps[row] + 1, here[row]]) for row in range(B)]
    waiting, taken = list(range(B)), [0] * B
    batch = [waiting.pop(0) for _ in range(min(batch_size or B, B))]
    shown, used = iter(denoiser.passes[::passes]), [0] * B
    while batch:
        steps = [canvases[row][taken[row] : taken[row] + 2] for row in batch]
        asked = [
            (row, before)
            for row, (before, after) in zip(batch, steps, strict=True)
            if needs_pass(policy, before, after, taken[row] == max_steps - 1)
        ]
        if asked:
            seen = next(shown)
            assert len(seen) == len(asked), "rows that the pass should not hold, or too few"
            for (row, before), tokens in zip(asked, seen, strict=True):
                used[row] += passes
                assert torch.equal(tokens[: len(before)], before)  # the denoiser sees padding on the right
        for row in batch:
            taken[row] += 1
        over = [taken[row] == out.num_steps[row] for row in batch]
        batch = [
            waiting.pop(0) if end and waiting else None if end else row for row, end in zip(batch, over, strict=True)
        ]
        batch = [row for row in batch if row is not None]
    assert next(shown, None) is None, "the denoiser saw more passes than the steps needed"
    assert not waiting
    assert used == out.num_passes.tolist()
    return canvases


def accounts(history: list[Tensor], edits: bool = False) -> tuple[list[int], list[int]]:
    """(step of the last reveal, number of times revised) of each position, by comparing canvas with canvas."""
    reveal_step, revisions = [-1] * len(history[0]), [0] * len(history[0])
    for step, (before, after) in enumerate(pairwise(history)):
        for n, (old, new) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
            if old == MASK and new != MASK:
                reveal_step[n] = step
            elif old != MASK and new == MASK:
                revisions[n] += 1
            elif edits and old != new:
                reveal_step[n], revisions[n] = step, revisions[n] + 1
            else:
                assert old == new, "a token was exchanged without being masked"
    return reveal_step, revisions
