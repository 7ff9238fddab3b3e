"""The command line.  torch and what builds on it is imported inside the commands: `--help` must not wait for it."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

import unmask
from unmask.display import accept_any_character, in_markup, say
from unmask.errors import UserError
from unmask.recipe import MOST_EXAMPLES, MOST_STEPS, known_recipes, load_recipe
from unmask.studies.study import known_studies

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from unmask.decoding.policies import Policy
    from unmask.decoding.tokens import TokenChoice
    from unmask.evaluation.compare import Result
    from unmask.evaluation.evaluate import Record
    from unmask.models.order_model import OrderModel
    from unmask.recipe import Recipe
    from unmask.report.trace import Span, Writing
    from unmask.runtime import Processes
    from unmask.tasks.task import Task

app = typer.Typer(
    help="Learn the order in which a masked diffusion model writes, and compare it with other unmasking rules.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

recipes = typer.Typer(help="Look at recipes.", no_args_is_help=True)
app.add_typer(recipes, name="recipe")

Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace an existing run folder; it is kept as NAME.replaced until the new run is finished."
    ),
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Stay on the CPU even where a GPU is present.")]
Run = Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)]

TrustTask = Annotated[
    bool,
    typer.Option(
        "--trust-task",
        help="Import the task and the rules of your own that the run's recipe names, which runs their code.",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(help="The held-out split, where the task has several.", show_default="the recipe's"),
]
RecipeName = Annotated[
    str, typer.Argument(help=f"A TOML file, or one that comes with unmask: {', '.join(known_recipes())}.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a value: --set order.budget=3. May be repeated.")
]

TopP = Annotated[float, typer.Option(help="Sample among the fewest tokens that hold this much of the mass.")]
TopK = Annotated[int, typer.Option(help="Sample among this many most probable tokens; 0: all.")]

# What typer raises for an unknown command or option and for a missing or wrong value; its home differs by version.
UsageError: Any = typer.BadParameter.__base__


def main(arguments: list[str] | None = None, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Run a command; whatever the user can mend is one line on stderr and exit code 2.

    interrupted: whether Ctrl-C was pressed, which may have come out of an import as any exception.
    """
    forced = "--force" in (sys.argv if arguments is None else arguments)
    accept_any_character()
    try:
        code = app(arguments, prog_name="unmask", standalone_mode=False)
    except UsageError as error:
        if message := error.format_message():  # empty where no command was given: the help has been printed instead
            command = error.ctx.command_path if error.ctx else "unmask"
            _refuse(f"{message.rstrip('.')} (see `{command} --help`)")
        sys.exit(2)
    except (UserError, OSError) as error:
        _refuse(str(error), forced)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
            said = str(error) if isinstance(error, MemoryError) else ""
            _refuse(said or "out of memory: use smaller batches, fewer examples or a smaller model")
            sys.exit(2)
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not have been imported
            _refuse("out of GPU memory: try --cpu, or wait until nothing else is on the GPU")
            sys.exit(2)
        _report_bug(interrupted())
    except Exception:
        _report_bug(interrupted())
    if code == 130:  # typer turns Ctrl-C into this
        _refuse("interrupted; the same command goes on where it stopped", forced)
    sys.exit(code)


def _refuse(message: str, forced: bool = False) -> None:
    if forced:  # that would begin anew
        message = message.replace("the same command", "the same command without --force")
    rank = os.environ.get("RANK", "0")  # of the processes that torchrun started
    say(f"unmask{'' if rank == '0' else f' (process {rank})'}: {' '.join(message.split())}", err=True)


def _report_bug(interrupted: bool) -> NoReturn:
    """Whatever else is raised is a mistake of this program, not of its user."""
    if interrupted:
        raise KeyboardInterrupt
    traceback.print_exc()
    _refuse(f"this is a bug in unmask {unmask.__version__}: please report it with the lines above")
    sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        say(unmask.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Learn the order in which a masked diffusion model writes, and compare it with other unmasking rules."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Run folder to write.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of everything: the puzzle, its examples, training, sampling.")] = 0,
    force: Force = False,
) -> None:
    """Learn an order on a small puzzle and compare it: a minute or two on a laptop CPU.

    Trains recipe `groups`, prints a table, and writes the model, results.jsonl and report.html to runs/demo.
    Fails with exit code 1 if the learned order does not win.
    """
    from unmask.training.run import train as train_run

    started = time.perf_counter()
    recipe = load_recipe("groups", [f"seed={seed}", f"task.seed={seed}"])
    train_run(recipe, out, force=force, cpu=True)
    records = _evaluate_run(out, cpu=True)
    _evaluate_bound(out, None, 8, None, cpu=True)
    _write_report([out], out / "report.html")
    cpu_seconds = time.process_time()
    say(f"report: {out / 'report.html'}   ({time.perf_counter() - started:.0f} s, {cpu_seconds:.0f} CPU seconds)")
    failures = verdict(records)
    if failures:
        for failure in failures:
            say(f"unmask: the learned order did NOT win: {failure}", err=True)
        raise typer.Exit(1)
    say("The learned order wins at the same number of steps.")


