"""The command line.  torch and what builds on it is imported inside the commands: `--help` must not wait for it."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Exit, Option, Typer

import unmask
from unmask.display import accept_any_character, say
from unmask.errors import Stopped, UserError
from unmask.files import refuse_link, write_text
from unmask.recipe import MOST_EXAMPLES, MOST_STEPS, known_recipes, known_studies, listed_recipes, load_recipe

if TYPE_CHECKING:
    from unmask.evaluation.bound import BoundReport
    from unmask.evaluation.records import Record
    from unmask.recipe import Recipe
    from unmask.report.tables import ResultTable

app = Typer(
    help="Learn the order in which a masked diffusion model writes, and compare it with other unmasking rules.",
    epilog="Example: unmask demo",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

recipes = Typer(help="Look at recipes.", epilog="Example: unmask recipe list", no_args_is_help=True)
app.add_typer(recipes, name="recipe")

Force = Annotated[
    bool,
    Option(
        "--force", help="Replace an existing run folder; it is kept as NAME.replaced until the new run is finished."
    ),
]
Cpu = Annotated[bool, Option("--cpu", help="Stay on the CPU even where a GPU is present.")]
Run = Annotated[Path, Argument(help="Folder of a finished run.", show_default=False)]

TrustTask = Annotated[
    bool,
    Option(
        "--trust-task",
        help="Import the task and the rules of your own that the run's recipe names, which runs their code.",
    ),
]
DenoiserFolder = Annotated[
    Path | None,
    Option(help="Of an order for a denoiser of yours: its folder.", show_default="that which the run names"),
]
AnyDenoiser = Annotated[
    bool, Option("--any-denoiser", help="Run the order even on another denoiser than it was learned for.")
]
Split = Annotated[
    str | None, Option(help="The held-out split, where the task has several.", show_default="the recipe's")
]
RecipeName = Annotated[
    str,
    Argument(
        help=f"A TOML file, a run or its recipe.json, or one that comes with unmask: {', '.join(known_recipes())}.",
        autocompletion=known_recipes,
    ),
]
Overrides = Annotated[
    list[str] | None, Option("--set", help="Override a value: --set order.budget=3. May be repeated.")
]

TopP = Annotated[float, Option(help="Sample among the fewest tokens that hold this much of the mass.")]
TopK = Annotated[int, Option(help="Sample among this many most probable tokens; 0: all.")]
Guidance = Annotated[float, Option(help="Weight of classifier-free guidance: a second pass, with the prompt masked.")]
MinLength = Annotated[int, Option(help="Forbid the end of sequence at this many first positions of the response.")]
StopAtEos = Annotated[
    bool, Option("--stop-at-eos", help="Finish a sequence when all its masks lie behind an end of sequence.")
]

Cached = Annotated[
    str,
    Option(
        "--cache",
        help="prefix: inside `blocks`, keep the keys and values of the prompt and of finished blocks; faster, and "
        "approximate for a bidirectional model. auto: where it is exact, for a block-causal model. none: never.",
    ),
]

# What typer raises for an unknown command or option and for a missing or wrong value; its home differs by version.
UsageError: Any = BadParameter.__base__


def main(arguments: list[str] | None = None, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Run a command; whatever the user can mend is one line on stderr and exit code 2.

    interrupted: whether Ctrl-C was pressed; then the caller handles the error, whatever it is.
    """
    forced = "--force" in (sys.argv if arguments is None else arguments)
    accept_any_character()
    try:
        with _warnings_in_one_line():
            code = app(arguments, prog_name="unmask", standalone_mode=False)
    except UsageError as error:
        if message := error.format_message():  # empty where no command was given: the help has been printed instead
            command = error.ctx.command_path if error.ctx else "unmask"
            _refuse(f"{message.rstrip('.')} (see `{command} --help`)")
        sys.exit(2)
    except (UserError, OSError) as error:
        _refuse(str(error), forced)
        sys.exit(2)
    except Stopped as stopped:
        _refuse(str(stopped), forced)
        sys.exit(75)  # EX_TEMPFAIL: try again
    except Exception as error:
        if interrupted():  # whatever came of it
            raise
        if message := _out_of_memory(error):
            _refuse(message)
            sys.exit(2)
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = Path(unmask.__file__).parent in Path(last).parents or "site-packages" in last
        bug = f"this is a bug in unmask {unmask.__version__}: please report it with the lines above"
        _refuse(bug if ours else f"the error is in {last}, code of your own; the lines above say where")
        sys.exit(1)
    if code == 130:  # typer turns Ctrl-C into this
        _refuse("interrupted; the same command resumes where it stopped", forced)
    sys.exit(code)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """A warning of unmask's own is one line on stderr, once; others are shown as Python does."""
    told, package, shown = set[str](), Path(unmask.__file__).parent, warnings.showwarning

    def show(message: Any, category: Any, filename: str, *where: Any, **more: Any) -> None:
        if package not in Path(filename).parents:
            shown(message, category, filename, *where, **more)
        elif _is_main() and str(message) not in told:
            told.add(str(message))
            _refuse(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _refuse(message: str, forced: bool = False) -> None:
    if forced:  # that would start from the beginning
        message = message.replace("the same command", "the same command without --force")
    rank = os.environ.get("RANK", "0")  # of the processes that torchrun started
    say(f"unmask{'' if rank == '0' else f' (process {rank})'}: {' '.join(message.split())}", err=True)


def _out_of_memory(error: Exception) -> str:
    """What to do about it, if that is the error."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not have been imported
        return "out of GPU memory: try --cpu, or wait until nothing else is on the GPU"
    if isinstance(error, MemoryError) and str(error):
        return str(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "out of memory: use smaller batches, fewer examples or a smaller model"
    return ""


def _version(wanted: bool) -> None:
    if wanted:
        say(unmask.__version__)
        raise Exit


@app.callback()
def options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Learn the order in which a masked diffusion model writes, and compare it with other unmasking rules."""


@app.command()
def demo(
    out: Annotated[Path, Option(help="Run folder to write.")] = Path("runs/demo"),
    seed: Annotated[int, Option(help="Seed of everything: the puzzle, its examples, training, sampling.")] = 0,
    force: Force = False,
    details: Annotated[bool, Option("--details", help="Print every table, and the held-out bound.")] = False,
) -> None:
    """Learn an order on a small puzzle and compare it: a minute or two on a laptop CPU.

    Trains recipe `groups`, prints the verdict and a table, and writes the model, results.jsonl and report.html to
    runs/demo.  Fails with exit code 1 if the learned order does not win.

    Example: unmask demo --out runs/demo
    """
    from unmask.evaluation.bound import evaluate_run_bound
    from unmask.evaluation.compare import why_not_won
    from unmask.evaluation.plan import evaluate
    from unmask.report.html import write_report
    from unmask.report.tables import verdict
    from unmask.training.run import train as train_run

    started = time.perf_counter()
    recipe = load_recipe("groups", [f"seed={seed}", f"task.seed={seed}"])
    train_run(recipe, out, force=force, cpu=True)
    records = evaluate(out, cpu=True)
    bound = evaluate_run_bound(out, cpu=True)
    write_report([out], out / "report.html")
    reasons = why_not_won(records)
    for reason in reasons:
        say(f"unmask: the learned order did NOT win: {reason}", err=True)
    say(verdict(records))
    _print_results(out, records, only_first=not details)
    if details:
        _print_bound(out, bound)
    cpu_seconds = time.process_time()
    say(f"report: {out / 'report.html'}   ({time.perf_counter() - started:.0f} s, {cpu_seconds:.0f} CPU seconds)")
    if reasons:
        raise Exit(1)


@recipes.command("list")
def list_() -> None:
    """List the recipes that come with unmask: task, what they train, and for what.

    Example: unmask recipe list
    """
    for name, task, trained, comment in listed_recipes():
        say(f"{name:<26} {task:<14} {trained:<26} {comment}".rstrip())


@recipes.command()
def show(recipe: RecipeName, set_: Overrides = None) -> None:
    """Check a recipe and print it resolved: every value that a run of it would use, as a recipe.

    Example: unmask recipe show groups --set order.budget=3
    """
    say(load_recipe(recipe, set_ or []).to_toml(), end="")


@app.command()
def train(
    recipe: RecipeName,
    out: Annotated[Path, Option(help="Run folder to write.")],
    set_: Overrides = None,
    force: Force = False,
    allow_change: Annotated[
        bool, Option("--allow-change", help="Continue an unfinished run with a recipe that differs from its own.")
    ] = False,
    cpu: Cpu = False,
) -> None:
    """Train what a recipe says: a denoiser, an order for it, or both.

    Checkpoints are written as the recipe's \\[saving] says: after a crash the same call resumes from the last one.
    SIGTERM saves and exits with code 75.

    Example: unmask train groups --out runs/mine --set order.budget=3
    """
    import torch

    from unmask.training.run import train as train_run

    wanted = load_recipe(recipe, set_ or [])
    try:
        train_run(wanted, out, force=force, cpu=cpu, allow_change=allow_change)
    except torch.OutOfMemoryError:
        raise UserError(_smaller_batches(wanted, out)) from None
    if _is_main():
        say(f"model: {out}   next: unmask evaluate {out}{' --trust-task' if wanted.own_code else ''}")


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
        f"NAME:{name}.accumulate={smaller[0]}); the run resumes from its last checkpoint"
    )


