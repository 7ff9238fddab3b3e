"""Code of the user's own: a task or a rule "module:Class", a checker "module:function".  To import it is to run it."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from itertools import accumulate
from typing import Any

from unmask.errors import UserError, require


def is_own(name: str) -> bool:
    """Whether a task is named "module:Class"."""
    return ":" in name


def source_of(name: str) -> str:
    """The file of the module in "module:Class".  Nothing is imported to find it, not even the packages around it."""
    folders, found = [*sys.path, ""], None
    for names in accumulate(name.partition(":")[0].split("."), "{}.{}".format):  # a, a.b, a.b.c
        found = PathFinder.find_spec(names, folders)
        folders = list(found.submodule_search_locations or []) if found else []
    return (found and found.origin) or "a file that was not found"


def import_class(kind: str, name: str) -> Any:
    """What "module:Class" names; `kind` is "task", "policy" or "checker".  The current folder is searched last."""
    module, _, cls = name.partition(":")
    form = (
        "module:function, such as my_module:check" if kind == "checker" else "module:Class, such as my_module:MyClass"
    )
    well_formed = all(part.isidentifier() for part in (*module.split("."), cls))
    require(well_formed, f"{kind} {name!r}: write a {kind} of your own as {form}")
    if "" not in sys.path:
        sys.path.append("")
    try:
        return getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        where = "installed packages and the current folder were searched"
        raise UserError(f"{kind} {name!r} cannot be imported: {error} ({where})") from None
    except Exception as error:  # whatever the module raises while it runs
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{kind} {name!r} cannot be imported: {what} ({place.filename}, line {place.lineno})") from None


def call_own(kind: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the user's own returns; where it raises, a UserError names the last line in its own file."""
    try:
        return function(*arguments)
    except Exception as error:  # whatever it raises
        places = traceback.extract_tb(error.__traceback__)[1:] or traceback.extract_tb(error.__traceback__)
        place = [other for other in places if other.filename == places[0].filename][-1]
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{kind} {name!r} raised {what} ({place.filename}, line {place.lineno})") from None
