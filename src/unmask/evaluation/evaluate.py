"""One policy at one budget on a task -> a record."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import unmask
from unmask.decoding.cache import Cache
from unmask.decoding.denoiser import AnyDenoiser
from unmask.decoding.generate import Engine
from unmask.decoding.policies import Blocks, NetworkPolicy, Policy, SelectorNetwork, network_of
from unmask.decoding.tokens import TokenChoice
from unmask.display import say
from unmask.errors import UserError
from unmask.evaluation.records import EvaluationSpec, Outcome, Record, wilson_interval
from unmask.evaluation.verdicts import Chunk, VerdictFile, joined, verdicts_in
from unmask.models.frozen import FrozenDenoiser
from unmask.models.networks import Denoiser, Selector
from unmask.models.order_model import OrderModel, weights_hash
from unmask.runtime import Processes, process_settings
from unmask.tasks.diversity import distinct_range, sequence_codes
from unmask.tasks.exact import ExactDenoiser
from unmask.tasks.task import Examples, Task, check_no_mask

AnyModel = Denoiser | FrozenDenoiser | ExactDenoiser
BATCH = 250  # sequences per pass
CHUNK = 4 * BATCH  # sequences per line of verdicts: the most that a crash loses
PICTURED = 24  # sequences whose reveal steps are kept for the picture

Advance = Callable[[int], None]  # called with the number of sequences that are done


@dataclass(frozen=True)
class ExactModel:
    """The exact posterior in the place of a model: there is no network, and no order that could read its states."""

    denoiser: ExactDenoiser
    selector: None = None


@dataclass(frozen=True)
class Setup:
    """What the evaluations of several policies have in common."""

    model: OrderModel | ExactModel  # its selector decides the learned rules, on its denoiser
    plain: OrderModel | ExactModel  # its denoiser is that of the heuristics
    task: Task
    label: str  # what records call the model
    num_examples: int
    choice: TokenChoice
    seed: int
    trained_seed: int | None = None  # that the order was learned with
    precision: str = "no"  # "bf16" runs the denoiser's trunk and the selector under autocast; scores stay float32
    compile: bool = False
    cache: Cache = "auto"

    def denoiser_of(self, policy: Policy) -> AnyModel:
        return (self.model if network_of(policy) is not None else self.plain).denoiser

    def spec(self, policy: Policy, budget: int) -> EvaluationSpec:
        selector = network_of(policy)
        learned, choice, denoiser = selector is not None, self.choice, self.denoiser_of(policy)
        return EvaluationSpec(
            task=self.task.name,
            model=self.label,
            policy=policy.name,
            trained_budget=budget if learned else None,
            budget=budget,
            temperature=float(choice.temperature),
            top_p=float(choice.top_p),
            top_k=choice.top_k,
            guidance=float(choice.guidance),
            eos_policy=choice.eos_policy,
            seed=self.seed,
            num_examples=self.num_examples,
            split=self.task.held_out,
            precision=self.precision,
            trained_seed=self.trained_seed if learned else None,
            selector=selector.selection.name if isinstance(selector, Selector) else None,
            selector_weights=weights_hash(selector) if isinstance(selector, nn.Module) else None,
            denoiser=fingerprint(denoiser),
            plain_denoiser=fingerprint(self.plain.denoiser) if learned else None,
            examples=_examples_hash(self.task.examples(torch.arange(min(self.num_examples, PICTURED)), "test")),
            cache="prefix" if self.cache == "prefix" and not getattr(denoiser, "block_size", 0) else "none",
        )


def fingerprint(denoiser: AnyModel) -> str:
    """What records call a denoiser: by its weights, or by the task whose posterior it is."""
    if isinstance(denoiser, FrozenDenoiser) and denoiser.lora:
        return f"{denoiser.fingerprint}+{weights_hash(denoiser.adapters)}"
    if isinstance(denoiser, ExactDenoiser | FrozenDenoiser):
        return denoiser.fingerprint
    return weights_hash(denoiser)


def device_of(denoiser: AnyModel) -> torch.device:
    if isinstance(denoiser, ExactDenoiser):
        return torch.device("cpu")
    return next(chain(denoiser.parameters(), denoiser.buffers())).device


def response_sizes(task: Task, examples: int) -> Tensor:
    """N of the first examples, by which a rule is checked before anything is generated."""
    return task.examples(torch.arange(min(examples, BATCH)), "test").response.sum(-1)


def evaluate_policy(
    setup: Setup,
    policy: Policy,
    budget: int,
    verdicts: VerdictFile | None = None,
    again: bool = False,
    advance: Advance = lambda sequences: None,
    processes: Processes | None = None,
) -> Record:
    """Generate for the first examples of the held-out split, and check every answer.

    Every chunk of examples is added to `verdicts` when it is done.  What is already there of this evaluation, on the
    same device, is not done again, unless `again`: the record is the same as without the interruption, but for the
    seconds.  Several `processes` share every chunk and all come to the same record.
    """
    processes, task, examples = processes or Processes(cpu=True), setup.task, setup.num_examples
    check_examples(task, examples)
    spec, denoiser = setup.spec(policy, budget), setup.denoiser_of(policy)
    device = device_of(denoiser)
    ran = (spec.key, device_name(device), setup.compile)
    chunks = verdicts.chunks(*ran) if verdicts is not None and not again else []
    done = sum(len(chunk.valid) for chunk in chunks)
    if done:
        advance(done)
    half = setup.precision == "bf16"
    used: AnyDenoiser = HalfTrunk(denoiser) if half else denoiser
    rule, size = half_selector(policy) if half else policy, min(BATCH, examples)
    engine = Engine(used, rule, budget, setup.choice, batch_size=size, compile=setup.compile, cache=setup.cache)
    engine.policy.check(budget, response_sizes(task, examples))
    for first in range(done, examples, CHUNK):
        ids = torch.arange(first, min(first + CHUNK, examples))
        mine = processes.share(ids)
        with process_settings(bf16=half):
            part = _evaluate_chunk(engine, setup, ran, mine, device, advance) if len(mine) else None
        chunk = joined([found for found in processes.gather(part) if found is not None])
        if len(mine) < len(ids):
            advance(len(ids) - len(mine))  # what the others did
        if first + CHUNK >= examples:
            chunk = replace(chunk, diverse=_diverse([*chunks, chunk], task))
        chunks.append(chunk)
        if verdicts is not None:
            verdicts.append(chunk)
    return Record(spec, _outcome(spec, chunks, task, policy.remasks), verdicts_in(chunks))


def examples_of(task: Task, asked: int | None, usual: int) -> int:
    """How many held-out examples are evaluated: those asked for; if nothing is asked, the usual number, or all."""
    if asked is None and task.test_examples is not None and 0 < task.test_examples < usual:
        say(f"unmask: task {task.name} has {task.test_examples} {task.held_out} examples: all are used", err=True)
        return task.test_examples
    number = usual if asked is None else asked
    check_examples(task, number)
    return number


def check_examples(task: Task, examples: int) -> None:
    """Raise UserError where a task has fewer."""
    if examples < 1:
        raise UserError(f"--examples must be at least 1, got {examples}")
    if task.test_examples is not None and examples > task.test_examples:
        raise UserError(
            f"task {task.name} has {task.test_examples} {task.held_out} examples: ask for at most as many "
            f"(--examples), not for {examples}"
        )


class HalfTrunk:
    """A denoiser whose trunk runs in bfloat16 under autocast; its head, and so every score, stays as it is."""

    keeps_no_tensors = True

    def __init__(self, denoiser: AnyDenoiser) -> None:
        self.denoiser, self.mask_token_id = denoiser, denoiser.mask_token_id
        self.block_size, self.can_cache = getattr(denoiser, "block_size", 0), getattr(denoiser, "can_cache", False)

    def new_cache(self, rows: int, length: int) -> Tensor:
        device = next(cast(nn.Module, self.denoiser).parameters()).device
        return self._half(device, "new_cache", rows, length)

    def cached(self, tokens: Tensor, *rest: Tensor) -> Tensor:
        return self._half(tokens.device, "cached", tokens, *rest).float()

    def _half(self, device: torch.device, method: str, *given: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            result: Tensor = getattr(self.denoiser, method)(*given)
            return result

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self._half(tokens.device, "hidden", tokens, attention_mask).float()

    @property
    def hidden_with(self) -> Any:
        """Where the denoiser has it: see `PlacingDenoiser`."""
        self.denoiser.hidden_with  # type: ignore[attr-defined]  # noqa: B018
        return lambda tokens, *rest: self._half(tokens.device, "hidden_with", tokens, *rest).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.denoiser.logits(hidden)


class HalfSelector:
    """A selector that runs in bfloat16 under autocast, as in training with `precision = "bf16"`; ours has logits in
    float32.  On a GPU it then leaves padding out too (`Layout.of`)."""

    def __init__(self, network: SelectorNetwork) -> None:
        self.network, self.selection = network, network.selection
        self.budget, self.prices = network.budget, network.prices
        self.block_size, self.drawn = getattr(network, "block_size", 0), getattr(network, "drawn", False)

    def __call__(self, hidden: Tensor, *rest: Any) -> Tensor:
        with torch.autocast(hidden.device.type, torch.bfloat16):
            return self.network(hidden, *rest)


def half_selector(policy: Policy) -> Policy:
    """The rule with its selector, where it has one, in bfloat16."""
    if isinstance(policy, Blocks):
        return replace(policy, inner=half_selector(policy.inner))
    if isinstance(policy, NetworkPolicy):
        return cast(Policy, replace(cast(Any, policy), network=HalfSelector(policy.network)))
    return policy


def _evaluate_chunk(
    engine: Engine, setup: Setup, ran: tuple[str, str, bool], ids: Tensor, device: torch.device, advance: Advance
) -> Chunk:
    """Generate for the test examples `ids`, which are consecutive."""
    started, task = time.perf_counter(), setup.task
    truth = task.examples(ids, "test")
    check_no_mask(truth, engine.denoiser.mask_token_id, task.text)
    canvas = torch.where(truth.response, engine.denoiser.mask_token_id, truth.tokens).to(device)
    attended = truth.attention_mask.to(device)
    out = engine.generate(canvas, seed=setup.seed, ids=ids, attention_mask=attended, on_finished=advance)
    tokens = out.tokens.cpu()
    valid, metrics = task.valid(tokens, truth), task.metrics(tokens, truth)
    for name, marks in {"valid": valid, **metrics}.items():
        if marks.shape != ids.shape or marks.dtype != torch.bool:
            found = f"{str(marks.dtype).removeprefix('torch.')} {list(marks.shape)}"
            raise UserError(f"task {task.name}: {name} must be bool [{len(ids)}], one for each example, got {found}")
    answers = sequence_codes(tokens[valid]).tolist() if task.unconditional else task.codes(tokens, truth)
    return Chunk(
        *ran,
        first=int(ids[0]),
        valid=_marks(valid),
        steps=out.num_steps.tolist(),
        metrics={name: _marks(marks) for name, marks in metrics.items()},
        answers=answers,
        reveal_step=out.reveal_step[: max(0, PICTURED - int(ids[0]))].tolist(),
        num_forwards=out.num_forwards,
        num_passes=int(out.num_passes.sum()),
        nothing_selected=int(out.nothing_selected.sum()),
        num_revisions=int(out.revisions.sum()),
        num_positions=int(truth.response.sum()),
        seconds=round(time.perf_counter() - started, 6),
        revision=revision(),
    )


def _marks(valid: Tensor) -> str:
    """A 0 or a 1 for each example."""
    return "".join("1" if right else "0" for right in valid.tolist())


def _diverse(chunks: list[Chunk], task: Task) -> list[float] | None:
    """Of a whole evaluation."""
    answers = [answer for chunk in chunks for answer in chunk.answers or []]
    found = task.diverse(answers) if answers and not task.unconditional else None
    return None if found is None else [round(part, 9) for part in found]


def _outcome(spec: EvaluationSpec, chunks: list[Chunk], task: Task, remasks: bool) -> Outcome:
    """What the chunks of a whole evaluation come to."""
    verdicts, examples = verdicts_in(chunks), spec.num_examples

    def total(name: str) -> int:
        return sum(getattr(chunk, name) for chunk in chunks)

    num_valid, num_steps = int(verdicts.valid.sum()), int(verdicts.steps.sum())
    low, high = wilson_interval(num_valid, examples)
    answers = [answer for chunk in chunks for answer in chunk.answers or []]
    means = {name: sum(c.metrics[name].count("1") for c in chunks) / examples for name in chunks[0].metrics}
    distinct = distinct_low = distinct_high = None
    if task.unconditional:
        distinct = len(set(answers))
        distinct_low, distinct_high = distinct_range(task, num_valid) if num_valid else (0, 0)
    return Outcome(
        score=num_valid / examples,
        ci_low=round(low, 6),
        ci_high=round(high, 6),
        mean_steps=round(num_steps / examples, 4),
        fewest_steps=int(verdicts.steps.min()),
        most_steps=int(verdicts.steps.max()),
        num_forwards=total("num_forwards"),
        mean_passes=round(total("num_passes") / examples, 4),
        mean_revisions=round(total("num_revisions") / total("num_positions"), 6) if remasks else None,
        nothing_selected=round(total("nothing_selected") / num_steps, 6) if spec.selector else None,
        distinct=distinct,
        distinct_low=distinct_low,
        distinct_high=distinct_high,
        metrics=means if task.unconditional or not answers else means | task.overall(answers),
        seconds=round(sum(chunk.seconds for chunk in chunks), 3),
        device=chunks[0].device,
        compile=chunks[0].compile,
        revision=chunks[-1].revision,
        checked=task.has_checker,
    )


def _examples_hash(examples: Examples) -> str:
    digest = hashlib.sha256()
    for tensor in (examples.tokens, examples.response, examples.attention_mask):
        digest.update(tensor.long().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def revision() -> str:
    """The version of unmask, and the commit where it runs from a checkout."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return unmask.__version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return unmask.__version__
    return f"{unmask.__version__}+{commit.stdout.strip()}"