@recipes.command()
def show(recipe: RecipeName, set_: Overrides = None) -> None:
    """Check a recipe and print it resolved: every value that a run of it would use, as a recipe."""
    say(load_recipe(recipe, set_ or []).to_toml(), end="")


@app.command()
def train(
    recipe: RecipeName,
    out: Annotated[Path, typer.Option(help="Run folder to write.")],
    set_: Overrides = None,
    force: Force = False,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Continue an unfinished run with a recipe that differs from its own.")
    ] = False,
    cpu: Cpu = False,
) -> None:
    """Train what a recipe says: a denoiser, an order for it, or both.

    Checkpoints are written as the recipe's \\[saving] says: after a crash the same call goes on from the last one.
    SIGTERM saves and exits with code 75.
    """
    import torch

    from unmask.training.checkpointer import Stopped
    from unmask.training.run import train as train_run

    wanted = load_recipe(recipe, set_ or [])
    try:
        train_run(wanted, out, force=force, cpu=cpu, allow_change=allow_change)
    except Stopped as stopped:
        _refuse(str(stopped), force)
        raise typer.Exit(75) from None  # EX_TEMPFAIL: try again
    except torch.OutOfMemoryError:
        raise UserError(_smaller_batches(wanted, out)) from None
    if os.environ.get("RANK", "0") != "0":
        return
    say(f"model: {out}   next: unmask evaluate {out}")


def _smaller_batches(recipe: Recipe, out: Path) -> str:
    """What to do when the GPU's memory is full: the next number of micro-batches that divides the batch."""
    ordering = recipe.order is not None and (not recipe.denoise or (out / "denoiser").exists())
    name, how = ("order", recipe.order) if ordering else ("denoise", recipe.denoise)
    assert how is not None
    smaller = [count for count in range(how.accumulate + 1, how.batch + 1) if how.batch % count == 0]
    if not smaller:
        return "out of GPU memory with one sequence at a time: use a smaller model, or a larger GPU"
    return (
        f"out of GPU memory with micro-batches of {how.batch // how.accumulate} sequences: run the same command with "
        f"--set {name}.accumulate={smaller[0]}, which makes them {how.batch // smaller[0]} (`unmask reproduce`: --set "
        f"NAME:{name}.accumulate={smaller[0]}); the run goes on from its last checkpoint"
    )


