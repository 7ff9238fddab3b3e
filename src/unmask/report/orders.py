"""What several rules write for the same examples, step by step: the data of the page's viewer and heat maps.

Steps are counted from 1 here, as people do; probabilities are in percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.decoding.blocks import block_causal, block_numbers
from unmask.decoding.confidence import FEATURES, confidence, log_probabilities
from unmask.decoding.generate import Generation
from unmask.decoding.policies import Blocks, NetworkPolicy, OneAtATime, Policy, in_blocks, network_of, parse_policy
from unmask.decoding.policies.names import own_rules
from unmask.decoding.policies.rule import Step
from unmask.decoding.tokens import TokenChoice
from unmask.display import visible
from unmask.errors import require
from unmask.evaluation.compare import rivals
from unmask.evaluation.evaluate import AnyModel, ExactModel, device_of
from unmask.evaluation.plan import is_exact, open_run
from unmask.evaluation.records import Record, grouped
from unmask.models.order_model import OrderModel
from unmask.progress import progress
from unmask.report.tables import headline, is_elsewhere, learned_on, row_name
from unmask.report.trace import generated, pieces, positions_shown
from unmask.tasks.exact import ExactDenoiser
from unmask.tasks.task import Examples, Task
from unmask.training.run import load_task
from unmask.training.run_folder import read_recipe
from unmask.variational.selection import OneByOne

AT_MOST = 4  # rules in a race
AT_ONCE = 64  # canvases in a pass


class Run(NamedTuple):
    """What one rule wrote for all examples."""

    name: str
    rule: Policy
    budget: int
    denoiser: AnyModel
    out: Generation
    valid: list[bool] | None


def raced(records: Sequence[Record]) -> list[Record]:
    """The best learned order and the best rules, each with the mean steps nearest to its own; without an order, all at
    the smallest budget."""
    learned, _ = headline(records)
    if learned is None:
        least = min((record.spec.budget for record in records), default=0)
        return [record for record in records if record.spec.budget == least][:AT_MOST]
    by_rule = grouped(rivals(learned, records), lambda record: record.spec.policy).values()
    near = [min(same, key=lambda record: abs(record.mean_steps - learned.mean_steps)) for same in by_rule]
    return [learned, *sorted(near, key=lambda record: -record.outcome.score)[: AT_MOST - 1]]


def orders_of(run: Path, records: Sequence[Record], examples: int, trust_task: bool = False) -> dict[str, Any]:
    """{examples: as viewer.js takes them, heat: {...} as page.js does}, of the first held-out examples."""
    known = [record for record in records if trust_task or not own_rules(record.spec.policy)]
    chosen = raced(known)
    require(bool(chosen), "only rules of your own were evaluated here: give --trust-task to run them")
    spec = chosen[0].spec
    model: OrderModel | ExactModel
    plain: OrderModel | ExactModel
    if is_exact(run):
        task = load_task(run, trust_task)[1].on_split(spec.split)
        model = plain = ExactModel(ExactDenoiser(task))
    else:
        here = not is_elsewhere(chosen[0], learned_on(run, read_recipe(run)))
        require(here, "the order ran on another denoiser (--any-denoiser), and no record says where that lies")
        model, plain, task, _ = open_run(run, None, spec.split, trust_task)
    ids = torch.arange(min(examples, spec.num_examples))
    truth, found = task.examples(ids, "test"), list[Run]()
    with progress("orders", len(chosen) * (1 + len(ids)), transient=True) as advance:
        for record in chosen:
            spec = record.spec
            background = partial(task.token_frequencies, device_of(model.denoiser))
            rule = parse_policy(spec.policy, model.selector, background)
            denoiser = (model if network_of(rule) is not None else plain).denoiser
            choice = TokenChoice(spec.temperature, spec.top_p, spec.top_k, spec.guidance, task.eos_token_id)
            given = choice, truth, ids, spec.seed, device_of(denoiser)
            out = generated(denoiser, task, rule, spec.budget, *given)
            valid = task.valid(out.tokens, truth).tolist() if task.has_checker else None
            found.append(Run(visible(row_name(record, records)), rule, spec.budget, denoiser, out, valid))
            advance()
        shown = []
        for row in range(len(ids)):
            shown.append(_example(task, truth, row, found))
            advance(len(found))
    return {"examples": shown, "heat": heat(task, found)}


def _example(task: Task, truth: Examples, row: int, found: Sequence[Run]) -> dict[str, Any]:
    """One example as viewer.js takes it."""
    shown, is_question = positions_shown(task, truth, row)
    here, response = truth.attention_mask[row], truth.response[row]
    has_prompt = bool((here & ~response).any())
    prompt = task.text(truth.tokens[row][here & ~response].tolist()) if is_question else ""
    return {
        "name": f"example {row}",
        "prompt": visible(prompt),
        "given": (~response[shown]).tolist(),
        "reference": labels(task, truth.tokens[row][shown].tolist()) if has_prompt else None,
        "grid": task.grid,
        "policies": [_policy(task, one, row, shown, here, response) for one in found],
    }


def _policy(task: Task, one: Run, row: int, shown: Tensor, here: Tensor, response: Tensor) -> dict[str, Any]:
    """What one rule wrote for one example: the canvas after each step, and what was said of its masks before it."""
    assert one.out.history is not None
    count, mask = int(one.out.num_steps[row]), one.denoiser.mask_token_id
    canvases = one.out.history[row, : count + 1]  # [S + 1, L]
    said = zip(*_said(one, canvases[:-1, here], response[here]), strict=True)
    steps = list[dict[str, Any]]()
    before: list[tuple[int, str | None]] = [(-1, None)] * len(shown)  # each token and its text
    for canvas, (sure, chosen) in zip(canvases[1:], said, strict=True):
        seen = torch.where((canvas == mask) & response, len(task.vocabulary), canvas)[shown].tolist()
        now = list(zip(seen, labels(task, seen), strict=True))
        step = {"tokens": list(map(_told, before, now)), "confidence": _percent(sure, here, shown)}
        before = now
        steps.append(step | ({} if chosen is None else {"selector": _percent(chosen, here, shown)}))
    return {
        "name": one.name,
        "valid": None if one.valid is None else one.valid[row],
        "drawing": task.drawing(one.out.tokens[row][shown].tolist()),
        "steps": steps,
    }


def _told(before: tuple[int, str | None], now: tuple[int, str | None]) -> int | str | list[str | None] | None:
    """What viewer.js is told: 0 as before, or the text; in a list if the token stayed and its letter has changed."""
    if now == before:
        return 0
    return [now[1]] if now[0] == before[0] else now[1]


def labels(task: Task, tokens: Sequence[int]) -> list[str | None]:
    """The text of each token, None for a mask; of parts of one letter, the first has the letter and the others ""."""
    return [text if part == 0 else "" for text, size in pieces(task, tokens) for part in range(size)]


def _percent(values: Tensor, here: Tensor, shown: Tensor) -> list[int | None]:
    """Of values [positions `here`], NaN where nothing was said, those of the positions that are shown."""
    whole = torch.full(here.shape, torch.nan).masked_scatter(here, values.float())[shown]
    return [None if value != value else round(100 * value) for value in whole.tolist()]


@torch.no_grad()
def _said(one: Run, canvases: Tensor, response: Tensor) -> tuple[Tensor, Tensor | list[None]]:
    """Of canvases [S, L], one for each step: c_n [S, L] of the denoiser, and P(n is revealed now) [S, L] of the
    selector if there is one; both NaN where nothing is masked, the second also outside the block that is written.

    A rule may have looked at less; here the denoiser is asked again, for all masks.
    """
    denoiser, mask = one.denoiser, one.denoiser.mask_token_id
    size = getattr(denoiser, "block_size", 0)
    blocks = in_blocks(one.rule, size)
    rule = blocks.inner if isinstance(blocks, Blocks) else blocks
    sees = block_causal(block_numbers(response[None], size), None) if size else None  # [1, L, L]
    sure, chosen = list[Tensor](), list[Tensor]()
    device = device_of(denoiser)
    block = (response.cumsum(-1) - 1) // (size or len(response))
    # Of each step, the block of its leftmost mask, and how many steps before it had the same.
    current = torch.where((canvases == mask) & response, block, len(response)).amin(-1)  # [S]
    used = (current[:, None] == current).tril(-1).sum(-1)
    for indices in torch.arange(len(canvases)).split(AT_ONCE):
        tokens = canvases[indices].to(device)
        masked = (tokens == mask) & response.to(device)
        hidden = denoiser.hidden(tokens, None if sees is None else sees.to(device).expand(len(tokens), -1, -1))
        logits = denoiser.logits(hidden[masked])  # [m, V]
        if mask < logits.shape[-1]:
            logits = logits.index_fill(-1, torch.tensor([mask], device=device), -torch.inf)
        read = confidence(log_probabilities(logits), FEATURES)
        nothing = torch.full(masked.shape, torch.nan, device=device)
        stats: dict[str, Tensor] = {name: nothing.masked_scatter(masked, read[name].float()) for name in FEATURES}  # type: ignore[literal-required]
        sure.append(stats["log_top"].exp().cpu())
        if isinstance(rule, NetworkPolicy) and rule.reads == FEATURES:  # the tokens that were drawn are not known here
            index = indices.to(device)
            step = Step(
                index,
                torch.full_like(index, one.budget),
                tokens,
                masked,
                response.to(device).expand_as(masked),
                torch.full_like(index, int(response.sum())),
                None,
                lambda: torch.empty(0),
                {"block": current[indices].to(device), "used": used[indices].to(device)},
                stats={name: torch.where(masked, value, 0.0) for name, value in stats.items()},  # type: ignore[arg-type]
                states=hidden.detach,
            )
            if isinstance(blocks, Blocks):
                step = blocks.inside(step)[1]
            scores = rule.logits(step).float()
            if isinstance(rule, OneAtATime) or isinstance(rule.network.selection, OneByOne):
                p = torch.where(step.masked, scores, -torch.inf).softmax(-1)
            else:
                p = scores.sigmoid()
            asked = step.masked & (step.index < step.max_steps - 1)[:, None]  # at the last step all is revealed
            chosen.append(torch.where(asked, p, torch.nan).cpu())
    return torch.cat(sure), torch.cat(chosen) if chosen else [None] * len(canvases)


def heat(task: Task, found: Sequence[Run]) -> dict[str, Any]:
    """The mean step of the last reveal, by position and by class of token: a row per rule."""
    when = torch.stack([one.out.reveal_step for one in found]).double() + 1  # [rules, B, L]
    when = torch.where(when > 0, when, torch.nan)
    written = ~when.isnan().all(0).all(0)  # [L]
    different, which = torch.stack([one.out.tokens for one in found]).unique(return_inverse=True)
    kinds, classes = [task.kind(token) for token in different.tolist()], {}
    for kind in dict.fromkeys(kinds):
        among = torch.tensor([name == kind for name in kinds])[which]
        if not (means := when.where(among, torch.nan).flatten(1).nanmean(-1)).isnan().all():
            classes[kind] = _rounded(means)
    groups = [[place for place in group if written[place] or task.grid[0]] for group in task.layout]
    return {
        "policies": [one.name for one in found],
        "grid": task.grid,
        "groups": [group for group in groups if group],
        "first": 0 if task.grid[0] else int(written.nonzero()[0]),  # what stands before it is a prompt
        "positions": [_rounded(row) for row in when.nanmean(1)],
        "classes": classes if len(classes) > 1 else {},
        "examples": when.shape[1],
    }


def _rounded(values: Tensor) -> list[float | None]:
    return [None if value != value else round(value, 2) for value in values.tolist()]
