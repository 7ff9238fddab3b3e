"""A run folder: who may write to it, and what is in it.

RUN/config.json, model.safetensors, tokenizer.json    the model, written last: a folder without it is unfinished
RUN/recipe.json                                       the recipe, resolved
RUN/metrics.jsonl                                     one object a line
RUN/start.txt                                         where `init` is given: hash of the denoiser that it gave
RUN/denoiser/                                         the denoiser as it was before order learning
RUN/baseline/                                         joint order learning only: that denoiser, plainly trained on for
                                                      as many further sequences, which is what heuristics run on;
                                                      trained here, or a copy of what `order.continued` names
and while the run is unfinished
RUN/lock                                              held by the process that trains
RUN/checkpoints/                                      of the stage under way; while it is there, the run is unfinished
RUN/order/                                            joint order learning only: the model, while the baseline trains

A stage that is finished has a folder; one that is under way has checkpoints.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unmask.models.order_model import OrderModel
from unmask.training.checkpoints import reason, sync, sync_folder, write_text
from unmask.training.recipe import Recipe, RecipeError, differences


class RunFolderError(ValueError):
    """A run folder that cannot be used; the message says what to do."""


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes from training into `out`.  The kernel lets go of the lock however this process ends."""
    path = out / "lock"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                raise OSError("its holder has just finished and taken the file away")
        except OSError:
            raise RunFolderError(
                f"another process is training into {out}: wait for it, or give another --out"
            ) from None
        yield


def is_finished(out: Path) -> bool:
    """The folder of the checkpoints goes only when the model is safely on the disk."""
    return (out / "config.json").exists() and not (out / "checkpoints").exists()


def prepare(out: Path, force: bool) -> None:
    """The folder `out`, empty or with an unfinished run in it.

    A finished run that `force` replaces is kept beside it, as NAME.replaced, until the new one is finished.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RunFolderError(f"{out} is a {'link' if out.is_symlink() else 'file'}: give another --out")
    if out.is_dir() and {path.name for path in out.iterdir()} - {"lock", "recipe.json.partial"}:
        if not (out / "recipe.json").exists():  # a run's first file; config.json alone is any model of anybody
            if not force:
                raise RunFolderError(f"{out} already holds something that is not a run: give another --out")
            raise RunFolderError(f"{out} is not a run folder, so --force will not replace it: give another --out")
        finished = is_finished(out)
        if finished and not force:
            _sweep(out)
            raise RunFolderError(f"{out} already holds a finished run: give another --out, or --force to replace it")
        if force:
            with locked(out):
                pass  # nobody is training into it
            if finished:
                old = _replaced(out)
                if old.exists() and not (old / "recipe.json").exists():
                    raise RunFolderError(f"{old}, where {out} would be kept, is not a run: give another --out")
                shutil.rmtree(old, ignore_errors=True)
                out.rename(old)
            else:
                shutil.rmtree(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(13, "it is read-only")
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written to ({reason(error)}): give another --out") from None


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run.  A task of the user's own is not imported."""
    path = folder / "recipe.json"
    try:
        return Recipe.from_json(path.read_text())
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: give the folder of a run, or restore the file from a copy") from None
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be read ({reason(error)}): mend that and give the same command again"
        ) from None
    except RecipeError as error:
        raise RunFolderError(
            f"{path} does not fit this version ({error}): undo that change, or use the unmask that wrote it"
        ) from None
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged ({error}): restore it from a copy") from None


def _replaced(out: Path) -> Path:
    return out.with_name(f"{out.name}.replaced")


def settle_recipe(recipe: Recipe, out: Path, allow_change: bool) -> None:
    """Store the recipe; where an unfinished run has another one, refuse what matters unless `allow_change`."""
    path = out / "recipe.json"
    if path.exists():
        stored = read_recipe(out)
        changes = differences(stored, recipe)
        said = ", ".join(f"{key} = {new!r} (was {old!r})" for key, old, new in changes)
        if changes and not allow_change:
            raise RunFolderError(
                f"{out} was begun with another recipe: {said}; give the same recipe, --allow-change to go on with the "
                "new one, or --force to begin anew"
            )
        if changes:
            with (out / "changes.log").open("a") as file:
                file.write(f"{said}\n")
        if stored == recipe:
            return
    write_text(path, recipe.to_json())


def note_start(out: Path, denoiser: str) -> None:
    """Keep the hash of the weights that a run starts from; one that goes on has started from what is noted."""
    if not (any((out / "checkpoints").glob("*")) or (out / "denoiser").exists()):
        write_text(out / "start.txt", f"{denoiser}\n")


def save_stage(model: OrderModel, folder: Path) -> None:
    """A model folder that is whole as soon as it is there."""
    partial = folder.with_name(f"{folder.name}.partial")
    with _said(folder):
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        sync_folder(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        sync(folder.parent)


def finish(model: OrderModel, out: Path) -> None:
    """The model itself; only then goes what the run would have been continued from."""
    with _said(out):
        model.save_pretrained(out)
        sync_folder(out)
    (out / "checkpoints").rename(out / "checkpoints.done")  # at once: half of them would be an unfinished run
    _sweep(out)


def _sweep(out: Path) -> None:
    """What a finished run has no more use for; after a crash in the middle of this, the next call does it."""
    for folder in (out / "checkpoints.done", out / "order"):
        shutil.rmtree(folder, ignore_errors=True)
    if (_replaced(out) / "recipe.json").exists():
        shutil.rmtree(_replaced(out), ignore_errors=True)
    (out / "lock").unlink(missing_ok=True)


@contextmanager
def _said(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunFolderError(
            f"the model could not be written to {folder} ({reason(error)}); "
            "the checkpoints are as they were: mend that and give the same command again"
        ) from None
