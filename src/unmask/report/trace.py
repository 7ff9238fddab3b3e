"""A sequence as it is written, step by step, for people to read: in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.decoding.denoiser import AnyDenoiser
from unmask.decoding.generate import generate
from unmask.decoding.policies import Policy
from unmask.decoding.tokens import TokenChoice
from unmask.display import in_html, visible
from unmask.tasks.task import Task

MASK, END = "·", "░"
PICTURE = "<!-- written by unmask sample -->"  # a file with this may be replaced
PROMPT = -1  # the step of what was given


class Span(NamedTuple):
    """A token as it is shown."""

    text: str
    step: int | None  # at which it was revealed; PROMPT where it was given, None for a mask
    is_end: bool = False  # an end of sequence, or several


@dataclass(frozen=True)
class Writing:
    """What a rule wrote for one example."""

    example: int
    policy: str
    budget: int
    question: str  # "" where the prompt is shown among the tokens
    wanted: str  # the right answer, where there is a question
    frames: list[list[Span]]  # after each step
    result: list[Span]
    num_steps: int
    valid: bool


class Watched:
    """A denoiser that keeps the canvas [L] of every pass over one sequence."""

    def __init__(self, denoiser: AnyDenoiser) -> None:
        self.denoiser, self.mask_token_id, self.passes = denoiser, denoiser.mask_token_id, list[Any]()

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.passes.append(tokens[0].clone())
        return self.denoiser.hidden(tokens, attention_mask)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.denoiser.logits(hidden)


def write(
    denoiser: AnyDenoiser, task: Task, rule: Policy, budget: int, example: int, choice: TokenChoice, seed: int
) -> Writing:
    """Generate for one held-out example and keep every canvas; in a batch the result would be the same."""
    ids = torch.tensor([example])
    truth, mask, watched = task.examples(ids, "test"), denoiser.mask_token_id, Watched(denoiser)
    out = generate(
        watched,
        torch.where(truth.response, mask, truth.tokens),
        rule,
        budget,
        seed=seed,
        ids=ids,
        attention_mask=truth.attention_mask,
        **vars(choice),
    )
    is_text = task.text_tokenizer is not None  # the question is shown as one, and the tokens are those of the response
    here = out.attention_mask[0]
    shown = truth.response[0] if is_text else here
    canvases = [seen[: here.sum()] for seen in watched.passes] + [out.tokens[0][here]]  # without padding
    frames, when = [], torch.full_like(canvases[0], PROMPT)
    for i, (before, after) in enumerate(pairwise(canvases)):
        when = torch.where((before == mask) & (after != mask), i, when)
        frames.append(spans(task, after[shown[here]].tolist(), when[shown[here]].tolist()))
    prompt = truth.attention_mask[0] & ~truth.response[0]
    return Writing(
        example,
        rule.name,
        budget,
        visible(task.text(truth.tokens[0][prompt].tolist())) if is_text else "",
        visible(task.text(truth.tokens[0][truth.response[0]].tolist())) if is_text else "",
        frames,
        spans(task, out.tokens[0][shown].tolist(), out.reveal_step[0][shown].tolist()),
        int(out.num_steps),
        bool(task.valid(out.tokens, truth)[0]),
    )


def spans(task: Task, tokens: Sequence[int], when: Sequence[int]) -> list[Span]:
    """Tokens as they read.  Those of a text follow one another without spaces, and the EOS tokens that fill a response
    are one mark with their number."""
    is_text = task.text_tokenizer is not None
    found = []
    for token, step in zip(tokens, when, strict=True):
        if token >= len(task.vocabulary):
            found.append(Span(MASK, None))
        elif is_text and token == task.eos_token_id:
            found.append(Span(END, step, is_end=True))
        else:
            found.append(Span(_sign(task.text([token])), step))
    if not is_text:
        return [span for item in found for span in (item, Span(" ", PROMPT))][:-1]
    *groups, last = [list(group) for _, group in groupby(found, lambda span: span.is_end)]
    if last[0].is_end and len(last) > 3:
        latest = max(span.step or 0 for span in last)
        last = [Span(f"{END}×{len(last)}", latest, is_end=True)]
    return [span for group in (*groups, last) for span in group]


def _sign(token: str) -> str:
    """A token on one line, as wide as it is shown."""
    return visible(token.replace("\n", "↵"))


def outcome(writing: Writing) -> str:
    """How it went; the answer to a question is right or wrong."""
    good, bad = ("right", "wrong") if writing.question else ("valid", "not valid")
    return f"{writing.num_steps} step{'' if writing.num_steps == 1 else 's'}, {good if writing.valid else bad}"


def wrapped(frame: Sequence[Span], room: int) -> list[list[Span]]:
    """Lines of at most `room` characters, broken between tokens."""
    lines: list[list[Span]] = [[]]
    for span in frame:
        if sum(len(other.text) for other in lines[-1]) + len(span.text) > room and lines[-1]:
            lines.append([])
        lines[-1].append(span)
    return lines


# --- as a picture -----------------------------------------------------------------------------------------------------

WIDTH = 104  # characters
CELL, LINE, SIZE = 7.25, 19, 12  # the width of a character and the height of a line, in points
MARGIN = 12


def picture(writings: Sequence[Writing]) -> str:
    """The SVG of what was written: for each rule a line a step, every token in the colour of its step."""
    rows: list[list[tuple[str, str]]] = []  # each of (text, style)
    most = max(writing.budget for writing in writings)
    marked = sorted({round(i * (most - 1) / 11) for i in range(12)})  # as many as fit beside the rest
    rows.append([("step  ", "fill:#6b7280"), *((f"{i} ", f"fill:{_colour(i, most)};font-weight:700") for i in marked)])
    rows[0] += [(f"  {MASK} masked  {END} end of sequence", "fill:#6b7280")]
    for _, group in groupby(writings, lambda writing: writing.example):
        same = list(group)
        if same[0].question:
            rows += [[], *([(line, "fill:#111827")] for line in _wrapped_text(same[0].question))]
            answer = _wrapped_text(f"answer: {same[0].wanted}")
            rows += [[("answer:", "fill:#6b7280"), (answer[0].removeprefix("answer:"), "fill:#111827")]]
            rows += [[(line, "fill:#111827")] for line in answer[1:]]
        for writing in same:
            verdict = "#15803d" if writing.valid else "#b91c1c"
            rows += [
                [],
                [(f"{writing.policy}: ", "fill:#111827;font-weight:700"), (outcome(writing), f"fill:{verdict}")],
            ]
            for step, frame in enumerate(writing.frames):
                for part, line in enumerate(wrapped(frame, WIDTH - 4)):
                    rows.append([(f"{step:>2}  " if part == 0 else "    ", "fill:#6b7280")])
                    rows[-1] += [(span.text, _style(span, most)) for span in line]
    height, width = LINE * len(rows) + 2 * MARGIN, round(CELL * WIDTH + 2 * MARGIN)
    lines = []
    for place, row in enumerate(rows):
        parts = "".join(f'<tspan style="{style}">{in_html(text)}</tspan>' for text, style in row)
        if parts:
            lines.append(f'<text xml:space="preserve" x="{MARGIN}" y="{MARGIN + LINE * place + SIZE}">{parts}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{SIZE}">\n{PICTURE}\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def _style(span: Span, most: int) -> str:
    if span.step in (None, PROMPT):
        return "fill:#9ca3af"
    return f"fill:{_colour(span.step or 0, most)}" + (";opacity:.45" if span.is_end else "")


def _colour(step: int, most: int) -> str:
    """From dark to light, and never too light to read."""
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    return to_hex(mpl.colormaps["plasma"](0.78 * step / max(1, most - 1)))


def _wrapped_text(text: str) -> list[str]:
    import textwrap

    return [line for part in text.splitlines() for line in textwrap.wrap(part, WIDTH)]
