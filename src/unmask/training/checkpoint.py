"""Checkpoints: what a run resumes from after a crash.

RUN/checkpoints/order-00000420/    the stage "order" after 420 updates
    tensors.safetensors            weights, moments of the optimiser, averages: whatever an update changes
    facts.json                     stage, update, counters, the recipe, the version of unmask
    manifest.json                  size and SHA-256 of the two

A checkpoint is written to a folder of another name, brought to the disk file by file, and only then renamed: whatever
has its name was whole once.  What happened to it since, the manifest tells.  Nothing in it can run code.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import unmask
from unmask import files
from unmask.display import say
from unmask.errors import UserError
from unmask.jsonl import parse_json

FORMAT_VERSION = 1
TENSORS, FACTS = "tensors.safetensors", "facts.json"


class CheckpointError(UserError):
    """A checkpoint that could not be written or read; the message says what failed and what is still good."""


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was written."""


class Checkpoint(NamedTuple):
    path: Path
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def warn(message: str) -> None:
    say(f"unmask: {message}", err=True)


class CheckpointFolder:
    """The newest `keep` checkpoints of a run."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep

    def save(self, stage: str, update: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then drop those that are too old, and those of updates that were taken back since.

        If it fails, the earlier ones are as they were.
        """
        final = self.folder / f"{stage}-{update:08d}"
        partial = final.with_name(f"{final.name}.partial")
        try:
            self.folder.mkdir(exist_ok=True)  # without parents: a run folder that is gone must not come back empty
            _discard(partial)
            partial.mkdir()
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / TENSORS)
            about = {"format_version": FORMAT_VERSION, "unmask": unmask.__version__, "stage": stage, "update": update}
            (partial / FACTS).write_text(json.dumps({**about, **facts}) + "\n", encoding="utf-8")
            files.list_files(partial, TENSORS, FACTS)
            _discard(final)
            partial.rename(final)
            files.sync(self.folder)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                _discard(partial)
            found = self._of(stage)
            last = f"the last good one is {found[-1]}" if found else "there is none before it"
            raise CheckpointError(
                f"checkpoint {final} could not be written ({reason(error)}); {last}; "
                "mend that and give the same command again"
            ) from None
        kept = self._of(stage)
        kept = kept[: kept.index(final) + 1][-self.keep :]
        for other in set(self._of(stage)) - set(kept):
            _discard(other)
        return final

    def newest(self, stage: str) -> Checkpoint | None:
        """The newest checkpoint of a stage that is whole; damaged ones are reported, and kept as NAME.damaged."""
        found = self._of(stage)
        for path in reversed(found):
            try:
                return read_checkpoint(path)
            except DamagedError as error:
                aside = path.with_name(f"{path.name}.damaged")
                _discard(aside)
                path.rename(aside)
                instead = "none is left: the stage starts over" if path == found[0] else "trying the one before it"
                warn(f"{error}: kept as {aside.name}; {instead}")
        return None

    def remove(self, stage: str) -> None:
        """The checkpoints of a stage that is finished."""
        for path in self.folder.glob(f"{stage}-*"):
            _discard(path)

    def remove_all(self) -> None:
        """Every checkpoint, and at last their folder: while it is there, the run is unfinished."""
        for path in self.folder.glob("*/"):
            _discard(path)
        files.discard(self.folder)

    def _of(self, stage: str) -> list[Path]:
        """From the oldest to the newest."""
        found = (path for path in self.folder.glob(f"{stage}-*") if path.name.removeprefix(f"{stage}-").isdecimal())
        return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises DamagedError in one line unless every byte is as it was written."""
    try:
        manifest = files.read_manifest(path)["files"]
        for name in (TENSORS, FACTS):
            if manifest[name] != files.fingerprint(path / name):
                raise DamagedError(f"checkpoint {path} is damaged ({name} is not what was written)")
        facts = parse_json((path / FACTS).read_text(encoding="utf-8"))
        version = facts["format_version"]
        tensors = load_file(path / TENSORS) if version == FORMAT_VERSION else {}
    except DamagedError:
        raise
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"checkpoint {path} is damaged ({reason(error)})") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"checkpoint {path} is damaged ({files.MANIFEST} or {FACTS} cannot be read)") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {version}, this unmask reads {FORMAT_VERSION}: "
            "resume with the unmask that wrote it, or start over with --force"
        )
    return Checkpoint(path, tensors, facts)


def reason(error: BaseException) -> str:
    """What an operating system says, in a few words."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def _discard(checkpoint: Path) -> None:
    files.discard(checkpoint, TENSORS, FACTS, files.MANIFEST)