@app.command()
def evaluate(
    run: Annotated[
        Path, Argument(help="Folder of a finished run; with --exact-denoiser also a recipe.", show_default=False)
    ],
    policy: Annotated[
        list[str] | None,
        Option(
            help="A rule, see `unmask policies`; may be repeated. With --curve, `learned` or `threshold` is all of its "
            "settings.",
            show_default="the recipe's",
        ),
    ] = None,
    steps: Annotated[
        list[int] | None,
        Option(
            help="Budget of steps, the most that a sequence may take; may be repeated.",
            show_default="the recipe's, and what a comparison at the learned order's steps needs",
        ),
    ] = None,
    curve: Annotated[
        bool,
        Option(
            "--curve",
            help="Quality against steps instead: the learned order at many prices against the best of all rules, each "
            "swept over its parameter, all with several --steps. Writes RUN/curve.json and RUN/curve.svg.",
        ),
    ] = False,
    against: Annotated[
        list[Path] | None,
        Option(
            help="Also run the heuristics at the budgets that a comparison with the order of this run needs; it must "
            "have been learned on the same denoiser, and evaluated. May be repeated.",
            show_default=False,
        ),
    ] = None,
    exact_denoiser: Annotated[
        bool,
        Option(
            "--exact-denoiser",
            help="The exact posterior of the task in place of the network, so that the error of the rule is seen "
            "alone; with its own records, in RUN/exact.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        Option(help="With --exact-denoiser: the folder for its records; a recipe needs it.", show_default="RUN/exact"),
    ] = None,
    set_: Overrides = None,
    split: Split = None,
    examples: Annotated[
        int | None, Option(min=1, max=MOST_EXAMPLES, help="Held-out examples.", show_default="the recipe's")
    ] = None,
    temperature: Annotated[float | None, Option(min=0, help="0 is greedy.", show_default="the recipe's")] = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    guidance: Guidance = 0.0,
    min_length: MinLength = 0,
    stop_at_eos: StopAtEos = False,
    seed: Annotated[
        int | None, Option(min=-(2**63), max=2**63 - 1, help="Seed of the sampling.", show_default="the recipe's")
    ] = None,
    again: Annotated[bool, Option("--again", help="Evaluate again what has been evaluated already.")] = False,
    compile: Annotated[
        bool, Option("--compile", help="Fixed shapes and torch.compile, on CUDA as graphs: for many examples.")
    ] = False,
    bf16: Annotated[
        bool, Option("--bf16", help="The denoiser's trunk in bfloat16, scores in float32: faster on a GPU.")
    ] = False,
    cache: Cached = "auto",
    perplexity: Annotated[
        str | None,
        Option(
            help="Also the perplexity of the samples of task text under this causal language model, a folder as "
            "transformers saves it, beside token entropy and distinct n-grams; adds to RUN/perplexity.jsonl.",
            show_default=False,
        ),
    ] = None,
    bound: Annotated[
        bool, Option("--bound", help="The held-out bound instead, in nats per token and, of text, bits per character.")
    ] = False,
    samples: Annotated[
        int | None,
        Option(
            min=1, max=10_000, help="Trajectories per sequence, with --bound: the more, the tighter.", show_default="8"
        ),
    ] = None,
    price: Annotated[
        float | None,
        Option(help="Of a step, with --bound and an order learned for prices.", show_default="the lowest"),
    ] = None,
    trust_task: TrustTask = False,
    denoiser: DenoiserFolder = None,
    any_denoiser: AnyDenoiser = False,
    cpu: Cpu = False,
) -> None:
    """Score policies on a run's task, compare them, and print tables; adds to RUN/results.jsonl.

    Every verdict is kept in RUN/verdicts.jsonl as it is made: after a crash the same call resumes where it stopped.

    Example: unmask evaluate runs/mine --policy learned --policy threshold:0.9
    """
    options: dict[str, Any] = {"examples": examples, "seed": seed, "split": split, "trust_task": trust_task, "cpu": cpu}
    options |= {"denoiser": denoiser, "any_denoiser": any_denoiser}
    if exact_denoiser and not bound:
        from unmask.evaluation.plan import exact_folder

        if denoiser is not None or any_denoiser:
            raise UserError("--exact-denoiser is in the place of any other: leave out --denoiser and --any-denoiser")
        run = exact_folder(run, out, set_ or [], trust_task)
    elif out is not None or set_:
        instead = "train another with `unmask train --set`, or choose other examples with --split"
        raise UserError(f"--out and --set are for --exact-denoiser: a run has its own folder and recipe: {instead}")
    if not bound:
        if samples is not None or price is not None:
            raise UserError("--samples and --price are for --bound; a rule has its own: --policy 'learned(price=0.1)'")
        tokens = {"top_p": top_p, "top_k": top_k, "guidance": guidance, "min_length": min_length}
        options |= {"temperature": temperature, "stop_at_eos": stop_at_eos, "compile": compile, "bf16": bf16, **tokens}
        options["cache"] = cache
        show = _evaluate_curve if curve else _evaluate
        if perplexity is not None:
            if curve:
                raise UserError("--perplexity takes no --curve: it reads the samples of single rules")
            options["perplexity"] = perplexity
        show(run, policies=policy or [], steps=steps or [], against=against or [], again=again, **options)
        return
    asks: dict[str, Any] = {"policy": policy, "steps": steps, "against": against, "curve": curve, "again": again}
    asks |= {"compile": compile, "bf16": bf16, "cache": cache != "auto", "perplexity": perplexity}
    asks |= {"temperature": temperature is not None, "top-p": top_p != 1.0, "top-k": top_k, "guidance": guidance}
    asks |= {"min-length": min_length, "stop-at-eos": stop_at_eos, "exact-denoiser": exact_denoiser}
    if given := [name for name, value in asks.items() if value]:
        raise UserError(f"--bound takes no --{given[0]}: it is a number of the trained model")
    if _is_main():  # a matter of seconds, and a sum whose rounding would depend on how it is divided
        from unmask.evaluation.bound import evaluate_run_bound

        _print_bound(run, evaluate_run_bound(run, samples=samples or 8, price=price or 0.0, **options))


def _evaluate(run: Path, trust_task: bool = False, perplexity: str = "", **options: Any) -> None:
    """Evaluate a run and print the tables."""
    from unmask.evaluation.perplexity import evaluate_run_perplexity, load_reader
    from unmask.evaluation.plan import evaluate
    from unmask.report.tables import perplexity_tables

    where = options.get("split"), trust_task, options["cpu"]
    reader = load_reader(run, perplexity, *where) if perplexity and _is_main() else None
    records = evaluate(run, trust_task=trust_task, **options)
    if _is_main():
        read = perplexity_tables(evaluate_run_perplexity(run, records, reader), records) if reader else []
        _print_results(run, records, read, trust_task=trust_task)


def _print_results(
    run: Path,
    records: Sequence[Record],
    more: Sequence[ResultTable] = (),
    *,
    trust_task: bool = False,
    only_first: bool = False,
) -> None:
    """The tables of a run's records, or the first of them: every rule with its steps and its score."""
    from rich.console import Console

    from unmask.report.tables import caption, learned_on, result_tables, title
    from unmask.training.run import load_task

    recipe, task = load_task(run, trust_task)
    split = f", {records[0].spec.split}" if len(task.held_out_splits) > 1 else ""
    told = caption(recipe, records, learned_on(run, recipe))
    tables = [*result_tables(records, title(run, task) + split, told), *more]
    Console(highlight=False).print(*tables[: 1 if only_first else None], sep="\n")


def _evaluate_curve(run: Path, **options: Any) -> None:
    """Draw quality against steps, and print the verdict and the gains."""
    from rich.console import Console

    from unmask.evaluation.curve import read_curve
    from unmask.evaluation.plan import evaluate
    from unmask.report.plots import curve_plot, svg
    from unmask.report.tables import curve_table, curve_verdict

    refuse_link(run / "curve.svg")
    records = evaluate(run, curve=True, **options)
    if not _is_main():
        return
    curve = read_curve(run / "curve.json")
    if curve is None or {record.key for record in records}.isdisjoint(point.key for point in curve.points):
        say("The order and rules are compared: add --policy learned, and a rule such as --policy threshold.")
        return
    say(curve_verdict(curve))
    Console(highlight=False).print(*map(curve_table, curve.by_measure), sep="\n")
    write_text(run / "curve.svg", svg(curve_plot(curve, "valid, %")) + "\n")
    say(f"curve: {run / 'curve.svg'}, {run / 'curve.json'}")


def _print_bound(run: Path, bound: BoundReport) -> None:
    from rich.console import Console

    from unmask.report.tables import bound_table, bound_verdict

    if verdict := bound_verdict(bound):
        say(verdict)
    Console(highlight=False).print(bound_table(bound, run.resolve().name))


def _is_main() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@app.command()
def reproduce(
    study: Annotated[
        str,
        Argument(
            help=f"A TOML file, or one that comes with unmask: {', '.join(known_studies())}.",
            autocompletion=known_studies,
        ),
    ],
    out: Annotated[Path, Option(help="Folder to write: one for each run, and results.")],
    stage: Annotated[
        list[str] | None,
        Option(help="Only this: a run, all seeds of one, or a split. May be repeated.", show_default="all"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Option("--set", help="Override a value of every recipe: task.folder=DATA; of one: NAME:order.updates=9."),
    ] = None,
    jobs: Annotated[
        int,
        Option(
            min=1, help="Stages at once, for small runs on a GPU; with more than one, each writes to a log in OUT/logs."
        ),
    ] = 1,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the commands and do nothing.")] = False,
    cpu: Cpu = False,
) -> None:
    """Run a whole experiment: one command per stage, each of them once.

    Every run, every evaluation, and their records together in OUT/results.  After a crash, or with more stages, the
    same call resumes where it stopped.  Ctrl-C and SIGTERM save what is training; SIGTERM exits with code 75.

    Example: unmask reproduce gsm8k-30m --out runs/gsm8k-30m --dry-run
    """
    from unmask.studies.study import Reproduction, load_study

    started = time.perf_counter()
    whole = Reproduction(*load_study(study), out, set_ or [], cpu, jobs)
    if dry_run:
        for command in whole.commands(stage or []):
            say(command)
        return
    whole.run(stage or [])
    say(f"records: {whole.records}   ({time.perf_counter() - started:.0f} s)")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        Argument(help="Folders of evaluated runs; with --markdown the folder of records.", show_default=False),
    ],
    out: Annotated[Path | None, Option(help="The file to write.", show_default="report.html in the first run")] = None,
    format_: Annotated[
        str | None,
        Option(
            "--format",
            help="html: the page. For papers: md, csv or tex, the tables; png or pdf, the plots, each in a file beside "
            "--out.",
            show_default="as --out ends, else html",
        ),
    ] = None,
    examples: Annotated[
        int,
        Option(min=0, max=MOST_EXAMPLES, help="Held-out examples to watch in the page, of those evaluated; 0: none."),
    ] = 12,
    markdown: Annotated[
        Path | None, Option(help="Write all tables and plots of a folder of records to this Markdown page instead.")
    ] = None,
    trust_task: TrustTask = False,
) -> None:
    """One self-contained HTML page of one or more runs: the verdict, plots, tables, and the orders to watch.

    With --markdown, the records that `unmask reproduce` left in OUT/results become a Markdown page.

    Example: unmask report runs/mine runs/other --out report.html
    """
    if markdown is not None:
        from unmask.studies.results_page import write_page

        if out is not None or len(runs) != 1:
            raise UserError("--markdown takes one folder of records, such as OUT/results, and no --out")
        write_page(markdown, runs[0])
        say(f"page: {markdown}")
        return
    from unmask.report.formats import FORMATS, write_format
    from unmask.report.html import read_sections, write_report

    if format_ is None:
        format_ = out.suffix[1:] if out is not None and out.suffix else "html"
    if format_ not in ("html", *FORMATS):
        raise UserError(f"unknown format {format_}: choose from html, {', '.join(FORMATS)}")
    path = out or runs[0] / f"report.{format_}"
    written = [path]
    if format_ == "html":
        write_report(runs, path, trust_task, examples)
    else:
        written = write_format(path, format_, read_sections(runs, trust_task))
    say("\n".join(f"report: {file}" for file in written))


