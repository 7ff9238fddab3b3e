"""One step of a canvas: the denoiser's pass, the projection where somebody reads it, the rule's decision, the writing.

The same code runs in two ways.  Eagerly, shapes follow the work: finished rows have left, and only the positions
that are read are projected.  Compiled, shapes stand still: the batch keeps its size, positions come in whole chunks,
the pieces go through torch.compile, and on a GPU a whole step is one CUDA graph, one for each number of chunks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from unmask import streams
from unmask.decoding.canvas import Canvas
from unmask.decoding.confidence import Confidence, confidence, log_probabilities
from unmask.decoding.policies.rule import Decision, Policy, Step
from unmask.decoding.tokens import TokenChoice

# Numbers of one chunk of the projection, positions x vocabulary: large enough to keep the device busy, small enough to
# stay in its caches (CPU) or out of the way of the weights (GPU).
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}


class Denoiser(Protocol):
    """What generation asks of a model.  `logits` gives the mask token no mass."""

    @property
    def mask_token_id(self) -> int: ...

    def hidden(self, tokens: Tensor, attention: Tensor | None = None) -> Tensor:
        """[B, L, D] from tokens [B, L] and attention [B, L] bool (False on padding; None: no padding)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] from hidden states [M, D]."""


class Reading(NamedTuple):
    """What one pass said, [b * L] each; zero where nothing was projected."""

    proposal: Tensor
    peak: Tensor  # the largest logit: not finite if any of them is NaN
    said: dict[str, Tensor]  # the keys of Confidence that the rule reads


class Stepper:
    """Takes a canvas one step further, in place.  It keeps what must outlive a step but belongs to no sequence."""

    def __init__(
        self, denoiser: Denoiser, policy: Policy, max_steps: int, choice: TokenChoice, canvas: Canvas, static: bool
    ) -> None:
        self.denoiser, self.policy, self.choice = denoiser, policy, choice
        self.wanted, self.static = policy.reads, static
        self.passes = 2 if choice.guidance else 1  # of the denoiser a step
        device = canvas.tokens.device
        self.last, self.budget = max_steps - 1, torch.tensor(max_steps, device=device)
        self.seed = torch.tensor(0, device=device)  # a tensor: a CUDA graph would keep a number for ever
        self.batch, self.length = canvas.tokens.shape
        self.longest = int(canvas.num_response.max())
        self.chunk, self.score_dtype = 0, torch.float32  # set by the first pass, which shows V and the dtype
        self.previous = torch.empty(0)  # log p of the last pass [slot, response position, V], where a rule reads KL
        self.status = torch.zeros(4, self.batch, dtype=torch.long, device=device)
        self.trunk, self.read, self.settle = denoiser.hidden, self._read, self._settle
        if static:
            # Every rule is a program of its own; beyond the limit (8) torch would silently run it eagerly.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            compiled = partial(torch.compile, dynamic=False)
            self.trunk, self.read, self.settle = compiled(self.trunk), compiled(self.read), compiled(self.settle)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def advance(self, canvas: Canvas, to_read: int) -> tuple[list[int], int]:
        """One step.  Which rows are finished [b], and how many positions the next step will read.

        `to_read`: how many this one reads, at most.
        """
        if not self.static:
            self._step(canvas, None)
        else:
            if not self.chunk:
                self._measure(self.trunk(canvas.tokens, canvas.attention))
            chunks = -(-to_read // self.chunk)
            if canvas.tokens.is_cuda:
                self._replay(canvas, chunks)
            else:
                self._step(canvas, chunks)
        done, bad_logits, bad_scores, left = self.status.tolist()
        for bad, what in ((bad_logits, "denoiser"), (bad_scores, "selector")):
            if any(bad):
                row, step = canvas.row[bad.index(1)], canvas.index[bad.index(1)] - 1
                raise ValueError(f"the {what}'s logits are not finite for sequence {int(row)} at step {int(step)}")
        return done, sum(left)

    def num_bytes(self, canvas: Canvas) -> int:
        """What the rule has the loop keep between steps."""
        return canvas.num_bytes() + self.previous.numel() * self.previous.element_size()

    def _measure(self, hidden: Tensor) -> None:
        """Everything that depends on the vocabulary."""
        probe = self.denoiser.logits(hidden[0, :1])
        V, device = probe.shape[-1], probe.device
        self.score_dtype = torch.promote_types(probe.dtype, torch.float32)
        self.chunk = max(1, min(CHUNK.get(device.type, CHUNK["cuda"]) // V, self.batch * self.longest))
        if "change" in self.wanted:
            self.previous = torch.zeros(self.batch, self.longest, V, dtype=self.score_dtype, device=device)

    def _step(self, canvas: Canvas, chunks: int | None) -> None:
        """`chunks`: of the projection, where shapes stand still; None: as many as it takes."""
        decision = None
        if self.wanted or chunks is not None:
            at = self._read_at(canvas)
        else:  # the rule does not ask the denoiser: only what it reveals is projected
            decision = self._decide(canvas, None, None)
            at = decision.reveal
        hidden = self.trunk(canvas.tokens, canvas.attention)
        unguided = self._without_prompt(canvas) if self.choice.guidance else None
        if not self.chunk:
            self._measure(hidden)
        reading = self._blank(canvas)
        places = at.flatten().nonzero()[:, 0] if chunks is None else _compact(at.flatten(), chunks * self.chunk)
        for chunk in torch.split(places, self.chunk) if len(places) else ():
            found = self.read(canvas, hidden, unguided, chunk)
            for kept, values in zip(_tensors(reading), _tensors(found), strict=True):
                kept[chunk] = values
        self.settle(canvas, hidden, reading, decision)

    def _read_at(self, canvas: Canvas) -> Tensor:
        """[b, L] bool: the positions that somebody reads."""
        return canvas.response & canvas.live[:, None] if self.policy.everywhere else canvas.masked

    def _without_prompt(self, canvas: Canvas) -> Tensor:
        """Hidden states of the same canvas with its prompt masked."""
        return self.trunk(torch.where(canvas.response, canvas.tokens, self.denoiser.mask_token_id), canvas.attention)

    def _blank(self, canvas: Canvas) -> Reading:
        def numbers() -> Tensor:
            return torch.zeros(canvas.tokens.numel(), dtype=self.score_dtype, device=canvas.tokens.device)

        return Reading(
            torch.zeros_like(canvas.tokens).flatten(), numbers(), {name: numbers() for name in sorted(self.wanted)}
        )

    def _read(self, canvas: Canvas, hidden: Tensor, unguided: Tensor | None, at: Tensor) -> Reading:
        """Proposal and confidence [m] at the places `at` [m] of the flattened canvas."""
        choice, row = self.choice, at // canvas.tokens.shape[1]
        logits = self.denoiser.logits(hidden.flatten(0, 1)[at])  # [m, V]
        if unguided is not None:
            base = self.denoiser.logits(unguided.flatten(0, 1)[at])
            logits = base + (1 + choice.guidance) * (logits - base)
        place = canvas.place.flatten()[at]
        if choice.min_length:
            early = (place < choice.min_length)[:, None]
            is_eos = torch.arange(logits.shape[-1], device=logits.device) == choice.eos_token_id
            logits = torch.where(early & is_eos, -torch.inf, logits)
        peak, best = logits.max(-1, keepdim=True)
        proposal = best[:, 0]
        if choice.temperature > 0:
            words = canvas.index[row], canvas.id[row], canvas.position.flatten()[at]
            uniforms = streams.uniforms(self.seed, streams.Purpose.TOKEN, *words, dtype=torch.float64)
            proposal = choice.propose(logits, uniforms)
        current = previous = None
        if "log_current" in self.wanted:  # the mask token is no token: where it stands, nobody looks at this
            current = canvas.tokens.flatten()[at].clamp(max=logits.shape[-1] - 1)
        if "change" in self.wanted:
            kept = canvas.slot[row], place.clamp(min=0)
            previous = self.previous[kept]
            self.previous[kept] = log_probabilities(logits).to(self.score_dtype)
        said = confidence(logits, self.wanted, (peak, best), proposal, current, previous)
        return Reading(proposal, peak[:, 0].to(self.score_dtype), {name: said[name] for name in sorted(self.wanted)})  # type: ignore[literal-required]

    def _decide(self, canvas: Canvas, hidden: Tensor | None, reading: Reading | None) -> Decision:
        """The rule's answer, with the last step's certainty and the masks put in."""
        seen: dict[str, Any] = {}
        if reading is not None and hidden is not None:
            shape = canvas.tokens.shape
            said: Confidence = {name: values.view(shape) for name, values in reading.said.items()}  # type: ignore[assignment]
            seen = {"hidden": hidden, "said": said, "proposal": reading.proposal.view(shape)}
        decision = self.policy.decide(
            Step(
                index=canvas.index,
                max_steps=self.budget.expand_as(canvas.index),
                tokens=canvas.tokens,
                masked=canvas.masked,
                response=canvas.response,
                num_response=canvas.num_response,
                attention=canvas.attention,
                uniforms=partial(self._uniforms, canvas),
                memory=canvas.memory,
                log_reveal=canvas.log_reveal,
                **seen,
            )
        )
        last = (canvas.index >= self.last)[:, None]
        return decision._replace(reveal=canvas.masked & (decision.reveal | last))

    def _settle(self, canvas: Canvas, hidden: Tensor, reading: Reading, decision: Decision | None) -> None:
        """Decide, if that has not been done, and write."""
        if decision is None:
            decision = self._decide(canvas, hidden, reading)
        shape, i, last = canvas.tokens.shape, canvas.index, canvas.index >= self.last
        bad = ~torch.isfinite(reading.peak.view(shape)).all(-1)
        bad_scores = torch.zeros_like(bad)
        reveal = decision.reveal
        masked = canvas.masked & ~reveal
        tokens = torch.where(reveal, reading.proposal.view(shape), canvas.tokens)
        reveal_step = torch.where(reveal, i[:, None], canvas.reveal_step)
        if "log_proposal" in self.wanted:
            log_p = reading.said["log_proposal"].view(shape)
            self._set(canvas, "log_reveal", torch.where(reveal, log_p, canvas.log_reveal))
        if decision.remask is not None:
            remask = decision.remask & canvas.response & ~canvas.masked & (canvas.live & ~last)[:, None]
            masked = masked | remask
            tokens = torch.where(remask, self.denoiser.mask_token_id, tokens)
            self._set(canvas, "revisions", canvas.revisions + remask)
        if decision.nothing_selected is not None:
            nothing = decision.nothing_selected & canvas.live & ~last
            self._set(canvas, "nothing_selected", canvas.nothing_selected + nothing)
        if decision.scores is not None:
            asked = canvas.masked & ~last[:, None]
            bad_scores = ~torch.isfinite(torch.where(asked, decision.scores, 0.0)).all(-1)
        for name, kept in (decision.memory or {}).items():
            self._set(canvas.memory, name, kept)
        over = last
        if self.choice.stop_at_eos:
            is_eos = canvas.response & ~masked & (tokens == self.choice.eos_token_id)
            before = masked & (is_eos.cumsum(-1) == 0)  # masks with no EOS to their left
            over = over | (masked.any(-1) & ~before.any(-1))
            rest = masked & over[:, None]
            tokens = torch.where(rest, torch.full_like(tokens, self.choice.eos_token_id or 0), tokens)
            reveal_step = torch.where(rest, i[:, None], reveal_step)
            masked = masked & ~rest
        left = masked.sum(-1)
        if not self.policy.remasks:
            over = over | (left == 0)
        over = over & canvas.live
        self._set(canvas, "tokens", tokens)
        self._set(canvas, "reveal_step", reveal_step)
        self._set(canvas, "masked", masked)
        self._set(canvas, "index", i + canvas.live)
        if self.policy.everywhere:
            left = canvas.num_response * (canvas.live & ~over)
        self._set(self, "status", torch.stack([over.long(), bad.long(), bad_scores.long(), left]))

    def _set(self, holder: Any, name: str, value: Tensor) -> None:
        """Eagerly a name, with shapes that stand still a place in memory: a CUDA graph knows addresses."""
        named = isinstance(holder, dict)
        old = holder[name] if named else getattr(holder, name)
        if self.static and old.shape == value.shape:
            old.copy_(value)
        elif named:
            holder[name] = value
        else:
            setattr(holder, name, value)

    def _uniforms(self, canvas: Canvas) -> Tensor:
        """[b, L + 1]: one draw a position, and under the position -1 one for the whole sequence."""
        words = torch.cat([canvas.position, torch.full_like(canvas.position[:, :1], -1)], dim=-1)
        step, ids = canvas.index[:, None], canvas.id[:, None]
        return streams.uniforms(self.seed, streams.Purpose.REVEAL, step, ids, words, dtype=torch.float64)

    def _replay(self, canvas: Canvas, chunks: int) -> None:
        """The step as one CUDA graph, recorded when it is first needed."""
        if chunks not in self.graphs:
            if not self.graphs:  # compile, and let the libraries set themselves up, before anything is recorded
                everything = torch.arange(len(canvas), device=canvas.tokens.device)
                before, previous = canvas.take(everything), self.previous.clone()
                side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        self._step(canvas, chunks)
                torch.cuda.current_stream().wait_stream(side)
                canvas.put(everything, before)
                self.previous.copy_(previous)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool):
                self._step(canvas, chunks)
            self.graphs[chunks] = graph
        self.graphs[chunks].replay()


def _compact(at: Tensor, size: int) -> Tensor:
    """[size]: the places where `at` [P] holds, in order; the first of them again where there are fewer than `size`.

    A place that comes twice is read twice and gets the same values twice.
    """
    target = torch.where(at, at.long().cumsum(-1) - 1, size)
    places = at.long().argmax().expand(size + 1).clone()
    return places.scatter_(0, target, torch.arange(len(at), device=at.device))[:size]


def _tensors(reading: Reading) -> list[Tensor]:
    return [reading.proposal, reading.peak, *(reading.said[name] for name in sorted(reading.said))]
