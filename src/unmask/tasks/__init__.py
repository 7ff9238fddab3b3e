"""Tasks by name.  A name is imported only when it is asked for: listing the names must not wait for torch."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from unmask.suggest import did_you_mean

if TYPE_CHECKING:
    from unmask.tasks.task import Task

TASKS = {
    "groups": "unmask.tasks.groups:Groups",
    "addition": "unmask.tasks.addition:Addition",
    "chain": "unmask.tasks.chain:Chain",
    "permutation": "unmask.tasks.permutation:Permutation",
    "latin-square": "unmask.tasks.latin_square:LatinSquare",
    "parity-dag": "unmask.tasks.parity_dag:ParityDag",
    "gsm8k": "unmask.tasks.gsm8k:GSM8K",
    "text": "unmask.tasks.text:Text",
}


def task_class(name: str) -> type[Any]:
    """The class of a task: a dataclass whose fields are the task's options, each with a default.

    `name` is one of TASKS, or "module:Class" for a task of your own that Python can import.
    """
    if name not in TASKS and ":" not in name:
        nearest = did_you_mean(name, TASKS)
        raise ValueError(
            f"unknown task {name!r}; {nearest}choose from {', '.join(TASKS)}, or give your own 'module:Class'"
        )
    module, _, cls = TASKS.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError, ValueError) as error:
        where = "installed packages and the current folder were searched"
        raise ValueError(f"task {name!r} cannot be imported: {error} ({where})") from None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"task {name!r} must be a dataclass whose fields are its options")
    return found


def make_task(name: str, **options: int | bool | str) -> Task:
    """The task of this name; a wrong name, option or value is a ValueError whose message is one line."""
    cls = task_class(name)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for option, value in options.items():
        if option not in defaults:
            nearest = did_you_mean(option, defaults)
            raise ValueError(f"task {name} has no option {option!r}; {nearest}choose from {', '.join(defaults)}")
        # Exact types: True is an instance of int, but never meant as one.
        if type(value) is not type(defaults[option]):
            kind = type(defaults[option]).__name__
            raise ValueError(f"task {name}: option {option} must be of type {kind}, not {type(value).__name__}")
    return cls(**options)