@app.command()
def evaluate(
    run: Run,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A rule, see `unmask policies`; may be repeated.", show_default="the recipe's"),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            help="Budget of steps; may be repeated.",
            show_default="the recipe's, and what a comparison at the learned order's steps needs",
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="Heuristics also at what a comparison with the learned order of this run needs, which was learned on "
            "the same denoiser and has been evaluated; may be repeated.",
            show_default=False,
        ),
    ] = None,
    split: Split = None,
    examples: Annotated[
        int | None, typer.Option(min=1, max=MOST_EXAMPLES, help="Held-out examples.", show_default="the recipe's")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.", show_default="the recipe's")] = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    guidance: Annotated[
        float, typer.Option(help="Weight of classifier-free guidance: a second pass, with the prompt masked.")
    ] = 0.0,
    min_length: Annotated[
        int, typer.Option(help="Forbid the end of sequence at this many first positions of the response.")
    ] = 0,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Finish a sequence when all its masks lie behind an end of sequence.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.", show_default="the recipe's")] = None,
    again: Annotated[bool, typer.Option("--again", help="Evaluate anew what has been evaluated already.")] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Fixed shapes and torch.compile, on CUDA as graphs: for many examples.")
    ] = False,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="The denoiser's trunk in bfloat16, scores in float32: faster on a GPU.")
    ] = False,
    bound: Annotated[bool, typer.Option("--bound", help="The held-out bound instead, in nats a token.")] = False,
    trajectories: Annotated[
        int, typer.Option(min=1, max=10_000, help="Trajectories a sequence and time, with --bound.")
    ] = 8,
    trust_task: TrustTask = False,
    cpu: Cpu = False,
) -> None:
    """Score policies on a run's task, compare them, and print tables; adds to RUN/results.jsonl.

    Every verdict is kept in RUN/verdicts.jsonl as it is made: after a crash the same call goes on where it stopped.
    """
    tokens = TokenOptions(temperature, top_p, top_k, guidance, min_length, stop_at_eos)
    if bound:
        if policy or steps or against or bf16 or tokens != TokenOptions():
            raise UserError(
                "--bound takes no --policy, no --steps, no --against, no --bf16 and nothing that chooses tokens, such "
                "as --temperature: it is a number of the trained model"
            )
        _evaluate_bound(run, examples, trajectories, seed, cpu, split, trust_task)
    else:
        _evaluate_run(
            run,
            policy or [],
            steps or [],
            examples,
            tokens,
            seed,
            against=against or [],
            split=split,
            again=again,
            compile=compile,
            bf16=bf16,
            trust_task=trust_task,
            cpu=cpu,
        )


@app.command()
def reproduce(
    study: Annotated[
        str, typer.Argument(help=f"A TOML file, or one that comes with unmask: {', '.join(known_studies())}.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write: one for each run, and results.")],
    stage: Annotated[
        list[str] | None,
        typer.Option(help="Only this: a run, all seeds of one, or a split. May be repeated.", show_default="all"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a value of every recipe: task.folder=DATA; of one: NAME:order.updates=9."),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Stages at once, for small runs on a GPU; with more than one, each writes to a log in OUT/logs.",
        ),
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and do nothing.")] = False,
    cpu: Cpu = False,
) -> None:
    """Do a whole experiment: one command a stage, each of them once.

    Every run, every evaluation, and their records side by side in OUT/results.  After a crash, or with more stages, the
    same call resumes.  Ctrl-C and SIGTERM save what is training; SIGTERM exits with code 75.
    """
    from unmask.studies.study import Reproduction, load_study

    started = time.perf_counter()
    whole = Reproduction(*load_study(study), out, set_ or [], cpu, say=say, jobs=jobs)
    if dry_run:
        for command in whole.commands(stage or []):
            say(command)
        return
    from unmask.training.checkpointer import Stopped

    try:
        whole.run(stage or [])
    except Stopped as stopped:
        _refuse(str(stopped))
        raise typer.Exit(75) from None
    say(f"records: {whole.records}   ({time.perf_counter() - started:.0f} s)")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of evaluated runs; with --markdown the folder of records.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page to write.", show_default="report.html in the first run")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Write all tables and plots of a folder of records to this Markdown page instead."),
    ] = None,
    trust_task: TrustTask = False,
) -> None:
    """Draw the results of one or more runs as one self-contained HTML page.

    With --markdown, the records that `unmask reproduce` left in OUT/results become a Markdown page.
    """
    if markdown is not None:
        from unmask.studies.results_page import write_page

        if out is not None or len(runs) != 1:
            raise UserError("--markdown takes one folder of records, such as OUT/results, and no --out")
        write_page(markdown, runs[0])
        say(f"page: {markdown}")
        return
    page = out or runs[0] / "report.html"
    _write_report(runs, page, trust_task, pictures=out is None)
    say(f"report: {page}")


@app.command()
def policies() -> None:
    """List every unmasking rule with its parameters and defaults: what --policy takes."""
    from unmask.rule_list import listed_rules

    for usage, rule, summary in listed_rules():
        say(f"{usage:<33} {rule:<14} {summary}")
    say(
        "\nA rule is written as its name alone (margin), with one value (threshold:0.9), or with several\n"
        "(klass(0.9,0.01,2), eb(0.1,order=margin), blocks(32,stochastic(margin,0.5))).  In Python it is the class\n"
        "beside it: unmask.policies.Threshold(0.9).  One of your own is written module:Class or module:Class(0.9).\n"
        "learned, lo-arm and reward decide by the run's own selector; the last two are decoding rules only,\n"
        "and it was not trained for them.\n"
        "i: step from 0, S: the most steps, N: size of the response, M: its masks, H_n: entropy,\n"
        "k_i: N div S, one more for the first N mod S steps, p_n: the denoiser's distribution at n, x_n: the token\n"
        "proposed there, c_n: its largest probability (confidence=sampled: that of x_n)."
    )