@app.command()
def push(
    run: Run,
    name: Annotated[str, Argument(help="OWNER/NAME of the model on the hub.", show_default=False)],
    private: Annotated[
        bool | None, Option("--private/--public", help="Of a new model.", show_default="as your settings on the hub")
    ] = None,
) -> None:
    """Upload a finished run to the Hugging Face hub: model, recipe, records, and a card made of them.

    The card shows the recipe with all its values, paths too.  Log in first: `hf auth login`.

    Example: unmask push runs/mine my-name/my-order --private
    """
    from unmask.report.card import push_run

    say(f"model: {push_run(run, name, private)}")


@app.command()
def policies() -> None:
    """List every unmasking rule with its parameters and defaults: what --policy takes.

    Example: unmask policies
    """
    from unmask.rule_list import listed_rules

    for usage, rule, words, formula in listed_rules():
        say(f"{usage:<33} {rule:<14} {words}  {formula}")
    say(
        "\nA rule is written as its name alone (margin), with one value (threshold:0.9), or with several\n"
        "(klass(0.9,0.01,2), eb(0.1,order=margin), blocks(32,stochastic(margin,0.5))).  In Python it is the class\n"
        "beside it: unmask.policies.Threshold(0.9).  One of your own is written module:Class or module:Class(0.9).\n"
        "learned, lo-arm and reward decide by the run's own selector; lo-arm is the rule that was trained\n"
        "where the recipe has order.selection = 'one', reward where it has order.reward and 'bernoulli'.\n"
        "i: step from 0, S: the most steps, N: size of the response, M: its masks, H_n: entropy,\n"
        "k_i: N div S, one more for the first N mod S steps (count=floor: Dream's and SMDM's, cosine: MaskGIT's),\n"
        "p_n: the denoiser's distribution at n, x_n: the token proposed there, c_n: its largest probability\n"
        "(confidence=sampled: that of x_n)."
    )


