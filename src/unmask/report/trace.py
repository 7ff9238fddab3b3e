"""A sequence as it is written, step by step, for people to read: in the terminal and as a picture."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console, Group
from rich.live import Live
from torch import Tensor

from unmask.decoding.cache import Cache
from unmask.decoding.denoiser import AnyDenoiser
from unmask.decoding.generate import Engine, Generation
from unmask.decoding.policies import Policy, network_of, own_blocks, parse_policy, trained_steps
from unmask.decoding.tokens import TokenChoice
from unmask.display import in_html, in_markup, visible
from unmask.errors import UserError, require
from unmask.evaluation.evaluate import device_of, response_sizes
from unmask.evaluation.plan import check_end, open_run
from unmask.progress import watched
from unmask.tasks.task import Examples, Task, check_example, check_no_mask

MASK, END = "·", "░"
BROKEN, LETTER = "\ufffd", 4  # what a decoder writes for a part of a letter, and the most bytes of one
PICTURE = "<!-- written by unmask sample -->"  # a file with this may be replaced
PROMPT = -1  # the step of what was given
PAUSE = 0.4  # seconds that a step stands in the animation at least
_NEED_EOS = ("min_length", "stop_at_eos", "eos_last", "stop_strings")
SEARCHED = 1000  # examples that are searched where a task has no end of them


class Span(NamedTuple):
    """A token as it is shown."""

    text: str
    step: (
        int | None
    )  # at which it was revealed, from 0; people see it from 1; PROMPT where it was given, None for a mask
    is_end: bool = False  # an end of sequence, or several


@dataclass(frozen=True)
class Writing:
    """What a rule wrote for one example."""

    example: int
    policy: str
    budget: int
    question: str  # "" where the prompt is shown among the tokens
    wanted: str  # the right answer, where there is a question and it is known
    frames: list[list[Span]]  # after each step
    result: list[Span]
    num_steps: int
    valid: bool | None  # None where nothing can tell


def sample(
    run: Path,
    policies: Sequence[str] = (),
    steps: int | None = None,
    num: int = 4,
    examples: Sequence[int] = (),
    find: str = "",
    prompts: Sequence[str] = (),
    *,
    split: str | None = None,
    temperature: float | None = None,
    seed: int = 0,
    cache: Cache = "auto",
    trust_task: bool = False,
    denoiser: Any = None,
    any_denoiser: bool = False,
    cpu: bool = False,
    on_step: Callable[[list[Writing]], None] | None = None,
    **tokens: Any,
) -> Iterator[list[Writing]]:
    """What each policy writes for each of the first `num` held-out examples, or for those in `examples`.

    prompts: in their place.
    find: right or wrong for each policy, such as "right,wrong": only examples where the policies are so.
    on_step: called before and after every step with what stands so far of an example, what is being written last, and
        with nothing when the example is finished.
    tokens: top_p and all else that `TokenChoice` takes but eos_token_id and tokenizer, which are those of the run.
    """
    device = torch.device("cpu") if cpu else None
    model, plain, task, recipe = open_run(run, device, split, trust_task, denoiser, any_denoiser)
    device = device_of(model.denoiser)
    names = policies or ["learned" if model.selector is not None else own_blocks("top-prob", plain.denoiser)]
    rules = [parse_policy(name, model.selector, partial(task.token_frequencies, device)) for name in names]
    words = [word.strip() for word in find.split(",")] if find else []
    if words and (len(words) != len(rules) or not set(words) <= {"right", "wrong"}):
        raise UserError(f"--find takes right or wrong for each --policy, such as right,wrong for two, not {find!r}")
    wanted = [word == "right" for word in words]
    require(not prompts or not (find or examples), "--prompt takes the place of examples: no --example and no --find")
    require(not find or on_step is None, "--find looks at many examples: leave out --watch, or --find")
    require(not find or task.has_checker, f"--find needs a checker, and task {task.name} has none: leave it out")
    temperature = recipe.evaluate.temperature if temperature is None else temperature
    check_end(task, "--min-length, --stop-at-eos, --eos-last and --stop", *map(tokens.get, _NEED_EOS))
    choice = TokenChoice(temperature, eos_token_id=task.eos_token_id, tokenizer=model.tokenizer, **tokens)
    # The data of a run need not be here to write for a prompt.
    sizes = task.prompted(prompts[0]).response.sum(-1) if prompts else response_sizes(task, 1)
    budget = steps or trained_steps(model.selector, int(sizes[0])) or 4
    limit = None if prompts else task.test_examples
    for number in examples:
        check_example(task, number)
    many = limit or max(SEARCHED, num)
    candidates = examples or range(len(prompts) or (many if wanted else min(num, many)))

    def written(example: int) -> Iterator[Writing]:
        done: list[Writing] = []
        for rule in rules:
            used = (model if network_of(rule) is not None else plain).denoiser
            prompt = prompts[example] if prompts else None
            seen = (lambda writing: on_step([*done, writing])) if on_step else None
            done.append(write(used, task, rule, budget, example, choice, seed, prompt, device, cache, seen))
            yield done[-1]

    if not wanted:
        for example in candidates:
            whole = list(written(example))
            if on_step is not None:
                on_step([])
            yield whole
        return
    found: list[list[Writing]] = []
    for example in watched(candidates, "looking"):
        pairs = zip(written(example), wanted, strict=True)
        # Up to the first rule that is not what is looked for.
        fitting = [writing for writing, _ in takewhile(lambda pair: pair[0].valid == pair[1], pairs)]
        found += [fitting] if len(fitting) == len(wanted) else []
        if len(found) == num:
            break
    if not found:
        raise UserError(f"in none of {len(candidates)} examples are {', '.join(names)} {find}")
    yield from found


def write(
    denoiser: AnyDenoiser,
    task: Task,
    rule: Policy,
    budget: int,
    example: int,
    choice: TokenChoice,
    seed: int,
    given: str | None = None,
    device: torch.device | str = "cpu",
    cache: Cache = "auto",
    on_step: Callable[[Writing], None] | None = None,
) -> Writing:
    """Generate for one held-out example and keep every canvas; in a batch the result would be the same.

    given: a prompt to generate for instead; the example is then a number that names the random draws.
    device: that of the networks.
    on_step: called before and after every step with what stands so far.
    """
    ids, mask = torch.tensor([example]), denoiser.mask_token_id
    truth = task.examples(ids, "test") if given is None else task.prompted(given)
    here, response = truth.attention_mask[0], truth.response[0]
    shown, is_question = positions_shown(task, truth, 0)
    question, wanted = (
        visible(task.text(truth.tokens[0][part].tolist())) if is_question else ""
        for part in (here & ~response, response)
    )
    about = (example, rule.name, budget, question, wanted if given is None else "")

    def tell(tokens: Tensor, masked: Tensor, steps: Tensor, num_steps: int) -> None:
        if on_step is not None:
            seen = torch.where(masked, len(task.vocabulary), tokens)[0].cpu()
            so_far = spans(task, seen[shown].tolist(), steps[0].cpu()[shown].tolist())
            on_step(Writing(*about, [], so_far, num_steps, None))

    def told(out: Generation) -> None:
        tell(out.tokens, out.masked, out.reveal_step, int(out.num_steps))

    tell(truth.tokens, truth.response, torch.full_like(truth.tokens, PROMPT), 0)
    out = generated(denoiser, task, rule, budget, choice, truth, ids, seed, device, cache, told)
    assert out.history is not None
    tokens, steps, history = out.tokens, out.reveal_step, out.history
    frames, when = [], torch.full_like(tokens[0][here], PROMPT)
    for i, (before, after) in enumerate(pairwise(history[0, :, here])):  # without padding
        when = torch.where((before == mask) & (after != mask), i, when)
        seen = torch.where(after == mask, len(task.vocabulary), after)  # the mask may be one of the task's tokens
        frames.append(spans(task, seen[shown[here]].tolist(), when[shown[here]].tolist()))
    result = spans(task, tokens[0][shown].tolist(), steps[0][shown].tolist())
    valid = bool(task.valid(tokens, truth)[0]) if given is None and task.has_checker else None
    return Writing(*about, frames, result, int(out.num_steps), valid)


def generated(
    denoiser: AnyDenoiser,
    task: Task,
    rule: Policy,
    budget: int,
    choice: TokenChoice,
    truth: Examples,
    ids: Tensor,  # [B]: they name the random draws
    seed: int,
    device: torch.device | str,
    cache: Cache = "auto",
    on_step: Callable[[Generation], None] | None = None,
) -> Generation:
    """What a rule writes for the prompts of these examples, with every canvas, on the CPU."""
    check_no_mask(truth, denoiser.mask_token_id, task.text)
    canvas = torch.where(truth.response, denoiser.mask_token_id, truth.tokens)
    engine, attended = Engine(denoiser, rule, budget, choice, cache=cache), truth.attention_mask.to(device)
    out = engine.generate(canvas.to(device), seed=seed, ids=ids, attention_mask=attended, history=True, on_step=on_step)
    there: dict[str, Any] = {name: value.cpu() for name, value in vars(out).items() if torch.is_tensor(value)}
    return replace(out, **there)


def positions_shown(task: Task, truth: Examples, row: int) -> tuple[Tensor, bool]:
    """[L] bool: the positions that are shown as tokens, and whether the prompt is a question apart from them.

    The prompt of a text is a question; one that stands around the response is shown among its tokens.
    """
    here, response = truth.attention_mask[row], truth.response[row]
    prompt = here & ~response
    is_question = task.text_tokenizer is not None and not (prompt & (response.cumsum(-1) > 0)).any()
    return (response if is_question else here), is_question


def pieces(task: Task, tokens: Sequence[int]) -> Iterator[tuple[str | None, int]]:
    """How tokens read, each with their number: one, or several that are parts of one letter.  A mask is None."""
    is_text, before, i = task.text_tokenizer is not None, list[int](), 0  # before: the tokens of the piece to the left
    while i < len(tokens):
        size, shown = 1, None
        if tokens[i] >= len(task.vocabulary):
            before = []
        elif tokens[i] == task.eos_token_id:
            shown, before = END, []
        else:
            size = _letter_size(task, tokens[i : i + LETTER])
            here = list(tokens[i : i + size])
            shown = visible(_read_after(task, before, here) if is_text else task.text(here))
            before = [] if BROKEN in shown else here
        yield shown, size
        i += size


def spans(task: Task, tokens: Sequence[int], when: Sequence[int]) -> list[Span]:
    """Tokens as they read.  Those of a text follow one another without spaces, and the EOS tokens that fill a response
    are one mark with their number.  Tokens that are parts of one letter are one span, of the last of their steps.
    Those of a grid stand in its rows."""
    is_text, found, i = task.text_tokenizer is not None, list[Span](), 0
    for text, size in pieces(task, tokens):
        if text is None:
            found.append(Span(MASK, None))
        else:
            is_end = is_text and tokens[i] == task.eos_token_id
            found.append(Span(text.replace("\n", "↵"), max(when[i : i + size]), is_end))
        i += size
    if not is_text:
        gaps = [Span(_gap(*task.grid, i), PROMPT) for i in range(1, len(found) + 1)]
        return [span for pair in zip(found, gaps, strict=True) for span in pair][:-1]
    *groups, last = [list(group) for _, group in groupby(found, lambda span: span.is_end)]
    if last[0].is_end and len(last) > 3:
        latest = max(span.step or 0 for span in last)
        last = [Span(f"{END}×{len(last)}", latest, is_end=True)]
    return [span for group in (*groups, last) for span in group]


def _gap(columns: int, box: int, i: int) -> str:
    """What stands before token i of a grid; of a line where `columns` is 0."""
    if columns and i % columns == 0:
        return "\n"
    return "  " if box and i % box == 0 else " "


def _letter_size(task: Task, tokens: Sequence[int]) -> int:
    """How many of these tokens make the first whole letter; 1 where they make none."""
    for size in range(1, len(tokens) + 1):
        if tokens[size - 1] in (task.eos_token_id, len(task.vocabulary)):
            break
        if BROKEN not in task.text(tokens[:size]):
            return size
    return 1


def _read_after(task: Task, before: Sequence[int], tokens: Sequence[int]) -> str:
    """How tokens read after those to their left: many tokenizers write spaces only between two."""
    alone, both = task.text(before), task.text([*before, *tokens])
    return both[len(alone) :] if before and both.startswith(alone) else task.text(tokens)


def outcome(writing: Writing) -> str:
    """How it went; the answer to a question is right or wrong."""
    steps = f"{writing.num_steps} step{'' if writing.num_steps == 1 else 's'}"
    if writing.valid is None:
        return steps
    good, bad = ("right", "wrong") if writing.question else ("valid", "not valid")
    return f"{steps}, {good if writing.valid else bad}"


def wrapped(frame: Sequence[Span], room: int) -> list[list[Span]]:
    """Lines of at most `room` characters, broken between tokens and at newlines."""
    lines: list[list[Span]] = [[]]
    for span in frame:
        if span.text == "\n" or (lines[-1] and sum(len(other.text) for other in lines[-1]) + len(span.text) > room):
            lines.append([])
        if span.text != "\n":
            lines[-1].append(span)
    return lines


# --- in the terminal --------------------------------------------------------------------------------------------------


def print_legend(console: Console, writing: Writing) -> None:
    # One line at 60 columns; the colours repeat anyway.
    marked = [f"[{_terminal_colour(i)}]{i + 1}[/]" for i in range(writing.budget)]
    shown = " ".join(marked if writing.budget <= 12 else [*marked[:6], "...", marked[-1]])
    ends = f"  {END} end of sequence" if writing.question else ""
    console.print(f"step {shown}  [dim]prompt[/]  {MASK} mask{ends}")


def print_writings(console: Console, written: Sequence[Writing], trace: bool) -> None:
    """What the rules wrote for one example, after its question if it has one; with `trace` every step."""
    for line in _lines(written, trace, len(written) > 1, console.width):
        console.print(line, soft_wrap=True)


@contextmanager
def animation(console: Console, pause: float = PAUSE) -> Iterator[Callable[[list[Writing]], None]]:
    """A function that shows what is being written in place, for `on_step`; what is printed meanwhile stands above."""
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(written: list[Writing]) -> None:
            live.update(Group(*_lines(written, False, True, console.width)), refresh=True)
            time.sleep(pause if written else 0)

        yield show


def _lines(written: Sequence[Writing], trace: bool, named: bool, width: int) -> Iterator[str]:
    """In rich's markup."""

    def spans_of(label: str, spans: Sequence[Span]) -> Iterator[str]:
        for part, line in enumerate(wrapped(spans, width - 6)):
            yield f"  {label if part == 0 else '':<2}  {''.join(map(_in_colour, line))}".rstrip()

    if written and written[0].question:
        yield f"\n[bold]{written[0].example}[/]  {in_markup(written[0].question)}"
        if written[0].wanted:
            yield f"[dim]answer:[/] {in_markup(written[0].wanted)}"
    for writing in written:
        if named:
            yield f"{in_markup(writing.policy)}:"
        for number, frame in enumerate(writing.frames if trace else [], start=1):
            yield from spans_of(str(number), frame)
        yield from spans_of("=" if trace else "", [*writing.result, Span(f"   {outcome(writing)}", None)])