@app.command()
def sample(
    run: Run,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A rule, see `unmask policies`; may be repeated.", show_default="learned if there is one"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_STEPS, help="Budget of steps.", show_default="the learned budget, or 4"),
    ] = None,
    num: Annotated[int, typer.Option(min=1, max=MOST_EXAMPLES, help="How many examples.")] = 4,
    example: Annotated[
        list[int] | None,
        typer.Option(
            min=0, max=2**63 - 1, help="The number of an example; may be repeated.", show_default="the first ones"
        ),
    ] = None,
    find: Annotated[
        str,
        typer.Option(
            help="The first examples where the rules are, in their order, right or wrong: right,wrong.",
            show_default=False,
        ),
    ] = "",
    split: Split = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.", show_default="the recipe's")] = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    trace: Annotated[bool, typer.Option("--trace", help="Print every step of the unmasking.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw every step as a picture, into this file.")] = None,
    trust_task: TrustTask = False,
) -> None:
    """Generate, and show what was written when: every token is coloured by the step that revealed it."""
    from unmask.decoding.policies import NetworkPolicy
    from unmask.evaluation.evaluate import policy_named
    from unmask.files import write_text
    from unmask.progress import progress
    from unmask.report.trace import PICTURE, picture, write
    from unmask.runtime import Processes

    if svg is not None and svg.exists() and PICTURE not in svg.read_text(encoding="utf-8", errors="replace")[:1000]:
        raise UserError(f"{svg} exists and is no picture of unmask: give another --svg")
    model, plain, task, recipe = _load(run, Processes(cpu=True), split, trust_task)
    names = policy or ["learned" if model.selector is not None else "top-prob"]
    rules = [policy_named(name, model) for name in names]
    wanted = _right_or_wrong(find, len(rules))
    choice = TokenOptions(temperature, top_p, top_k).choice(task, recipe.evaluate.temperature)
    budget = steps or (model.selector.budget if model.selector is not None else 4)
    limit = task.test_examples
    if limit is not None and (beyond := [i for i in example or [] if i >= limit]):
        raise UserError(f"task {task.name} has the examples 0 to {limit - 1}: no --example {beyond[0]}")
    many = limit or max(SEARCHED, num)
    candidates = example or range(many if wanted else min(num, many))
    console, found = _console(), list[Any]()
    has_end = task.text_tokenizer is not None  # which is shown by a mark then
    if not wanted:
        _print_legend(console, budget, has_end)
    with progress("looking", len(candidates), transient=True) if wanted else nullcontext() as advance:
        for number in candidates:
            written = list[Any]()
            for rule in rules:
                denoiser = (model if isinstance(rule, NetworkPolicy) else plain).denoiser
                written.append(write(denoiser, task, rule, budget, number, choice, seed))
                if wanted and written[-1].valid != wanted[len(written) - 1]:
                    break  # the other rules cannot make it what is looked for
            if advance is not None:
                advance()
            if wanted and [writing.valid for writing in written] != wanted:
                continue
            found.append(written)
            if not wanted:
                _print_writing(console, written, trace)
            elif len(found) == num:
                break
    if wanted and not found:
        raise UserError(f"in none of {len(candidates)} examples are {', '.join(names)} {find}")
    if wanted:
        _print_legend(console, budget, has_end)
        for written in found:
            _print_writing(console, written, trace)
    if svg is not None:
        svg.parent.mkdir(parents=True, exist_ok=True)
        write_text(svg, picture([writing for written in found for writing in written]))
        say(f"picture: {svg}")


SEARCHED = 1000  # examples that `sample --find` looks at where a task has no end of them


def _right_or_wrong(find: str, rules: int) -> list[bool]:
    words = [word.strip() for word in find.split(",")] if find else []
    if words and (len(words) != rules or not set(words) <= {"right", "wrong"}):
        raise UserError(f"--find takes right or wrong for each --policy, such as right,wrong for two, not {find!r}")
    return [word == "right" for word in words]


