"""Studies: an experiment of many runs as a list of `unmask train` and `unmask evaluate` commands, each run once.

A study is a TOML file:

policies, others       heuristics; of the others, only the best per budget on the first split run on later splits
learned                how orders decode, such as "learned(deterministic)"
learned_tried          further ways, evaluated on the first split only
bf16                   evaluate with the denoiser's trunk in bfloat16
[[train]]              a run per seed: `recipe` with the overrides `set`, from the run that `start` names (if that has
                       the same seeds: from the one of the same seed); a joint order is compared with the run that
                       `baseline` names, or with one that it trains itself; an order that is kept without a denoiser is
                       evaluated on that of the run that `denoiser` names, and so are the heuristics beside it
[[evaluate]]           a held-out split: every order, and every heuristic at the steps that the orders take; with
                       `curve = true` the sweep of `unmask evaluate --curve` instead, with `steps` as the caps; with
                       `task` only the runs of that task, with `runs` only those of these names

OUT/RUN/                            the folder of a run
OUT/logs/STAGE.txt                  the output of a stage, where several run at once
OUT/results/STUDY.jsonl             the records of all runs
OUT/results/STUDY/gains.jsonl       the orders against the heuristics at equal steps, seeds together
OUT/results/STUDY/curve.jsonl       the orders against the best of all rules, seeds together, where `curve = true`
OUT/results/STUDY/stages.jsonl      the command, the wall time and the hardware of each stage
OUT/results/STUDY/recipes/RUN.json  the recipe of a run
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unmask import files
from unmask.decoding.policies import Learned, check_policy
from unmask.display import say
from unmask.errors import UserError, did_you_mean, require
from unmask.evaluation.compare import at_most_steps, curves, gains, rivals
from unmask.evaluation.curve import compared_curves
from unmask.evaluation.evaluate import device_name, revision
from unmask.evaluation.records import Record, grouped, read_run, record_lines
from unmask.fields import build
from unmask.jsonl import append_jsonl, read_jsonl, sealed
from unmask.recipe import (
    PLAIN_RULES,
    Recipe,
    differences,
    known_studies,
    load_recipe,
    not_continued,
    read_toml,
    recipe_folder,
)
from unmask.studies.jobs import Job, run_jobs
from unmask.training.run_folder import is_finished, locked, read_recipe

SEED = 0  # of the sampling: orders can be compared only if it is the same for all


@dataclass(frozen=True)
class Training:
    """A run, or one per seed."""

    name: str
    recipe: str  # a name, or a file beside the study's
    start: str = ""  # the name of an earlier training, from which it starts
    baseline: str = ""  # of a joint order: the name of an earlier training, which is its denoiser trained further
    denoiser: str = ""  # of an order kept without one: the name of an earlier training, on whose it is evaluated
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
    steps: tuple[int, ...] = ()  # further budgets of the heuristics; of a curve, the caps of all
    curve: bool = False  # sweep the orders over their prices and every rule over its settings
    task: str = ""  # only the runs of this task, where others do not have the split; "": all
    runs: tuple[str, ...] = ()  # the names of the trainings that are evaluated; none: all


@dataclass(frozen=True)
class Study:
    train: tuple[Training, ...]
    evaluate: tuple[Split, ...] = ()
    policies: tuple[str, ...] = PLAIN_RULES
    others: tuple[str, ...] = ()
    learned: tuple[str, ...] = ("learned",)
    learned_tried: tuple[str, ...] = ()
    bf16: bool = False

    def __post_init__(self) -> None:
        for rule in (*self.learned, *self.learned_tried):
            _learned_name(rule)
        for rule in (*self.policies, *self.others):
            check_policy(rule)
        require(bool(self.train), "a study needs at least one [[train]]")
        for split in self.evaluate:
            require(split.examples >= 1, f"{split.split}: examples must be at least 1, got {split.examples}")
        chosen = bool(self.others and self.evaluate and self.evaluate[0].curve)
        require(not chosen, "others are chosen on the first split, which must have no curve: put another one first")
        names = [training.name for training in self.train]
        for name in names:
            if Path(name).name != name or name in ("", "..", "results", "logs", "lock"):
                raise UserError(f"a run cannot be called {name!r}: it is the name of its folder in OUT")
        stages = [*names, *(split.split for split in self.evaluate)]
        if twice := [name for name in stages if stages.count(name) > 1]:
            raise UserError(f"two stages are called {twice[0]!r}")
        for split in self.evaluate:
            if unknown := [name for name in split.runs if name not in names]:
                raise UserError(f"{split.split}: no run {unknown[0]!r}; {_instead(unknown[0], names)}")
        for place, training in enumerate(self.train):
            others = {"starts from": training.start, "has the baseline": training.baseline}
            for what, name in {**others, "is evaluated on": training.denoiser}.items():
                if name and name not in names[:place]:
                    raise UserError(f"{training.name} {what} {name!r}, which is no run before it")
                seeds = self.train[names.index(name)].seeds if name else ()
                if seeds and (what != "starts from" or seeds != training.seeds):
                    raise UserError(f"{training.name} {what} {name!r}, which has seeds of its own")


@dataclass(frozen=True)
class Run:
    """A training with one of its seeds."""

    training: Training
    start: str  # the name of the run that it starts from, or ""
    source: str  # the recipe's name or file
    overrides: tuple[str, ...]
    recipe: Recipe


@dataclass(frozen=True)
class Stage:
    """What one command does: train a run, or evaluate it on a split."""

    run: str
    split: Split | None = None  # None: train
    policies: tuple[str, ...] = ()
    best_others: bool = False  # also the best of the other rules, which are known after the first split
    steps: tuple[int, ...] = ()
    against: tuple[str, ...] = ()  # orders: the policies also run at the steps that these take
    part: str = ""  # where a run has several evaluations on a split

    @property
    def name(self) -> str:
        """RUN, SPLIT/RUN or SPLIT/RUN/PART."""
        return "/".join(filter(None, [self.split.split if self.split else "", self.run, self.part]))


@dataclass(frozen=True)
class Done:
    """A line of stages.jsonl: an attempt at a stage."""

    stage: str
    command: str
    finished: bool
    started: float  # seconds since the epoch
    seconds: float
    jobs: int  # the most that ran at once
    device: str
    torch: str
    revision: str
    models: str  # hash of the models that it used


def load_study(name: str) -> tuple[Study, Path]:
    """A study by path, or by the name of one that comes with unmask; and its file."""
    path = Path(name)
    if not path.is_file():
        path = recipe_folder() / "studies" / f"{name}.toml"
    if not path.is_file():
        known = known_studies()
        raise UserError(f"no study {name!r}; {did_you_mean(name, known)}give a file or one of {', '.join(known)}")
    return build(Study, read_toml(path), "study"), path


class Reproduction:
    """A study in a folder.  Each stage is a process, and `jobs` of them run at once."""

    def __init__(
        self, study: Study, path: Path, out: Path, overrides: Sequence[str] = (), cpu: bool = False, jobs: int = 1
    ) -> None:
        self.study, self.out, self.cpu, self.jobs = study, out, cpu, jobs
        self.records = out / "results" / f"{path.stem}.jsonl"
        self.beside = out / "results" / path.stem
        self.best_others: list[str] = []  # as far as they are known
        given = [_addressed(override) for override in overrides]
        known = {"", *(name for one in study.train for name in (one.name, *(run for run, _ in one.runs())))}
        if unknown := [whose for whose, _ in given if whose not in known]:
            raise UserError(f"--set: no run {unknown[0]!r}; {_instead(unknown[0], known)}")
        self.runs: dict[str, Run] = {}
        for training in study.train:
            beside = path.parent / training.recipe
            source = str(beside) if beside.is_file() else training.recipe
            for name, seed in training.runs():
                same_seed = training.start + name.removeprefix(training.name)
                start = same_seed if same_seed in self.runs else training.start
                words = [f"init={out / start}"] if start else []
                words += [f"order.continued={out / training.baseline}"] if training.baseline else []
                own = [value for whose, value in given if whose in ("", name, training.name)]
                words += [*training.set, *seed, *own]
                self.runs[name] = Run(training, start, source, tuple(words), load_recipe(source, words))
        self._check_runs()

    def _check_runs(self) -> None:
        """Refuse, before anything is trained, orders that could not be compared."""
        found: dict[tuple[object, ...], str] = {}
        for name, run in self.runs.items():
            recipe, baseline = run.recipe, run.training.baseline
            recipe.check_start()
            if recipe.order is not None:
                model = recipe.model.label or (recipe.init, recipe.model.causal, recipe.model.size)
                other = found.setdefault((model, recipe.order.budget, run.recipe.is_joint, recipe.seed), name)
                if other != name:
                    raise UserError(
                        f"{other} and {name} have the same budget and the same seed: set another model.label in one "
                        "of them, or their records could not be told apart"
                    )
            if run.training.denoiser and not recipe.model.denoiser:
                raise UserError(f"{name} brings its own denoiser: leave out denoiser = {run.training.denoiser!r}")
            if not baseline:
                continue
            if self._denoiser_of(self.runs[baseline].start) != self._denoiser_of(run.start):
                raise UserError(f"{name} and its baseline {baseline} must start from the same denoiser")
            for key, has, needed in not_continued(self.runs[baseline].recipe, recipe):
                raise UserError(f"{baseline} has {key} = {has!r}: as the baseline of {name} it must have {needed!r}")

    # --- what there is to do ------------------------------------------------------------------------------------------

    def stages(self, wanted: Sequence[str] = ()) -> list[Stage]:
        """All stages in order, or those that are asked for: by run, by the name of a training, or by split."""
        names = {name: {name, run.training.name} for name, run in self.runs.items()}
        known = set().union(*names.values(), (split.split for split in self.study.evaluate))
        for name in wanted:
            if name not in known:
                raise UserError(f"no stage {name!r}; {_instead(name, known)}")
        trained = [run for run in self.runs if not wanted or names[run] & set(wanted)]
        there = [run for run in self.runs if run in trained or self._is_trained(run)]
        splits = [split for split in self.study.evaluate if not wanted or split.split in wanted]
        return [Stage(run) for run in trained] + [stage for split in splits for stage in self._evaluate(split, there)]

    def _evaluate(self, split: Split, runs: Sequence[str]) -> list[Stage]:
        """Orders first: the heuristics run at the steps that these take."""
        study, first = self.study, split == self.study.evaluate[0]
        runs = [run for run in runs if split.task in ("", self.runs[run].recipe.task["name"])]
        runs = [run for run in runs if not split.runs or self.runs[run].training.name in split.runs]
        budgets = {run: order.budget for run in runs if (order := self.runs[run].recipe.order) is not None}
        rivals_of = {order: self.runs[order].training.baseline or self._denoiser_of(order) for order in budgets}
        elsewhere = tuple(order for order in budgets if rivals_of[order] != order)
        # Sorted: whichever of them is chosen, the commands of the first split stay the same.
        learned = tuple(sorted({*study.learned, *study.learned_tried})) if first else study.learned
        best_others = bool(study.others) and not first
        if split.curve:  # an order that brings its own denoiser also runs the rules: once on that of another run
            on = {run: self.runs[run].training.denoiser for run in runs}
            sweeps = {denoiser: run for run, denoiser in reversed(on.items()) if denoiser}
            others = [run for run in runs if run in elsewhere or sweeps.get(on[run], run) != run]
            return [Stage(run, split, ("learned",) if run in others else (), steps=split.steps) for run in runs]
        stages = [Stage(run, split, learned) for run in elsewhere]
        for run in [run for run in runs if run not in elsewhere]:
            if run in budgets:  # it brings its own denoiser for the heuristics
                stages.append(Stage(run, split, (*learned, *study.policies), best_others))
                against: tuple[str, ...] = (run,)
            else:
                against = tuple(order for order in elsewhere if rivals_of[order] == run)
                stages.append(Stage(run, split, study.policies, best_others, split.steps, against))
            frozen = tuple(order for order in against if not self.runs[order].recipe.is_joint)
            if first and study.others and frozen:  # by these the best of the others are chosen
                # Beyond the orders' budgets too: some rules finish by themselves, and then that score counts.
                most = max(budgets[order] for order in frozen)
                beyond = tuple(steps for steps in split.steps if steps > most) or split.steps[-1:]
                stages.append(Stage(run, split, study.others, False, beyond, frozen, "others"))
        return stages

    def _denoiser_of(self, name: str) -> str:
        """The run that trained the denoiser of a run, as far as the study knows: a frozen order has another's."""
        run = self.runs.get(name)
        if run is None or run.recipe.is_joint or run.recipe.denoise is not None:
            return name
        return self._denoiser_of(run.start) or name

    def command(self, stage: Stage) -> list[str]:
        """The words after `unmask`, with the best of the other rules as far as they are known."""
        run, folder = self.runs[stage.run], self.out / stage.run
        if stage.split is None:
            words = ["train", run.source, *_each("--set", run.overrides), "--out", str(folder)]
        else:
            others = self.best_others if stage.best_others else []
            words = ["evaluate", str(folder), "--split", stage.split.split, "--examples", str(stage.split.examples)]
            words += ["--seed", str(SEED), "--temperature", f"{run.recipe.evaluate.temperature:g}"]
            words += [*_each("--policy", [*stage.policies, *others]), *_each("--steps", stage.steps)]
            words += _each("--against", [self.out / order for order in stage.against])
            words += ["--curve"] if stage.split.curve else []
            if other := run.training.denoiser:
                words += ["--denoiser", str(self.out / other), "--any-denoiser"]
            own = run.recipe.model.denoiser == ""  # any other has a precision of its own
            words += ["--bf16"] if self.study.bf16 and own else []
            words += ["--trust-task"] if run.recipe.own_code else []  # the study's recipe names it
        return [*words, "--cpu"] if self.cpu else words

    def typed(self, stage: Stage) -> str:
        """The command as one would type it; a comment says what is not known yet."""
        missing = "  # and --policy with the best of the other rules, which the first split tells"
        unknown = stage.best_others and not self.best_others
        return shlex.join(["unmask", *self.command(stage)]) + (missing if unknown else "")

    def commands(self, wanted: Sequence[str] = ()) -> list[str]:
        """All commands as one would type them, with what is known by now."""
        self.best_others = self._best_others()
        return [self.typed(stage) for stage in self.stages(wanted)]

    # --- doing it -----------------------------------------------------------------------------------------------------

    def run(self, wanted: Sequence[str] = ()) -> None:
        """Do what has not been done; what was interrupted is resumed."""
        self.out.mkdir(parents=True, exist_ok=True)
        with locked(self.out):
            stages = self.stages(wanted)
            self._check_needs(stages)
            shown = {stage: f"[{place}/{len(stages)}] {stage.name}" for place, stage in enumerate(stages, start=1)}
            try:
                self._run({stage: text for stage, text in shown.items() if not stage.best_others})
                self.best_others = self._best_others()
                self._run({stage: text for stage, text in shown.items() if stage.best_others})
            finally:
                self.collect()

    def _check_needs(self, stages: Sequence[Stage]) -> None:
        """Before anything is done: a run that a stage needs is there, or among the stages."""
        planned = {stage.name for stage in stages}
        for stage in stages:
            if stage.split is None and self._is_trained(stage.run):
                continue
            for run in sorted(self._needs(stage) & self.runs.keys() - planned):
                if not self._is_trained(run):
                    raise UserError(f"{stage.name} needs {self.out / run}: add --stage {run}")

    def _needs(self, stage: Stage) -> set[str]:
        """The names of the stages that must come first."""
        if stage.split is None:
            run = self.runs[stage.run]
            return {run.start, run.training.baseline} - {""}
        return {*self._evaluated_with(stage), *(f"{stage.split.split}/{order}" for order in stage.against)}

    def _evaluated_with(self, stage: Stage) -> list[str]:
        """The runs whose models an evaluation reads."""
        return list(filter(None, (stage.run, *stage.against, self.runs[stage.run].training.denoiser)))

    def _run(self, shown: dict[Stage, str]) -> None:
        """Run the stages that are not done, each as soon as what it needs is there; `shown`: how it is announced."""
        left: dict[str, Stage] = {}
        jobs: list[Job] = []
        for stage, text in shown.items():
            if stage.best_others and not self.best_others:
                needs, first = ", ".join(self.study.others), self.study.evaluate[0].split
                raise UserError(f"{stage.name} needs the best of {needs}: run stage {first} first")
            if self._is_done(stage):
                say(f"{text}: done before")
                continue
            words, folder = self.command(stage), self.out / stage.run
            if stage.split is None and (folder / "recipe.json").exists() and not (folder / "checkpoints").exists():
                words.append("--force")  # it was interrupted before its first checkpoint
            # Evaluations of the same run write to the same records: never at once.
            after = self._needs(stage) | {other.name for other in left.values() if other.run == stage.run}
            log = self.out / "logs" / f"{stage.name.replace('/', '-')}.txt" if self.jobs > 1 else None
            jobs.append(Job(stage.name, [sys.executable, "-P", "-m", "unmask", *words], frozenset(after), log))
            left[stage.name] = stage

        def began(job: Job) -> None:
            say(f"{shown[left[job.name]]}: {self.typed(left[job.name])}")

        def ended(job: Job, code: int, started: float, seconds: float) -> None:
            self._note(left[job.name], code == 0, started, seconds)
            how = {0: "done in", 75: "stopped after"}.get(code, "failed after")
            say(f"{shown[left[job.name]]}: {how} {seconds:.0f} s")

        run_jobs(jobs, self.jobs, began, ended)

    def _is_trained(self, run: str) -> bool:
        return is_finished(self.out / run)

    def _is_done(self, stage: Stage) -> bool:
        if stage.split is not None:
            key = (stage.name, self.typed(stage), self._models(stage))
            found = read_done(self.beside / "stages.jsonl")
            return any(done.finished and (done.stage, done.command, done.models) == key for done in found)
        if not self._is_trained(stage.run):
            return False
        folder = self.out / stage.run
        if keys := " and ".join(key for key, _, _ in differences(read_recipe(folder), self.runs[stage.run].recipe)):
            raise UserError(
                f"{folder} was trained by a recipe with another {keys}: move it away, or give another --out"
            )
        return True

    def _models(self, stage: Stage) -> str:
        """Twelve hex digits that change with the models that are evaluated, by the checksums in their manifests."""
        names = ("config.json", "model.safetensors", "tokenizer.json")
        runs = [run for run in self._evaluated_with(stage) if stage.split is not None and self._is_trained(run)]
        listed = [files.read_manifest(self.out / run)["files"] for run in runs]
        text = json.dumps([[found.get(name) for name in names] for found in listed])
        return hashlib.sha256(text.encode()).hexdigest()[:12] if listed else ""

    def _note(self, stage: Stage, finished: bool, started: float, seconds: float) -> None:
        """Add an attempt to stages.jsonl."""
        device = device_name(torch.device("cuda" if torch.cuda.is_available() and not self.cpu else "cpu"))
        ran_on = device, torch.__version__, revision(), self._models(stage)
        times = round(started, 3), round(seconds, 3)
        self.beside.mkdir(parents=True, exist_ok=True)
        done = Done(stage.name, self.typed(stage), finished, *times, self.jobs, *ran_on)
        append_jsonl(self.beside / "stages.jsonl", [done])

    # --- what came of it ----------------------------------------------------------------------------------------------

    def evaluated(self) -> list[Record]:
        """Everything that has been evaluated, of all runs; once where several ran a heuristic on one denoiser."""
        folders = [self.out / run for run in self.runs]
        found = [record for run in folders if (run / "results.jsonl").exists() for record in read_run(run)]
        return list({record.key: record for record in found}.values())

    def collect(self) -> None:
        """Put the records of all runs into one file, and the recipes, the gains and the curves beside it."""
        (self.beside / "recipes").mkdir(parents=True, exist_ok=True)
        for run in self.runs:
            if self._is_trained(run):
                shutil.copy(self.out / run / "recipe.json", self.beside / "recipes" / f"{run}.json")
        records, study = self.evaluated(), self.study
        swept = [split.split for split in study.evaluate if split.curve]
        chosen = [_learned_name(rule) for rule in (*study.learned, *study.learned_tried)]
        # A point of a sweep has no line of its own among the gains: its curve has.
        single = [r for r in records if not (r.spec.learned and r.spec.split in swept and r.spec.policy not in chosen)]
        written: dict[Path, Sequence[Any]] = {self.records: record_lines(records)}
        written[self.beside / "gains.jsonl"] = gains(single)
        if swept:
            on_swept = [record for record in records if record.spec.split in swept]
            written[self.beside / "curve.jsonl"] = [found for found in compared_curves(on_swept) if found.seeds]
        for path, items in written.items():
            files.write_text(path, "".join(f"{sealed(asdict(item))}\n" for item in items))

    def _best_others(self) -> list[str]:
        """Of the other rules, for each budget the one with the best mean score at its orders' steps on the first split.

        A rule that takes fewer steps than an order even at its largest budget counts with its score there.
        """
        if not (self.study.others and self.study.evaluate):
            return []
        first, chosen = self.study.evaluate[0], [_learned_name(rule) for rule in self.study.learned]
        records = [record for record in self.evaluated() if record.spec.split == first.split]
        orders = [r for r in records if r.spec.policy in chosen and r.spec.plain_denoiser == r.spec.denoiser]
        names, best = {check_policy(rule).name: rule for rule in self.study.others}, []  # as the study writes them
        for _, ours in sorted(grouped(orders, lambda record: record.spec.trained_budget or 0).items()):
            scores: dict[str, list[float]] = {}
            for learned in ours:
                for curve in curves(rivals(learned, records)):
                    rule, score = curve[0].spec.policy, at_most_steps(learned.mean_steps, curve)[0].score
                    if rule in names and score is not None:
                        scores.setdefault(rule, []).append(score)
            known = {rule: sum(found) for rule, found in scores.items() if len(found) == len(ours)}
            best += [names[max(known, key=lambda rule: known[rule])]] if known else []
        return list(dict.fromkeys(best))


def _learned_name(rule: str) -> str:
    """The name of a form of the learned rule, as records have it."""
    parsed = check_policy(rule)
    if not isinstance(parsed, Learned):
        raise UserError(f"{rule!r} is no learned order: write learned, or learned(deterministic)")
    return parsed.name


def _addressed(override: str) -> tuple[str, str]:
    """`NAME:key=value` as its name and the rest; without one, the name is empty."""
    key, equals, value = override.partition("=")
    name, _, key = key.rpartition(":")
    return name, f"{key}{equals}{value}"


def _each(option: str, values: Iterable[object]) -> list[str]:
    return [word for value in values for word in (option, str(value))]


def _instead(name: str, known: Iterable[str]) -> str:
    return f"{did_you_mean(name, known)}choose from {', '.join(sorted(filter(None, known)))}"


def read_done(path: Path) -> list[Done]:
    return read_jsonl(path, Done) if path.exists() else []