@app.command()
def serve(
    runs: Annotated[list[Path], Argument(help="Folders of finished runs.", show_default=False)],
    host: Annotated[str, Option(help="The address to listen on; 0.0.0.0: all of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    batch: Annotated[int, Option(min=1, max=1024, help="Sequences that share a pass.")] = 16,
    queue: Annotated[int, Option(min=1, help="Requests that may wait; those beyond are refused with 429.")] = 256,
    max_steps: Annotated[int, Option(min=1, max=MOST_STEPS, help="The most steps that a request may ask for.")] = 1000,
    timeout: Annotated[float, Option(min=0.1, help="Seconds after which a request is given up.")] = 60.0,
    token: Annotated[
        str,
        Option(
            envvar="UNMASK_TOKEN", help="What clients must send as `Authorization: Bearer TOKEN`.", show_default=False
        ),
    ] = "",
    trust_task: TrustTask = False,
    cpu: Cpu = False,
) -> None:
    """A playground in the browser and an HTTP interface, including OpenAI-style completions; see GET /docs.

    Requests share the passes of the model, and each gets what it would get alone.  SIGTERM lets those that are being
    answered finish.

    Example: unmask serve runs/demo --port 8000
    """
    from unmask.runtime import Processes

    try:
        from unmask.serve import app as http
    except ModuleNotFoundError as error:
        raise UserError(f"unmask serve needs {error.name}: pip install 'unmask[serve]'") from None
    from unmask.serve.served import Served
    from unmask.serve.worker import Worker

    local = host in ("127.0.0.1", "localhost", "::1")
    if not local and not token:
        say(f"unmask: whoever reaches {host} can use this server: set UNMASK_TOKEN to ask for a token", err=True)
    device = Processes(cpu).device
    models = [Served(run, max_steps, device, trust_task) for run in runs]
    hosts = ("127.0.0.1", "localhost", "[::1]") if local else ()
    server = http.Server(models, Worker(batch, queue), http.Limits(timeout, token, hosts))
    http.run(server, http.listen(host, port), timeout)


@app.command()
def sample(
    run: Run,
    policy: Annotated[
        list[str] | None,
        Option(help="A rule, see `unmask policies`; may be repeated.", show_default="learned if there is one"),
    ] = None,
    steps: Annotated[
        int | None, Option(min=1, max=MOST_STEPS, help="Budget of steps.", show_default="the learned budget, or 4")
    ] = None,
    num: Annotated[int, Option(min=1, max=MOST_EXAMPLES, help="How many examples.")] = 4,
    example: Annotated[
        list[int] | None,
        Option(min=0, max=2**63 - 1, help="The number of an example; may be repeated.", show_default="the first ones"),
    ] = None,
    find: Annotated[
        str,
        Option(
            help="The first examples where the rules are, in their order, right or wrong: right,wrong.",
            show_default=False,
        ),
    ] = "",
    prompt: Annotated[
        list[str] | None,
        Option(help="A text to generate for; may be repeated.", show_default="those of held-out examples"),
    ] = None,
    split: Split = None,
    temperature: Annotated[float | None, Option(min=0, help="0 is greedy.", show_default="the recipe's")] = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    guidance: Guidance = 0.0,
    min_length: MinLength = 0,
    stop_at_eos: StopAtEos = False,
    eos_last: Annotated[
        bool, Option("--eos-last", help="Reveal an end of sequence only where nothing else is proposed.")
    ] = False,
    repetition_penalty: Annotated[
        float, Option(help="Above 1: tokens that stand elsewhere in the sequence become less probable.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        Option(
            help="Once the response up to its first mask holds this text, all masks become end of sequence; what is "
            "written behind it stays.  May be repeated.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, Option(min=-(2**63), max=2**63 - 1, help="Seed of the sampling.")] = 0,
    cache: Cached = "auto",
    trace: Annotated[bool, Option("--trace", help="Print every step of the unmasking.")] = False,
    watch: Annotated[
        bool, Option("--watch", help="Show every step in place while it is made; off a terminal as --trace.")
    ] = False,
    svg: Annotated[Path | None, Option(help="Draw every step as a picture, into this file.")] = None,
    trust_task: TrustTask = False,
    denoiser: DenoiserFolder = None,
    any_denoiser: AnyDenoiser = False,
    cpu: Cpu = False,
) -> None:
    """Generate, and show what was written when: every token is coloured by the step that revealed it.

    Example: unmask sample runs/demo --watch --policy learned --policy margin
    """
    from rich.console import Console

    from unmask.report import trace as traces

    if svg is not None:
        traces.check_picture(svg)
    console, found = Console(highlight=False), list[Any]()
    options: dict[str, Any] = {"split": split, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    options |= {"guidance": guidance, "min_length": min_length, "stop_at_eos": stop_at_eos, "eos_last": eos_last}
    options |= {"repetition_penalty": repetition_penalty, "stop_strings": stop or []}
    options |= {"prompts": prompt or [], "trust_task": trust_task, "denoiser": denoiser, "any_denoiser": any_denoiser}
    moving = watch and console.is_interactive
    with traces.animation(console) if moving else nullcontext() as on_step:
        options |= {"cache": cache, "cpu": cpu, "on_step": on_step}
        for written in traces.sample(run, policy or [], steps, num, example or [], find, **options):
            if not found:
                traces.print_legend(console, written[0])
            traces.print_writings(console, written, trace or (watch and not moving))
            found += written
    if svg is not None:
        svg.parent.mkdir(parents=True, exist_ok=True)
        write_text(svg, traces.picture(found))
        say(f"picture: {svg}")