def _print_legend(console: Console, budget: int, has_end: bool) -> None:
    from unmask.report.trace import END, MASK

    # One line at 60 columns; the colours repeat anyway.
    marked = [f"[{_colour(i)}]{i}[/]" for i in range(budget)]
    shown = " ".join(marked if budget <= 12 else [*marked[:6], "...", marked[-1]])
    ends = f"  {END} end of sequence" if has_end else ""
    console.print(f"step {shown}  [dim]prompt[/]  {MASK} mask{ends}")


def _print_writing(console: Console, written: Sequence[Writing], trace: bool) -> None:
    """What the rules wrote for one example; where it has a question, that first."""
    from unmask.report.trace import Span, outcome, wrapped

    def print_spans(label: str, spans: Sequence[Span]) -> None:
        for part, line in enumerate(wrapped(spans, console.width - 6)):
            shown = f"  {label if part == 0 else '':<2}  {_line(line)}"
            console.print(shown.rstrip(), soft_wrap=True)

    if written[0].question:
        console.print(f"\n[bold]{written[0].example}[/]  {in_markup(written[0].question)}")
        console.print(f"[dim]answer:[/] {in_markup(written[0].wanted)}")
    for writing in written:
        if len(written) > 1:
            console.print(f"{in_markup(writing.policy)}:")
        for i, frame in enumerate(writing.frames if trace else []):
            print_spans(str(i), frame)
        print_spans("=" if trace else "", [*writing.result, Span(f"   {outcome(writing)}", None)])


def _line(spans: Sequence[Span]) -> str:
    """Every token in the colour of the step that revealed it."""
    shown = []
    for span in spans:
        style = "dim" if span.step == -1 else "" if span.step is None else _colour(span.step)
        style = f"dim {style}" if span.is_end else style
        shown.append(f"[{style}]{in_markup(span.text)}[/]" if style and span.text.strip() else in_markup(span.text))
    return "".join(shown)


def _colour(step: int) -> str:
    return ["bright_yellow", "bright_green", "bright_cyan", "bright_blue", "bright_magenta", "bright_red"][step % 6]


def verdict(records: list[Record]) -> list[str]:
    """Why the learned order does not win: empty if it does.

    It wins if its 95% interval lies above that of every heuristic at the same budget, and its valid samples are as
    varied as true ones.
    """
    learned = [r for r in records if r.trained_budget is not None]
    failures = [] if learned else ["no learned order was evaluated"]
    for record in learned:
        rivals = [r for r in records if r.trained_budget is None and r.budget == record.budget]
        if not rivals:
            failures.append(f"no heuristic was evaluated at {record.budget} steps")
        failures += [
            f"{rival.policy} is valid in [{rival.ci_low:.3f}, {rival.ci_high:.3f}] at {rival.budget} steps, "
            f"learned in [{record.ci_low:.3f}, {record.ci_high:.3f}]"
            for rival in rivals
            if rival.ci_high >= record.ci_low
        ]
        if not record.diverse:
            failures.append(
                f"{record.distinct} distinct valid samples, outside the true distribution's 99% range "
                f"[{record.distinct_low}, {record.distinct_high}]"
            )
    return failures


