"""The one generation loop: a denoiser, a rule, a number of steps."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor

from unmask.decoding.cache import Cache, Kept, check_cache
from unmask.decoding.canvas import Canvas, blank_canvas, checked_allowed
from unmask.decoding.confidence import Confidence
from unmask.decoding.denoiser import AnyDenoiser, CachingDenoiser
from unmask.decoding.policies import Blocks, Policy, in_blocks, network_of, parse_policy
from unmask.decoding.stepper import Stepper
from unmask.decoding.tokens import Allowed, Decodes, Processor, TokenChoice
from unmask.errors import UserError, require


@dataclass(frozen=True)
class Generation:
    """B sequences of L positions, finished or on their way.  Steps are counted per sequence, from 0."""

    tokens: Tensor  # [B, L]
    masked: Tensor  # [B, L] bool: what is still to be written; nothing in the end
    reveal_step: Tensor  # [B, L]: the step of each response token's last reveal or edit, -1 on prompt and padding
    revisions: Tensor  # [B, L]: how often it was masked again or edited
    num_steps: Tensor  # [B]: the steps that this sequence took part in
    num_passes: Tensor  # [B]: denoiser passes that they needed, guidance included
    nothing_selected: Tensor  # [B]: steps in which a selector chose nothing and the rule fell back
    attention_mask: Tensor  # [B, L] bool: False on padding
    num_forwards: int  # denoiser rows evaluated, needed or (with fixed shapes) not; setting a shape up excluded
    memory_bytes: int  # what the rule kept between steps
    history: Tensor | None = None  # [B, steps + 1, L] on request: the tokens after 0, 1, ... of a sequence's own steps


def generate(
    denoiser: AnyDenoiser,
    prompts: Tensor | Sequence[Tensor],
    policy: Policy | str,
    max_steps: int,
    *,
    seed: int = 0,
    ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    guidance: float = 0.0,
    cfg_keep_tokens: Sequence[int] = (),
    eos_token_id: int | Sequence[int] | None = None,
    min_length: int = 0,
    stop_at_eos: bool = False,
    eos_last: bool = False,
    suppress_tokens: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    stop_strings: str | Sequence[str] = (),
    tokenizer: Decodes | None = None,
    processors: Sequence[Processor] = (),
    allowed: Allowed | Sequence[Tensor] | None = None,
    batch_size: int | None = None,
    fixed_shapes: bool = False,
    compile: bool = False,
    cache: Cache = "auto",
    on_finished: Callable[[int], None] = lambda sequences: None,
    on_step: Callable[[Generation], None] | None = None,
    history: bool = False,
) -> Generation:
    """Fill in the mask tokens of `prompts` in at most `max_steps` parallel steps.

    prompts: [B, L] with the mask token wherever something is to be written (any set of positions), or a list of such
        sequences of different lengths, which are padded on the left.
    policy: a rule, or the string that `--policy` takes, such as "threshold:0.9".
    ids: [B], what names a sequence's random stream; by default its place in `prompts`.
    attention_mask: [B, L] bool, False on padding; only with a tensor of prompts.  The denoiser sees padding last.
    temperature ... processors: see `TokenChoice`.
    allowed: the tokens that a response position may get, True where allowed: [L, V] for all prompts or [B, L, V]; for a
        list of prompts a list of [L, V].  Or a function (sequences [m, L], rows [m], positions [m]) -> bool [m, V] of
        the positions that are read, each counted without padding in the sequence of its row; it is not compiled.
        What a stop fills up becomes EOS all the same (`TokenChoice`).
    batch_size: of more prompts than this, the next one enters as soon as one is finished.
    fixed_shapes: every pass has `batch_size` rows, idle ones included, every projection the same number of positions.
    compile: fixed shapes, torch.compile, and CUDA graphs on a GPU; takes a minute.  To call it again, keep an `Engine`.
    cache: "prefix" keeps the keys and values of the prompt and of finished blocks while `blocks` writes a block, faster
        and for a bidirectional model an approximation (`decoding.cache`).  "auto" keeps them where that is exact but
        for the last bits: for a block-causal model, without guidance and fixed shapes.  "none" never.
    on_finished: called with the number of sequences that have just been finished.
    on_step: called after each step with what stands so far; `Engine.stream` is the same as an iterator.
    history: keep the tokens after each step; a sequence that is finished stays as it is.

    A sequence's result depends on its tokens, its id and the seed.  Its random draws never depend on the batch.  The
    denoiser's last bits do, since matrix products round differently in different shapes: where two positions or tokens
    all but tie, the batch can decide between them.  With fixed shapes it cannot: results are the same bit for bit, in
    any batch, for the same `batch_size`, the same L, and padding in both calls or in neither.  (Eagerly this library's
    own networks leave padding out of their products; with padding they are exact only if compiled.)
    """
    choice = TokenChoice(
        temperature, top_p, top_k, guidance, eos_token_id, min_length, stop_at_eos,
        eos_last=eos_last, suppress_tokens=suppress_tokens, repetition_penalty=repetition_penalty,
        stop_strings=stop_strings, tokenizer=tokenizer, processors=processors, cfg_keep_tokens=cfg_keep_tokens,
    )  # fmt: skip
    engine = Engine(
        denoiser, policy, max_steps, choice,
        batch_size=batch_size, fixed_shapes=fixed_shapes, compile=compile, cache=cache,
    )  # fmt: skip
    given: dict[str, Any] = {"seed": seed, "ids": ids, "attention_mask": attention_mask, "allowed": allowed}
    return engine.generate(prompts, **given, on_finished=on_finished, on_step=on_step, history=history)


@dataclass
class _Turn:
    """Where the loop stands after a step."""

    stepper: Stepper
    whole: Canvas  # all sequences; what is in the batch shows once it is recorded
    active: Canvas  # the batch
    rows: list[int | None]  # the sequence in each row of it
    memory_bytes: int

    def record(self) -> None:
        if self.active is not self.whole:
            busy = [row for row, sequence in enumerate(self.rows) if sequence is not None]
            self.whole.record(self.active, torch.tensor(busy, device=self.active.row.device))

    def result(self) -> Generation:
        """Outside of inference mode these are ordinary tensors."""
        return generation(self.whole, self.stepper, self.memory_bytes)


def generation(canvas: Canvas, stepper: Stepper, memory_bytes: int) -> Generation:
    """What stands on a canvas, as the prompts were given."""
    attended = torch.ones_like(canvas.response) if canvas.attention_mask is None else canvas.attention_mask
    positions = canvas.column.argsort(-1)  # [B, L]: where each place of the prompts stands in the canvas
    return Generation(
        tokens=canvas.tokens.gather(-1, positions),
        masked=canvas.masked.gather(-1, positions),
        reveal_step=canvas.reveal_step.gather(-1, positions),
        revisions=canvas.revisions.gather(-1, positions),
        num_steps=canvas.index.clone(),
        num_passes=(canvas.passes if stepper.skips else canvas.index) * stepper.passes,
        nothing_selected=canvas.nothing_selected.clone(),
        attention_mask=attended.gather(-1, positions),
        num_forwards=stepper.forwards,
        memory_bytes=memory_bytes,
    )


class Engine:
    """`generate` with its settings fixed.  A compiled one keeps what it compiled for prompts of the same shape."""

    def __init__(
        self,
        denoiser: AnyDenoiser,
        policy: Policy | str,
        max_steps: int,
        choice: TokenChoice | None = None,
        *,
        batch_size: int | None = None,
        fixed_shapes: bool = False,
        compile: bool = False,
        cache: Cache = "auto",
    ) -> None:
        if missing := [name for name in ("mask_token_id", "hidden", "logits") if not hasattr(denoiser, name)]:
            needed = "mask_token_id, hidden(tokens, attention_mask) and logits(hidden)"
            raise UserError(f"a denoiser needs {needed}; {type(denoiser).__name__} has no {missing[0]}")
        _whole_number("the denoiser's mask_token_id", denoiser.mask_token_id, 0)
        policy = parse_policy(policy) if isinstance(policy, str) else policy
        if not isinstance(policy, Policy):
            raise UserError(f"policy must be a rule such as unmask.policies.Margin() or 'margin', got {policy!r}")
        policy = in_blocks(policy, getattr(denoiser, "block_size", 0))
        max_steps = _whole_number("max_steps", max_steps, 1)
        batch_size = None if batch_size is None else _whole_number("batch_size", batch_size, 1)
        if not isinstance(policy.reads, Set):
            raise UserError(f"{policy.key}: `reads` must be a set of names, got {policy.reads!r}")
        if unknown := policy.reads - Confidence.__annotations__.keys():
            known = ", ".join(Confidence.__annotations__)
            raise UserError(f"{policy.name} reads {', '.join(sorted(unknown))}; a rule can read {known}")
        if policy.fuses and "change" in policy.reads:
            raise UserError(f"{policy.name} fuses logits: it cannot read change too")
        if policy.shadows and not hasattr(denoiser, "hidden_with"):
            needed = "attention masks and position ids: a denoiser with hidden_with(tokens, attend, positions)"
            raise UserError(f"{policy.name} needs {needed}; {type(denoiser).__name__} has none: take another rule")
        self.denoiser, self.policy, self.max_steps = denoiser, policy, max_steps
        self.choice, self.batch_size = TokenChoice() if choice is None else choice, batch_size
        require(isinstance(self.choice, TokenChoice), f"choice must be a TokenChoice, got {choice!r}")
        if self.choice.eos_last and (policy.remasks or not policy.reads):
            what = "masks again what was revealed" if policy.remasks else "decides before the denoiser's pass"
            raise UserError(f"eos_last does not go with {policy.name}, which {what}: leave one of them out")
        if compile and self.choice.processors:
            raise UserError("processors cannot be compiled: leave compile out")
        self.fixed_shapes, self.compile = fixed_shapes or compile, compile
        self.keeps = check_cache(cache, denoiser, policy, bool(self.choice.guidance), self.fixed_shapes)
        self._kept: tuple[Stepper, Canvas] | None = None

    def generate(
        self,
        prompts: Tensor | Sequence[Tensor],
        *,
        seed: int = 0,
        ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        allowed: Allowed | Sequence[Tensor] | None = None,
        on_finished: Callable[[int], None] = lambda sequences: None,
        on_step: Callable[[Generation], None] | None = None,
        history: bool = False,
    ) -> Generation:
        """As `unmask.generate`."""
        functions = callable(on_finished) and (on_step is None or callable(on_step))
        require(functions, "on_step and on_finished must be functions: give one, or leave them out")
        watched, canvases = on_step is not None or history, None
        for turn in self._turns(prompts, seed, ids, attention_mask, allowed, on_finished, watched):
            if watched:
                out = turn.result()
                if history:
                    B, L = out.tokens.shape
                    rows, most = torch.arange(B, device=out.tokens.device), int(out.num_steps.max())
                    canvases = out.tokens.new_empty(B, 1, L) if canvases is None else canvases
                    if most >= canvases.shape[1]:  # twice the room: max_steps may be far more than are taken
                        canvases = torch.cat([canvases, canvases.new_empty(B, most + 1, L)], dim=1)
                    canvases[rows, out.num_steps] = out.tokens
                if on_step is not None:
                    on_step(out)
        out = turn.result()
        if canvases is None:
            return out
        canvases[:, 0] = torch.where(out.reveal_step >= 0, self.denoiser.mask_token_id, out.tokens)
        index = torch.arange(int(out.num_steps.max()) + 1, device=canvases.device)  # finished: the last canvas again
        return replace(out, history=canvases[rows[:, None], torch.minimum(index, out.num_steps[:, None])])

    def stream(
        self,
        prompts: Tensor | Sequence[Tensor],
        *,
        seed: int = 0,
        ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        allowed: Allowed | Sequence[Tensor] | None = None,
    ) -> Iterator[Generation]:
        """What stands after each step, for all prompts; the last is what `generate` returns."""
        for turn in self._turns(prompts, seed, ids, attention_mask, allowed, lambda sequences: None, watched=True):
            yield turn.result()

    def mode(self) -> AbstractContextManager[object]:
        """What every pass runs in.

        Inference mode launches kernels faster, but its tensors cannot take part in training: a model that might keep
        one, such as a table that it fills in on first use, runs without.  Derived classes must declare it themselves.
        """
        keeps_nothing = vars(type(self.denoiser)).get("keeps_no_tensors", False)
        return torch.inference_mode() if keeps_nothing else torch.no_grad()

    def canvas(
        self, prompts: Tensor | Sequence[Tensor], seed: int, ids: Tensor | None, attention_mask: Tensor | None
    ) -> Canvas:
        """Prompts before the first step; UserError where the rule cannot write them."""
        seed = _whole_number("seed", seed)
        mask, size = self.denoiser.mask_token_id, getattr(self.denoiser, "vocab_size", None)
        canvas = blank_canvas(prompts, attention_mask, ids, mask, None if size is None else max(size, mask + 1), seed)
        self.policy.check(self.max_steps, canvas.num_response)
        if getattr(network_of(self.policy), "drawn", False) and not self.choice.temperature:
            looks = "the order looks at the tokens that are drawn (model.selector.drawn)"
            warnings.warn(f"{looks}, and greedy ones are not: give a temperature above 0", stacklevel=2)
        return canvas

    def to_read(self, sizes: Sequence[int], masks: int) -> int:
        """The most positions that the next step reads of responses of these sizes, with `masks` left in them all."""
        whole, most = sum(sizes) if self.policy.reads_revealed else masks, self.policy.most_read
        return whole if most is None else min(whole, most * len(sizes))

    def _turns(
        self,
        prompts: Tensor | Sequence[Tensor],
        seed: int,
        ids: Tensor | None,
        attention_mask: Tensor | None,
        allowed: Allowed | Sequence[Tensor] | None,
        on_finished: Callable[[int], None],
        watched: bool,  # somebody looks at what stands after each step, not at the end alone
    ) -> Iterator[_Turn]:
        """The loop of `generate` and `stream`, one step at a time."""
        with self.mode():
            whole = self.canvas(prompts, seed, ids, attention_mask)
            lists = isinstance(prompts, Sequence) or not isinstance(allowed, Sequence)
            require(lists, "a list of masks goes with a list of prompts: give allowed as [L, V] or [B, L, V]")
            mask = self.denoiser.mask_token_id
            allowed = None if allowed is None else checked_allowed(allowed, whole, self.choice, mask)
            if self.compile and allowed is not None and not isinstance(allowed, Tensor):
                raise UserError("a function of allowed tokens cannot be compiled: give a mask, or leave compile out")
        turns = self._write(whole, allowed, on_finished)
        while True:
            with self.mode():  # not while somebody else's code runs between the steps
                turn = next(turns, None)
                if turn is not None and watched:
                    turn.record()
            if turn is None:
                return
            yield turn

    def _write(self, whole: Canvas, allowed: Allowed | None, on_finished: Callable[[int], None]) -> Iterator[_Turn]:
        """Write all sequences."""
        sizes, total = whole.num_response.tolist(), len(whole)
        stepper, active = self._start(whole, allowed)
        # What the host knows of each row of the batch: the sequence that it holds, None if it idles, and its steps.
        rows: list[int | None] = [row if row < total else None for row in range(len(active))]
        steps, entered, left = [0] * len(active), min(len(active), total), total
        masks, kept = sum(sizes[:entered]), 0
        try:
            while left:
                to_read = self.to_read([sizes[row] for row in rows if row is not None], masks)
                over, masks = stepper.advance(active, steps, to_read)
                steps, kept = [step + 1 for step in steps], max(kept, stepper.num_bytes(active))
                done = [row for row, sequence in enumerate(rows) if over[row] and sequence is not None]
                left -= len(done)
                if done:
                    slots = torch.tensor(done, device=active.row.device)
                    if active is not whole:
                        whole.record(active, slots)
                yield _Turn(stepper, whole, active, rows, kept)
                if not done:
                    continue
                on_finished(len(done))
                if not left:
                    break
                stepper.forget_draws()
                fresh = range(entered, min(entered + len(done), total))  # enter as soon as others are finished
                entered += len(fresh)
                masks += sum(sizes[sequence] for sequence in fresh)
                for row, sequence in zip_longest(done, fresh):
                    rows[row], steps[row] = sequence, 0
                if fresh:
                    entering = whole.take(slice(fresh.start, fresh.stop))
                    entering.memory = self.policy.init_state(len(fresh), entering.tokens.shape[1], slots.device)
                    active.put(slots[: len(fresh)], entering)
                active.live[slots[len(fresh) :]] = False
                if not self.fixed_shapes and len(fresh) < len(done):  # and where none is waiting, finished rows leave
                    active = active.take(active.live.nonzero()[:, 0])
                    steps = [step for step, row in zip(steps, rows, strict=True) if row is not None]
                    rows = [row for row in rows if row is not None]
        finally:
            self._kept = (stepper, active) if self.compile else None

    def _start(self, whole: Canvas, allowed: Allowed | None) -> tuple[Stepper, Canvas]:
        """The first batch, and what takes it further."""
        size = self.batch_size or len(whole)
        active = whole
        if len(whole) > size:
            active = whole.take(slice(size))
        elif self.fixed_shapes and len(whole) < size:  # the rows that are missing idle
            active = whole.take(torch.arange(size, device=whole.row.device).clamp(max=len(whole) - 1))
            active.live[len(whole) :], active.masked[len(whole) :] = False, False
        active.memory = self.policy.init_state(len(active), active.tokens.shape[1], active.tokens.device)
        longest = int(whole.num_response.max())
        reused, self._kept = self._kept, None  # a second call before this one ends finds nothing, and compiles its own
        if reused is not None and reused[0].fits(active, longest, allowed):
            stepper, kept = reused
            kept.put(slice(None), active)
            active = kept
            if isinstance(stepper.allowed, Tensor) and isinstance(allowed, Tensor):
                stepper.allowed.copy_(allowed)
        else:
            if self.fixed_shapes:  # written in place, and what is compiled for it outlasts this call
                active = active.take(slice(None))
                active.slot = torch.arange(size, device=active.slot.device)
            settings = self.denoiser, self.policy, self.max_steps, self.choice
            states = None
            if self.keeps and isinstance(self.policy, Blocks):
                states = Kept(cast(CachingDenoiser, self.denoiser), self.policy, active)
            stepper = Stepper(*settings, active, longest, self.fixed_shapes, self.compile, states)
            stepper.allowed = allowed.clone() if self.compile and isinstance(allowed, Tensor) else allowed
        stepper.forwards = 0
        stepper.highest = int(whole.tokens.max()) if self.choice.processors else 0
        return stepper, active


def _whole_number(name: str, value: Any, least: int | None = None) -> int:
    wanted = f"{name} must be a whole number" + (f" from {least} on" if least is not None else "")
    try:
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{wanted}, got {value!r}") from None
    if not (-(2**63) <= number < 2**63 if least is None else least <= number < 2**31):
        raise UserError(f"{wanted}{' of 64 bits' if least is None else ''}, got {number}")
    return number
