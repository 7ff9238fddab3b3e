"""A run folder: who may write to it, and what is in it.

RUN/manifest.json                                     size and SHA-256 of the files below; it says that this program
                                                      wrote the folder, and without it nothing here is ever replaced
RUN/config.json, model.safetensors, tokenizer.json    the model, written last: a folder without it is unfinished
RUN/recipe.json                                       the recipe, resolved
RUN/metrics.jsonl                                     one object a line, each with its own checksum
RUN/start.txt                                         where `init` or `model.denoiser` is given: hash of that denoiser
RUN/denoiser/                                         the denoiser as it was before order learning, if the
                                                      run has one of its own (`model.denoiser`: it lies elsewhere)
RUN/exact/                                            evaluations of the exact posterior in its place
RUN/baseline/                                         joint order learning only: that denoiser, trained further on as
                                                      many sequences without an order, for the heuristics;
                                                      trained here, or a copy of what `order.continued` names
and while the run is unfinished
RUN/lock                                              held by the process that trains
RUN/checkpoints/                                      of the stage under way; while it is there, the run is unfinished
RUN/order/                                            joint order learning only: the model, while the baseline trains

A stage that is finished has a folder with a manifest of its own; one that is under way has checkpoints.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from unmask import files
from unmask.errors import UserError
from unmask.fields import build
from unmask.jsonl import parse_json
from unmask.models.order_model import MODEL_FILES, OrderModel
from unmask.recipe import Recipe, differences
from unmask.training.checkpoint import CheckpointFolder, reason, warn

# All that the commands of this program write below a run folder; whatever else is there is somebody's own.
WRITTEN = re.compile(
    r"""(
    ((denoiser|baseline|order)(\.partial)?/)?((manifest|config|tokenizer)\.json|model\.safetensors)
    | (exact/)?((recipe|manifest|curve)\.json | (results|verdicts)\.jsonl | orders\.png | curve\.svg)
    | (exact/)?report[\w.-]*\.(html|md|csv|tex|png|pdf)
    | start\.txt | changes\.log | lock | bound\.json | metrics\.jsonl
    | checkpoints/[a-z]+-\d+(\.partial|\.damaged)?/(tensors\.safetensors|(facts|manifest)\.json)
    | unmask/.*     # of the experiment trackers
    )(\.partial)?""",
    re.VERBOSE,
)


class RunFolderError(UserError):
    """A run folder that cannot be used; the message says what to do."""


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes from training into `out`."""
    with ExitStack() as stack:
        try:
            stack.enter_context(files.locked(out))
        except BlockingIOError:
            raise RunFolderError(
                f"another process is training into {out}: wait for it, or give another --out"
            ) from None
        yield


def is_finished(out: Path) -> bool:
    """The folder of the checkpoints goes last, when the model is safely on the disk and nothing else is left to do."""
    return (out / "config.json").exists() and not (out / "checkpoints").exists()


def prepare(out: Path, force: bool) -> None:
    """The folder `out`, empty or with an unfinished run in it; what is refused is refused before anything is changed.

    A finished run that `force` replaces is kept beside it, as NAME.replaced, until the new one is finished.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RunFolderError(f"{out} is a {'link' if out.is_symlink() else 'file'}: give another --out")
    begun = {"lock", "manifest.json.partial", "recipe.json.partial", *(["manifest.json"] if files.is_ours(out) else [])}
    if out.is_dir() and {path.name for path in out.iterdir()} - begun:
        if not (files.is_ours(out) and (out / "recipe.json").exists()):  # a run's first files
            what = "is not a run folder, so --force will not replace it" if force else "holds something that is no run"
            raise RunFolderError(f"{out} {what}: give another --out")
        for path in out.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(out.resolve()):
                raise RunFolderError(f"{path} is a link that leads out of the run: take it away, or give another --out")
        if is_finished(out) and not force:
            raise RunFolderError(f"{out} already holds a finished run: give another --out, or --force to replace it")
        if force:
            _make_way(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(13, "it is read-only")
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written to ({reason(error)}): give another --out") from None


def _make_way(out: Path) -> None:
    """Put a finished run aside, remove an unfinished one; refuse where that would cost a file of somebody else's."""
    old, finished = _replaced(out), is_finished(out)
    if (path := _foreign(out)) is not None:
        raise RunFolderError(f"{path} was not written by unmask, so --force will not replace {out}: move it away")
    taken = old.is_symlink() or old.is_file() or (old.is_dir() and any(old.iterdir()))
    if finished and taken and not (_was_replaced(old, out) and _foreign(old) is None):
        raise RunFolderError(f"{old}, where {out} would be kept, is not a run that --force replaced: move it away")
    with locked(out):
        pass  # nobody is training into it
    if not finished:
        _remove(out)
        return
    if old.exists():
        _remove(old)
    files.write_manifest(out, files.read_manifest(out)["files"], replaced=out.name)
    out.rename(old)


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run.  A task of the user's own is not imported."""
    path = folder / "recipe.json"
    try:
        files.check(folder, path.name)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: give the folder of a run, or restore the file from a copy") from None
    except OSError as error:
        instead = "mend that and give the same command again"
        raise RunFolderError(f"{path} cannot be read ({reason(error)}): {instead}") from None
    try:
        values = parse_json(text)
    except UserError as error:
        raise RunFolderError(f"{path} is damaged ({error}): restore it from a copy") from None
    try:
        return build(Recipe, values)
    except UserError as error:
        instead = "undo that change, or use the unmask that wrote it"
        raise RunFolderError(f"{path} does not fit this version ({error}): {instead}") from None