class TokenOptions(NamedTuple):
    """The options that say how tokens are chosen."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    guidance: float = 0.0
    min_length: int = 0
    stop_at_eos: bool = False

    def choice(self, task: Task, temperature: float) -> TokenChoice:
        """The same for generation; `temperature` where no other is given."""
        from unmask.decoding.tokens import TokenChoice

        if task.eos_token_id is None and (self.min_length or self.stop_at_eos):
            raise UserError(
                f"task {task.name} has no end of sequence (eos_token_id): leave out --min-length and --stop-at-eos"
            )
        given = self if self.temperature is not None else self._replace(temperature=temperature)
        return TokenChoice(**given._asdict(), eos_token_id=task.eos_token_id)


def _evaluate_run(
    run: Path,
    policies: Sequence[str] = (),
    budgets: Sequence[int] = (),
    examples: int | None = None,
    tokens: TokenOptions | None = None,
    seed: int | None = None,
    *,
    against: Sequence[Path] = (),
    split: str | None = None,
    again: bool = False,
    compile: bool = False,
    bf16: bool = False,
    trust_task: bool = False,
    cpu: bool = False,
) -> list[Record]:
    """Evaluate policies x budgets, the recipe's where none are named; print the tables and add to the run's results.

    Without `budgets`, heuristics also run at those that a comparison with the learned order needs; and always at those
    that one with the orders of the runs `against` needs.
    """
    from unmask.decoding.policies import NetworkPolicy
    from unmask.evaluation.compare import Result
    from unmask.evaluation.evaluate import evaluate as evaluate_policy
    from unmask.evaluation.evaluate import policy_named, response_sizes
    from unmask.evaluation.verdicts import VerdictFile
    from unmask.files import refuse_link
    from unmask.jsonl import append_jsonl
    from unmask.models.order_model import weights_hash
    from unmask.progress import progress
    from unmask.report.tables import read_orders, read_records, table
    from unmask.runtime import Processes, precision_on

    processes = Processes(cpu)
    model, plain, task, recipe = _load(run, processes, split, trust_task)
    settings = recipe.evaluate
    names = list(policies) or [*(["learned"] if model.selector is not None else []), *settings.policies]
    own = [model.selector.budget] if model.selector is not None else []
    number = examples or settings.examples
    choice = (tokens or TokenOptions()).choice(task, settings.temperature)
    sizes = response_sizes(task, number)
    learned: list[tuple[Policy, int]] = []
    heuristics: list[tuple[Policy, int]] = []
    rules = [policy_named(name, model) for name in names]
    for rule in {rule.name: rule for rule in rules}.values():
        is_learned = isinstance(rule, NetworkPolicy)
        asked = budgets or settings.budgets or own or [task.length]
        wanted = list(dict.fromkeys(own if is_learned and not (policies and budgets) else asked))
        if wrong := [budget for budget in wanted if not 1 <= budget <= MOST_STEPS]:
            raise UserError(f"--steps must be between 1 and {MOST_STEPS:,}, got {wrong[0]}")
        fitting = [budget for budget in wanted if _can_run(rule, budget, sizes)]
        if not fitting:
            rule.check(wanted[0], sizes)  # says why
        left_out = [str(budget) for budget in wanted if budget not in fitting]
        if left_out and processes.is_main:
            say(f"unmask: {rule.name} cannot run at {', '.join(left_out)} steps: left out", err=True)
        (learned if is_learned else heuristics).extend((rule, budget) for budget in fitting)
    sampling = recipe.seed if seed is None else seed
    precision = precision_on(processes.device.type, "bf16" if bf16 else "no")
    if bf16 and precision == "no" and processes.is_main:
        say("unmask: without --bf16: bfloat16 is slower than float32 on this CPU", err=True)
    way: dict[str, Any] = {
        **{name: getattr(choice, name) for name in ("temperature", "top_p", "top_k", "guidance", "eos_policy")},
        "task": task.name,
        "split": task.held_out,
        "num_examples": number,
        "seed": sampling,
        "precision": precision,
    }
    elsewhere = [result for other in against for result in _learned_in(other, way, weights_hash(plain.denoiser))]
    results, orders = run / "results.jsonl", run / "orders.jsonl"
    for path in (results, orders, run / "verdicts.jsonl"):
        refuse_link(path)
    recorded = read_records(results) if results.exists() else []
    pictured, stream = read_orders(orders), VerdictFile(run / "verdicts.jsonl", processes.is_main)

    def evaluated(wanted: Sequence[tuple[Policy, int]]) -> list[Result]:
        found = []
        with progress("evaluate", number * len(wanted), visible=processes.is_main) as advance:
            for rule, budget in wanted:
                record, order, verdicts = evaluate_policy(
                    model if isinstance(rule, NetworkPolicy) else plain,
                    task,
                    rule,
                    budget,
                    examples=number,
                    choice=choice,
                    seed=sampling,
                    label=_label(recipe),
                    trained_seed=recipe.seed,
                    plain=plain,
                    precision=way["precision"],
                    stream=stream,
                    again=again,
                    compile=compile,
                    advance=advance,
                    processes=processes,
                )
                if processes.is_main and (again or record not in recorded):
                    append_jsonl(results, [record])
                if processes.is_main and order not in pictured:
                    append_jsonl(orders, [order])
                found.append(Result(record, verdicts))
        return found

    compared = evaluated(learned) if learned else []
    met = [*([] if budgets else compared), *elsewhere]
    heuristics = _with_equal_steps(heuristics, met, sizes) if met else heuristics
    compared += elsewhere
    compared += evaluated(heuristics) if heuristics else []
    if further := _budgets_lacking(heuristics, met, compared, sizes):
        compared += evaluated(further)
    records = [result.record for result in compared]
    if not processes.is_main:
        return records
    on = f", {task.held_out}" if len(task.held_out_splits) > 1 else ""
    _console().print(table(records, _title(run, task) + on, _caption(recipe, records)))
    _print_comparisons(compared)
    return records


def _learned_in(run: Path, asked: dict[str, Any], denoiser: str) -> list[Result]:
    """The learned orders of another run, evaluated as `asked` and learned on the denoiser with this hash."""
    from unmask.evaluation.compare import results
    from unmask.evaluation.verdicts import VerdictFile
    from unmask.report.tables import read_records

    found = [
        record
        for record in read_records(run / "results.jsonl")
        if record.trained_budget is not None and all(getattr(record, name) == asked[name] for name in asked)
    ]
    if not found:
        raise UserError(
            f"--against {run}: its learned order has not been evaluated on {asked['num_examples']} examples of "
            f"{asked['split']} with the same settings: run `unmask evaluate {run} --policy learned` with them first"
        )
    if any(record.plain_denoiser != denoiser for record in found):
        raise UserError(f"--against {run}: its order was learned on another denoiser, so nothing here compares with it")
    return results(found, VerdictFile(run / "verdicts.jsonl"))


def _with_equal_steps(
    heuristics: Sequence[tuple[Policy, int]], learned: Sequence[Result], sizes: Tensor
) -> list[tuple[Policy, int]]:
    """Each heuristic also at the floor and the ceiling of the learned mean steps, and at the learned maximum."""
    needed = {
        steps
        for result in learned
        for steps in (math.floor(result.mean_steps), math.ceil(result.mean_steps), result.record.max_steps)
    }
    rules = {rule.name: rule for rule, _ in heuristics}
    return [
        (rule, budget)
        for name, rule in rules.items()
        for asked in [{budget for other, budget in heuristics if other.name == name}]
        for budget in sorted(asked | {steps for steps in needed if _can_run(rule, steps, sizes)})
    ]


def _can_run(rule: Policy, budget: int, sizes: Tensor) -> bool:
    try:
        rule.check(budget, sizes)
    except UserError:
        return False
    return True


def _budgets_lacking(
    heuristics: Sequence[tuple[Policy, int]], learned: Sequence[Result], compared: Sequence[Result], sizes: Tensor
) -> list[tuple[Policy, int]]:
    """What else a comparison needs of rules that take fewer steps than their budget."""
    from unmask.evaluation.compare import next_budget

    needed: dict[tuple[str, int], tuple[Policy, int]] = {}
    for rule in {rule.name: rule for rule, _ in heuristics}.values():
        curve = [result for result in compared if result.record.policy == rule.name]
        for result in learned:
            budget = next_budget(result.mean_steps, curve)
            if budget and _can_run(rule, budget, sizes):
                needed[rule.name, budget] = (rule, budget)
    return list(needed.values())


def _print_comparisons(results: Sequence[Result]) -> None:
    """Every learned order against the heuristics, and the areas under score against steps."""
    from unmask.evaluation.compare import compare
    from unmask.report.tables import area_rows, area_table, by_learned, comparison_table

    records = [result.record for result in results]
    for comparisons in by_learned(compare(results)):
        _console().print(comparison_table(comparisons, records))
    if rows := area_rows(records):
        _console().print(area_table(rows))


def _evaluate_bound(
    run: Path,
    examples: int | None,
    trajectories: int,
    seed: int | None,
    cpu: bool,
    split: str | None = None,
    trust_task: bool = False,
) -> None:
    from dataclasses import asdict

    from unmask.evaluation.evaluate import evaluate_bound
    from unmask.files import write_text
    from unmask.jsonl import sealed
    from unmask.progress import progress
    from unmask.report.tables import bound_table
    from unmask.runtime import Processes

    processes = Processes(cpu)
    if not processes.is_main:
        return  # a matter of seconds, and a sum whose rounding would depend on how it is divided
    model, plain, task, recipe = _load(run, processes, split, trust_task)
    if model.selector is None:
        raise UserError(f"{run} has no learned order, so it has no order bound: train one with an [order] section")
    number = examples or recipe.evaluate.examples
    with progress("bound", number) as advance:
        bound = evaluate_bound(
            model,
            plain,
            task,
            examples=number,
            trajectories=trajectories,
            seed=recipe.seed if seed is None else seed,
            advance=advance,
        )
    write_text(run / "bound.json", sealed(asdict(bound)) + "\n")
    _console().print(bound_table(bound, task.name))


def _write_report(runs: list[Path], page: Path, trust_task: bool = False, pictures: bool = True) -> None:
    """Write the page and, with `pictures`, orders.png into every run."""
    import json

    from unmask.evaluation.compare import compare, results
    from unmask.evaluation.verdicts import VerdictFile
    from unmask.files import refuse_link
    from unmask.report.html import Section, write_html
    from unmask.report.plots import order_picture, pictured
    from unmask.report.tables import read_bound, read_orders, read_records
    from unmask.training.run import load_task

    names = [run.resolve().name for run in runs]
    sections = []
    for run, name in zip(runs, names, strict=True):
        if not run.is_dir():
            raise UserError(f"{run}: no such folder; give the folder of an evaluated run")
        records, orders = read_records(run / "results.jsonl"), read_orders(run / "orders.jsonl")
        if not records:
            raise UserError(f"{run}/results.jsonl is empty: run `unmask evaluate {run}` first")
        recipe, task = load_task(run, trust_task)
        sections.append(
            Section(
                _title(run, task),
                _caption(recipe, records),
                records,
                orders,
                read_bound(run / "bound.json"),
                compare(results(records, VerdictFile(run / "verdicts.jsonl"))),
                name if names.count(name) == 1 else str(run),
                json.dumps(recipe.task, sort_keys=True),
            )
        )
    write_html(page, sections)
    for run, section in zip(runs, sections, strict=True):
        if pictures and (chosen := pictured(section.orders)):
            refuse_link(run / "orders.png")
            order_picture(chosen).savefig(run / "orders.png", dpi=110)


def _label(recipe: Recipe) -> str:
    """What records call a model: its label, the name of its size, or layers x width."""
    if recipe.model.label:
        return recipe.model.label
    if recipe.init:
        return Path(recipe.init).name
    if recipe.model.causal:
        return Path(recipe.model.causal).name
    return recipe.model.size or f"{recipe.model.layers}x{recipe.model.width}"


def _title(run: Path, task: Task) -> str:
    """The task of a run with all that is known about it."""
    facts = [f"{task.length} tokens"]
    if task.min_steps is not None:
        facts.append(f"best possible number of steps {task.min_steps}")
    if task.entropy is not None:
        facts.append(f"true entropy {task.entropy:.3f} nats")
    return f"{run.resolve().name}, {task.name}: {', '.join(facts)}"


def _caption(recipe: Recipe, records: list[Record]) -> str:
    """Which denoiser each rule ran on, and how tokens were chosen."""
    from unmask.evaluation.evaluate import Record
    from unmask.recipe import continued

    tokens = f"Tokens sampled at temperature {_values(records, 'temperature')}"
    for field, what in (("top_p", "top-p"), ("top_k", "top-k"), ("guidance", "guidance")):
        if any(getattr(record, field) != Record.__dataclass_fields__[field].default for record in records):
            tokens += f", {what} {_values(records, field)}"
    if any(record.eos_policy != "none" for record in records):
        tokens += f", end of sequence: {' and '.join(sorted({record.eos_policy for record in records}))}"
    tokens += "."
    if recipe.order is None:
        return f"Every rule runs on the same plainly trained denoiser. {tokens}"
    if recipe.order.denoiser_rate == 0:
        return f"The order was learned on a frozen denoiser; every rule runs on those very weights. {tokens}"
    plain = continued(recipe)
    return (
        "The order was learned jointly with the denoiser. The heuristics run on the denoiser as it was before order "
        f"learning, given as many further plain updates: {plain.updates} of {plain.batch} sequences. {tokens}"
    )


def _values(records: Sequence[Record], field: str) -> str:
    return " and ".join(f"{value:g}" for value in sorted({getattr(record, field) for record in records}))


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _load(
    run: Path, processes: Processes, split: str | None, trust_task: bool
) -> tuple[OrderModel, OrderModel, Task, Recipe]:
    """The model of a run, the one whose denoiser the heuristics run on, the task and the recipe, ready to use."""
    import torch

    from unmask.training.run import load_run

    model, plain, recipe, task = load_run(run, trust_task)
    if split is not None:
        task = task.on_split(split)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    return model.to(processes.device), plain.to(processes.device), task, recipe
