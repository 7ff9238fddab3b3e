"""Studies: an experiment of many runs as a list of `unmask train` and `unmask evaluate` commands, done once each.

A study is a TOML file:

policies, others       heuristics; of the others only the best for each budget join in after the first split, where they
                       are chosen
learned                how orders decode, such as "learned(deterministic)"; chosen on the first split among these and
learned_tried          these, which are evaluated there only
bf16                   evaluate with the denoiser's trunk in bfloat16
[[train]]              a run for each seed: `recipe` with the overrides `set`, from the run that `start` names (if that
                       has the same seeds: from the one of its own seed); a joint order beside the run that `baseline`
                       names, or beside one of its own
[[evaluate]]           a held-out split: every order, and every heuristic at the steps that the orders take

OUT/RUN/                            the folder of a run
OUT/logs/STAGE.txt                  what a stage wrote, where several run at once
OUT/results/STUDY.jsonl             the records of all runs
OUT/results/STUDY/gains.jsonl       the orders against the heuristics at equal steps, seeds together
OUT/results/STUDY/stages.jsonl      the command, the wall time and the hardware of each stage
OUT/results/STUDY/recipes/RUN.json  the recipe of a run
"""

from __future__ import annotations

import gc
import hashlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from unmask import files
from unmask.errors import UserError, did_you_mean
from unmask.jsonl import append_jsonl, read_jsonl, sealed
from unmask.recipe import (
    Recipe,
    RecipeError,
    build,
    differences,
    load_recipe,
    not_continued,
    read_toml,
    recipe_folder,
)
from unmask.tasks import is_own

if TYPE_CHECKING:
    from unmask.evaluation.records import Record

Command = list[str]
BEST_OTHER = "BEST-OTHER"  # what a command shows before the best of the other rules are known
SEED = 0  # of the sampling, the same for every order: it must be, if they are to be compared


@dataclass(frozen=True)
class Training:
    """A run, or one for each seed."""

    name: str
    recipe: str  # a name, or a file beside the study's
    start: str = ""  # the name of an earlier one, from which it starts
    baseline: str = ""  # of a joint order: the name of an earlier one, which is that denoiser plainly trained on
    set: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()  # none: the recipe's own

    def runs(self) -> list[tuple[str, list[str]]]:
        """The name of each run, and what its seed overrides."""
        if not self.seeds:
            return [(self.name, [])]
        return [(f"{self.name}-seed{seed}", [f"seed={seed}"]) for seed in self.seeds]


@dataclass(frozen=True)
class Split:
    """What is evaluated on a held-out split."""

    split: str
    examples: int
    steps: tuple[int, ...] = ()  # at which the heuristics run besides


@dataclass(frozen=True)
class Study:
    train: tuple[Training, ...]
    evaluate: tuple[Split, ...] = ()
    policies: tuple[str, ...] = ("iid", "top-prob", "margin")
    others: tuple[str, ...] = ()
    learned: tuple[str, ...] = ("learned",)
    learned_tried: tuple[str, ...] = ()
    bf16: bool = False

    def __post_init__(self) -> None:
        for rule in (*self.learned, *self.learned_tried):
            _learned_name(rule)
        names = [training.name for training in self.train]
        for name in names:
            if Path(name).name != name or name in ("", "..", "results", "logs", "lock"):
                raise UserError(f"a run cannot be called {name!r}: it is the name of its folder in OUT")
        stages = [*names, *(split.split for split in self.evaluate)]
        if twice := [name for name in stages if stages.count(name) > 1]:
            raise UserError(f"two stages are called {twice[0]!r}")
        for place, training in enumerate(self.train):
            for what, name in (("starts from", training.start), ("has the baseline", training.baseline)):
                if name and name not in names[:place]:
                    raise UserError(f"{training.name} {what} {name!r}, which is no run before it")
                seeds = self.train[names.index(name)].seeds if name else ()
                if seeds and (what != "starts from" or seeds != training.seeds):
                    raise UserError(f"{training.name} {what} {name!r}, which has seeds of its own")