def _in_colour(span: Span) -> str:
    """A token in the colour of the step that revealed it."""
    style = "dim" if span.step == PROMPT else "" if span.step is None else _terminal_colour(span.step)
    style = f"dim {style}" if span.is_end else style
    return f"[{style}]{in_markup(span.text)}[/]" if style and span.text.strip() else in_markup(span.text)


def _terminal_colour(step: int) -> str:
    return ["bright_yellow", "bright_green", "bright_cyan", "bright_blue", "bright_magenta", "bright_red"][step % 6]


# --- as a picture -----------------------------------------------------------------------------------------------------

WIDTH = 104  # characters
CELL, LINE, SIZE = 7.25, 19, 12  # the width of a character and the height of a line, in points
MARGIN = 12


def check_picture(path: Path) -> None:
    """Raise UserError where writing the picture would replace another file, or its name is not that of an SVG."""
    require(path.suffix == ".svg", f"{path}: the picture is an SVG, give --svg a name that ends in .svg")
    if path.exists() and PICTURE not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
        raise UserError(f"{path} exists and is no picture of unmask: give another --svg")


def picture(writings: Sequence[Writing]) -> str:
    """The SVG of what was written: every step of each rule, every token in the colour of its step."""
    rows: list[list[tuple[str, str]]] = []  # each of (text, style)
    most = max(writing.budget for writing in writings)
    marked = sorted({round(i * (most - 1) / 11) for i in range(12)})  # as many as fit beside the rest
    rows.append(
        [("step  ", "fill:#6b7280"), *((f"{i + 1} ", f"fill:{_colour(i, most)};font-weight:700") for i in marked)]
    )
    rows[0] += [(f"  {MASK} masked  {END} end of sequence", "fill:#6b7280")]
    for _, group in groupby(writings, lambda writing: writing.example):
        same = list(group)
        if same[0].question:
            rows += [[], *([(line, "fill:#111827")] for line in _wrapped_text(same[0].question))]
        if same[0].wanted and same[0].question:
            first, *more = _wrapped_text(f"answer: {same[0].wanted}")
            rows += [[("answer:", "fill:#6b7280"), (first.removeprefix("answer:"), "fill:#111827")]]
            rows += [[(line, "fill:#111827")] for line in more]
        for writing in same:
            verdict = {True: "#15803d", False: "#b91c1c", None: "#6b7280"}[writing.valid]
            rows.append([])
            rows.append(
                [(f"{writing.policy}: ", "fill:#111827;font-weight:700"), (outcome(writing), f"fill:{verdict}")]
            )
            for number, frame in enumerate(writing.frames, start=1):
                for part, line in enumerate(wrapped(frame, WIDTH - 4)):
                    rows.append([(f"{number:>2}  " if part == 0 else "    ", "fill:#6b7280")])
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
    return [line for part in text.splitlines() for line in textwrap.wrap(part, WIDTH)]
