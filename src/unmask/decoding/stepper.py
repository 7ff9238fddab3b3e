"""One step of a canvas: the denoiser's pass, the projection where somebody reads it, the rule's decision, the writing.

Only the positions that are read are projected; the denoiser's last MLP runs there alone too, unless the rule looks at
hidden states.
Eager: shapes follow the work; finished rows leave, and where the rule decides before the pass, rows that reveal nothing
take no part in it.  It launches few kernels (`Recorded`: few tokens pass as one) and waits for the device twice per
step: before the pass for the places to read, after it for the status.
Static: the batch keeps its size and positions come in whole chunks, so products round alike whatever is in the batch.
Compiled, the static pieces go through torch.compile, and on a GPU a step is one CUDA graph per number of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from unmask import rng
from unmask.decoding.blocks import block_causal, block_numbers
from unmask.decoding.cache import Kept
from unmask.decoding.canvas import Canvas, no_token
from unmask.decoding.confidence import Confidence, confidence, largest, log_probabilities
from unmask.decoding.denoiser import AnyDenoiser
from unmask.decoding.policies.rule import Decision, Policy, Step
from unmask.decoding.recorded import Recorded, Trunk, recordable
from unmask.decoding.shadows import hidden_with_shadows
from unmask.decoding.tokens import Allowed, TokenChoice, penalised
from unmask.errors import UserError, require
from unmask.variational.posterior import full_precision

# Numbers of one chunk of the projection, positions x vocabulary: large enough to keep the device busy, small enough to
# stay in its caches (CPU) or out of the way of the weights (GPU).
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}
AHEAD = 1 << 22  # uniforms drawn for the steps to come
_LOGITS = "the denoiser's `logits` must be [M, V] from hidden states [M, D]"
_FINITE = ("log_top", "log_proposal", "margin", "entropy", "peak")  # what is finite if the logits are sound


class Stepper:
    """Takes a canvas one step further, in place.  It keeps what must outlive a step but belongs to no sequence."""

    def __init__(
        self,
        denoiser: AnyDenoiser,
        policy: Policy,
        max_steps: int,
        choice: TokenChoice,
        canvas: Canvas,
        longest: int,  # of all responses to come
        static: bool,
        compile: bool,  # only what is static
        kept: Kept | None = None,  # only what is not
    ) -> None:
        self.denoiser, self.policy, self.choice = denoiser, policy, choice
        self.static, self.compile, self.kept = static, compile, kept
        self.block_size: int = getattr(denoiser, "block_size", 0)
        self.passes = 2 if choice.guidance else 1  # of the denoiser per step that needs it
        self.skips = policy.remasks or not policy.reads  # then a step may need none
        self.forwards = 0  # denoiser rows evaluated
        device = canvas.tokens.device
        self.last, self.max_steps = max_steps - 1, torch.tensor(max_steps, device=device)
        self.batch, self.length = canvas.tokens.shape
        self.highest = 0  # of all token ids of all prompts, where there are processors
        self.longest, self.padded = longest, canvas.attention_mask is not None
        self.chunk, self.score_dtype = 0, torch.float32  # positions, log p; set by the first pass, which shows V
        # A rule may look at nothing by which one sees that logits are sound.
        self.wanted = policy.reads | ({"log_top"} if policy.reads and not policy.reads & set(_FINITE) else set())
        self.keeps_log_reveal = policy.remasks and "log_proposal" in self.wanted
        self.previous = torch.empty(0)  # [slot, response position, V]: log p of the last pass, or what a rule fuses
        self.allowed: Allowed | None = None
        self.status = torch.empty(0)  # [?, b]: what the host must know after a step
        self.status_names: tuple[str, ...] = ()
        self.peaks: tuple[Tensor, Tensor] | None = None  # places and largest logits [m], where no more was read
        self.turn, self.drawn_at, self.drawn = 0, 0, torch.empty(0, 0)  # uniforms [b, turns, L + 1] from a turn on
        trunk: Trunk = denoiser.hidden
        self.finish: Callable[[Tensor], Tensor] = lambda states: states  # hidden states of what a pass gives
        own = recordable(denoiser)
        if own and hasattr(denoiser, "finish") and not (policy.reads_hidden or policy.shadows):
            # A derived class may have another `hidden`, and a listener must hear the whole pass: neither is `own`.
            trunk, self.finish = partial(cast(Any, trunk), finish=False), denoiser.finish
            if kept is not None:
                kept.cached = partial(kept.cached, finish=False)
        self.trunk = trunk if static or not own else Recorded(denoiser, trunk)
        self.locate, self.read, self.settle = self._locate, self._read_into, self._settle
        self.shadow_trunk: Any = getattr(denoiser, "hidden_with", None)
        if compile:
            # Every rule is a program of its own; beyond the limit (8) torch would silently run it eagerly.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            for name in ("trunk", "locate", "read", "settle", *["shadow_trunk"] * policy.shadows):
                setattr(self, name, torch.compile(getattr(self, name), dynamic=False))
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def advance(self, canvas: Canvas, steps: list[int], to_read: int) -> tuple[list[bool], int]:
        """One step.  Which rows are finished [b], and how many masks are left.

        `steps` [b]: how many each row has taken.  `to_read`: how many positions this step reads, at most.
        """
        self.turn += 1
        if not self.static:
            self._eager_step(canvas, all_last=min(steps) == self.last, any_last=max(steps) == self.last)
        else:
            if not self.chunk:
                self._measure(self._hidden(canvas.tokens, canvas.attention_mask, canvas))
            chunks = -(-to_read // self.chunk)
            self.forwards += self.passes * self.batch
            if self.compile and canvas.tokens.is_cuda:
                with torch.cuda.device_of(canvas.tokens):  # type: ignore[no-untyped-call]  # whose streams are recorded
                    self._replay(canvas, chunks)
            else:
                self._static_step(canvas, chunks)
        status = dict(zip(self.status_names, self.status.tolist(), strict=True))  # the device is waited for here
        for name, what in (("logits", "denoiser"), ("scores", "selector")):
            row = next((row for row, total in enumerate(status.get(name, ())) if not math.isfinite(total)), None)
            if row is not None:
                if self.peaks is not None:
                    places, peaks = self.peaks
                    row = int(places[~torch.isfinite(peaks)][0]) // self.length
                at = f"for sequence {int(canvas.row[row])} at step {steps[row]}"
                given = {"processors": self.choice.processors, "allowed tokens": self.allowed is not None}
                changed = " and ".join(name for name, is_given in given.items() if is_given and what == "denoiser")
                by = f", {changed} applied: leave a token at every position" if changed else ""
                raise UserError(f"the {what}'s logits are not finite {at}{by}")
        stopped = status.get("stopped", [False] * len(steps))
        finished = status.get("finished", [not self.policy.remasks] * len(steps))
        over = [
            step == self.last or bool(stopped[row]) or (status["masks"][row] == 0 and bool(finished[row]))
            for row, step in enumerate(steps)
        ]
        masks = int(sum(status["masks"]))
        if self.choice.stop_strings:
            busy = [row for row, live in enumerate(canvas.live.tolist()) if live and not over[row]]
            ended, filled = self._end_at_strings(canvas, busy)
            over, masks = [end or row in ended for row, end in enumerate(over)], masks - filled
        return over, masks

    def _end_at_strings(self, canvas: Canvas, rows: list[int]) -> tuple[list[int], int]:
        """Which of these rows have written a stop string, and how many masks of theirs became EOS."""
        ended, tokenizer, strings = [], self.choice.tokenizer, self.choice.stop_strings
        assert tokenizer is not None
        first_mask = torch.where(canvas.masked, canvas.place, self.length).amin(-1, keepdim=True)
        beginning = canvas.response & (canvas.place < first_mask)
        for row in rows:
            try:
                text = tokenizer.decode(canvas.tokens[row, beginning[row]].tolist())
            except Exception as error:  # whatever a tokenizer of the user's own raises
                raise UserError(f"stop_strings: the tokenizer cannot decode what was written ({error!r})") from error
            require(isinstance(text, str), f"stop_strings: the tokenizer's decode must give a text, got {_shape(text)}")
            ended += [row] if any(string in text for string in strings) else []
        slots = torch.tensor(ended, dtype=torch.long, device=canvas.row.device)
        rest = canvas.masked & torch.isin(torch.arange(len(canvas), device=slots.device), slots)[:, None]
        self._set(canvas, "tokens", torch.where(rest, self.choice.eos_ids[0], canvas.tokens))
        self._set(canvas, "reveal_step", torch.where(rest, canvas.index[:, None] - 1, canvas.reveal_step))
        self._set(canvas, "masked", canvas.masked & ~rest)
        return ended, int(rest.sum())

    def fits(self, canvas: Canvas, longest: int, allowed: Allowed | None) -> bool:
        """Whether what was compiled can take this batch."""
        found = (*canvas.tokens.shape, canvas.tokens.device, canvas.attention_mask is not None)
        shapes = [each.shape if isinstance(each, Tensor) else None for each in (self.allowed, allowed)]
        return (
            shapes[0] == shapes[1]
            and longest <= self.longest
            and found == (self.batch, self.length, self.max_steps.device, self.padded)
        )

    def forget_draws(self) -> None:
        """The rows of the canvas have changed."""
        self.drawn = torch.empty(0, 0)

    def num_bytes(self, canvas: Canvas) -> int:
        """What the rule has the loop keep between steps."""
        kept = [*canvas.memory.values(), self.previous, *[canvas.log_reveal] * self.keeps_log_reveal]
        return sum(tensor.nbytes for tensor in kept)

    # --- one step, in two ways ----------------------------------------------------------------------------------------

    def _eager_step(self, canvas: Canvas, all_last: bool, any_last: bool) -> None:
        decision = None
        last = (canvas.index == self.last)[:, None] if any_last else None  # [b, 1]
        if all_last:  # nothing to decide
            decision = Decision(canvas.masked)
        elif not self.policy.reads:  # the rule does not ask the denoiser: only what it reveals is projected
            decision = self._decide(canvas, last)
        at = self._read_at(canvas) if decision is None else decision.reveal
        wanted = self.wanted if decision is None else frozenset[str]()
        places = at.flatten().nonzero()[:, 0]  # waits for the device: before the pass, not behind it
        rows, states = None, places  # which rows take part, and where in their hidden states the places are
        if decision is not None and self.skips:
            takes_part = at.any(-1)
            rows = takes_part.nonzero()[:, 0]
            states = (takes_part.cumsum(0) - 1)[places // self.length] * self.length + places % self.length
            if not len(rows):  # nobody asks the denoiser
                self.peaks = places, places.to(self.score_dtype)
                self._settle(canvas, torch.empty(0), canvas.tokens, {}, decision, last)
                return
        hidden, unguided = self._passes(canvas, rows)
        self.forwards += self.passes * len(hidden)
        if not self.chunk:
            self._measure(hidden)
        read_from = self._at(hidden, unguided, states)
        split = (each.split(self.chunk) for each in (places, *read_from))  # type: ignore[no-untyped-call]
        parts = [self._read(canvas, wanted, *part) for part in zip(*split, strict=True)]
        proposed, read = parts[0] if len(parts) == 1 else (torch.cat(each, dim=-1) for each in zip(*parts, strict=True))
        proposal, stats = canvas.tokens.flatten().scatter(0, places, proposed), {}
        self.peaks = None if wanted else (places, read[0])
        if wanted:
            values = read.new_zeros(len(read), proposal.numel()).scatter_(1, places.expand_as(read), read)
            stats = self._named(values, at)
        self._settle(canvas, hidden, proposal.view_as(at), stats, decision, last)

    def _static_step(self, canvas: Canvas, chunks: int) -> None:
        hidden, unguided = self._passes(canvas)
        places, proposal, values, last = self.locate(canvas)
        for part in places[: chunks * self.chunk].split(self.chunk) if chunks else ():  # type: ignore[no-untyped-call]
            self.read(canvas, hidden, unguided, part, proposal, values)
        stats = self._named(values, canvas.tokens)
        self.settle(canvas, hidden, proposal.view_as(canvas.tokens), stats, None, last)

    def _named(self, values: Tensor, canvas: Tensor) -> dict[str, Tensor]:
        """What was read [K, b * L] by its names, [b, L] each."""
        names = sorted(self.wanted) or ["peak"]
        return dict(zip(names, values.view(-1, *canvas.shape).unbind(), strict=True))

    def _replay(self, canvas: Canvas, chunks: int) -> None:
        """The static step as one CUDA graph, recorded when it is first needed."""
        if chunks not in self.graphs:
            if not self.graphs:  # compile, and let the libraries set themselves up, before anything is recorded
                everything = torch.arange(len(canvas), device=canvas.tokens.device)
                before, previous = canvas.take(everything), self.previous.clone()
                side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        self._static_step(canvas, chunks)
                torch.cuda.current_stream().wait_stream(side)
                canvas.put(everything, before)
                self.previous.copy_(previous)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool):
                self._static_step(canvas, chunks)
            self.graphs[chunks] = graph
        self.graphs[chunks].replay()

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _passes(self, canvas: Canvas, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What a pass gives [b, L, D] for some rows or all, and for guidance for the same with their prompt masked."""
        if self.kept is not None:
            return self.kept.passed(canvas, rows), None
        tokens, response, attention_mask = canvas.tokens, canvas.response, canvas.attention_mask
        whole = canvas if rows is None else None  # with rows, it is decided already
        if self.block_size:
            attention_mask = block_causal(block_numbers(response, self.block_size), attention_mask)
        if rows is not None and len(rows) < len(canvas):
            tokens, response = tokens[rows], response[rows]
            attention_mask = None if attention_mask is None else attention_mask[rows]
        hidden = self._hidden(tokens, attention_mask, whole)
        if not self.choice.guidance:
            return hidden, None
        kept = response
        for token in self.choice.cfg_keep_tokens:
            kept = kept | (tokens == token)
        return hidden, self._hidden(torch.where(kept, tokens, self.denoiser.mask_token_id), attention_mask, whole)

    def _hidden(self, tokens: Tensor, attention_mask: Tensor | None, canvas: Canvas | None) -> Tensor:
        """[b, L, D]; where the rule wants shadows, with those of the canvas."""
        try:
            if self.policy.shadows and canvas is not None:
                longest = getattr(self.denoiser, "context_length", None) or self.length
                long = f"a sequence of {self.length} tokens is longer than the model's context of {longest}: shorten it"
                require(self.length <= longest, long)
                most = min(self.policy.most_read or self.longest, self.longest)
                at, mask = self._read_at(canvas), self.denoiser.mask_token_id
                return hidden_with_shadows(self.shadow_trunk, tokens, canvas, at, most, mask)
            return self.trunk(tokens, attention_mask)
        except IndexError as error:  # from a table of embeddings
            needed = f"its vocabulary must hold ids up to {int(tokens.max())}, its context {self.length} positions"
            raise UserError(f"the denoiser cannot look these tokens up: {needed}") from error

    def _at(self, hidden: Tensor, unguided: Tensor | None, at: Tensor) -> list[Tensor]:
        """Hidden states [m, D] at the places `at` [m] of the flattened canvas, of each pass [b, L, D]."""
        passes = [hidden] if unguided is None else [hidden, unguided]
        return [self.finish(states.flatten(0, 1).index_select(0, at)) for states in passes]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[m, V] from hidden states [m, D]."""
        logits = self.denoiser.logits(hidden)
        if logits.shape != (len(hidden), self.vocab_size):
            raise UserError(f"{_LOGITS}, got {_shape(logits)} for M = {len(hidden)} and V = {self.vocab_size}")
        return logits

    def _measure(self, hidden: Tensor) -> None:
        """Everything that depends on the vocabulary."""
        if not torch.is_tensor(hidden) or hidden.ndim != 3 or hidden.shape[1] != self.length:
            raise UserError(f"the denoiser's `hidden` must be [B, L, D] from tokens [B, L], got {_shape(hidden)}")
        probe, choice, mask = self.denoiser.logits(self.finish(hidden[0, :1])), self.choice, self.denoiser.mask_token_id
        if not torch.is_tensor(probe) or probe.ndim != 2 or len(probe) != 1:
            raise UserError(f"{_LOGITS}, got {_shape(probe)} for M = 1")
        self.policy.check_logits(probe)
        self.vocab_size = V = probe.shape[-1]
        if isinstance(self.allowed, Tensor) and self.allowed.shape[-1] != V:
            raise UserError(f"allowed is for {self.allowed.shape[-1]} tokens, and the denoiser writes {V}")
        device = probe.device
        for name, ids in (("eos_token_id", choice.eos_ids), ("suppress_tokens:", choice.suppress_tokens)):
            for token in ids:
                if not 0 <= token < V or token == mask:
                    raise UserError(f"{name} {token} is not one of the {V} tokens that the denoiser writes")
        # Where the mask token is one of the head's, it must never be written.
        self.never = torch.tensor([*choice.suppress_tokens, *[mask] * (mask < V)], dtype=torch.long, device=device)
        early = choice.eos_ids if choice.min_length else ()
        if len({*self.never.tolist(), *early}) == V:
            hold = "suppress_tokens and, before min_length, eos_token_id hold" if early else "suppress_tokens holds"
            raise UserError(f"{hold} every token: leave one out")
        if choice.min_length:
            self.is_eos = choice.is_eos(torch.arange(V, device=device))  # [V]
        self.score_dtype = torch.promote_types(probe.dtype, torch.float32)
        numbers = CHUNK.get(device.type, CHUNK["cuda"]) // (4 if self.choice.temperature else 1)  # sampling: float64
        self.chunk = max(1, numbers // V)
        if self.static:  # of the same shape whatever the responses; half a canvas, so that less is filled up
            self.chunk = min(self.chunk, -(-self.batch * self.length // 2))
        if "change" in self.wanted or self.policy.fuses:
            self.previous = torch.zeros(self.batch, self.longest, V, dtype=self.score_dtype, device=device)

    def _read_at(self, canvas: Canvas) -> Tensor:
        """[b, L] bool: the positions that the rule looks at."""
        at = canvas.response & canvas.live[:, None] if self.policy.reads_revealed else canvas.masked
        return self.policy.looks_at(at, canvas.place, canvas.memory)

    def _read(
        self,
        canvas: Canvas,
        wanted: frozenset[str],
        at: Tensor,  # [m]: places of the flattened canvas
        hidden: Tensor,  # [m, D]
        unguided: Tensor | None = None,  # [m, D]
    ) -> tuple[Tensor, Tensor]:
        """The proposal [m] at each place, and what is wanted [K, m] in alphabetical order, or the largest logit [1, m]
        where nothing is."""
        choice = self.choice
        logits = self._logits(hidden)
        if unguided is not None:
            base, logits = full_precision(self._logits(unguided)), full_precision(logits)
            guided = base + (1 + choice.guidance) * (logits - base)
            logits = torch.where(base == -torch.inf, logits, guided)  # a token that is impossible without the prompt
        if choice.repetition_penalty != 1:
            logits = penalised(logits, self._others(canvas, at), choice.repetition_penalty)
        if choice.min_length:
            early = (canvas.place.flatten()[at] < choice.min_length)[:, None]
            logits = torch.where(early & self.is_eos, -torch.inf, logits)
        if len(self.never):
            logits = logits.index_fill(-1, self.never, -torch.inf)
        if choice.processors:
            logits = self._processed(canvas, at, logits)
        if self.allowed is not None:
            logits = torch.where(self._is_allowed(canvas, at, logits), logits, -torch.inf)
        if self.previous.numel():
            kept = canvas.slot[at // self.length], canvas.place.flatten()[at].clamp(min=0)
        if self.policy.fuses:  # at a sequence's first pass the slot holds another's
            before = torch.where(canvas.index[at // self.length, None] == 0, 0.0, self.previous[kept])
            logits, self.previous[kept] = self.policy.fuse(logits, before)
        peak, best = largest(logits)
        proposal = best
        if choice.temperature > 0:
            row = at // self.length
            words = canvas.index[row], canvas.id[row], canvas.position.flatten()[at]
            uniforms = rng.uniforms(canvas.seed[row], rng.Purpose.TOKEN, *words, dtype=torch.float64)
            proposal = choice.sample(logits, uniforms)
        if not wanted:
            return proposal, peak[None]
        log_p, current, previous = log_probabilities(logits), None, None
        if "log_current" in wanted:  # the mask token is no token: where it stands, nobody looks at this
            current = canvas.tokens.flatten()[at].clamp(max=logits.shape[-1] - 1)
        if "change" in wanted:
            previous = self.previous[kept]
            self.previous[kept] = log_p
        stats: dict[str, Tensor] = confidence(log_p, wanted, best, proposal, current, previous)  # type: ignore[assignment]
        if "change" in wanted:  # the first pass has none before it; the slot holds another sequence's
            stats["change"] = torch.where(canvas.index[at // self.length] == 0, torch.inf, stats["change"])
        values = [stats[name] for name in sorted(wanted)]
        return proposal, torch.stack(values) if len(values) > 1 else values[0][None]

    def _others(self, canvas: Canvas, at: Tensor) -> Tensor:
        """[m, V]: how often each token stands in the sequence of each place [m], the place itself left out."""
        tokens, V = self._without_padding(canvas), self.vocab_size
        tokens = tokens.clamp(max=V)  # what the head does not write, such as the mask
        counts = torch.zeros(len(tokens), V + 1, dtype=torch.long, device=at.device)
        counts.scatter_add_(-1, tokens, torch.ones_like(tokens))
        elsewhere = counts[at // self.length]
        return elsewhere.scatter_add(-1, tokens.flatten()[at][:, None], -torch.ones_like(at)[:, None])[:, :V]

    def _processed(self, canvas: Canvas, at: Tensor, logits: Tensor) -> Tensor:
        """Through the processors, which may look up the score of any token of the sequence, the mask token too."""
        sequences, V = self._without_padding(canvas)[at // self.length], self.vocab_size
        beyond = max(0, self.denoiser.mask_token_id + 1 - V, self.highest + 1 - V)
        scores = torch.nn.functional.pad(logits, (0, beyond), value=-torch.inf)
        for processor in self.choice.processors:
            given, name = processor(sequences, scores), getattr(processor, "__name__", type(processor).__name__)
            if not torch.is_tensor(given) or given.shape != scores.shape:
                raise UserError(f"processor {name} must return scores {_shape(scores)} as it gets, not {_shape(given)}")
            if not given.is_floating_point():
                raise UserError(f"processor {name} must return scores, not {given.dtype}: -inf is for what it forbids")
            scores = given
        return scores[:, :V].index_fill(-1, self.never, -torch.inf)

    def _is_allowed(self, canvas: Canvas, at: Tensor, logits: Tensor) -> Tensor:
        """[m, V] bool."""
        row = at // self.length
        if isinstance(self.allowed, Tensor):
            column = canvas.column.flatten()[at]
            return self.allowed[column] if self.allowed.ndim == 2 else self.allowed[canvas.row[row], column]
        assert self.allowed is not None
        positions = canvas.position.flatten()[at]
        allowed = self.allowed(self._without_padding(canvas)[row], canvas.row[row], positions)
        if not torch.is_tensor(allowed) or allowed.dtype != torch.bool or allowed.shape != logits.shape:
            raise UserError(f"allowed must return booleans {_shape(logits)}, got {_shape(allowed)}")
        empty = ~(allowed & (logits != -torch.inf)).any(-1)
        if empty.any():
            sequence, position = (int(each[empty][0]) for each in (canvas.row[row], positions))
            raise no_token(position, sequence)
        return allowed

    def _without_padding(self, canvas: Canvas) -> Tensor:
        """[b, L], with the mask token on padding."""
        if canvas.attention_mask is None:
            return canvas.tokens
        return torch.where(canvas.attention_mask, canvas.tokens, self.denoiser.mask_token_id)

    def _locate(self, canvas: Canvas) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With static shapes: where to read, room for what is read, and which rows are at their last step.

        [P]: the places that are read, in order, P a multiple of the chunk; where there are fewer, the last of them
        again.  It fills up its own chunk, and a place that comes twice in one chunk gets the same values twice.
        """
        at = self._read_at(canvas)
        size = -(-self.batch * self.longest // self.chunk) * self.chunk
        order = at.long().cumsum(-1)  # by rows: inductor cannot fuse what surrounds a scan over the whole batch
        count = order[:, -1]
        target = torch.where(at, order - 1 + (count.cumsum(0) - count)[:, None], size).flatten()
        everywhere = torch.arange(at.numel(), device=at.device)
        places = torch.zeros(size + 1, dtype=torch.long, device=at.device).scatter_(0, target, everywhere)
        last = (count.sum() - 1).clamp(min=0)
        places = places[torch.arange(size, device=at.device).clamp(max=last)]
        values = torch.zeros(max(1, len(self.wanted)), at.numel(), dtype=self.score_dtype, device=at.device)
        return places, canvas.tokens.flatten().clone(), values, (canvas.index == self.last)[:, None]

    def _read_into(
        self, canvas: Canvas, hidden: Tensor, unguided: Tensor | None, at: Tensor, proposal: Tensor, values: Tensor
    ) -> None:
        """`_read`, into the room that `_locate` made."""
        proposal[at], read = self._read(canvas, self.wanted, at, *self._at(hidden, unguided, at))
        values[:, at] = read.to(values.dtype)

    def _decide(self, canvas: Canvas, last: Tensor | None, **seen: Any) -> Decision:
        """The rule's answer, with the last step's certainty in it."""
        step = Step(
            index=canvas.index,
            max_steps=self.max_steps.expand_as(canvas.index),
            tokens=canvas.tokens,
            masked=canvas.masked,
            response=canvas.response,
            num_response=canvas.num_response,
            attention_mask=canvas.attention_mask,
            uniforms=partial(self._uniforms, canvas),
            memory=canvas.memory,
            log_reveal=canvas.log_reveal,
            **seen,
        )
        rule, step = self.policy.key, step if self.policy.holds_back else step.offered()
        try:
            decision = self.policy.decide(step)
        except KeyError as missing:
            if missing.args[0] not in Confidence.__annotations__:
                raise
            raise UserError(f"{rule} looks at step.stats[{missing}]: it must declare this in `reads`") from None
        if not isinstance(decision, Decision):
            raise UserError(f"{rule} must answer with a Decision(reveal=...), not with a {type(decision).__name__}")
        if not isinstance(decision.reveal, Tensor):
            found = type(decision.reveal).__name__
            raise UserError(f"{rule} must reveal by booleans {_shape(canvas.masked)}, got {found}")
        if decision.reveal.shape != canvas.masked.shape or decision.reveal.dtype != torch.bool:
            shape, dtype = _shape(decision.reveal), decision.reveal.dtype
            raise UserError(f"{rule} must reveal by booleans {_shape(canvas.masked)}, got {dtype} {shape}")
        reveal = step.masked & decision.reveal
        return decision._replace(reveal=reveal if last is None else reveal | (canvas.masked & last))

    def _settle(
        self,
        canvas: Canvas,
        hidden: Tensor,
        proposal: Tensor,  # [b, L]
        stats: dict[str, Tensor],  # [b, L] each
        decision: Decision | None,  # None: still to be made
        last: Tensor | None,  # [b, 1] bool: rows at their last step; None: there are none
    ) -> None:
        """Decide, write, and say how it stands."""
        if decision is None:
            held_back = canvas.masked & self.choice.is_eos(proposal) if self.choice.eos_last else None
            states = partial(self.finish, hidden)
            decision = self._decide(canvas, last, states=states, stats=stats, proposal=proposal, held_back=held_back)
        reveal = decision.reveal
        masked = canvas.masked ^ reveal
        tokens = torch.where(reveal, proposal, canvas.tokens)
        reveal_step = torch.where(reveal, canvas.index[:, None], canvas.reveal_step)
        written = reveal
        if decision.edit is not None:
            if not (self.policy.reads and self.policy.reads_revealed):  # or what stands there would be the proposal
                told = "it must declare `reads_revealed = True` and what it reads"
                raise UserError(f"{self.policy.name} edits what was revealed: {told}")
            edit = self._revised(canvas, decision.edit, last) & (proposal != canvas.tokens)
            written, tokens = reveal | edit, torch.where(edit, proposal, tokens)
            reveal_step = torch.where(edit, canvas.index[:, None], reveal_step)
            self._set(canvas, "revisions", canvas.revisions + edit)
        if "log_proposal" in stats and self.keeps_log_reveal:
            self._set(canvas, "log_reveal", torch.where(written, stats["log_proposal"], canvas.log_reveal))
        if decision.remask is not None:
            remask = self._revised(canvas, decision.remask, last)
            masked = masked | remask
            tokens = torch.where(remask, self.denoiser.mask_token_id, tokens)
            self._set(canvas, "revisions", canvas.revisions + remask)
        if decision.nothing_selected is not None:
            nothing = decision.nothing_selected & canvas.live
            nothing = nothing if last is None else nothing & ~last[:, 0]
            self._set(canvas, "nothing_selected", canvas.nothing_selected + nothing)
        for name, kept in (decision.memory or {}).items():
            self._set(canvas.memory, name, kept)
        status = {}
        if self.choice.stop_at_eos:
            is_eos = canvas.response & ~masked & self.choice.is_eos(tokens)
            before = masked & (is_eos.cumsum(-1) == 0)  # masks with no EOS to their left
            stopped = masked.any(-1) & ~before.any(-1)
            rest = masked & stopped[:, None]
            tokens = torch.where(rest, torch.full_like(tokens, self.choice.eos_ids[0]), tokens)
            reveal_step = torch.where(rest, canvas.index[:, None], reveal_step)
            masked = masked & ~rest
            status["stopped"] = stopped
        # 0 x is 0 exactly where x is finite, and a sum of zeros cannot overflow.
        if self.peaks is not None:
            sound = (0 * self.peaks[1]).sum(dtype=self.score_dtype).expand_as(canvas.index)
        else:
            sound = (0 * next(stats[name] for name in _FINITE if name in stats)).sum(-1)
        status |= {"masks": masked.sum(-1), "logits": sound}
        if decision.finished is not None:
            status["finished"] = decision.finished
        if decision.scores is not None:
            asked = canvas.masked if last is None else canvas.masked & ~last
            status["scores"] = (0 * torch.where(asked, decision.scores, 0.0)).sum(-1)
        self._set(canvas, "tokens", tokens)
        self._set(canvas, "reveal_step", reveal_step)
        self._set(canvas, "masked", masked)
        if self.skips:
            needed = reveal.any(-1)
            if self.wanted:  # all but those that the last step leaves nothing to reveal
                needed = canvas.live if last is None else canvas.live & (needed | ~last[:, 0])
            self._set(canvas, "passes", canvas.passes + needed)
        self._set(canvas, "index", canvas.index + (canvas.live if self.static else 1))
        self._set(self, "status", torch.stack(list(status.values())))
        self.status_names = tuple(status)

    def _revised(self, canvas: Canvas, where: Tensor, last: Tensor | None) -> Tensor:
        """[b, L] bool: what a rule may mask again or edit of what it names; nothing at the last step."""
        if not self.policy.remasks:
            raise UserError(f"{self.policy.name} masks again what was revealed: it must declare `remasks = True`")
        where = where & canvas.response & ~canvas.masked & canvas.live[:, None]
        return where if last is None else where & ~last

    def _set(self, holder: Any, name: str, value: Tensor) -> None:
        """Eagerly a new tensor, with static shapes in place: a CUDA graph knows addresses."""
        named = isinstance(holder, dict)
        old = holder[name] if named else getattr(holder, name)
        if self.static and old.shape == value.shape:
            old.copy_(value)
        elif named:
            holder[name] = value
        else:
            setattr(holder, name, value)

    def _uniforms(self, canvas: Canvas) -> Tensor:
        """[b, L + 1]: one draw per position, and under the position -1 one for the whole sequence."""
        steps, seeds, ids = (each[:, None, None] for each in (canvas.index, canvas.seed, canvas.id))
        if not self.static:  # a hash takes dozens of kernels, for one step or many
            if self.turn - self.drawn_at < self.drawn.shape[1]:
                return self.drawn[:, self.turn - self.drawn_at]
            ahead = torch.arange(max(1, min(self.last, AHEAD // canvas.tokens.numel())), device=steps.device)
            steps = steps + ahead[:, None]  # [b, steps, 1]
        positions = torch.cat([canvas.position, torch.full_like(canvas.position[:, :1], -1)], dim=-1)[:, None]
        drawn = rng.uniforms(seeds, rng.Purpose.REVEAL, steps, ids, positions, dtype=torch.float64)
        if not self.static:
            self.drawn, self.drawn_at = drawn, self.turn
        return drawn[:, 0]


def _shape(value: Any) -> str:
    return str(list(value.shape)) if torch.is_tensor(value) else f"a {type(value).__name__}"
