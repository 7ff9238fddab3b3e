"""Tasks by name.  A name is imported only when it is asked for: listing the names must not wait for torch."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from unmask.errors import UserError, did_you_mean, require
from unmask.fields import check_fields
from unmask.own_code import import_class, is_own

if TYPE_CHECKING:
    from unmask.tasks.task import Task

TASKS = {
    "groups": "unmask.tasks.puzzles.groups:Groups",
    "addition": "unmask.tasks.puzzles.addition:Addition",
    "chain": "unmask.tasks.puzzles.chain:Chain",
    "permutation": "unmask.tasks.puzzles.permutation:Permutation",
    "latin-square": "unmask.tasks.puzzles.latin_square:LatinSquare",
    "parity-dag": "unmask.tasks.puzzles.parity_dag:ParityDag",
    "sudoku": "unmask.tasks.sudoku.sudoku:Sudoku",
    "waiting-lines": "unmask.tasks.puzzles.waiting_lines:WaitingLines",
    "statements": "unmask.tasks.statements:Statements",
    "molecules": "unmask.tasks.molecules.molecules:Molecules",
    "gsm8k": "unmask.tasks.gsm8k.gsm8k:GSM8K",
    "text": "unmask.tasks.text.text:Text",
}


def task_class(name: str) -> type[Any]:
    """The class of a task: a subclass of Task and a dataclass whose fields are its options, each with a default.

    `name` is one of TASKS, or "module:Class" for a task of your own that Python can import.
    """
    if name in TASKS:
        module, _, cls = TASKS[name].partition(":")
        return getattr(importlib.import_module(module), cls)
    unknown = f"unknown task {name!r}; {did_you_mean(name, TASKS)}choose from {', '.join(TASKS)}"
    require(is_own(name), f"{unknown}, or give your own 'module:Class'")
    found: type[Any] = import_class("task", name)
    from unmask.tasks.task import Task

    is_task = isinstance(found, type) and issubclass(found, Task)
    require(is_task, f"task {name!r} is no task: make it a subclass of unmask.tasks.task.Task")
    missing = ", ".join(sorted(found.__abstractmethods__))
    require(not missing, f"task {name!r} has no {missing}: unmask.tasks.task.Task says what these are")
    is_dataclass = dataclasses.is_dataclass(found)
    require(is_dataclass, f"task {name!r} must be a frozen dataclass whose fields are its options")
    return found


def make_task(name: str, **options: int | bool | str) -> Task:
    """The task of this name; UserError for a wrong name, option or value."""
    cls = task_class(name)
    known = [option.name for option in dataclasses.fields(cls)]
    for key in options:
        instead = did_you_mean(key, known) or "leave it out: "
        require(key in known, f"task: unknown key {key!r}; {instead}task {name} has {', '.join(known)}")
    values = check_fields(cls, options, "task")
    try:
        task: Task = cls(**values)
        return task
    except ValueError as error:
        if isinstance(error, UserError) or not is_own(name):
            raise
        raise UserError(f"task {name}: {error}") from None  # a user's own task need not know of UserError