class Stage(NamedTuple):
    """One command."""

    name: str  # RUN, or SPLIT/RUN
    of: tuple[str, ...]  # the names under which a user may ask for it
    command: Command
    runs: tuple[str, ...]  # whose models it uses; a training has none


@dataclass(frozen=True)
class Done:
    """A line of stages.jsonl: an attempt at a stage."""

    stage: str
    command: str
    finished: bool
    started: float  # seconds since the epoch
    seconds: float
    jobs: int  # how many ran at once at most
    device: str
    torch: str
    revision: str
    models: str  # hash of what the models that it used say of themselves


def study_folder() -> Path:
    return recipe_folder() / "studies"


def known_studies() -> list[str]:
    """The names of the studies that come with unmask."""
    return sorted(study.stem for study in study_folder().glob("*.toml"))


def load_study(name: str) -> tuple[Study, Path]:
    """A study by path, or by the name of one that comes with unmask; and its file."""
    path = Path(name)
    if not path.is_file():
        path = study_folder() / f"{name}.toml"
    if not path.is_file():
        known = known_studies()
        raise RecipeError(f"no study {name!r}; {did_you_mean(name, known)}give a file or one of {', '.join(known)}")
    study: Study = build(Study, read_toml(path), "study")
    return study, path


class Reproduction:
    """A study in a folder.  `command` runs one command of the command line in this process.

    With `jobs` > 1, as many commands run at once, as processes of their own.
    """

    def __init__(
        self,
        study: Study,
        path: Path,
        out: Path,
        overrides: Sequence[str] = (),
        cpu: bool = False,
        command: Callable[[Command], None] = lambda arguments: None,
        say: Callable[[str], None] = lambda text: None,
        jobs: int = 1,
    ) -> None:
        self.study, self.path, self.out, self.cpu, self.command, self.say = study, path, out, cpu, command, say
        self.jobs = jobs
        self.shown: dict[str, str] = {}  # by stage: how it is announced
        self.records = out / "results" / f"{path.stem}.jsonl"
        self.beside = out / "results" / path.stem
        self.recipes: dict[str, tuple[str, list[str]]] = {}  # by run: the recipe's name and its overrides
        self.loaded: dict[str, Recipe] = {}
        self.training: dict[str, Training] = {}
        self.start: dict[str, str] = {}  # by run: the run that it starts from, or ""
        self.best_others: list[str] = []
        given = [_addressed(override) for override in overrides]
        for training in study.train:
            beside = path.parent / training.recipe
            name = str(beside) if beside.is_file() else training.recipe
            for run, seed in training.runs():
                own = [value for whose, value in given if whose in ("", run, training.name)]
                self.start[run] = self._of_the_same_seed(training, run)
                start = [f"init={out / self.start[run]}"] if training.start else []
                start += [f"order.continued={out / training.baseline}"] if training.baseline else []
                self.recipes[run] = (name, [*start, *training.set, *seed, *own])
                self.training[run] = training
        known = {"", *self.training, *(training.name for training in study.train)}
        if unknown := [whose for whose, _ in given if whose not in known]:
            raise UserError(f"--set: no run {unknown[0]!r}; {_instead(unknown[0], known)}")
        self._check_orders()
        self._check_baselines()

    def _of_the_same_seed(self, training: Training, run: str) -> str:
        """The run that a run starts from: of several seeds, the one of its own."""
        seed = run.removeprefix(training.name)
        return training.start + seed if training.start + seed in self.training else training.start

    def _check_orders(self) -> None:
        """Refuse orders whose records nothing would tell apart: they would be taken for seeds of one order."""
        found: dict[tuple[object, ...], str] = {}
        for run in self.recipes:
            recipe = self._recipe(run)
            if recipe.order is None:
                continue
            model = recipe.model.label or (recipe.init, recipe.model.causal, recipe.model.size)
            key = (model, recipe.order.budget, self._is_joint(run), recipe.seed)
            if key in found:
                raise UserError(
                    f"{found[key]} and {run} have the same budget and the same seed: set another model.label in one of "
                    "them, or their records could not be told apart"
                )
            found[key] = run

    def _check_baselines(self) -> None:
        """Refuse a baseline that is trained otherwise than its orders need before anything is trained."""
        for run, training in self.training.items():
            if not training.baseline:
                continue
            if self._denoiser_of(self.start[training.baseline]) != self._denoiser_of(self.start[run]):
                raise UserError(f"{run} and its baseline {training.baseline} must start from the same denoiser")
            for key, has, needed in not_continued(self._recipe(training.baseline), self._recipe(run)):
                raise UserError(
                    f"{training.baseline} has {key} = {has!r}, but as the baseline of {run} it must have {needed!r}"
                )

    # --- what there is to do ------------------------------------------------------------------------------------------

    def stages(self, wanted: Sequence[str] = ()) -> list[Stage]:
        """All stages in order, or those that are asked for: by run, by the name of a training, or by split."""
        trainings = [self._train(run) for run in self.recipes]
        names = {name for stage in trainings for name in stage.of} | {split.split for split in self.study.evaluate}
        for name in wanted:
            if name not in names:
                raise UserError(f"no stage {name!r}; {_instead(name, names)}")
        chosen = [stage for stage in trainings if not wanted or set(stage.of) & set(wanted)]
        there = {stage.name for stage in chosen} | {run for run in self.recipes if self._is_trained(run)}
        for split in self.study.evaluate:
            if not wanted or split.split in wanted:
                chosen += self._evaluate(split, [run for run in self.recipes if run in there])
        return chosen

    def _recipe(self, run: str) -> Recipe:
        if run not in self.loaded:
            self.loaded[run] = load_recipe(*self.recipes[run])
        return self.loaded[run]

    def _is_trained(self, run: str) -> bool:
        from unmask.training.run_folder import is_finished

        return is_finished(self.out / run)

    def _is_joint(self, run: str) -> bool:
        order = self._recipe(run).order
        return order is not None and order.denoiser_rate > 0

    def _budget(self, run: str) -> int:
        order = self._recipe(run).order
        assert order is not None
        return order.budget

    def _train(self, run: str) -> Stage:
        recipe, overrides = self.recipes[run]
        sets = [word for override in overrides for word in ("--set", override)]
        return Stage(run, (run, self.training[run].name), self._on_device(["train", recipe, *sets], run, "--out"), ())

    def _evaluate(self, split: Split, runs: Sequence[str]) -> list[Stage]:
        """Orders first: the heuristics run at the steps that these take."""
        orders = [run for run in runs if self._recipe(run).order is not None]
        denoiser = {run: self._rivals_of(run) for run in orders}
        first = split == self.study.evaluate[0]
        rules = [*self.study.policies, *([BEST_OTHER] if self.study.others and not first else [])]
        elsewhere = [run for run in orders if denoiser[run] != run]
        # Sorted: whichever of them is chosen, on the first split the commands stay the same.
        learned = sorted({*self.study.learned, *self.study.learned_tried}) if first else self.study.learned
        stages = [self._evaluation(split, run, learned) for run in elsewhere]
        for run in [run for run in runs if run not in elsewhere]:
            if run in orders:  # it brings its own denoiser for the heuristics
                stages.append(self._evaluation(split, run, [*learned, *rules]))
                continue
            against = [order for order in elsewhere if denoiser[order] == run]
            stages.append(self._evaluation(split, run, rules, split.steps, against))
            frozen = [order for order in against if not self._is_joint(order)]  # by which the best other is chosen
            if first and self.study.others and frozen:
                # Beyond the orders' budgets too: some of them end by themselves, and that is what they then come to.
                most = max(self._budget(order) for order in frozen)
                beyond = [steps for steps in split.steps if steps > most] or split.steps[-1:]
                stages.append(self._evaluation(split, run, self.study.others, beyond, frozen, "others"))
        return stages

    def _rivals_of(self, order: str) -> str:
        """The run on whose denoiser an order's rivals are evaluated: its own, where it names no other."""
        return self.training[order].baseline or order if self._is_joint(order) else self._denoiser_of(order)

    def _denoiser_of(self, run: str) -> str:
        """The run that trained the denoiser of a run, as far as the study knows: a frozen order has another's."""
        start = self.start.get(run, "")
        frozen = start and self._recipe(run).denoise is None and not self._is_joint(run)
        return self._denoiser_of(start) if frozen else run

    def known(self, stage: Stage) -> Stage:
        """With the best of the other rules in the place of BEST_OTHER, once they are known."""
        if BEST_OTHER in stage.command:
            self.best_others = self.best_others or self._best_others()
            if self.best_others:
                at = stage.command.index(BEST_OTHER)
                words = [word for rule in self.best_others for word in ("--policy", rule)]
                return stage._replace(command=[*stage.command[: at - 1], *words, *stage.command[at + 1 :]])
        return stage

    def _evaluation(
        self,
        split: Split,
        run: str,
        policies: Sequence[str],
        steps: Sequence[int] = (),
        against: Sequence[str] = (),
        part: str = "",
    ) -> Stage:
        words = ["--split", split.split, "--examples", str(split.examples), "--seed", str(SEED)]
        words += ["--temperature", f"{self._recipe(run).evaluate.temperature:g}"]
        for option, values in (("--policy", policies), ("--steps", steps)):
            words += [word for value in values for word in (option, str(value))]
        words += [word for order in against for word in ("--against", str(self.out / order))]
        words += ["--bf16"] if self.study.bf16 else []
        words += ["--trust-task"] if is_own(self._recipe(run).task["name"]) else []  # the study's recipe names it
        command = self._on_device(["evaluate", str(self.out / run), *words])
        return Stage("/".join([split.split, run, *([part] if part else [])]), (split.split,), command, (run, *against))

    def _on_device(self, words: list[str], run: str = "", option: str = "") -> Command:
        out = [option, str(self.out / run)] if option else []
        return [*words, *out, *(["--cpu"] if self.cpu else [])]

    # --- doing it -----------------------------------------------------------------------------------------------------

    def run(self, wanted: Sequence[str] = ()) -> None:
        """Do what has not been done; what was interrupted goes on, and the rest is as it was."""
        from unmask.training.run_folder import locked

        self.out.mkdir(parents=True, exist_ok=True)
        with locked(self.out):
            self._run(self.stages(wanted))

    def _run(self, stages: Sequence[Stage]) -> None:
        self.shown = {
            stage.name: f"[{place}/{len(stages)}] {stage.name}" for place, stage in enumerate(stages, start=1)
        }
        self._check_needs(stages)
        try:
            if self.jobs > 1:
                self._at_once([stage for stage in stages if BEST_OTHER not in stage.command])
                self._at_once([stage for stage in stages if BEST_OTHER in stage.command])
                return
            for planned in stages:
                if stage := self._left(planned):
                    self.say(f"{self.shown[stage.name]}: {written(stage)}")
                    self._do(stage)
        finally:
            self.collect()

    def _check_needs(self, stages: Sequence[Stage]) -> None:
        """Before anything is done: a run that a stage needs is there, or among the stages."""
        planned = {stage.name for stage in stages}
        for stage in stages:
            for run in sorted(self._needs(stage) & self.recipes.keys() - planned):
                if not self._is_trained(run) and not self._is_trained(stage.name):
                    raise UserError(f"{stage.name} needs {self.out / run}: add --stage {run}")

    def _left(self, planned: Stage) -> Stage | None:
        """The stage with what is known by now, unless it is done."""
        stage = self.known(planned)
        if self._is_done(stage):
            self.say(f"{self.shown[stage.name]}: done before")
            return None
        if BEST_OTHER in stage.command:
            first = self.study.evaluate[0].split
            raise UserError(f"{stage.name} needs the best of {', '.join(self.study.others)}: run stage {first} first")
        return stage

    def _at_once(self, stages: Sequence[Stage]) -> None:
        """Several stages at a time, each as a process, as soon as what it needs is there."""
        from unmask.studies.jobs import Ended, Job, run_jobs

        left = {stage.name: stage for planned in stages if (stage := self._left(planned))}

        def began(job: Job) -> None:
            self.say(f"{self.shown[job.name]}: {written(left[job.name])}")

        def ended(job: Job, how: Ended) -> None:
            self._note(left[job.name], how.code == 0, how.started, how.seconds, self.jobs)
            said = {0: "done in", 75: "stopped after"}.get(how.code, "failed after")
            self.say(f"{self.shown[job.name]}: {said} {how.seconds:.0f} s")

        jobs: list[Job] = []
        for name, stage in left.items():
            command = [sys.executable, "-P", "-m", "unmask", *self._resumed(stage)]
            after = self._needs(stage) | {job.name for job in jobs if left[job.name].runs[:1] == stage.runs[:1] != ()}
            jobs.append(Job(name, command, after, self.out / "logs" / f"{name.replace('/', '-')}.txt"))
        run_jobs(jobs, self.jobs, began, ended)

    def _needs(self, stage: Stage) -> frozenset[str]:
        """The stages that must come first.  Two that evaluate the same run, and write to its records, never meet."""
        if not stage.runs:
            return frozenset([self.start[stage.name], self.training[stage.name].baseline])
        return frozenset([*stage.runs, *(f"{stage.of[0]}/{order}" for order in stage.runs[1:])])

    def _is_done(self, stage: Stage) -> bool:
        if stage.runs:
            models = self._models(stage)
            return any(
                done.finished and (done.stage, done.command, done.models) == (stage.name, written(stage), models)
                for done in self.done()
            )
        if not self._is_trained(stage.name):
            return False
        from unmask.training.run_folder import read_recipe

        folder = self.out / stage.name
        if keys := [key for key, _, _ in differences(read_recipe(folder), self._recipe(stage.name))]:
            raise UserError(
                f"{folder} was trained by a recipe with another {' and '.join(keys)}: move it away, "
                "or give another --out"
            )
        return True

    def _models(self, stage: Stage) -> str:
        """Twelve hex digits that change with the models, whose checksums are in the manifests."""
        names = ("config.json", "model.safetensors", "tokenizer.json")
        listed = [files.read_manifest(self.out / run)["files"] for run in stage.runs if self._is_trained(run)]
        text = json.dumps([[found.get(name) for name in names] for found in listed])
        return hashlib.sha256(text.encode()).hexdigest()[:12] if listed else ""

    def _resumed(self, stage: Stage) -> Command:
        """The command of a stage, as it must be given where an earlier attempt has left something."""
        folder = self.out / stage.name
        if not stage.runs and (folder / "recipe.json").exists() and not (folder / "checkpoints").exists():
            return [*stage.command, "--force"]  # it was interrupted, and nothing is there to go on from
        return stage.command

    def _do(self, stage: Stage) -> None:
        """A stage in this process, which it leaves as it was: the next one must not differ from the same on its own."""
        import torch

        from unmask.runtime import process_settings

        started, clock, finished = time.time(), time.perf_counter(), False
        try:
            with process_settings():
                self.command(self._resumed(stage))
            finished = True
        finally:
            self._note(stage, finished, started, time.perf_counter() - clock, 1)
            # Compiled code is kept for each place in the source, not for each model: without this the tenth run of a
            # study would run uncompiled.
            torch._dynamo.reset()
            gc.collect()
            if torch.cuda.is_available() and not self.cpu:
                torch.cuda.empty_cache()

    def _note(self, stage: Stage, finished: bool, started: float, seconds: float, jobs: int) -> None:
        """Add an attempt to stages.jsonl."""
        import torch

        from unmask.evaluation.evaluate import device_name, revision

        on_gpu = torch.cuda.is_available() and not self.cpu
        self.beside.mkdir(parents=True, exist_ok=True)
        done = Done(
            stage.name,
            written(stage),
            finished,
            round(started, 3),
            round(seconds, 3),
            jobs,
            device_name(torch.device("cuda" if on_gpu else "cpu")),
            torch.__version__,
            revision(),
            self._models(stage),
        )
        append_jsonl(self.beside / "stages.jsonl", [done])

    def done(self) -> list[Done]:
        return read_done(self.beside / "stages.jsonl")

    # --- what came of it ----------------------------------------------------------------------------------------------

    def evaluated(self) -> list[Record]:
        """Everything that has been evaluated, of all runs."""
        from unmask.evaluation.records import read_run

        folders = [self.out / run for run in self.recipes]
        return [record for run in folders if (run / "results.jsonl").exists() for record in read_run(run)]

    def collect(self) -> None:
        """Put the records of all runs into one file, and the recipes and the gains beside it."""
        from unmask.evaluation.compare import gains
        from unmask.evaluation.records import record_lines

        (self.beside / "recipes").mkdir(parents=True, exist_ok=True)
        for run in self.recipes:
            if self._is_trained(run):
                shutil.copy(self.out / run / "recipe.json", self.beside / "recipes" / f"{run}.json")
        records = self.evaluated()
        _rewrite(self.records, record_lines(records))
        _rewrite(self.beside / "gains.jsonl", gains(records))

    def _best_others(self) -> list[str]:
        """Of the other rules, for each budget the one with the best mean score at its orders' steps on the first split.

        A rule that takes fewer steps than an order even at its largest budget counts with its score there.
        """
        from unmask.decoding.policies import parse_policy
        from unmask.evaluation.compare import at_most_steps, curves, rivals

        first, chosen = self.study.evaluate[0], [_learned_name(rule) for rule in self.study.learned]
        records = [record for record in self.evaluated() if record.spec.split == first.split]
        orders: dict[int, list[Record]] = {}
        for record in records:
            spec = record.spec
            if spec.policy in chosen and spec.trained_budget and spec.plain_denoiser == spec.denoiser:
                orders.setdefault(spec.trained_budget, []).append(record)
        names, best = {parse_policy(rule).name for rule in self.study.others}, []
        for _, ours in sorted(orders.items()):
            scores: dict[str, list[float]] = {}
            for learned in ours:
                for curve in curves(rivals(learned, records)):
                    rule, score = curve[0].spec.policy, at_most_steps(learned.mean_steps, curve)[0].score
                    if rule in names and score is not None:
                        scores.setdefault(rule, []).append(score)
            known = {rule: sum(found) for rule, found in scores.items() if len(found) == len(ours)}
            best += [max(known, key=lambda rule: known[rule])] if known else []
        return list(dict.fromkeys(best))


def _learned_name(rule: str) -> str:
    """The name of a form of the learned rule, as records have it."""
    from unmask.decoding.policies import Learned, parse_policy

    parsed = parse_policy(rule, network=cast(Any, object()))
    if not isinstance(parsed, Learned):
        raise UserError(f"{rule!r} is no learned order: write learned, or learned(deterministic)")
    return parsed.name


def _addressed(override: str) -> tuple[str, str]:
    """`NAME:key=value` as its name and the rest; without one, the name is empty."""
    key, equals, value = override.partition("=")
    name, _, key = key.rpartition(":")
    return name, f"{key}{equals}{value}"


def _instead(name: str, known: Iterable[str]) -> str:
    return f"{did_you_mean(name, known)}choose from {', '.join(sorted(filter(None, known)))}"


def read_done(path: Path) -> list[Done]:
    return [Done(**row) for row in read_jsonl(path, Done)] if path.exists() else []


def written(stage: Stage) -> str:
    """As one would type it."""
    return shlex.join(["unmask", *stage.command])


def _rewrite(path: Path, items: Sequence[Any]) -> None:
    """The file anew; never a moment without one."""
    files.write_text(path, "".join(f"{sealed(asdict(item))}\n" for item in items))
