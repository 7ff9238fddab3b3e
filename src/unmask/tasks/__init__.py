"""Tasks by name.  A name is imported only when it is asked for: listing the names must not wait for torch."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from importlib.machinery import PathFinder
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from unmask.errors import UserError, did_you_mean
from unmask.fields import check_fields

if TYPE_CHECKING:
    from unmask.tasks.task import Task

TASKS = {
    "groups": "unmask.tasks.puzzles.groups:Groups",
    "addition": "unmask.tasks.puzzles.addition:Addition",
    "chain": "unmask.tasks.puzzles.chain:Chain",
    "permutation": "unmask.tasks.puzzles.permutation:Permutation",
    "latin-square": "unmask.tasks.puzzles.latin_square:LatinSquare",
    "parity-dag": "unmask.tasks.puzzles.parity_dag:ParityDag",
    "gsm8k": "unmask.tasks.gsm8k.gsm8k:GSM8K",
    "text": "unmask.tasks.text.text:Text",
}


def is_own(name: str) -> bool:
    """Whether a name is "module:Class", a task of the user's own: making it imports the module, which runs its code."""
    return name not in TASKS and ":" in name


def source_of(name: str) -> str:
    """Where the module of a user's own task lies.  Nothing is imported to find it, not even the packages around it."""
    module, _ = _module_and_class(name)
    folders, found = [*sys.path, ""], None
    for names in accumulate(module.split("."), "{}.{}".format):  # a, a.b, a.b.c
        found = PathFinder.find_spec(names, folders)
        folders = list(found.submodule_search_locations or []) if found else []
    return (found and found.origin) or "a file that was not found"


def task_class(name: str) -> type[Any]:
    """The class of a task: a dataclass whose fields are the task's options, each with a default.

    `name` is one of TASKS, or "module:Class" for a task of your own that Python can import.
    """
    if name not in TASKS and ":" not in name:
        nearest = did_you_mean(name, TASKS)
        raise UserError(
            f"unknown task {name!r}; {nearest}choose from {', '.join(TASKS)}, or give your own 'module:Class'"
        )
    module, cls = _module_and_class(name)
    if is_own(name) and "" not in sys.path:
        sys.path.append("")  # it may lie in the current folder, where nothing else is looked for
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        where = "installed packages and the current folder were searched"
        raise UserError(f"task {name!r} cannot be imported: {error} ({where})") from None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise UserError(f"task {name!r} must be a dataclass whose fields are its options")
    return found


def _module_and_class(name: str) -> tuple[str, str]:
    module, _, cls = TASKS.get(name, name).partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), cls)):
        raise UserError(f"task {name!r}: write a task of your own as module:Class, such as palindromes:Palindromes")
    return module, cls


def make_task(name: str, **options: int | bool | str) -> Task:
    """The task of this name; a wrong name, option or value is a ValueError whose message is one line."""
    cls = task_class(name)
    values = check_fields(cls, options, "task")
    try:
        task: Task = cls(**values)
    except ValueError as error:
        if isinstance(error, UserError) or not is_own(name):
            raise
        raise UserError(f"task {name}: {error}") from None  # a task of the user's own need not know of UserError
    return task