def _replaced(out: Path) -> Path:
    return out.with_name(f"{out.name}.replaced")


def _was_replaced(old: Path, out: Path) -> bool:
    """Whether `old` is a run that --force put aside for `out`."""
    return not old.is_symlink() and files.is_ours(old) and files.read_manifest(old).get("replaced") == out.name


def _foreign(out: Path) -> Path | None:
    """Something below a run folder that this program does not write there."""
    for path in sorted(out.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or WRITTEN.fullmatch(path.relative_to(out).as_posix())):
            return path
    return None


def _remove(out: Path) -> None:
    """Delete a run.  Its recipe and its manifest go last: what a crash leaves is still known for what it is."""
    last = [out / "recipe.json", out / files.MANIFEST]
    for path in sorted(set(out.iterdir()) - set(last)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in last:
        path.unlink(missing_ok=True)
    out.rmdir()


def changes_in(recipe: Recipe, out: Path, allow_change: bool) -> str:
    """How the recipe of an unfinished run differs, in words; refused unless `allow_change`."""
    if not (out / "recipe.json").exists():
        return ""
    differing = differences(read_recipe(out), recipe)
    changes = ", ".join(f"{key} = {new!r} (was {old!r})" for key, old, new in differing)
    if changes and not allow_change:
        raise RunFolderError(
            f"{out} was begun with another recipe: {changes}; give the same recipe, --allow-change to resume with the "
            "new one, or --force to start over"
        )
    return changes


def store_recipe(recipe: Recipe, out: Path, changes: str = "") -> None:
    """Write recipe.json where it differs; `changes` that matter are noted."""
    if changes:
        with (out / "changes.log").open("a", encoding="utf-8") as file:
            file.write(f"{changes}\n")
    path, text = out / "recipe.json", recipe.to_json()
    listed = path.name in files.read_manifest(out)["files"]
    if not (listed and path.exists() and path.read_text(encoding="utf-8") == text):
        files.write_listed(out, path.name, text)


def note_start(out: Path, denoiser: str, same: bool = False) -> None:
    """Keep the hash of the weights that a run starts from; a resumed run has started from what is noted.

    same: they are read again from where they lie, so they must still be the same.
    """
    if not (any((out / "checkpoints").glob("*")) or (out / "denoiser").exists()):
        files.write_listed(out, "start.txt", f"{denoiser}\n")
    elif same and (out / "start.txt").read_text(encoding="utf-8").strip() != denoiser:
        raise RunFolderError(f"{out} was begun with another denoiser: give that one, or --force to start over")


def save_stage(model: OrderModel, folder: Path) -> None:
    """A model folder that is whole as soon as it is there."""
    partial = folder.with_name(f"{folder.name}.partial")
    with _writing(folder):
        _discard(partial)
        partial.mkdir()  # without parents: a run folder that is gone must not come back
        model.save_pretrained(partial)
        _discard(folder)
        partial.rename(folder)
        files.sync(folder.parent)


def finish(model: OrderModel, out: Path) -> None:
    """The model itself; only then goes what the run would have been continued from."""
    if not files.is_ours(out):
        raise RunFolderError(f"{out} was taken away while it was trained: the same command starts over")
    with _writing(out):
        model.save_pretrained(out)
    sweep(out)


def sweep(out: Path) -> None:
    """Remove what a finished run has no use for, the checkpoints last: a crash before that leaves it unfinished."""
    _discard(out / "order")
    if _was_replaced(old := _replaced(out), out):
        if (path := _foreign(old)) is None:
            _remove(old)
        else:
            warn(f"{old} is kept: {path} was not written by unmask")
    (out / "lock").unlink(missing_ok=True)
    CheckpointFolder(out / "checkpoints").remove_all()


def _discard(folder: Path) -> None:
    files.discard(folder, *MODEL_FILES, files.MANIFEST)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunFolderError(
            f"the model could not be written to {folder} ({reason(error)}); "
            "the checkpoints are as they were: mend that and give the same command again"
        ) from None
