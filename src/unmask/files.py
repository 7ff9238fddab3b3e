"""Files that must last: written whole, listed with their checksums, locked.

FOLDER/manifest.json    {"format": FORMAT, "files": {name: {"bytes": ..., "sha256": ...}}}

A folder with such a manifest was written by this program.  What is listed must be as it was written; what is not listed
is not checked: a file is taken off the list before it is replaced, so a crash leaves no wrong line.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unmask.errors import UserError, require

MANIFEST, FORMAT = "manifest.json", "unmask manifest 1"


class ChecksumError(UserError):
    """A file that is not as it was written; the message says which."""


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace a file whole: a crash leaves the old one or the new one, never a part.  Links are not followed."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.rename(path)
    sync(path.parent)


def fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder says of its files: nothing where it has no manifest."""
    path = folder / MANIFEST
    if not path.exists():
        return {"format": FORMAT, "files": {}}
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] == FORMAT and isinstance(found["files"], dict):
            return dict(found)
    raise ChecksumError(f"{path} is damaged, or is not of unmask: restore it from a copy, or move it away")


def is_ours(folder: Path) -> bool:
    """Whether this program wrote a folder, which its manifest says."""
    with suppress(OSError, ChecksumError):
        read_manifest(folder)
        return (folder / MANIFEST).exists()
    return False


def write_manifest(folder: Path, files: Mapping[str, Any], **more: str) -> None:
    write_text(folder / MANIFEST, json.dumps({"format": FORMAT, **more, "files": files}, indent=2) + "\n")


def list_files(folder: Path, *names: str, texts: Mapping[str, str] = MappingProxyType({})) -> None:
    """Bring files of a folder to the disk and list them; `texts`: by name, what is to be written next."""
    listed = read_manifest(folder)["files"]
    for name in names:
        sync(folder / name)
        listed[name] = fingerprint(folder / name)
    for name, text in texts.items():
        data = text.encode()
        listed[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_manifest(folder, listed)


def write_listed(folder: Path, name: str, text: str) -> None:
    """Replace a file and its line of the manifest, which is there before the file is."""
    listed = read_manifest(folder)["files"]
    if listed.pop(name, None) or not (folder / MANIFEST).exists():
        write_manifest(folder, listed)
    write_text(folder / name, text)
    list_files(folder, name)


def check(folder: Path, *names: str) -> None:
    """Raise ChecksumError unless these files are as they were listed."""
    listed = read_manifest(folder)["files"]
    for name in names:
        if name in listed and listed[name] != fingerprint(folder / name):
            raise ChecksumError(f"{folder / name} is damaged (it is not what was written): restore it from a copy")


def discard(folder: Path, *names: str) -> None:
    """Delete these files of a folder and the folder; one that holds anything else is kept as NAME.kept1."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / f"{name}.partial").unlink(missing_ok=True)
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        names_left = (folder.with_name(f"{folder.name}.kept{number}") for number in count(1))
        folder.rename(next(path for path in names_left if not path.exists()))


def refuse_link(path: Path) -> None:
    """Raise UserError where a write to `path` would leave its folder through a symbolic link."""
    outside = path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve())
    require(not outside, f"{path} is a link that leads out of its folder, so nothing is written there: take it away")


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold FOLDER/lock; the kernel lets go of it however this process ends.  BlockingIOError where another holds it."""
    path = folder / "lock"
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
            raise BlockingIOError("its holder has just finished and taken the file away")
        yield
